"""When a request is to have its tokens: what its client asked for, else what its class of vLLM's priority is promised.

Read by the table of live requests and by the sidecar's count of who was in time. Knows no clock and no request but
the one it is asked about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from ...engine_adapter.protocol import RequestEvent

OWN: Final = "own"  # stands for a class where a request spoke for itself


@dataclass(frozen=True, slots=True)
class TimeObjective:
    """Seconds that a request may take; infinite where nobody said."""

    ttft_s: float = math.inf  # from its arrival to its first token
    tpot_s: float = math.inf  # mean per token after the first

    @property
    def is_given(self) -> bool:
        """Return whether there is anything to keep."""
        return self.ttft_s < math.inf or self.tpot_s < math.inf

    def is_kept(self, first_s: float, rest_s: float, tokens: int) -> bool:
        """Return whether so many tokens were in time: the first after `first_s`, the others within `rest_s` of it."""
        return first_s <= self.ttft_s and (tokens <= 1 or rest_s <= self.tpot_s * (tokens - 1))


NONE: Final = TimeObjective()


@dataclass(frozen=True, slots=True)
class ObjectiveClass:
    """The objective of all requests of one priority."""

    name: str
    priority: int
    objective: TimeObjective


@dataclass(frozen=True, slots=True)
class ObjectiveClasses:
    """The classes of an engine's requests; each name and each priority once."""

    classes: tuple[ObjectiveClass, ...] = ()
    heeds_own: bool = True  # what a request asks for itself; False: only classes count
    _by_priority: dict[int, ObjectiveClass] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_priority", {each.priority: each for each in self.classes})

    def objective(self, arrival: RequestEvent) -> TimeObjective:
        """Return what holds for a request that arrives: its own word, for what it leaves open its class's."""
        known = self._by_priority.get(arrival.priority)
        classes = NONE if known is None else known.objective
        if not self._has_own(arrival):
            return classes
        return TimeObjective(
            classes.ttft_s if arrival.ttft_ms is None else arrival.ttft_ms / 1e3,
            classes.tpot_s if arrival.tpot_ms is None else arrival.tpot_ms / 1e3,
        )

    def name(self, arrival: RequestEvent) -> str:
        """Return under which name a request that has an objective is counted."""
        return OWN if self._has_own(arrival) else self._by_priority[arrival.priority].name

    def _has_own(self, arrival: RequestEvent) -> bool:
        return self.heeds_own and (arrival.ttft_ms is not None or arrival.tpot_ms is not None)


NO_CLASSES: Final = ObjectiveClasses()
