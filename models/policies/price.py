"""The price policy: each request drafts as deep as its next token's survival still pays for its row.

Over a grid of (survival threshold, deepest round) it predicts tokens per second of the step, with the cost
table's verify and drafting times, and takes the best cell; so for stop rules on the drafter's confidence
(models/policies/stop_rules.py). Where the engine offers splits of its device, it asks for the one that promises most
by what it has shown to cost (models/policies/split_choice.py). `PricePolicy.act` is called once per record.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Final

import msgspec
import numpy as np

from ...engine_adapter.arrays import Bools, Floats, Ints
from ...engine_adapter.compiled import compiled
from ...env.estimate.confidence import Forecast
from ...env.estimate.engine_state import EngineState
from ...env.estimate.overlap_bound import PhaseTimes, draft_ahead_bound
from ...env.estimate.planning_view import PlanningView
from ...env.estimate.split_cost import IdealSplit
from ...env.spaces import Action, Capabilities
from .advice import NEUTRAL, Advice
from .baselines import uniform
from .confidence_bootstrap import ConfidenceBootstrap
from .probe import BUDGET_SHARE, Chances, ProbeAccount
from .split_choice import RateEstimates, SplitChoice
from .step_grid import HYSTERESIS, PLANES, choose
from .stop_rules import EDGE_LIST, NO_RULE, all_drafts, predict_stops, rule_of

BINS: Final = 48  # survival thresholds, log-spaced
LOWEST_SURVIVAL: Final = 0.01
SETTLE_DECISIONS = 3  # the whole grid is searched this often; between, requests are placed at the point in force
SETTLED_DECISIONS = 12  # ... while search after search finds the same point
AHEAD_GAIN = 0.01  # that drafting ahead must promise
PAY_BACK_STEPS = 64.0  # what a drafter must make up for is paid once, and has to come in again within so many steps
COMPARE_SEARCHES = 3  # confidence is weighed against history in one of so many
SIMILAR_BATCH = 8  # ... while the batch has changed by less than one in so many requests


def least_survival(edge: int) -> float:
    """Return the survival above which a draft token is worth its row at the threshold `edge`, 0..BINS."""
    return LOWEST_SURVIVAL ** (edge / BINS) if edge < BINS else -1.0


class Plan(msgspec.Struct, frozen=True):
    """What one way of choosing would ask for, and what it expects."""

    action: Action  # a probe may replace it
    rate: float  # tokens/s
    depth: int  # deepest round
    drafted: float  # tokens in all
    even_rates: Floats  # (k_max + 1,) what it expects of one length for all, tokens/s
    chances: Chances | None = None  # None: the population as seen without stop rules


class OperatingPoint(msgspec.Struct):
    """What is in force for batches of one size: two requests need not be relearnt because one of them just ended."""

    is_stopping: bool = False
    cell: tuple[int, int] = (0, 0)  # (threshold bin, deepest round) of lengths by history
    stop_cell: tuple[int, int] = (0, 0)  # (threshold to keep, deepest round) of stop rules
    rate: float = 0.0  # tokens/s expected last
    searches: int = 0

    @property
    def place(self) -> tuple[bool, tuple[int, int]]:
        """Return the way followed and its cell."""
        return self.is_stopping, self.stop_cell if self.is_stopping else self.cell


class PricePolicy:
    """Per-request lengths by marginal survival against marginal cost, with probes of what is not known.

    With calibrated confidences at hand it also weighs stop rules, and follows whichever promises more.
    """

    def __init__(self, capabilities: Capabilities, *, use_confidence: bool = True) -> None:
        self.name = "price" if use_confidence else "price:history"
        self._k_max = capabilities.k_max
        self._can_stop = use_confidence and not capabilities.is_async
        self._point = OperatingPoint()
        self._points: dict[tuple[int, int], OperatingPoint] = {}  # by split and size of the batch
        self._plans: dict[tuple[int, int], tuple[OperatingPoint, Plan]] = {}  # the newest of each
        self._next_search = self._interval = SETTLE_DECISIONS  # decisions from now, and from the last one
        self._held: Plan | None = None  # last searched for
        self.plan: Plan | None = None  # the newest action's, whether or not a probe took its place
        self._held_for: tuple[int, Forecast | None, int] = (0, None, 0)  # requests, forecast if followed, split
        self._probes = ProbeAccount()
        self._bootstrap = ConfidenceBootstrap()
        self._can_split = len(capabilities.splits) > 1
        self._splits = SplitChoice(len(capabilities.splits))
        self._advice = NEUTRAL

    def follow(self, advice: Advice) -> None:
        """Lean as advised from the next search on, until advised otherwise."""
        self._advice = advice
        self._probes.budget_share = BUDGET_SHARE * advice.probe_factor

    def act(self, state: EngineState) -> Action:
        """Return the lengths of the cell with the most tokens per second, now and then of a probe."""
        view = state.view()
        self.plan = None
        if self._k_max == 0:
            return uniform(view.size, 0, "nothing to speculate on")
        if view.requests == 0:
            return self._expecting(view, int(np.count_nonzero(state.in_batch())))
        if self._can_split:
            return self._side_by_side(state, view)
        plan = self.plan = self._plan(view, 0)
        self._point.rate = plan.rate
        return self._probed(plan, view)

    def _expecting(self, view: PlanningView, in_batch: int) -> Action:
        """Return what was last planned for as many as read their prompts now, or for one.

        Decisions act steps later: with a request at a time an answer's first steps would else be without drafts.
        """
        coming = max(in_batch, 1)
        if (kept := self._plans.get((0, _size(coming)))) is None:
            return uniform(view.size, 0, "nothing to speculate on")
        self._point, plan = kept
        return msgspec.structs.replace(self._follow(plan, view).action, reason=f"nobody decodes: as last with {coming}")

    def _probed(self, plan: Plan, view: PlanningView) -> Action:
        requests = view.requests
        if plan.depth == 0 and self._can_stop and self._bootstrap.begins(view, plan.rate):
            return uniform(view.size, 1, f"{requests} decoding: learning what confidence tells")
        if plan.depth > 0 and self._probes.looks_back(view, plan.rate / plan.even_rates.item(0) - 1.0):
            return uniform(view.size, 0, f"{requests} decoding: probing length 0")
        begin_s = view.catch_up_s() if self._probes.is_due(view) else 0.0
        probe = self._probes.choose(view, plan.rate, plan.depth, plan.chances, begin_s)
        if probe is not None:
            return uniform(view.size, probe, f"{requests} decoding: probing length {probe}")
        return plan.action

    def _side_by_side(self, state: EngineState, view: PlanningView) -> Action:
        """Return the action under the split that is in force or on trial at this size of the batch."""
        requests, octave = view.requests, state.octave
        split = self._splits.at(requests, octave)
        planned = view.under(state.cost_under(split))
        plan = self.plan = self._plan(planned, split)
        self._point.rate = plan.rate
        is_trial = self._splits.is_trial(octave)  # whose few steps are to tell of the split alone
        action = plan.action if is_trial else self._probed(plan, planned)
        rates = RateEstimates(partial(self._promised, state, view), partial(self._promised_at_best, view))
        self._splits.note(requests, octave, state.split == split, rates)
        return msgspec.structs.replace(action, split=split)

    def _promised(self, state: EngineState, view: PlanningView, split: int) -> float | None:
        """Return the tokens per second of the best plan under a split; None while nothing is known of the split."""
        if split and not state.split_cost(split).is_shown:
            return None
        return self._rate_at(view.under(state.cost_under(split)), split)

    def _promised_at_best(self, view: PlanningView) -> float:
        """Return the tokens per second that no split can exceed; infinite while that is not known."""
        ideal = IdealSplit(view.unsplit_cost)
        return self._rate_at(view.under(ideal), 0) if ideal.is_known(view.requests) else math.inf

    def _rate_at(self, view: PlanningView, split: int) -> float:
        """Return the tokens per second of the best plan at the view's costs, from the split's operating point on.

        Of those who run now, whichever way is the better: so the rates of two splits tell of the splits.
        """
        kept = self._points.get((split, _size(view.requests)), self._point)
        point = msgspec.structs.replace(kept)  # a copy: what is only asked about must not move what is followed
        history = self._by_history(view, point)
        if (forecast := self._forecast(view)) is None:
            return history.rate
        return history.rate * (1.0 + max(_lead(self._by_confidence(view, forecast, point), history), 0.0))

    def _forecast(self, view: PlanningView) -> Forecast | None:
        return view.forecast if self._can_stop else None

    def _plan(self, view: PlanningView, split: int) -> Plan:
        forecast, requests = self._forecast(view), view.requests
        self._next_search -= 1
        held_requests, held_forecast, held_split = self._held_for
        is_similar = abs(requests - held_requests) * SIMILAR_BATCH <= held_requests
        is_similar &= forecast is held_forecast and split == held_split
        if self._held is not None and self._next_search > 0 and is_similar:
            return self._follow(self._held, view)
        before = self._point.place
        self._held = self._search(view, forecast, split)
        if view.capabilities.frontier:
            action = msgspec.structs.replace(self._held.action, frontier=_frontier(view, self._held))
            self._held = msgspec.structs.replace(self._held, action=action)
        self._plans[split, _size(requests)] = self._point, self._held
        self._held_for = requests, forecast, split
        is_settled = is_similar and self._point.place == before
        self._interval = min(2 * self._interval, SETTLED_DECISIONS) if is_settled else SETTLE_DECISIONS
        self._next_search = self._interval
        return self._held

    def _follow(self, plan: Plan, view: PlanningView) -> Plan:
        """Return the plan for the requests as they are now, at the operating point in force."""
        if self._point.is_stopping or plan.depth == 0:
            lengths, default = np.full(view.size, plan.depth, np.int64), plan.depth
        else:
            lengths, default = _placed(view.acceptance(), view, self._point.cell)
        action = msgspec.structs.replace(plan.action, lengths=lengths, default_length=default)
        return msgspec.structs.replace(plan, action=action)

    def _search(self, view: PlanningView, forecast: Forecast | None, split: int) -> Plan:
        begun = msgspec.structs.replace(self._point, searches=0)
        point = self._point = self._points.setdefault((split, _size(view.requests)), begun)
        if forecast is None:
            point.is_stopping = False
            return self._by_history(view, point)
        point.searches += 1
        if point.searches % COMPARE_SEARCHES:  # both take too long for every step
            return self._by_confidence(view, forecast, point) if point.is_stopping else self._by_history(view, point)
        history, stops = self._by_history(view, point), self._by_confidence(view, forecast, point)
        ahead = _lead(stops, history) + self._advice.stop_lead
        point.is_stopping = ahead > (-HYSTERESIS if point.is_stopping else HYSTERESIS)
        return stops if point.is_stopping else history

    def _by_confidence(self, view: PlanningView, forecast: Forecast, point: OperatingPoint) -> Plan:
        go_on, table, verify_s = predict_stops(view, forecast, point.rate)
        choice = choose(table, view, _reading_s(view), point.stop_cell, verify_s, self._advice.time_weight)
        keep, depth = point.stop_cell = (choice.threshold, choice.depth)
        kept = "all kept" if keep == NO_RULE else f"kept above {EDGE_LIST[keep]:.2f}"
        reason = (
            f"{view.requests} decoding: {choice.drafted:.0f} drafts in up to {depth} rounds, {kept}, "
            f"{choice.gain_percent:+.0f} % over none"
        )
        lengths = np.full(view.size, depth, np.int64)
        stop = rule_of(go_on, view.confidence, keep, depth) if depth else None
        prune = view.capabilities.released_prune  # asked for; the gate in the engine finds out whether it pays
        action = Action(lengths, depth, price=1.0 / choice.rate, prune=prune, stop=stop, reason=reason)
        return Plan(action, choice.rate, depth, choice.drafted, choice.even_rates, all_drafts(view, forecast))

    def _by_history(self, view: PlanningView, point: OperatingPoint) -> Plan:
        acceptance = view.acceptance()
        table = np.zeros((PLANES, BINS + 1, self._k_max + 1))
        _tabulate(acceptance, view.decoding, view.population.delivery, view.requests, table)
        choice = choose(table, view, _reading_s(view), point.cell, time_weight=self._advice.time_weight)
        point.cell = (choice.threshold, choice.depth)
        lengths, default = _placed(acceptance, view, point.cell)
        reason = (
            f"{view.requests} decoding: {choice.drafted:.0f} drafts in {choice.depth} rounds, "
            f"{choice.gain_percent:+.0f} % over none"
        )
        prune = view.capabilities.released_prune
        action = Action(lengths, default, price=1.0 / choice.rate, prune=prune, reason=reason)
        return Plan(action, choice.rate, choice.depth, choice.drafted, choice.even_rates)


def _placed(acceptance: Floats, view: PlanningView, cell: tuple[int, int]) -> tuple[Ints, int]:
    """Return (n,) lengths, as deep as survival is worth a row, and that of who is not known or not decoding."""
    threshold, depth = cell
    lengths = np.empty(view.size, np.int64)
    mean = view.population.mean
    return lengths, _place(acceptance, view.decoding, mean, least_survival(threshold), depth, lengths)


def _lead(stops: Plan, history: Plan) -> float:
    """Return by how much more stop rules add to the best length for all than lengths by history do, as a share.

    Rules are weighed by recent drafts, whoever's, lengths by those who run now: rates would tell which of these are the
    luckier. So each way is compared with one length for all under its own estimates.
    """
    even = int(np.argmax(stops.even_rates))
    by_stops, by_history = (plan.rate / plan.even_rates.item(even) for plan in (stops, history))
    return by_stops / by_history - 1.0


def _size(requests: int) -> int:
    """Return the class of a batch: small ones each their own, larger ones by octave."""
    return requests if requests < SIMILAR_BATCH else SIMILAR_BATCH * requests.bit_length()


def _reading_s(view: PlanningView) -> float:
    """Return what the drafter must read to draft for all, in seconds per step: what it missed, and new prompts."""
    return view.catch_up_s() / PAY_BACK_STEPS + view.keep_up_s()


def _frontier(view: PlanningView, plan: Plan) -> int:
    """Return how many tokens to draft ahead: all that can be where that can pay, else none.

    What it can win at most (env/estimate/overlap_bound.py) with the hit rate that history gives; whether it does win,
    the engine's own gate measures.
    """
    length = min(max(round(plan.drafted / view.requests), 1), plan.depth)  # of a chunk, about
    if length == 0:
        return 0
    rows = view.requests + plan.drafted
    acceptance = view.acceptance()[view.decoding]
    hits = acceptance[:, :length].prod(axis=1) * acceptance[:, min(length, acceptance.shape[1] - 1)]
    cost = view.unsplit_cost
    draft_s = float(cost.draft_alone_s(rows, plan.depth, plan.drafted))
    times = PhaseTimes(draft_s, float(cost.verify_time_s(rows)))
    return view.capabilities.frontier if draft_ahead_bound(times, float(hits.mean())) >= 1.0 + AHEAD_GAIN else 0


@compiled
def _tabulate(acceptance: Floats, decoding: Bools, delivery: Floats, requests: int, table: Floats) -> None:
    """Fill in the table, (4, BINS + 1, k_max + 1) of zeros; its first row and column: none drafted."""
    scale = BINS / -math.log(LOWEST_SURVIVAL)
    k_max = acceptance.shape[1]
    for i in range(len(decoding)):
        if not decoding[i]:
            continue
        survival = 1.0
        for j in range(k_max):
            survival *= acceptance[i, j]
            cell = 1 + int(max(min(math.log(max(survival, 1e-9)) * -scale, BINS - 1.0), 0.0))
            table[0, cell, j + 1] += 1.0
            table[1, cell, j + 1] += survival
    for cell in range(BINS + 1):
        drafted = tokens = 0.0
        for j in range(k_max + 1):
            if cell > 0 and j > 0:
                for plane in range(2):  # sums over the thresholds, kept in the other planes for the next of them
                    table[2 + plane, cell, j] = table[2 + plane, cell - 1, j] + table[plane, cell, j] * delivery[j - 1]
                drafted += table[2, cell, j]
                tokens += table[3, cell, j]
            table[0, cell, j], table[1, cell, j] = drafted, tokens + requests
    for cell in range(BINS + 1):
        for j in range(k_max + 1):
            table[2, cell, j], table[3, cell, j] = table[0, cell, j] + requests, j


@compiled
def _place(acceptance: Floats, decoding: Bools, mean: Floats, least: float, depth: int, lengths: Ints) -> int:
    """Fill in (n,) lengths; return the default."""
    depth = min(depth, len(mean))
    survival, default = 1.0, 0
    while default < depth and survival * mean[default] > least:
        survival *= mean[default]
        default += 1
    for i in range(len(lengths)):
        lengths[i] = default
        if decoding[i]:
            survival, length = 1.0, 0
            while length < depth and survival * acceptance[i, length] > least:
                survival *= acceptance[i, length]
                length += 1
            lengths[i] = length
    return default
