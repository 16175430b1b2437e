"""Who of the requests with objectives was in time: counts by class, from what happened to requests.

Fed by a session with the events of every record, and by readers of telemetry with those of a file. Knows no clock:
times are the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ...engine_adapter.protocol import MAX_REQUESTS, RequestEvent
from ...env.estimate.objectives import NO_CLASSES, ObjectiveClasses, TimeObjective
from ..snapshot import AttainmentStatus

MOST_KEPT: Final = 2 * MAX_REQUESTS  # requests whose end was never heard of go first


@dataclass(slots=True)
class _Promised:
    """One live request with an objective. Seconds on the engine's clock."""

    name: str
    objective: TimeObjective
    arrived_s: float
    first_s: float | None = None  # not heard of yet


@dataclass(slots=True)
class _Count:
    finished: int = 0
    in_time: int = 0


def added_up(counts: Iterable[Mapping[str, AttainmentStatus]]) -> dict[str, AttainmentStatus]:
    """Return the sums over several engines, by class."""
    totals: dict[str, AttainmentStatus] = {}
    for each in counts:
        for name, one in each.items():
            so_far = totals.get(name, AttainmentStatus())
            totals[name] = AttainmentStatus(so_far.finished + one.finished, so_far.in_time + one.in_time)
    return totals


class Attainment:
    """The requests of one engine that have objectives, and what became of those before."""

    def __init__(self, classes: ObjectiveClasses = NO_CLASSES) -> None:
        self.classes = classes  # of requests that arrive from now on
        self._live: dict[int, _Promised] = {}
        self._counts: dict[str, _Count] = {each.name: _Count() for each in classes.classes}

    def follow(self, classes: ObjectiveClasses) -> None:
        """Go by other classes for the requests that arrive from now on."""
        self.classes = classes
        for each in classes.classes:
            self._counts.setdefault(each.name, _Count())

    def take(self, events: Sequence[RequestEvent]) -> None:
        """Take in what happened to requests until one record, or who was there when an engine was met."""
        ends: list[RequestEvent] = []  # a record may tell of an end before it tells of the first token
        for event in events:
            if event.kind == "arrival":
                self._arrive(event)
            elif event.kind in ("finish", "abort"):
                ends.append(event)
            elif event.kind == "first_token" and (known := self._live.get(event.handle)) is not None:
                known.first_s = event.time_s
        for event in ends:
            self._end(event)

    def _arrive(self, event: RequestEvent) -> None:
        objective = self.classes.objective(event)
        if not objective.is_given or event.handle in self._live:
            return
        self._live[event.handle] = _Promised(self.classes.name(event), objective, event.time_s)
        if len(self._live) > MOST_KEPT:
            del self._live[next(iter(self._live))]

    def _end(self, event: RequestEvent) -> None:
        """Count a request that finished; not one whose first token the sidecar has not heard of."""
        known = self._live.pop(event.handle, None)
        if known is None or known.first_s is None or event.kind == "abort":
            return
        count = self._counts.setdefault(known.name, _Count())
        count.finished += 1
        count.in_time += known.objective.is_kept(
            known.first_s - known.arrived_s, event.time_s - known.first_s, event.tokens
        )

    def status(self) -> dict[str, AttainmentStatus]:
        """Return the counts by class, in the order of the configuration."""
        return {name: AttainmentStatus(count.finished, count.in_time) for name, count in self._counts.items()}
