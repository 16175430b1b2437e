"""The guard: when the sidecar may steer, when it holds still, and when it gives the engine back to its default.

Called by the governor, the replay and the tests. Pure: a state and what was seen in, the next state out. Doubt costs
at most what FASER gains: holding sends nothing, so the lease in force runs out by itself; falling back gives it back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from ...env.spaces import Lengths
from ..config import GuardConfig
from ..snapshot import Stance

FAULT_WEIGHT: Final = 2  # a fault outweighs this many sound records
MAX_DOUBLINGS: Final = 6  # of the time out: at most 64 times as long


class Sight(NamedTuple):
    """What one record showed. Records are the engine's: one per step."""

    lag_s: float = 0.0  # by how much the record took longer than the quickest ones
    lost: int = 0  # records missing just before it
    trip: str = ""  # why the policy is to be switched off now: failed too often, lost against no speculation


@dataclass(frozen=True, slots=True)
class GuardState:
    """What the guard remembers between two records."""

    stance: Stance = "steer"
    reason: str = ""  # why it does not steer: stale, gap, or what tripped it
    weight: int = 0  # of recent faults
    remaining: int = 0  # sound records until steering starts again
    trips: int = 0  # in a row; each doubles the time out
    sound: int = 0  # records since the last trip ended


def judge(state: GuardState, sight: Sight, limits: GuardConfig) -> GuardState:
    """Return the stance after one record."""
    if sight.trip:
        patience = limits.retry_records << min(state.trips, MAX_DOUBLINGS)
        return GuardState("fallback", sight.trip, 0, patience, state.trips + 1)
    fault = _fault(sight, limits)
    if state.stance == "fallback":
        return _recover(state, fault, limits)
    if not fault:
        return _calm(state, limits)
    weight = state.weight + FAULT_WEIGHT
    if weight >= FAULT_WEIGHT * limits.hold_records:
        return replace(state, stance="fallback", reason=fault, weight=0, remaining=limits.recover_records, sound=0)
    return replace(state, stance="hold", reason=fault, weight=weight)


def _fault(sight: Sight, limits: GuardConfig) -> str:
    if not sight.lag_s <= limits.stale_ms / 1e3:  # a lag that is no number is no sound record either
        return "stale"
    return "gap" if sight.lost >= limits.gap_records else ""


def _recover(state: GuardState, fault: str, limits: GuardConfig) -> GuardState:
    if fault:
        return replace(state, remaining=max(state.remaining, limits.recover_records))
    if state.remaining > 1:
        return replace(state, remaining=state.remaining - 1)
    return GuardState(trips=state.trips)


def _calm(state: GuardState, limits: GuardConfig) -> GuardState:
    if state.stance == "steer" and not state.weight and not state.trips:
        return state  # the common case allocates nothing
    sound = state.sound + 1
    trips = state.trips if sound < 2 * limits.retry_records else 0
    return GuardState("steer", "", max(state.weight - 1, 0), 0, trips, sound)


@dataclass(slots=True)
class Breaker:
    """Counts a policy's failures in a row; says when it is enough."""

    failures: int = 0

    def fail(self, limits: GuardConfig) -> str:
        """Count a failure; return why to trip, empty while it is not enough."""
        self.failures += 1
        if self.failures < limits.breaker_failures:
            return ""
        self.failures = limits.breaker_failures - 1  # after the time out, one more failure trips again
        return "circuit"

    def succeed(self) -> None:
        """Forget the failures."""
        self.failures = 0


class Dwell:
    """Hysteresis of lengths: a request's length falls at once, but rises only a while after it last changed."""

    def __init__(self) -> None:
        self._handles = np.zeros(0, np.int64)
        self._lengths = np.zeros(0, np.int64)
        self._changed = np.zeros(0, np.int64)  # record at which the length last changed

    def settle(self, handles: Lengths, lengths: Lengths, record: int, records: int) -> Lengths:
        """Return the lengths that may be had now, (n,) like `lengths`.

        :param handles: (n,) the requests, in the order of `lengths`
        :param record: number of this record
        :param records: how long a length must have stood before it may rise
        """
        before, changed = self._known(handles, lengths, record - records)
        is_early = (lengths > before) & (record - changed < records)
        settled = np.where(is_early, before, lengths)
        self._changed = np.where(settled != before, record, changed)
        self._handles, self._lengths = handles.copy(), settled
        return settled

    def _known(self, handles: Lengths, lengths: Lengths, long_ago: int) -> tuple[Lengths, Lengths]:
        """Return length and time of change per request; a new one may have what it is given."""
        if np.array_equal(handles, self._handles):
            return self._lengths, self._changed
        place = {handle: index for index, handle in enumerate(self._handles.tolist())}
        found = np.array([place.get(handle, -1) for handle in handles.tolist()], np.int64)
        if not len(self._handles):
            return lengths.copy(), np.full(len(handles), long_ago, np.int64)
        is_known = found >= 0
        return (
            np.where(is_known, self._lengths[found], lengths),
            np.where(is_known, self._changed[found], long_ago),
        )
