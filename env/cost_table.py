"""What a step costs, measured online from the step records: seconds by verified rows and drafting rounds.

Called by env/state.py (learning) and by policies (asking). All times are robust against outliers: innovations
are clipped, and a fast common level takes up what slows the whole machine. Nothing here reads a clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .draft_cost import DraftCost

Floats = npt.NDArray[np.float64]

KNEE_ROWS = {"cpu": 16.0, "cuda": 256.0}  # prior only: rows at which a step costs twice an empty one
LEVEL_GAIN = 0.1  # the level follows a change of the machine within about 10 steps
NODE_GAIN = 0.02  # a node that is known follows drift within about 50 of its own steps
SEEN_VISITS = 0.05
CONFIDENT_STEPS = 1.0  # visits at which a node counts as half known
MEMORY_RECORDS = 8000.0  # visits fade by time, so that an old measurement is renewed
UNMEASURED_SHARE = 0.3  # by how much an unmeasured step may at least be off
LEAST_PROMPT_ROWS = 32  # of fewer the time drowns in the step's own
PROMPT_GAIN, MIN_PROMPT_ROW, MAX_PROMPT_ROW = 0.1, 0.02, 1.0
MIN_STEP_S, MAX_STEP_S, MIN_LEVEL_S = 1e-6, 60.0, 1e-9  # beyond: a broken clock, not a step
MAX_ROWS = 1 << 20
MAX_NODES = 80
ANCHOR_SLACK = 0.05  # log: below it the unit is left as it is
# A step of more rows may be faster: matrix products have kernels for some row counts and not for others (two rows take
# 12 % longer than three on the CPU build). Believed beyond DIP_DOUBT standard errors of a node's measurement.
DIP_DOUBT = 3.0


@dataclass(frozen=True, slots=True)
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
    visits: Floats = field(init=False)  # per node
    nodes: Floats = field(init=False)  # rows
    _log_nodes: Floats = field(init=False)
    _prior: Floats = field(init=False)
    _correction: Floats = field(init=False)  # log factor on the prior, per node
    _bent: tuple[Floats, Floats] | None = None  # see `_curves`; None: nodes have changed since
    _spread: Floats = field(init=False)  # usual absolute surprise (log), per node; wide while new
    _overlap_share: float = 0.0
    _drafting: DraftCost = field(default_factory=DraftCost)
    _sizes: Floats = field(init=False)
    _size_list: list[float] = field(init=False)
    _node_list: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._sizes = np.array(self.graph_sizes, np.float64)
        self.nodes = _node_rows(self.graph_sizes, max(self.max_rows, 64))
        self._log_nodes = np.log(self.nodes)
        # Python's numbers for the one step that is learnt: numpy's cost is per call.
        self._node_list, self._size_list = self.nodes.tolist(), self._sizes.tolist()
        self._prior = 1.0 + self.nodes / KNEE_ROWS.get(self.device, 64.0)
        self.visits = np.zeros(len(self.nodes))
        self._correction = np.zeros(len(self.nodes))
        self._spread = np.ones(len(self.nodes))

    def learn(self, cost: StepCost) -> None:
        """Take in one step."""
        verify_s = cost.total_s - cost.draft_s + cost.overlap_s
        is_credible = MIN_STEP_S < verify_s < MAX_STEP_S and 0.0 <= cost.draft_s < MAX_STEP_S
        if not is_credible or not 0 < cost.rows <= MAX_ROWS or cost.overlap_s < 0.0:
            return
        if self.measured_steps == 0:
            self.level_s = max(verify_s / float(self._units(np.array([float(cost.rows)]))[0]), MIN_LEVEL_S)
        if cost.is_draft_known:
            self.learn_drafting(cost)
        if cost.prefill_rows * 2 > cost.rows and float(self.visits.sum()) > CONFIDENT_STEPS:
            self._learn_prompt_row(cost, verify_s)
        else:
            self._learn_verifying(cost, verify_s)
        self.measured_steps += 1

    def verify_time_s(self, rows: npt.ArrayLike) -> Floats:
        """Return seconds of everything but drafting for each number of rows, any shape."""
        return self.level_s * self._units(np.asarray(rows, np.float64))

    def prefill_time_s(self, requests: int, prefill_rows: float) -> float:
        """Return seconds that prompts, `prompt_rows` of them, add to a step of `requests` decoding rows.

        Prompts are work that waits either way. Their rows raise what one more row costs, but their own time is not
        to be shared among the tokens of the step: beside a long prefill every draft would look cheap.
        """
        alone_s, both_s = self.verify_time_s(np.array([float(requests), requests + prefill_rows]))
        return float(both_s - alone_s)

    def prompt_rows(self, prefill_rows: float) -> float:
        """Return prompt rows in rows that decode, as the other functions take them."""
        return self.prompt_row * prefill_rows

    def draft_time_s(self, rows: npt.ArrayLike, rounds: npt.ArrayLike, drafted: npt.ArrayLike) -> Floats:
        """Return seconds of drafting after a step of `rows`, for `rounds` rounds over `drafted` tokens in all."""
        draft_s: Floats = self.level_s * (1.0 - self._overlap_share) * self._drafting.units(rows, rounds, drafted)
        return draft_s

    def draft_prices_s(self) -> tuple[float, float]:
        """Return seconds of one more drafted token, and of one more round."""
        unit_s = self.level_s * (1.0 - self._overlap_share)
        return unit_s * self._drafting.per_token, unit_s * self._drafting.per_round

    def step_time_s(self, rows: int, rounds_batches: npt.ArrayLike = ()) -> float:
        """Return seconds of a step of `rows` rows; `rounds_batches` holds the requests in each drafting round."""
        batches = np.asarray(rounds_batches, np.float64).reshape(-1)
        batches = batches[batches > 0]
        drafting = self.draft_time_s(rows, len(batches), batches.sum())
        return float(self.verify_time_s(rows) + drafting)

    def confidence(self, rows: npt.ArrayLike) -> Floats:
        """Return 0 (a guess) .. 1 (measured often and lately) for each number of rows."""
        known = self.visits / (self.visits + CONFIDENT_STEPS)
        return np.interp(self._padded(np.asarray(rows, np.float64)), self.nodes, known)

    def time_range_s(self, rows: Floats, rounds: Floats, drafted: Floats) -> tuple[Floats, Floats]:
        """Return (least, most) plausible seconds of steps, (m,) each; the first is the step without drafts.

        What was never measured may be as cheap as that step, or as much dearer again as the guess says.
        """
        verify_s, draft_s = self.verify_time_s(rows), self.draft_time_s(rows, rounds, drafted)
        doubt = 1.0 - self.confidence(rows)
        chance = np.interp(rows, self.nodes, self._spread / np.sqrt(self.visits + 1.0))
        guess = np.maximum(verify_s - verify_s[0], UNMEASURED_SHARE * verify_s) * doubt
        extra = np.maximum(guess, verify_s * np.minimum(chance, UNMEASURED_SHARE))
        draft_doubt = draft_s * self._drafting.doubt(rounds, float(rows[0]))
        return verify_s - np.minimum(
            extra, 0.9 * verify_s
        ) + draft_s - draft_doubt, verify_s + extra + draft_s + draft_doubt

    def catch_up_time_s(self, tokens: int) -> float:
        """Return seconds in which the drafter makes up for so many skipped tokens."""
        return self.level_s * self._drafting.per_missed * tokens

    @property
    def drafting_steps(self) -> int:
        """Steps in which drafting was measured."""
        return self._drafting.steps

    def learn_drafting(self, cost: StepCost) -> None:
        """Take in what one step's drafting cost; `learn` does so itself where it is known."""
        if cost.draft_s > 0.0:
            share = min(cost.overlap_s / cost.draft_s, 1.0)
            self._overlap_share += 0.05 * (share - self._overlap_share)
        if cost.prefill_rows * 2 > cost.rows:
            return
        units = cost.draft_s / self.level_s
        if cost.caught_up:  # such steps are no measure of drafting: the first one would make it look dear
            self._drafting.learn_missed(cost.rows, cost.rounds, cost.drafted, min(cost.caught_up, MAX_ROWS), units)
            return
        self._drafting.learn(cost.rows, cost.requests, cost.rounds, cost.drafted, units)

    def _learn_prompt_row(self, cost: StepCost, verify_s: float) -> None:
        """Learn from a step of mostly prompt rows what one of them costs beside a row that decodes.

        The curve itself stays: bent by such steps it would make drafts beside a prompt look as cheap as its rows.
        """
        if cost.prefill_rows < LEAST_PROMPT_ROWS:
            return
        units = verify_s / self.level_s
        _, curve = self._curves()
        alike = float(np.interp(units, curve, self.nodes)) * max(units / float(curve[-1]), 1.0)
        found = (alike - (cost.rows - cost.prefill_rows)) / cost.prefill_rows
        surprise = math.log(min(max(found, MIN_PROMPT_ROW), 1.0 / MIN_PROMPT_ROW) / self.prompt_row)
        self._prompt_steps += 1
        gain = max(1.0 / self._prompt_steps, PROMPT_GAIN)
        # At most a row that decodes: with dearer ones the curve would get flatter, and they dearer again.
        self.prompt_row = min(self.prompt_row * math.exp(gain * min(max(surprise, -1.0), 1.0)), MAX_PROMPT_ROW)

    def _learn_verifying(self, cost: StepCost, verify_s: float) -> None:
        alike = cost.rows - cost.prefill_rows + self.prompt_rows(cost.prefill_rows)
        low, high, share = self._between(max(alike, 1.0))
        weight = (1.0 - cost.prefill_rows / cost.rows) ** 2 + 0.02  # prefill rows skip the LM head and the sampler
        visits, prior, correction, spread = self.visits, self._prior, self._correction, self._spread
        for node in (low, high):
            if visits[node] < SEEN_VISITS:  # new: start from what its neighbours suggest
                correction[node] = math.log(self._curves()[0][node] / prior[node])
        # Against the nodes' own values, not the monotone curve: that would wind up where the curve holds them back.
        own = [prior.item(node) * math.exp(correction.item(node)) for node in (low, high)]
        expected = self.level_s * (own[0] * (1.0 - share) + own[1] * share)
        innovation = math.log(verify_s / expected)
        known = visits.item(low) * (1.0 - share) + visits.item(high) * share
        limit = 3.0 * (spread.item(low) * (1.0 - share) + spread.item(high) * share) + 0.02
        surprise = min(abs(innovation), 1.0)
        innovation = min(max(innovation, -limit), limit) * weight
        for node, part in ((low, 1.0 - share), (high, share)):
            # A little faster than the mean of all visits, so that an outlier among the first is forgotten.
            gain = max(1.5 / (visits.item(node) + 1.5), NODE_GAIN)
            correction[node] = min(max(correction.item(node) + gain * part * innovation, -12.0), 12.0)
            spread[node] += 0.1 * part * weight * (surprise - spread.item(node))
            visits[node] += part * weight
        level_s = self.level_s * math.exp(LEVEL_GAIN * known / (known + CONFIDENT_STEPS) * innovation)
        self.level_s = min(max(level_s, MIN_LEVEL_S), MAX_STEP_S)
        self.visits *= 1.0 - 1.0 / MEMORY_RECORDS
        self._anchor()
        self._bent = None  # most steps are followed by no question

    def _between(self, rows: float) -> tuple[int, int, float]:
        """Return the nodes around so many rows, and the share (0..1) of the way from the lower to the upper one."""
        if self._size_list:  # captured graphs run the next captured size
            place = bisect_left(self._size_list, rows)
            rows = self._size_list[place] if place < len(self._size_list) else rows
        nodes = self._node_list
        high = min(bisect_left(nodes, rows), len(nodes) - 1)
        low = high if nodes[high] <= rows or high == 0 else high - 1
        span = nodes[high] - nodes[low]
        return low, high, (rows - nodes[low]) / span if span > 0.0 else 1.0

    def _anchor(self) -> None:
        """Let the level be what an empty step takes, as the prior's and the drafting's units assume.

        The first record sets it, and may be off by ten times: a long prompt, a cold start.
        """
        known = self.visits > CONFIDENT_STEPS
        first = int(known.argmax())
        if known[first] and abs(shift := float(self._correction[first])) > ANCHOR_SLACK:
            self._correction[self.visits > 0.0] -= shift
            self.level_s = min(max(self.level_s * math.exp(shift), MIN_LEVEL_S), MAX_STEP_S)
            self._drafting.rescale(math.exp(-shift))

    def _curves(self) -> tuple[Floats, Floats]:
        """Return the curve at all nodes, and the same made monotone: it can be asked for rows.

        Visited nodes are as measured, others as their visited neighbours bend.
        """
        if self._bent is not None:
            return self._bent
        seen = self.visits >= SEEN_VISITS
        known = self.visits / (self.visits + 0.5)
        around = np.interp(self._log_nodes, self._log_nodes[seen], self._correction[seen]) if seen.any() else 0.0
        curve = self._prior * np.exp(known * self._correction + (1.0 - known) * around)
        monotone = rising(curve, self.visits + 0.01)
        off = curve / monotone - 1.0
        doubt = DIP_DOUBT * self._spread / np.sqrt(np.minimum(self.visits, 1.0 / NODE_GAIN) + 1.0)
        trust = np.maximum(1.0 - np.square(doubt / np.maximum(np.abs(off), 1e-9)), 0.0)  # Breiman's garrote
        self._bent = monotone * (1.0 + trust * off), monotone
        return self._bent

    def _units(self, rows: Floats) -> Floats:
        padded = self._padded(rows)
        beyond = np.maximum(padded - self.nodes[-1], 0.0) / self.nodes[-1]
        units: Floats = np.interp(padded, self.nodes, self._curves()[0]) * (1.0 + beyond)
        return units

    def _padded(self, rows: Floats) -> Floats:
        """Captured graphs run the next captured size; beyond the largest the engine runs eagerly."""
        if not len(self._sizes):
            return rows
        place = np.searchsorted(self._sizes, rows)
        return np.where(place < len(self._sizes), self._sizes[np.minimum(place, len(self._sizes) - 1)], rows)


def rising(values: Floats, weights: Floats) -> Floats:
    """Return the non-decreasing sequence nearest to `values`, (m,), in weighted least squares.

    Pool adjacent violators. A node with few visits yields to a neighbour with many.
    """
    blocks: list[tuple[float, float, int]] = []  # (mean, weight, nodes)
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        nodes = 1
        while blocks and blocks[-1][0] > value:
            mean, heavy, many = blocks.pop()
            value = (mean * heavy + value * weight) / (heavy + weight)
            weight, nodes = heavy + weight, nodes + many
        blocks.append((value, weight, nodes))
    return np.repeat([mean for mean, _, _ in blocks], [nodes for _, _, nodes in blocks])


def _node_rows(graph_sizes: tuple[int, ...], max_rows: int) -> Floats:
    steps = [1.0, 2.0, 3.0]
    while steps[-1] < max_rows:
        steps.append(steps[-2] * 2.0)
    if graph_sizes:
        thin = graph_sizes[:: max(1, len(graph_sizes) // MAX_NODES)]
        steps = [*thin, graph_sizes[-1], *(step for step in steps if step > graph_sizes[-1])]
    return np.unique(np.array(steps, np.float64))
