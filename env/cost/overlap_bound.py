"""What drafting and verifying side by side can win at most, and what a measured overlap was worth. Pure arithmetic.

Called by benchmarks (the machine's own times against these bounds) and by whoever fills a profile's splits from
measured times. A bound holds for times measured on the very shares that the phases have when they overlap, and counts
nothing for what overlap itself costs: messages, smaller batches' bookkeeping, two phases in each other's way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Both phases of one step of n requests, each alone, in seconds."""

    draft_s: float
    verify_s: float

    def __post_init__(self) -> None:
        times = (self.draft_s, self.verify_s)
        if not all(math.isfinite(time) and time >= 0.0 for time in times) or not sum(times):
            raise ValueError(f"phase times {times}; expected seconds of at least 0, not both 0")

    @property
    def serial_s(self) -> float:
        """One phase after the other."""
        return self.draft_s + self.verify_s

    @property
    def draft_share(self) -> float:
        """The drafter's part of a serial step, d."""
        return self.draft_s / self.serial_s


def ping_pong_bound(whole: PhaseTimes, half: PhaseTimes) -> float:
    """Return how many times faster two groups that take turns can be: (V(n)+D(n)) / (2 max(V(n/2), D(n/2))).

    Below 1 where halves are hardly cheaper than the whole: each group reads all of the weights.

    :param whole: a step of all n requests.
    :param half: a step of n/2.
    """
    return whole.serial_s / (2.0 * max(half.draft_s, half.verify_s))


def draft_ahead_bound(times: PhaseTimes, hit_rate: float = 1.0) -> float:
    """Return how many times faster drafting the next chunk under the verification of this one can be.

    1 / max(d, 1 - d) if every chunk drafted ahead is of use. A chunk that is not leaves its step serial, so with a
    hit rate h it is 1 / (1 - h min(d, 1 - d)): never below 1, because the bound charges a miss nothing.
    """
    if not 0.0 <= hit_rate <= 1.0:
        raise ValueError(f"hit rate {hit_rate:g}; expected 0 to 1")
    share = times.draft_share
    return 1.0 / (1.0 - hit_rate * min(share, 1.0 - share))


def hidden_share(times: PhaseTimes, together_s: float) -> float:
    """Return which part of the shorter phase a measured overlap hid; negative if it was slower than serial."""
    return (times.serial_s - together_s) / min(times.draft_s, times.verify_s)
