"""How many replicas there are to be: when one is added, merged away or taken back. Pure.

The number is the simulated cluster's and Ray Serve's (models/pipeline/replicas.py): requests in flight over what a
replica is to have. It is followed upward at once, downward only where it was lower for the whole of the idle time, with
a margin: an engine takes tens of seconds to load, so a replica that is missed is dearer than one that is spare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ...models.pipeline.replicas import replicas_for
from .views import FleetView, ReplicaView

MEMORY_S: Final = 5.0  # of the mean, so that a burst of a second adds nothing
DIGITS: Final = 1  # of the mean that count: it comes near a number and never reaches it
MARGIN: Final = 0.8  # of what fewer replicas are to have: their load must fit with room


@dataclass(frozen=True, slots=True)
class SizeRule:
    """Between which numbers, and by what."""

    least: int = 1
    most: int = 1
    requests_each: float = 8.0  # in flight, that a replica is to have
    idle_s: float = 300.0  # what was not needed for so long goes


@dataclass(frozen=True, slots=True)
class SizeMemory:
    """What is remembered from one decision to the next."""

    at_s: float = -math.inf
    mean: float = 0.0  # of the requests in flight, over MEMORY_S
    enough_since_s: tuple[float, ...] = ()  # by number of replicas below the most; infinite: not enough now


@dataclass(frozen=True, slots=True)
class Resize:
    """What is to be done now; names are of replicas."""

    add: int = 0
    restore: tuple[str, ...] = ()  # drained, not yet gone: they serve again
    drain: tuple[str, ...] = ()


STAY: Final = Resize()


def resize(rule: SizeRule, memory: SizeMemory, view: FleetView) -> tuple[SizeMemory, Resize]:
    """Return what to remember and what to do."""
    mean = _mean(memory, view)
    ongoing = round(mean, DIGITS)
    fewest = replicas_for(ongoing, rule.requests_each * MARGIN, rule.least, rule.most)
    after = SizeMemory(view.now_s, mean, _enough(memory, fewest, view.now_s, rule.most))
    here = len(view.of("pending", "starting", "serving"))
    wanted = replicas_for(ongoing, rule.requests_each, rule.least, rule.most)
    if not here and view.ongoing:
        wanted = max(wanted, 1)  # nobody serves: the mean need not be waited for
    if wanted > here:
        return after, _more(view, wanted - here)
    if view.of("starting"):  # it was wanted a moment ago
        return after, STAY
    for count in range(rule.least, min(here, rule.most)):
        if view.now_s - after.enough_since_s[count] >= rule.idle_s:
            return after, Resize(drain=_spare(view, here - count))
    return after, STAY


def _mean(memory: SizeMemory, view: FleetView) -> float:
    """Return the mean of what is in flight; it begins with what is there."""
    weight = 1.0 - math.exp(-max(view.now_s - memory.at_s, 0.0) / MEMORY_S)
    return memory.mean + weight * (view.ongoing - memory.mean)


def _enough(memory: SizeMemory, fewest: int, now_s: float, most: int) -> tuple[float, ...]:
    """Return since when each number of replicas has been enough without a break, if `fewest` are now."""
    known = memory.enough_since_s if len(memory.enough_since_s) == most else (math.inf,) * most
    return tuple(min(since_s, now_s) if count >= fewest else math.inf for count, since_s in enumerate(known))


def _more(view: FleetView, count: int) -> Resize:
    """Return how to have so many more: first those that still drain, whose engines are warm; the busiest first."""
    draining = sorted(view.of("draining"), key=lambda each: (-each.requests, each.name))
    restored = tuple(each.name for each in draining[:count])
    return Resize(add=count - len(restored) if view.may_start else 0, restore=restored)


def _spare(view: FleetView, count: int) -> tuple[str, ...]:
    """Return who goes: who still waits for room, then who has least to finish, of equals the youngest."""

    def order(replica: ReplicaView) -> tuple[bool, int, float, str]:
        return replica.state != "pending", replica.requests, -replica.since_s, replica.name

    return tuple(each.name for each in sorted(view.of("pending", "serving"), key=order)[:count])
