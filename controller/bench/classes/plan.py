"""What a benchmark with classes of requests is to measure: the classes, the load points, the rivals. Pure.

Called by controller/bench/classes/bench.py, which builds the plan from flags, and by
controller/bench/classes/course.py, which follows it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import msgspec

from ....env.estimate.objectives import OWN
from ....env.workload.workload import TimedRequest
from ...errors import UsageError
from ...objectives import NAME
from ..plan import BY_OBJECTIVE, MAX_LOAD, NONE, TABLE, BenchPlan
from ..workload import Replay

FORM: Final = "NAME:CLIENTS:PACE with commas between them, such as interactive:2:0.7,batch:6:2.0"
CLASS_RIVALS: Final = (NONE, "k1", "k2", "k3", "k4", TABLE, *BY_OBJECTIVE)
LEAST_PACE, MOST_PACE = 0.05, 100.0  # what a request may say of its time per token ends a little further
LEAST_SECONDS, MOST_SECONDS = 2.0, 600.0
MOST_PEAK: Final = 100.0


class ClassShare(msgspec.Struct, frozen=True):
    """One class of requests."""

    name: str
    clients: int  # in a closed loop; in an open one its part of the requests
    pace: float  # its time per token, as a multiple of what no speculation gives with as many requests


@dataclass(frozen=True, slots=True)
class ClassPlan:
    """What to measure: a closed loop of all classes' clients, or the same classes in replayed traces."""

    classes: tuple[ClassShare, ...]
    bench: BenchPlan
    seconds: float  # of a turn
    peaks: tuple[float, ...] = (1.0,)  # of each replayed trace, as multiples of its rate

    def __post_init__(self) -> None:
        if not LEAST_SECONDS <= self.seconds <= MOST_SECONDS:
            raise UsageError(f"--class-seconds {self.seconds:g}", f"{LEAST_SECONDS:g} to {MOST_SECONDS:g}")
        if NONE not in self.bench.rivals:
            raise UsageError(f"--classes without the rival {NONE}", "it, for a pace is told against its time per token")
        if len(self.bench.mixes) > 1:
            raise UsageError("several --kinds beside --classes", "one mix, joined with +")

    @property
    def clients(self) -> int:
        """Return the clients of all classes."""
        return sum(each.clients for each in self.classes)

    @property
    def points(self) -> dict[str, Replay | None]:
        """Return the load points by their names; None is the closed loop."""
        if not self.bench.replays:
            return {f"{self.clients} clients": None}
        replays = [scaled(each, peak) for each in self.bench.replays for peak in self.peaks]
        return {f"{each.name} at {each.peak_rps:g}/s": each for each in replays}


def parse_classes(text: str) -> tuple[ClassShare, ...]:
    """Read classes with commas between them; raise UsageError for what is none, or stands twice."""
    classes = tuple(_parse(part.strip()) for part in text.split(","))
    for one, other in combinations(classes, 2):
        if one.name == other.name:
            raise UsageError(f"--classes with {one.name} twice", "each name once")
    if (clients := sum(each.clients for each in classes)) > MAX_LOAD:
        raise UsageError(f"--classes with {clients} clients", f"{MAX_LOAD} in all, which a server runs at once")
    return classes


def _parse(part: str) -> ClassShare:
    name, *rest = (field.strip() for field in part.split(":"))
    if len(rest) != 2:
        raise UsageError(f"--classes with {part!r}", FORM)
    if not NAME.fullmatch(name) or name == OWN:
        raise UsageError(f"--classes with the name {name!r}", f"letters, digits, - and _, a letter first, not {OWN!r}")
    clients, pace = _number(rest[0]), _number(rest[1])
    if not clients.is_integer() or not 1 <= clients <= MAX_LOAD:
        raise UsageError(f"--classes with {rest[0]!r} clients in {part!r}", f"a whole number from 1 to {MAX_LOAD}")
    if not LEAST_PACE <= pace <= MOST_PACE:
        raise UsageError(f"--classes with the pace {rest[1]!r} in {part!r}", f"{LEAST_PACE:g} to {MOST_PACE:g}")
    return ClassShare(name, int(clients), pace)


def parse_peaks(text: str) -> tuple[float, ...]:
    """Return multiples of a trace's peak rate, ascending."""
    peaks = tuple(sorted({_number(part) for part in text.split(",")}))
    if not all(0.0 < peak <= MOST_PEAK for peak in peaks):
        raise UsageError(f"--peaks {text}", f"numbers above 0, at most {MOST_PEAK:g}, with commas between them")
    return peaks


def _number(text: str) -> float:
    """Return a finite number, NaN for anything else."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def scaled(replay: Replay, peak: float) -> Replay:
    """Return a replay at a multiple of its rate."""
    low_rps = None if replay.low_rps is None else replay.low_rps * peak
    return replace(replay, peak_rps=round(replay.peak_rps * peak, 3), low_rps=low_rps)


def in_shares(count: int, classes: Sequence[ClassShare]) -> list[ClassShare]:
    """Return the class of each of so many requests: every i-th one, so that each stretch has all in their shares."""
    total = sum(each.clients for each in classes)
    given = [0] * len(classes)
    order = []
    for at in range(1, count + 1):
        behind = [each.clients * at / total - given[place] for place, each in enumerate(classes)]
        place = behind.index(max(behind))
        given[place] += 1
        order.append(classes[place])
    return order


def promised(request: TimedRequest, share: ClassShare, base_tpot_ms: float | None) -> TimedRequest:
    """Return a request of a class, with the class's objective once the time per token is known that it is told by."""
    tpot_ms = None if base_tpot_ms is None else share.pace * base_tpot_ms
    return replace(request, class_name=share.name, tpot_ms=tpot_ms)


def dealt(
    stream: Sequence[TimedRequest], classes: Sequence[ClassShare], base_tpot_ms: float | None
) -> dict[str, list[TimedRequest]]:
    """Return each class's requests of one closed loop's stream, whose first requests are one for each client."""
    order = in_shares(sum(each.clients for each in classes), classes)
    work: dict[str, list[TimedRequest]] = {each.name: [] for each in classes}
    for at, request in enumerate(stream):
        share = order[at % len(order)]
        work[share.name].append(promised(request, share, base_tpot_ms))
    return work


def busiest(requests: Sequence[TimedRequest], seconds: float) -> list[TimedRequest]:
    """Return the requests of the stretch of so many seconds in which most arrive, the first of them at once."""
    times_s = [request.arrival_s for request in requests]
    ends = [bisect_right(times_s, begin_s + seconds) for begin_s in times_s]
    first = max(range(len(requests)), key=lambda at: ends[at] - at)
    return [replace(each, arrival_s=each.arrival_s - times_s[first]) for each in requests[first : ends[first]]]


def marked(requests: Sequence[TimedRequest], classes: Sequence[ClassShare], base_tpot_ms: float) -> list[TimedRequest]:
    """Return a replay's requests, each with its class and objective."""
    order = in_shares(len(requests), classes)
    return [promised(request, share, base_tpot_ms) for request, share in zip(requests, order, strict=True)]
