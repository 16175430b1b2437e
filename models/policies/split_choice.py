"""Which split of the device the price policy asks for: the one that promises most, for each octave of requests.

What a split costs cannot be told from unsplit steps: how much the phases slow each other down is the hardware's
secret. So each of them is given a few steps now and then, and compared by the tokens per second that the best plan
promises under the costs it has shown (`EngineState.cost_under`), which luck with drafts does not reach. Where not even
two groups that are never in each other's way would be faster, none is tried. Pure, no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

GAIN: Final = 0.03  # another split must promise so much more
TRIAL_RECORDS: Final = (
    20  # shown under a split until it is judged; the first ones teach nothing (env/cost/split_cost.py)
)
LEAST_RECORDS: Final = 7  # ... before it can be hopeless
HOPELESS: Final = 0.1  # a split that promises so much less is left at once ...
HOPELESS_PATIENCE: Final = 8  # ... and the next trial comes so many times as late
UNTOLD_PATIENCE: Final = 1.5  # ... and one that told nothing says nothing against it, but may never tell
PATIENCE: Final = 2 * TRIAL_RECORDS  # records without it, and the engine does not act on a split
FIRST_INTERVAL, LAST_INTERVAL = 96, 4096  # records between two trials of a split, longer while they change nothing
LEAST_INTERVAL: Final = 16  # records between two trials
LEAST_REQUESTS: Final = 2  # one request makes no two groups


class SplitTrial(msgspec.Struct):
    """What is in force at one octave of requests, and what is tried."""

    waits: list[int]  # records from a trial of each split to its next one
    due: list[int]  # when that is
    split: int = 0
    tried: int | None = None  # on trial
    is_back: bool = False  # unsplit was tried, and the split in force is measured again beside it
    clock: int = 0  # records so far
    since: int = 0  # the clock when the newest trial ended
    shown: int = 0  # records of the trial under the split that was asked for
    missing: int = 0  # records in a row under another one

    @classmethod
    def of(cls, splits: int) -> SplitTrial:
        """Return one at which nothing was tried yet."""
        return cls([FIRST_INTERVAL] * splits, [FIRST_INTERVAL] * splits)

    @property
    def asked(self) -> int:
        """The split to plan for."""
        return self.split if self.tried is None or self.is_back else self.tried

    def begin(self, tried: int | None, is_back: bool = False) -> None:
        """Go on to a trial, to its way back, or to none."""
        self.tried, self.is_back, self.shown = tried, is_back, 0

    def next_trial(self) -> int | None:
        """Return the split whose trial is due, None if it is not time for any."""
        if self.clock < self.since + LEAST_INTERVAL:
            return None
        others = [split for split in range(len(self.due)) if split != self.split and self.due[split] <= self.clock]
        return min(others, key=self.due.__getitem__, default=None)

    def keep(self, tried: int, patience: float = 2.0) -> None:
        """End a trial with the split in force as before; the next trial of that split comes so many times as late."""
        self.waits[tried] = min(int(patience * self.waits[tried]), LAST_INTERVAL)
        self.due[tried] = self.clock + self.waits[tried]
        self.since = self.clock
        self.begin(None)

    def change(self, split: int) -> None:
        """Let another split be in force; the one before is tried again soon."""
        self.waits[self.split], self.due[self.split] = FIRST_INTERVAL, self.clock + FIRST_INTERVAL
        self.split, self.missing, self.since = split, 0, self.clock
        self.begin(None)


class RateEstimates(NamedTuple):
    """What a policy expects, tokens per second."""

    of: Callable[[int], float | None]  # of the best plan under a split; None: nothing is known of it
    at_best: Callable[[], float]  # that no split can exceed


class SplitChoice:
    """Chooses among `splits` of them; 0 is unsplit."""

    def __init__(self, splits: int) -> None:
        self._splits = splits
        self._standings: dict[int, SplitTrial] = {}
        self._octave = 0

    def at(self, requests: int, octave: int) -> int:
        """Return the split to plan for, on trial or in force, for a batch of `requests` in this octave."""
        if octave != self._octave:
            self._standing(self._octave).begin(None)  # what a trial has seen so far is too little
            self._octave = octave
        return 0 if self._is_idle(requests) else self._standing(octave).asked

    def is_trial(self, octave: int) -> bool:
        """Return whether the split is only tried."""
        return self._standing(octave).tried is not None

    def note(self, requests: int, octave: int, is_shown: bool, rates: RateEstimates) -> None:
        """Count one decision; begin or judge a trial when it is time.

        :param is_shown: whether the newest step ran under the split that is planned for
        """
        if self._is_idle(requests):
            return
        standing = self._standing(octave)
        standing.clock += 1
        standing.shown += is_shown
        standing.missing = 0 if is_shown else standing.missing + 1
        if standing.missing > PATIENCE:  # the engine does not act on what was asked
            standing.missing = 0
            standing.split, lost = 0, standing.asked
            standing.keep(lost, HOPELESS_PATIENCE)
        elif standing.tried is not None:
            self._judge(standing, rates)
        elif (split := standing.next_trial()) is not None:
            if standing.split == 0 and rates.at_best() < (1.0 + GAIN) * (rates.of(0) or 0.0):
                standing.keep(split)  # without a trial
            else:
                standing.begin(split)

    def _judge(self, standing: SplitTrial, rates: RateEstimates) -> None:
        tried = standing.tried
        assert tried is not None
        if standing.shown < LEAST_RECORDS:
            return
        if tried == 0 and not standing.is_back:
            if standing.shown >= TRIAL_RECORDS:
                standing.begin(0, is_back=True)
            return
        ahead, behind = rates.of(tried), rates.of(standing.split)
        if not ahead or not behind:  # such as beside prompts, which tell nothing
            if standing.shown >= PATIENCE:
                standing.keep(tried, UNTOLD_PATIENCE)
            return
        gain = ahead / behind - 1.0
        if tried and gain < -HOPELESS:
            standing.keep(tried, HOPELESS_PATIENCE)
        elif standing.shown < TRIAL_RECORDS:
            return
        elif gain > (GAIN if tried else 0.0):
            standing.change(tried)
        else:
            standing.keep(tried)

    def _is_idle(self, requests: int) -> bool:
        return self._splits < 2 or requests < LEAST_REQUESTS

    def _standing(self, octave: int) -> SplitTrial:
        return self._standings.setdefault(octave, SplitTrial.of(self._splits))
