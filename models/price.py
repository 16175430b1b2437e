"""The price policy: each request drafts as deep as its next token's survival still pays for its row.

Over a grid of (survival threshold, deepest round) it predicts tokens per second of the step, with the cost
table's verify and drafting times, and takes the best cell; so for stop rules on the drafter's confidence
(models/stopping.py). `PricePolicy.act` is called once per record.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..env.acceptance import Floats, Ints
from ..env.confidence import EDGES, Forecast
from ..env.requests import Bools
from ..env.spaces import Action, Capabilities
from ..env.state import EngineState
from .baselines import uniform
from .probe import Chances, ProbeAccount
from .stopping import all_drafts, predict_stops

BINS = 48  # survival thresholds, log-spaced
LOWEST_SURVIVAL = 0.01
HYSTERESIS = 0.01  # gain below which the cell of the step before is kept
SETTLE_DECISIONS = 3  # the whole grid is searched this often; between, requests are placed at the point in force
PAY_BACK_STEPS = 64.0  # what a drafter must make up for is paid once, and has to come in again within so many steps
COMPARE_DECISIONS = 3 * SETTLE_DECISIONS  # confidence is weighed against history this often
SIMILAR_BATCH = 8  # ... while the batch has changed by less than one in so many requests


@dataclass(frozen=True, slots=True)
class Grid:
    """Predictions per (threshold bin, deepest round), all (BINS + 1, k_max + 1); row 0 drafts nothing."""

    tokens: Floats  # expected emitted tokens of the step
    drafted: Floats  # draft tokens
    step_s: Floats

    @property
    def rate(self) -> Floats:
        """Tokens per second."""
        return self.tokens / self.step_s


def survival_bins(conditional: Floats) -> tuple[Floats, Ints]:
    """Return survival (n, k_max) and its bin 0..BINS-1, ascending as survival falls."""
    survival = conditional.cumprod(axis=1)
    scale = BINS / -np.log(LOWEST_SURVIVAL)
    bins: Ints = np.minimum(np.log(np.maximum(survival, 1e-9)) * -scale, BINS - 1).astype(np.int64)
    return survival, bins


def least_survival(edge: int) -> float:
    """Return the survival above which `survival_bins` gives a bin below `edge`."""
    return LOWEST_SURVIVAL ** (edge / BINS) if edge < BINS else -1.0


def predict(state: EngineState, survival: Floats, bins: Ints, begin_s: float = 0.0) -> Grid:
    """Return the predictions for a batch of the n requests whose survival is given.

    :param begin_s: what a step in which all of them draft is charged for what the drafter must make up for
    """
    n, k_max = survival.shape
    delivery = state.population.delivery
    cell = (bins * k_max + np.arange(k_max)).ravel()
    table = np.zeros((2, BINS + 1, k_max + 1))  # leading row and column: none
    table[0, 1:, 1:] = np.bincount(cell, minlength=BINS * k_max).reshape(BINS, k_max) * delivery
    table[1, 1:, 1:] = np.bincount(cell, survival.ravel(), BINS * k_max).reshape(BINS, k_max) * delivery
    drafted, gain = table.cumsum(axis=1).cumsum(axis=2)
    rows = drafted + (n + state.prompt_rows())
    step_s = state.cost.verify_time_s(rows) + state.cost.draft_time_s(rows, np.arange(k_max + 1), drafted)
    step_s = step_s - state.cost.prefill_time_s(n, state.prompt_rows())
    if begin_s > 0.0:
        step_s[:, 1:] += begin_s * np.minimum(drafted[:, 1:2] / max(n, 1), 1.0)
    return Grid(gain + n, drafted, step_s)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one way of choosing would ask for, and what it expects."""

    action: Action  # a probe may replace it
    rate: float  # tokens/s
    depth: int  # deepest round
    people: Chances | None = None  # None: the population as seen without stop rules


class PricePolicy:
    """Per-request lengths by marginal survival against marginal cost, with probes of what is not known.

    With calibrated confidences at hand it also weighs stop rules, and follows whichever promises more.
    """

    def __init__(self, capabilities: Capabilities, *, use_confidence: bool = True) -> None:
        self.name = "price" if use_confidence else "price:history"
        self._k_max = capabilities.k_max
        self._can_stop = use_confidence and not capabilities.is_async
        self._cell = (0, 0)  # (threshold bin, deepest round) in force
        self._stop_cell = (0, 0)  # (threshold to keep, deepest round) in force
        self._is_stopping = False
        self._decisions = 0
        self._held: Plan | None = None  # last searched for
        self._held_for: tuple[int, Forecast | None] = (0, None)  # requests, and forecast if it was followed
        self._rate = 0.0  # tokens/s expected last
        self._probes = ProbeAccount()

    def act(self, state: EngineState) -> Action:
        """Return the lengths of the cell with the most tokens per second, now and then of a probe."""
        decoding = state.decoding()
        requests = int(np.count_nonzero(decoding))
        if self._k_max == 0 or requests == 0:
            return uniform(state, 0, "nothing to speculate on")
        plan = self._plan(state, decoding, requests)
        self._rate = plan.rate
        probe = self._probes.choose(state, requests, plan.rate, plan.depth, plan.people, state.catch_up_s(decoding))
        if probe is not None:
            return uniform(state, probe, f"{requests} decoding: probing length {probe}")
        return plan.action

    def _plan(self, state: EngineState, decoding: Bools, requests: int) -> Plan:
        forecast = state.confidence.forecast if self._can_stop and state.confidence.is_ready else None
        self._decisions += 1
        is_due = self._decisions % SETTLE_DECISIONS == 0
        before, held_forecast = self._held_for
        is_similar = abs(requests - before) * SIMILAR_BATCH <= before and forecast is held_forecast
        if self._held is None or is_due or not is_similar:
            self._held = self._search(state, forecast, decoding, requests)
            self._held_for = requests, forecast
            return self._held
        return self._follow(self._held, state, decoding)

    def _follow(self, plan: Plan, state: EngineState, decoding: Bools) -> Plan:
        """Return the plan for the requests as they are now, at the operating point in force."""
        if self._is_stopping or plan.depth == 0:
            lengths, default = np.full(state.requests.size, plan.depth, np.int64), plan.depth
        else:
            survival = with_stranger(state, decoding).cumprod(axis=1)
            lengths, default = self._placed(survival > least_survival(self._cell[0]), state, decoding)
        return replace(plan, action=replace(plan.action, lengths=lengths, default_length=default))

    def _search(self, state: EngineState, forecast: Forecast | None, decoding: Bools, requests: int) -> Plan:
        if forecast is None:
            self._is_stopping = False
            return self._by_history(state, decoding, requests)
        if self._decisions % COMPARE_DECISIONS:  # both take too long for every step
            way = self._by_confidence if self._is_stopping else self._by_history
            return way(state, decoding, requests)
        history, stops = (way(state, decoding, requests) for way in (self._by_history, self._by_confidence))
        ahead = stops.rate / history.rate - 1.0
        self._is_stopping = ahead > (-HYSTERESIS if self._is_stopping else HYSTERESIS)
        return stops if self._is_stopping else history

    def _by_confidence(self, state: EngineState, decoding: Bools, requests: int) -> Plan:
        forecast = state.confidence.forecast
        assert forecast is not None
        grid = predict_stops(state, forecast, requests, self._rate, state.catch_up_s(decoding) / PAY_BACK_STEPS)
        rate = grid.rate
        self._stop_cell = settle(self._stop_cell, rate)
        keep, depth = self._stop_cell
        now = float(rate[self._stop_cell])
        gain = (now / float(rate[0, 0]) - 1.0) * 100.0
        reason = (
            f"{requests} decoding: {grid.drafted[self._stop_cell]:.0f} drafts in up to {depth} rounds, "
            f"kept above {EDGES[keep]:.2f}, {gain:+.0f} % over none"
        )
        lengths = np.full(state.requests.size, depth, np.int64)
        stop = grid.rule(state.confidence, keep, depth) if depth else None
        prune = state.capabilities.released_prune  # asked for; the gate in the engine finds out whether it pays
        action = Action(lengths, depth, price=1.0 / now, prune=prune, stop=stop, reason=reason)
        return Plan(action, now, depth, all_drafts(state, forecast))

    def _by_history(self, state: EngineState, decoding: Bools, requests: int) -> Plan:
        survival, bins = survival_bins(with_stranger(state, decoding))
        grid = predict(state, survival[:-1], bins[:-1], state.catch_up_s(decoding) / PAY_BACK_STEPS)
        rate = grid.rate
        self._cell = settle(self._cell, rate)
        now = float(rate[self._cell])
        edge, depth = self._cell
        lengths, default = self._placed(bins < edge, state, decoding)
        gain = (now / float(rate[0, 0]) - 1.0) * 100.0
        reason = (
            f"{requests} decoding: {grid.drafted[self._cell]:.0f} drafts in {depth} rounds, {gain:+.0f} % over none"
        )
        action = Action(lengths, default, price=1.0 / now, prune=state.capabilities.released_prune, reason=reason)
        return Plan(action, now, depth)

    def _placed(self, is_worth: Bools, state: EngineState, decoding: Bools) -> tuple[Ints, int]:
        """Return lengths and default of what is worth its row, (n + 1, k_max), in the rounds in force."""
        chosen = np.minimum(is_worth.sum(axis=1), self._cell[1])
        default = int(chosen[-1])
        lengths = np.full(state.requests.size, default, np.int64)
        lengths[decoding] = chosen[:-1]
        return lengths, default


def with_stranger(state: EngineState, decoding: Bools) -> Floats:
    """Return (n + 1, k_max) acceptance; the last row is a request that nothing is known about."""
    return np.concatenate([state.acceptance()[decoding], state.population.mean[None, :]])


def settle(cell: tuple[int, int], rate: Floats) -> tuple[int, int]:
    """Return the best cell, or the one in force if that is nearly as good."""
    best = divmod(int(rate.argmax()), rate.shape[1])
    return best if rate[cell] < rate[best] * (1.0 - HYSTERESIS) else cell
