"""Which split of the device the price policy asks for: the one that has shown to emit most, for each size of the batch.

What a split is worth cannot be told from unsplit steps: how much the phases slow each other down is the hardware's
secret. So each of them is given a few steps now and then, and compared by the tokens per second that the best plan
promises under the costs it has shown (`EngineState.cost`), which luck with drafts does not reach. Pure, no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

GAIN: Final = 0.02  # another split must promise so much more
TRIAL_RECORDS: Final = 16  # a trial lasts so long; its first steps still drain what was drafted before
SETTLE_RECORDS: Final = 4
HOPELESS: Final = 0.1  # a trial that promises so much less ends at once
FIRST_INTERVAL, LAST_INTERVAL = 64, 4096  # records between two trials, doubled while they change nothing
LEAST_REQUESTS: Final = 2  # one request makes no two groups


class Standing(msgspec.Struct):
    """What is in force at one size of the batch, and what is tried."""

    split: int = 0
    tried: int | None = None  # a split on trial
    records: int = 0  # of the trial, or since the last one
    interval: int = FIRST_INTERVAL
    turn: int = 0  # the trials so far: the others have their turns


class SplitChoice:
    """Chooses among `splits` of them; 0 is unsplit."""

    def __init__(self, splits: int) -> None:
        self._splits = splits
        self._standings: dict[int, Standing] = {}

    def at(self, requests: int, size: int) -> int:
        """Return the split to plan for, on trial or in force, for a batch of `requests` of the class `size`."""
        if self._splits < 2 or requests < LEAST_REQUESTS:
            return 0
        standing = self._standings.setdefault(size, Standing())
        return standing.split if standing.tried is None else standing.tried

    def note(self, requests: int, size: int, rate_under: Callable[[int], float]) -> None:
        """Count one decision; begin or judge a trial when it is time.

        :param rate_under: returns the tokens per second that are to be had under a split
        """
        if self._splits < 2 or requests < LEAST_REQUESTS:
            return
        standing = self._standings[size]
        standing.records += 1
        if standing.tried is None:
            if standing.records >= standing.interval:
                others = [split for split in range(self._splits) if split != standing.split]
                standing.tried = others[standing.turn % len(others)]
                standing.turn, standing.records = standing.turn + 1, 0
            return
        if standing.records < SETTLE_RECORDS:
            return
        gain = rate_under(standing.tried) / max(rate_under(standing.split), 1e-9) - 1.0
        if standing.records < TRIAL_RECORDS and gain > -HOPELESS:
            return
        if gain > GAIN:
            standing.split, standing.interval = standing.tried, FIRST_INTERVAL
        else:
            standing.interval = min(2 * standing.interval, LAST_INTERVAL)
        standing.tried, standing.records = None, 0
