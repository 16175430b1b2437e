"""What steps cost under a split, as three numbers beside the cost table of unsplit steps.

Called by env/state.py (learning) and, through `EngineState.cost`, by policies (asking): it answers what a CostTable
answers. Under a split two groups of requests take turns, so both phases take longer than on the whole device, and part
of the shorter one is hidden. A table of its own for each split would have to be measured anew at every number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .cost_table import NO_PROMPTS, CostTable, Floats, Prompts, StepCost

GAIN: Final = 0.1  # of a step, once so many are known
HIDDEN_GUESS: Final = 0.5  # before it was seen: a drafter that does not pay in turn may pay while nobody waits for it
MOST: Final = 16.0  # times as long, or as short: beyond lies a broken clock


@dataclass(slots=True)
class SplitCost:
    """Steps under one split: factors on both phases of `base`, and the share of the shorter phase that is hidden.

    All three are guesses while `measured_steps` is 0.
    """

    base: CostTable
    verify_factor: float = 1.0
    draft_factor: float = 1.0
    hidden: float = HIDDEN_GUESS  # 0..1
    measured_steps: int = 0
    _drafted_steps: int = 0

    def learn(self, cost: StepCost) -> None:
        """Take in one step under this split; steps of mostly prompt rows tell little of it and are left out."""
        verify_s = cost.total_s - cost.draft_s + cost.overlap_s
        if cost.rows <= 0 or cost.prefill_rows * 2 > cost.rows or verify_s <= 0.0 or cost.caught_up:
            return
        self.measured_steps += 1
        gain = max(1.0 / self.measured_steps, GAIN)
        expected_s = float(self.base.verify_time_s(cost.rows))
        self.verify_factor = _moved(self.verify_factor, verify_s / expected_s, gain)
        if cost.draft_s <= 0.0 or not cost.is_draft_known:
            return
        self._drafted_steps += 1
        gain = max(1.0 / self._drafted_steps, GAIN)
        drafting_s = float(self.base.draft_time_s(cost.rows, cost.rounds, cost.drafted))
        if drafting_s > 0.0:
            self.draft_factor = _moved(self.draft_factor, cost.draft_s / drafting_s, gain)
        share = min(max(cost.overlap_s / min(verify_s, cost.draft_s), 0.0), 1.0)
        self.hidden += gain * (share - self.hidden)

    def verify_time_s(self, rows: npt.ArrayLike) -> Floats:
        """Return seconds of everything but drafting for each number of rows, any shape."""
        return self.base.verify_time_s(rows) * self.verify_factor

    def beside_prompts_s(self, rows: npt.ArrayLike, requests: int, prompts: Prompts) -> Floats:
        """Return mean seconds of everything but drafting for each number of decoding rows, any shape."""
        return self.base.beside_prompts_s(rows, requests, prompts) * self.verify_factor

    def prompt_rows(self, prefill_rows: float) -> float:
        """Return prompt rows in rows that decode."""
        return self.base.prompt_rows(prefill_rows)

    def draft_time_s(self, rows: npt.ArrayLike, rounds: npt.ArrayLike, drafted: npt.ArrayLike) -> Floats:
        """Return seconds that drafting adds to a step of `rows`, with what is hidden taken off."""
        draft_s = self.base.draft_time_s(rows, rounds, drafted) * self.draft_factor
        return np.asarray(draft_s - self.hidden * np.minimum(draft_s, self.verify_time_s(rows)))

    def draft_prices_s(self) -> tuple[float, float]:
        """Return seconds of one more drafted token, and of one more round, while drafting is the shorter phase."""
        factor = self.draft_factor * (1.0 - self.hidden)
        token_s, round_s = self.base.draft_prices_s()
        return token_s * factor, round_s * factor

    def step_time_s(self, rows: int, rounds_batches: Iterable[float] = ()) -> float:
        """Return seconds of a step of `rows` rows; `rounds_batches` holds the requests in each drafting round."""
        batches = [batch for batch in rounds_batches if batch > 0]
        return float(self.verify_time_s(rows) + self.draft_time_s(rows, len(batches), sum(batches)))

    def confidence(self, rows: npt.ArrayLike) -> Floats:
        """Return 0 (a guess) .. 1 (measured often and lately) for each number of rows."""
        return self.base.confidence(rows)

    def time_range_s(
        self, rows: Floats, rounds: Floats, drafted: Floats, prompts: Prompts = NO_PROMPTS
    ) -> tuple[Floats, Floats]:
        """Return (least, most) plausible seconds of steps, (m,) each; the first is the step without drafts."""
        least_s, most_s = self.base.time_range_s(rows, rounds, drafted, prompts)
        return least_s * self.verify_factor, most_s * self.verify_factor

    def catch_up_time_s(self, tokens: int) -> float:
        """Return seconds in which the drafter makes up for so many skipped tokens."""
        return self.base.catch_up_time_s(tokens) * self.draft_factor

    def keep_up_time_s(self, prompt_rows: float) -> float:
        """Return seconds in which the drafter reads prompts so that it can draft behind them."""
        return self.base.keep_up_time_s(prompt_rows) * self.draft_factor


def _moved(factor: float, seen: float, gain: float) -> float:
    """Return the factor, moved towards what was seen, in logarithms."""
    surprise = math.log(min(max(seen, 1.0 / MOST), MOST) / factor)
    return factor * math.exp(gain * surprise)
