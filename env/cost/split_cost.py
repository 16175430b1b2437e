"""What steps cost under a split, as three numbers beside the cost table of unsplit steps.

Called by env/estimate/engine_state.py (learning) and, through `EngineState.cost`, by policies (asking): it answers
what a CostTable answers. Under a split two groups of requests take turns, so both phases take longer than on the
whole device, and part of the shorter one is hidden. A table of its own for each split would have to be measured anew
at every number of rows.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ...engine_adapter.arrays import Floats
from .cost_table import NO_PROMPTS, CostTable, Prompts, StepCost

SETTLE_STEPS: Final = 3  # behind a change of split: they verify what was drafted before it
LEARNING_STEPS: Final = 16  # the next so many tell the numbers; whatever comes later tells how fast the machine is
LEAST_STEPS: Final = 3  # before a number is believed
KNOWN: Final = 0.5  # confidence of the table; below it a step under a split would be compared with a guess
HIDDEN_GUESS: Final = 0.5  # before it was seen: a drafter that does not pay in turn may pay while nobody waits for it
MOST: Final = 16.0  # times as long, or as short: beyond lies a broken clock


def _few() -> deque[float]:
    return deque(maxlen=LEARNING_STEPS)


@dataclass(slots=True)
class SplitCost:
    """Steps under one split: factors on both phases of `base`, and the share of the shorter phase that is hidden.

    Each is the median of what the first steps since the split came into force have shown, and a guess before.
    """

    base: CostTable
    verify_factor: float = 1.0
    draft_factor: float = 1.0
    hidden: float = HIDDEN_GUESS  # 0..1
    _since: int = 0  # steps since the split came into force
    _verify_logs: deque[float] = field(default_factory=_few)
    _draft_logs: deque[float] = field(default_factory=_few)
    _shares: deque[float] = field(default_factory=_few)

    def begin(self) -> None:
        """Note that the split comes into force."""
        self._since = 0
        for seen in (self._verify_logs, self._draft_logs, self._shares):
            seen.clear()

    @property
    def is_shown(self) -> bool:
        """Whether steps have told the numbers since the split came into force."""
        return len(self._verify_logs) >= LEAST_STEPS

    def learn(self, cost: StepCost) -> None:
        """Take in one step under this split; steps of mostly prompt rows tell little of it and are left out."""
        self._since += 1
        verify_s = cost.total_s - cost.draft_s + cost.overlap_s
        is_odd = cost.rows <= 0 or cost.prefill_rows * 2 > cost.rows or verify_s <= 0.0 or cost.caught_up > 0
        if is_odd or self._since <= SETTLE_STEPS or float(self.base.confidence(cost.rows)) < KNOWN:
            return
        surprise = _log_ratio(verify_s, float(self.base.verify_time_s(cost.rows)))
        if len(self._verify_logs) == LEARNING_STEPS:
            self._follow(cost, surprise)
            return
        self._verify_logs.append(surprise)
        self.verify_factor = math.exp(_middle(self._verify_logs, math.log(self.verify_factor)))
        if cost.draft_s > 0.0:
            self._learn_drafting(cost, verify_s)

    def _follow(self, cost: StepCost, surprise: float) -> None:
        """Let the base know how fast the machine is, and what a length cost that was only drafted under this split."""
        self.base.follow(surprise - math.log(self.verify_factor))
        if cost.is_draft_known and cost.draft_s > 0.0:
            self.base.learn_drafting(replace(cost, draft_s=cost.draft_s / self.draft_factor, overlap_s=0.0))

    def _learn_drafting(self, cost: StepCost, verify_s: float) -> None:
        self._shares.append(min(max(cost.overlap_s / min(verify_s, cost.draft_s), 0.0), 1.0))
        self.hidden = _middle(self._shares, self.hidden)
        drafting_s = float(self.base.draft_time_s(cost.rows, cost.rounds, cost.drafted))
        if cost.is_draft_known and drafting_s > 0.0:
            self._draft_logs.append(_log_ratio(cost.draft_s, drafting_s))
            self.draft_factor = math.exp(_middle(self._draft_logs, math.log(self.draft_factor)))

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

    def confidence(self, rows: npt.ArrayLike) -> Floats:
        """Return 0 (a guess) .. 1 (measured often and lately) for each number of rows."""
        return self.base.confidence(rows)

    def time_range_s(
        self, rows: Floats, rounds: Floats, drafted: Floats, prompts: Prompts = NO_PROMPTS
    ) -> tuple[Floats, Floats]:
        """Return (least, most) plausible seconds of steps, (m,) each; the first is the step without drafts."""
        least_s, most_s = self.base.time_range_s(rows, rounds, drafted, prompts)
        waited_s = self.draft_time_s(rows, rounds, drafted)
        drafting_s = waited_s - self.verify_factor * self.base.draft_time_s(rows, rounds, drafted)
        return least_s * self.verify_factor + drafting_s, most_s * self.verify_factor + drafting_s

    def catch_up_time_s(self, tokens: int) -> float:
        """Return seconds in which the drafter makes up for so many skipped tokens."""
        return self.base.catch_up_time_s(tokens) * self.draft_factor

    def keep_up_time_s(self, prompt_rows: float) -> float:
        """Return seconds in which the drafter reads prompts so that it can draft behind them."""
        return self.base.keep_up_time_s(prompt_rows) * self.draft_factor


class IdealSplit(SplitCost):
    """What a split could be at best: each group's phases as fast as on the whole device, the shorter one hidden whole.

    Two groups read the weights twice, so even this is slower than unsplit where half of the rows cost nearly as much
    as all (docs/design/overlap.md, "What it can win at most").
    """

    def __init__(self, base: CostTable) -> None:
        super().__init__(base, hidden=1.0)

    def is_known(self, requests: int) -> bool:
        """Return whether the base was measured at the rows of half a batch, with a draft token for each request."""
        return float(self.base.confidence(requests)) >= KNOWN

    def verify_time_s(self, rows: npt.ArrayLike) -> Floats:
        """Return seconds of everything but drafting for each number of rows, any shape."""
        return 2.0 * self.base.verify_time_s(np.asarray(rows, np.float64) / 2.0)

    def beside_prompts_s(self, rows: npt.ArrayLike, requests: int, prompts: Prompts) -> Floats:
        """Return mean seconds of everything but drafting for each number of decoding rows, any shape."""
        doubled = self.verify_time_s(rows) - self.base.verify_time_s(rows)
        return self.base.beside_prompts_s(rows, requests, prompts) + doubled


def _log_ratio(seen: float, expected: float) -> float:
    return math.log(min(max(seen / expected, 1.0 / MOST), MOST))


def _middle(seen: deque[float], before: float) -> float:
    """Return the median of what was seen, and what held before while that is too little."""
    return statistics.median(seen) if len(seen) >= LEAST_STEPS else before
