"""Into how many stages to cut, by what each number of them brought: tokens per second, by octave of the batch.

A cut is tried for some steps once nothing is known of it at this load, and again after a while; it is followed if it
brought more. What a move itself costs is in nobody's figure: it is over long before the next trial.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...env.estimate.engine_state import StageSight

SETTLE_STEPS: Final = 4  # behind a move: the pipeline fills, and the first steps load caches
TRIAL_STEPS: Final = 40
PATIENCE_STEPS: Final = 2000  # of the same octave, after which what is known of another cut is too old
LEAD: Final = 1.03  # a cut is followed that brought so many times as much
FORGET: Final = 0.98  # a step, of what came before


@dataclass(slots=True)
class Brought:
    """What one cut brought at one load."""

    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    seen_at: int = 0  # steps of this octave at which it was last in force

    def add(self, sight: StageSight, now: int) -> None:
        """Count a step."""
        self.tokens = FORGET * self.tokens + sight.emitted
        self.seconds = FORGET * self.seconds + sight.elapsed_s
        self.steps += 1
        self.seen_at = now

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / max(self.seconds, 1e-9)


class Trials:
    """Follows the number of stages that brought most at this load."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._brought: dict[tuple[int, int], Brought] = {}  # by octave of the running requests, and stages
        self._steps: dict[int, int] = {}  # by octave
        self._chosen = most
        self._left = 0  # steps of a trial
        self._octave = 0

    def choose(self, sight: StageSight) -> int:
        """Return how many stages to cut into."""
        octave = max(sight.running, 1).bit_length()
        now = self._steps[octave] = self._steps.get(octave, 0) + 1
        if octave != self._octave:  # another load: what is tried here says nothing there
            self._octave, self._left = octave, 0
            self._chosen = self._best(octave)
        if sight.is_moving or sight.steady_steps < SETTLE_STEPS or not sight.running:
            return self._chosen
        if sight.stages == self._chosen:
            self._at(octave, self._chosen).add(sight, now)
            self._left -= 1
        if self._left <= 0:
            self._chosen = self._next(octave, now)
        return self._chosen

    def _at(self, octave: int, stages: int) -> Brought:
        return self._brought.setdefault((octave, stages), Brought())

    def _best(self, octave: int) -> int:
        """Return the number of stages that brought most, the one in force unless another led."""
        known = {count: self._at(octave, count) for count in range(1, self._most + 1)}
        own = known[self._chosen].rate
        best = max(known, key=lambda count: known[count].rate)
        return best if known[best].rate > LEAD * own else self._chosen

    def _next(self, octave: int, now: int) -> int:
        """Return the cut to go on with: one of which too little is known, else the best."""
        for count in range(1, self._most + 1):
            known = self._at(octave, count)
            if known.steps < TRIAL_STEPS or now - known.seen_at > PATIENCE_STEPS:
                known.seen_at = now
                self._left = TRIAL_STEPS
                return count
        self._left = TRIAL_STEPS
        return self._best(octave)
