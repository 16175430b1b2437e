"""What a step costs, measured online from the step records: seconds by verified rows and drafting rounds.

Called by env/estimate/engine_state.py (learning) and by policies (asking). All times are robust against outliers:
innovations are clipped, and a fast common level takes up what slows the whole machine. Nothing here reads a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...engine_adapter.arrays import Floats
from ..cost import cost_table_kernel as kernel
from .cost_table_kernel import CONFIDENT_STEPS, LOG_NODE, NODE, PRIOR, SPREAD, TABLE_ROWS, VISITS
from .draft_cost import DraftCost
from .plain_steps import PlainSteps

KNEE_ROWS = {"cpu": 16.0, "cuda": 256.0}  # prior only: rows at which a step costs twice an empty one
OTHER_KNEE_ROWS = 64.0  # ... on devices that nobody has measured
LEAST_PROMPT_ROWS = 32  # of fewer the time drowns in the step's own
PROMPT_GAIN, MIN_PROMPT_ROW, MAX_PROMPT_ROW = 0.1, 0.02, 1.0  # of about 10 prompts; in rows that decode
OVERLAP_GAIN = 0.05  # the share of drafting that is hidden is that of about 20 drafting steps
MIN_STEP_S, MAX_STEP_S, MIN_LEVEL_S = 1e-6, 60.0, 1e-9  # beyond: a broken clock, not a step
FOLLOW_GAIN, FOLLOW_MOST = 0.05, 0.5  # of a surprise, a logarithm
MAX_ROWS = 1 << 20  # of a step; beyond: nonsense
MAX_NODES = 80  # of the table, about: engines with CUDA graphs name up to hundreds of sizes


class Prompts(NamedTuple):
    """Prompts beside what decodes: some steps have many rows of them, the others none."""

    rows: float  # in a step that has any, in rows that decode
    share: float  # of steps that have any, 0..1


NO_PROMPTS: Final = Prompts(0.0, 0.0)


@dataclass(slots=True)
class StepCost:
    """What one step did and how long it took; rows and tokens as counts, times in seconds."""

    rows: int  # rows through the target: prefill, decode and drafts
    prefill_rows: int
    requests: int
    context_tokens: int  # KV entries that attention reads
    rounds: int  # drafting rounds, the longest draft
    drafted: int  # draft tokens over all requests
    total_s: float
    draft_s: float
    overlap_s: float
    is_draft_known: bool = True  # False: `rounds` and `drafted` say too little
    caught_up: int = 0  # tokens the drafter had skipped and made up for in `draft_s`
    all_draft: bool = False  # everybody may draft behind this step: the drafter reads the prompts in it too


@dataclass(slots=True)
class CostTable:
    """Step time as level x (curve over rows + drafting); the curve is known only at nodes that were visited.

    Before the first record the level is 1 s per unit and everything is a guess: `confidence` is 0 and
    `measured_steps` is 0. Between and beyond visited nodes the prior's shape, 1 + rows / knee, is bent to fit.
    """

    device: str = "cpu"
    graph_sizes: tuple[int, ...] = ()
    max_rows: int = 8192
    level_s: float = 1.0
    measured_steps: int = 0
    prompt_row: float = 1.0  # what a prompt's row costs, in rows that decode: no LM head, no sampler
    _prompt_steps: int = 0
    _table: Floats = field(init=False)  # (TABLE_ROWS, nodes)
    _is_bent: bool = False  # False: nodes have changed since; most steps are followed by no question
    _sizes: Floats = field(init=False)
    _overlap_share: float = 0.0
    _drafting: DraftCost = field(default_factory=DraftCost)
    _plain: PlainSteps = field(default_factory=PlainSteps)

    def __post_init__(self) -> None:
        self._sizes = np.array(self.graph_sizes, np.float64)
        nodes = _node_rows(self.graph_sizes, max(self.max_rows, 64))
        self._table = np.zeros((TABLE_ROWS, len(nodes)))
        self._table[NODE], self._table[LOG_NODE] = nodes, np.log(nodes)
        self._table[PRIOR] = 1.0 + nodes / KNEE_ROWS.get(self.device, OTHER_KNEE_ROWS)
        self._table[SPREAD] = 1.0

    @property
    def nodes(self) -> Floats:
        """Rows of the steps that are told apart, ascending."""
        nodes: Floats = self._table[NODE]
        return nodes

    @property
    def visits(self) -> Floats:
        """How often each node was measured, with forgetting."""
        visits: Floats = self._table[VISITS]
        return visits

    def learn(self, cost: StepCost) -> None:
        """Take in one step."""
        verify_s = cost.total_s - cost.draft_s + cost.overlap_s
        is_credible = MIN_STEP_S < verify_s < MAX_STEP_S and 0.0 <= cost.draft_s < MAX_STEP_S
        if not is_credible or not 0 < cost.rows <= MAX_ROWS or cost.overlap_s < 0.0:
            return
        if self.measured_steps == 0:
            self.level_s = max(verify_s / kernel.units(self._bent(), self._sizes, float(cost.rows)), MIN_LEVEL_S)
        if cost.is_draft_known:
            self.learn_drafting(cost)
        if cost.prefill_rows * 2 > cost.rows and float(self.visits.sum()) > CONFIDENT_STEPS:
            self._learn_prompt_row(cost, verify_s)
        else:
            self._learn_verifying(cost, verify_s)
        self.measured_steps += 1

    def follow(self, surprise: float) -> None:
        """Move the common level a little: steps of another kind took exp(surprise) times what they were known to take.

        So the table keeps up with a machine that gets slower or faster while no step of its own kind is made.
        """
        self._change_level(FOLLOW_GAIN * min(max(surprise, -FOLLOW_MOST), FOLLOW_MOST))

    def verify_time_s(self, rows: npt.ArrayLike) -> Floats:
        """Return seconds of everything but drafting for each number of rows, any shape."""
        times_s = np.array(rows, np.float64, order="C")
        kernel.verify(self._bent(), self._sizes, self.level_s, times_s.reshape(-1))
        return times_s

    def plain_factor(self, requests: int) -> float:
        """Return by how much a step of so many requests without a draft differs from what the curve says of it."""
        return self._plain.factor(requests)

    def beside_prompts_s(self, rows: npt.ArrayLike, requests: int, prompts: Prompts) -> Floats:
        """Return mean seconds of everything but drafting for each number of decoding rows, any shape, without prompts'.

        A row beside prompts never costs less than without them: where a prompt's row is taken for more than it is, the
        curve gets too flat at many rows, and drafts beside prompts would look cheap.

        :param requests: rows of the step without drafts
        """
        alone_s = self.verify_time_s(rows)
        if prompts.rows == 0.0:
            return alone_s
        together_s = self.verify_time_s(np.asarray(rows) + prompts.rows)
        return _mixed(alone_s, together_s - self.prefill_time_s(requests, prompts.rows), prompts.share)

    def prefill_time_s(self, requests: int, prefill_rows: float) -> float:
        """Return seconds that prompts, `prompt_rows` of them, add to a step of `requests` decoding rows.

        Prompts are work that waits either way. Their rows raise what one more row costs, but their own time is not
        to be shared among the tokens of the step: beside a long prefill every draft would look cheap.
        """
        if prefill_rows == 0.0:
            return 0.0
        table, sizes, alone = self._bent(), self._sizes, float(requests)
        return self.level_s * (kernel.units(table, sizes, alone + prefill_rows) - kernel.units(table, sizes, alone))

    def prompt_rows(self, prefill_rows: float) -> float:
        """Return prompt rows in rows that decode, as the other functions take them."""
        return self.prompt_row * prefill_rows

    def draft_time_s(self, rows: npt.ArrayLike, rounds: npt.ArrayLike, drafted: npt.ArrayLike) -> Floats:
        """Return seconds of drafting after a step of `rows`, for `rounds` rounds over `drafted` tokens in all."""
        draft_s = self._drafting.units(rows, rounds, drafted)
        draft_s *= self.level_s
        draft_s *= 1.0 - self._overlap_share
        return draft_s

    def draft_prices_s(self) -> tuple[float, float]:
        """Return seconds of one more drafted token, and of one more round."""
        unit_s = self.level_s * (1.0 - self._overlap_share)
        return unit_s * self._drafting.per_token, unit_s * self._drafting.per_round

    def confidence(self, rows: npt.ArrayLike) -> Floats:
        """Return 0 (a guess) .. 1 (measured often and lately) for each number of rows."""
        known = np.array(rows, np.float64, order="C")
        kernel.confidence(self._table, self._sizes, known.reshape(-1))
        return known

    def time_range_s(
        self, rows: Floats, rounds: Floats, drafted: Floats, prompts: Prompts = NO_PROMPTS
    ) -> tuple[Floats, Floats]:
        """Return (least, most) plausible seconds of steps, (m,) each; the first is the step without drafts.

        What was never measured may be as cheap as that step, or as much dearer again as the guess says. Prompts count
        as in `beside_prompts_s`.
        """
        if prompts.rows > 0.0:
            prefill_s = self.prefill_time_s(int(rows[0]), prompts.rows)
            alone_s, together_s = (self.time_range_s(each, rounds, drafted) for each in (rows, rows + prompts.rows))
            least_s, most_s = _mixed(np.array(alone_s), np.subtract(together_s, prefill_s), prompts.share)
            return least_s, most_s
        draft_s = self.draft_time_s(rows, rounds, drafted)
        doubt = self._drafting.doubt(rounds, float(rows[0]))
        kernel.time_range(
            self._bent(), self._sizes, self.level_s, np.ascontiguousarray(rows, np.float64), draft_s, doubt
        )
        return draft_s, doubt

    def catch_up_time_s(self, tokens: int) -> float:
        """Return seconds in which the drafter makes up for so many skipped tokens."""
        return self.level_s * self._drafting.per_read * tokens

    def keep_up_time_s(self, prompt_rows: float) -> float:
        """Return seconds in which the drafter reads prompts so that it can draft behind them, and else would not."""
        return self.level_s * max(self._drafting.per_read - self._drafting.per_idly_read, 0.0) * prompt_rows

    def learn_drafting(self, cost: StepCost) -> None:
        """Take in what one step's drafting cost; `learn` does so itself where it is known."""
        if cost.draft_s > 0.0:
            share = min(cost.overlap_s / cost.draft_s, 1.0)
            self._overlap_share += OVERLAP_GAIN * (share - self._overlap_share)
        units, is_mostly_prompt = cost.draft_s / self.level_s, cost.prefill_rows * 2 > cost.rows
        if not cost.caught_up and not is_mostly_prompt:
            self._drafting.learn(cost.rows, cost.requests, cost.rounds, cost.drafted, units)
        elif cost.rounds == 0 and not cost.caught_up:
            self._drafting.learn_idle_reading(cost.prefill_rows, units)
        elif cost.all_draft or not is_mostly_prompt:  # no measure of drafting: it would look dear, or cheap per row
            prompt_rows = cost.prefill_rows if cost.all_draft else 0
            read = prompt_rows + min(cost.caught_up, MAX_ROWS)
            self._drafting.learn_reading(cost.rows - prompt_rows, cost.rounds, cost.drafted, read, units)

    def _learn_prompt_row(self, cost: StepCost, verify_s: float) -> None:
        """Learn from a step of mostly prompt rows what one of them costs beside a row that decodes.

        The curve itself stays: bent by such steps it would make drafts beside a prompt look as cheap as its rows.
        """
        if cost.prefill_rows < LEAST_PROMPT_ROWS:
            return
        units = verify_s / self.level_s
        alike = kernel.rows_alike(self._bent(), units)
        found = (alike - (cost.rows - cost.prefill_rows)) / cost.prefill_rows
        surprise = math.log(min(max(found, MIN_PROMPT_ROW), 1.0 / MIN_PROMPT_ROW) / self.prompt_row)
        self._prompt_steps += 1
        gain = max(1.0 / self._prompt_steps, PROMPT_GAIN)
        # At most a row that decodes: with dearer ones the curve would get flatter, and they dearer again.
        self.prompt_row = min(self.prompt_row * math.exp(gain * min(max(surprise, -1.0), 1.0)), MAX_PROMPT_ROW)

    def _learn_verifying(self, cost: StepCost, verify_s: float) -> None:
        rows, prefill_rows = float(cost.rows), float(cost.prefill_rows)
        if cost.rows == cost.requests and not cost.prefill_rows and float(self.visits.sum()) > CONFIDENT_STEPS:
            self._plain.learn(cost.requests, math.log(verify_s / float(self.verify_time_s(rows))))
        change, shift = kernel.learn(
            self._table, self._sizes, self.level_s, self.prompt_row, verify_s, rows, prefill_rows
        )
        self._change_level(change)
        if shift:
            self._change_level(shift)
            self._drafting.rescale(math.exp(-shift))
        self._is_bent = False

    def _change_level(self, change: float) -> None:
        self.level_s = min(max(self.level_s * math.exp(change), MIN_LEVEL_S), MAX_STEP_S)

    def _bent(self) -> Floats:
        """Return the table with its curves as of now."""
        if not self._is_bent:
            kernel.bend(self._table)
            self._is_bent = True
        return self._table


def _mixed(alone_s: Floats, beside_s: Floats, share: float) -> Floats:
    """Return the mean time of steps of which a share has prompts; those are never faster than the others."""
    mean_s: Floats = alone_s + share * np.maximum(beside_s - alone_s, 0.0)
    return mean_s


def _node_rows(graph_sizes: tuple[int, ...], max_rows: int) -> Floats:
    steps = [1.0, 2.0, 3.0]
    while steps[-1] < max_rows:
        steps.append(steps[-2] * 2.0)
    if graph_sizes:
        thin = graph_sizes[:: max(1, len(graph_sizes) // MAX_NODES)]
        steps = [*thin, graph_sizes[-1], *(step for step in steps if step > graph_sizes[-1])]
    return np.unique(np.array(steps, np.float64))
