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

from ...engine_adapter.arrays import Floats, Ints
from ...engine_adapter.protocol import MatchRule, Rest, StopRule
from ...env.cost.split_cost import IdealSplit
from ...env.estimate.confidence import Forecast
from ...env.estimate.engine_state import EngineState
from ...env.estimate.planning_view import PlanningView
from ...env.spaces import Action, Capabilities
from .admission import admission
from .baselines import uniform
from .copying import beside_favoured, match_rule, with_copies
from .favouring import FavouredGroups, choose_favouring, told_favoured
from .probe import Chances, ProbeAccount
from .resting import REST_RECORDS, choose_rest
from .split_choice import RateEstimates, SplitChoice
from .step_grid import BINS, PLANES, Choice, choose, least_survival, place, tabulate
from .stop_rules import EDGE_LIST, NO_RULE, all_drafts, predict_stops, predict_trims, rule_of
from .token_values import VALUES, ShortestSteps, TokenValues

SETTLE_DECISIONS = 3  # the whole grid is searched this often, 30 us at 64 requests; between, lengths are placed, 5 us
SETTLED_DECISIONS = 12  # ... while search after search finds the same point
PAY_BACK_STEPS = 64.0  # what a drafter must make up for is paid once, and has to come in again within so many steps
LEAST_SHARE: Final = 0.01  # of the drafts that are copies: fewer are not worth reckoning with
COMPARE_SEARCHES = 3  # confidence is weighed against history in one of so many
SIMILAR_BATCH = 8  # ... while the batch has changed by less than one in so many requests


class Plan(msgspec.Struct, frozen=True):
    """What one way of choosing would ask for, and what it expects."""

    action: Action  # a probe may replace it
    rate: float  # tokens/s
    threshold: int  # of the cell: bin of survival, or under stop rules of what is kept
    depth: int  # ... and deepest round
    drafted: float  # tokens in all
    even_rates: Floats  # (k_max + 1,) what it expects of one length for all, tokens/s
    chances: Chances | None = None  # of drafts that no stop rule ends; None: lengths by history

    @property
    def is_stopping(self) -> bool:
        """Return whether drafts end by stop rules."""
        return self.chances is not None

    @property
    def point(self) -> tuple[bool, int, int]:
        """Return the operating point: the way followed and its cell."""
        return self.is_stopping, self.threshold, self.depth


class PricePolicy:
    """Per-request lengths by marginal survival against marginal cost, with probes of what is not known.

    With calibrated confidences at hand it also weighs stop rules, and follows whichever promises more.
    """

    def __init__(
        self, capabilities: Capabilities, *, use_confidence: bool = True, use_copies: bool = True,
        values: TokenValues | None = VALUES,
    ) -> None:  # fmt: skip
        """Take values of tokens by objectives, None for 1 whoever's they are."""
        is_whole = use_confidence and use_copies
        self.name = "price" if is_whole else "price:drafter" if use_confidence else "price:history"
        if values != VALUES:
            self.name = "price:even" if values is None else "price:values"
        self._can_copy = use_copies and bool(capabilities.copy_max)
        self._k_max = capabilities.k_max
        # An engine that verifies adaptively decides on its device, where it need not wait for what was drawn.
        self._can_stop = use_confidence and (capabilities.is_adaptive or not capabilities.is_async)
        # By split and size of the batch, the newest: two requests need not be relearnt because one of them just ended.
        self._plans: dict[tuple[int, int], Plan] = {}
        self._searches = 0
        self._next_search = self._interval = SETTLE_DECISIONS  # decisions from now, and from the last one
        self._held: Plan | None = None  # last searched for
        self.plan: Plan | None = None  # the newest action's, whether or not a probe took its place
        self._held_for: tuple[int, Forecast | None, int] = (0, None, 0)  # requests, forecast if followed, split
        self._probes = ProbeAccount()
        self._can_split = len(capabilities.splits) > 1
        self._splits = SplitChoice(len(capabilities.splits))
        self._values, self._shortest = values, ShortestSteps()
        self._rest: Rest | None = None
        self._rested_at = -REST_RECORDS  # when this was decided

    def values_of(self, view: PlanningView) -> Floats | None:
        """Return (size,) what a token of each live request is worth, 0..1 of the most; None where all count alike."""
        return None if self._values is None else self._values.of(view, self._shortest)

    def follow(self, values: TokenValues) -> None:
        """Let tokens be worth this from now on."""
        self._values = values

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
        return self._probed(plan, view)

    def _expecting(self, view: PlanningView, in_batch: int) -> Action:
        """Return what was last planned for as many as read their prompts now, or for one.

        Decisions act steps later: with a request at a time an answer's first steps would else be without drafts.
        """
        coming = max(in_batch, 1)
        if (plan := self._plans.get((0, _size(coming)))) is None:
            return uniform(view.size, 0, "nothing to speculate on")
        return msgspec.structs.replace(self._follow(plan, view).action, reason=f"nobody decodes: as last with {coming}")

    def _probed(self, plan: Plan, view: PlanningView) -> Action:
        if plan.action.favours:  # its rates are in the value of the dearest token, which is no measure for probes
            return plan.action
        if plan.depth > 0 and self._probes.looks_back(view, plan.rate / plan.even_rates.item(0) - 1.0):
            return uniform(view.size, 0, f"{view.requests} decoding: probing length 0")
        begin_s = view.catch_up_s() if self._probes.is_due(view) else 0.0
        probe = self._probes.choose(view, plan.rate, plan.depth, plan.chances, begin_s)
        if probe is not None:
            return uniform(view.size, probe, f"{view.requests} decoding: probing length {probe}")
        return plan.action

    def _side_by_side(self, state: EngineState, view: PlanningView) -> Action:
        """Return the action under the split that is in force or on trial at this size of the batch."""
        if self.values_of(view) is not None:
            # Under a split two groups take turns: more tokens in all, later ones for each. Who is late has no time.
            plan = self.plan = self._plan(view.under(state.cost_under(0)), 0)
            return msgspec.structs.replace(plan.action, split=0)
        requests, octave = view.requests, state.octave
        split = self._splits.at(requests, octave)
        planned = view.under(state.cost_under(split))
        plan = self.plan = self._plan(planned, split)
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
        history = self._by_history(view)
        if (forecast := self._forecast(view)) is None:
            return history.rate
        stops = self._by_confidence(view, forecast, self._before(view, split))
        return history.rate * (1.0 + max(_lead(stops, history), 0.0))

    def _before(self, view: PlanningView, split: int) -> Plan | None:
        """Return the newest plan for as many requests, else the newest of all."""
        return self._plans.get((split, _size(view.requests)), self._held)

    def _forecast(self, view: PlanningView) -> Forecast | None:
        return view.forecast if self._can_stop else None

    def _plan(self, view: PlanningView, split: int) -> Plan:
        forecast, requests = self._forecast(view), view.requests
        self._next_search -= 1
        if (values := self.values_of(view)) is not None:
            return self._by_value(view, values, forecast)
        held_requests, held_forecast, held_split = self._held_for
        is_similar = abs(requests - held_requests) * SIMILAR_BATCH <= held_requests
        is_similar &= forecast is held_forecast and split == held_split
        if self._held is not None and self._next_search > 0 and is_similar:
            return self._follow(self._held, view)
        before, plan = self._held, self._search(view, forecast, split)
        self._held = self._plans[split, _size(requests)] = plan
        self._held_for = requests, forecast, split
        is_settled = is_similar and before is not None and plan.point == before.point
        self._interval = min(2 * self._interval, SETTLED_DECISIONS) if is_settled else SETTLE_DECISIONS
        self._next_search = self._interval
        return plan

    def _follow(self, plan: Plan, view: PlanningView) -> Plan:
        """Return the plan for the requests as they are now, at its operating point."""
        if plan.is_stopping or plan.depth == 0:
            lengths, default = np.full(view.size, plan.depth, np.int64), plan.depth
        else:
            lengths, default = _placed(view.acceptance(), view, np.ones(view.size), plan.threshold, plan.depth)
        action = msgspec.structs.replace(plan.action, lengths=lengths, default_length=default)
        return msgspec.structs.replace(plan, action=action)

    def _search(self, view: PlanningView, forecast: Forecast | None, split: int) -> Plan:
        if forecast is None:
            return self._by_history(view)
        before = self._before(view, split)
        self._searches += 1
        if self._searches % COMPARE_SEARCHES:  # both take too long for every step
            is_stopping = before is not None and before.is_stopping
            return self._by_confidence(view, forecast, before) if is_stopping else self._by_history(view)
        history, stops = self._by_history(view), self._by_confidence(view, forecast, before)
        return stops if _lead(stops, history) > 0.0 else history

    def _by_confidence(self, view: PlanningView, forecast: Forecast, before: Plan | None) -> Plan:
        is_adaptive, rate = view.capabilities.is_adaptive, before.rate if before else 0.0
        stops = predict_trims(view, forecast) if is_adaptive else predict_stops(view, forecast, rate)
        go_on, table, verify_s = stops
        choice, match = self._choose(table, view, verify_s)
        keep, depth = choice.threshold, choice.depth
        reason = (
            f"{view.requests} decoding: {choice.drafted:.0f} drafts in up to {depth} rounds, {_kept(keep)}, "
            f"{choice.gain_percent:+.0f} % over none"
        )
        lengths = np.full(view.size, depth, np.int64)
        stop = rule_of(go_on, view.confidence, keep, depth) if depth else None
        action = _asked(view, lengths, depth, choice, reason, match, stop)
        return Plan(action, choice.rate, keep, depth, choice.drafted, choice.even_rates, all_drafts(view, forecast))

    def _by_value(self, view: PlanningView, values: Floats, forecast: Forecast | None) -> Plan:
        """Return the plan that brings most value, by history or under stop rules."""
        plan, groups = self._by_history(view, values), FavouredGroups.of(values, view.decoding)
        if forecast is not None and not view.capabilities.is_adaptive:
            stops = self._favouring_by_confidence(view, groups, forecast)
            plan = stops if _lead(stops, plan) > 0.0 else plan
        reason = f"{plan.action.reason}; {told_favoured(view, groups.favoured & (plan.action.lengths > 0))}"
        match = self._copies_beside(view, groups, plan.rate)
        action = msgspec.structs.replace(plan.action, reason=reason, match=match, favours=True)
        if (rest := self._resting(view, values, groups, action)) is not None:
            reason += f"; {len(rest.handles)} rest {rest.steps} steps in {rest.steps + 1}"
            action = msgspec.structs.replace(action, rest=rest, reason=reason)
        return msgspec.structs.replace(plan, action=action)

    def _resting(self, view: PlanningView, values: Floats, groups: FavouredGroups, action: Action) -> Rest | None:
        """Return who rests, which is thought over once in a few records: it takes as long as the rest of a plan."""
        most, worth = view.capabilities.rest_steps, self._values
        if not most or worth is None:
            return None
        if not self._rested_at <= view.records < self._rested_at + REST_RECORDS:
            self._rested_at = view.records
            self._rest = choose_rest(view, worth, values, groups.favoured, action.lengths, most)
        return self._rest

    def _copies_beside(self, view: PlanningView, groups: FavouredGroups, rate: float) -> MatchRule | None:
        """Return when to copy beside favoured requests, `rate` being what the plan brings in value per second."""
        if not self._can_copy or view.matches is None:
            return None
        even = self._by_history(view)
        match = even.action.match
        return None if match is None else beside_favoured(match, view, groups, rate / even.rate)

    def _favouring_by_confidence(self, view: PlanningView, groups: FavouredGroups, forecast: Forecast) -> Plan:
        before = self._before(view, 0)
        go_on, table, _ = predict_stops(view, forecast, before.rate if before else 0.0)
        choice = choose_favouring(table, view, groups, _reading_s(view))
        keep, depth = choice.threshold, max(choice.depth, choice.others_depth)
        reason = f"{view.requests} decoding: {choice.drafted:.0f} drafts in up to {depth} rounds, {_kept(keep)}"
        lengths = np.where(groups.favoured, choice.depth, choice.others_depth)
        stop = rule_of(go_on, view.confidence, keep, depth) if depth else None
        rated = Choice(keep, depth, choice.rate, choice.drafted, choice.even_rates)
        action = _asked(view, lengths, choice.others_depth, rated, reason, None, stop)
        return Plan(action, choice.rate, keep, depth, choice.drafted, choice.even_rates, all_drafts(view, forecast))

    def _by_history(self, view: PlanningView, values: Floats | None = None) -> Plan:
        acceptance = view.acceptance()
        table = np.zeros((PLANES, BINS + 1, self._k_max + 1))
        worths = np.ones(view.size) if values is None else values
        base = float(view.requests) if values is None else float(values[view.decoding].sum())
        tabulate(acceptance, view.decoding, worths, view.population.delivery, view.requests, base, table)
        choice, match = self._choose(table, view) if values is None else (choose(table, view, _reading_s(view)), None)
        lengths, default = _placed(acceptance, view, worths, choice.threshold, choice.depth)
        reason = (
            f"{view.requests} decoding: {choice.drafted:.0f} drafts in {choice.depth} rounds, "
            f"{choice.gain_percent:+.0f} % over none"
        )
        action = _asked(view, lengths, default, choice, reason, match)
        return Plan(action, choice.rate, choice.threshold, choice.depth, choice.drafted, choice.even_rates)

    def _choose(
        self, table: Floats, view: PlanningView, verify_s: Floats | None = None
    ) -> tuple[Choice, MatchRule | None]:
        """Return the best cell, and when to copy beside it."""
        matches = view.matches if self._can_copy else None
        if matches is None:
            return choose(table, view, _reading_s(view), verify_s), None
        mixed = table
        if matches.share > LEAST_SHARE:  # the time of the mean rows, then: copies are of any length
            mixed, verify_s = with_copies(table, view.requests, matches), None
        choice = choose(mixed, view, _reading_s(view), verify_s)
        return choice, match_rule(view, matches, table, choice)


def _asked(
    view: PlanningView, lengths: Ints, default: int, choice: Choice, reason: str, match: MatchRule | None,
    stop: StopRule | None = None,
) -> Action:  # fmt: skip
    """Return the action of a choice; whether pruning and drafting ahead pay, the gates in the engine find out."""
    capabilities = view.capabilities
    ahead = _frontier(capabilities, choice.depth)
    return Action(
        lengths, default, price=1.0 / choice.rate, prune=capabilities.released_prune, stop=stop, frontier=ahead,
        admission=admission(view, choice.depth) if capabilities.is_adaptive and choice.depth else None, match=match,
        reason=reason,
    )  # fmt: skip


def _kept(keep: int) -> str:
    """Say what is kept of drafts at a threshold."""
    return "all kept" if keep == NO_RULE else f"kept above {EDGE_LIST[keep]:.2f}"


def _frontier(capabilities: Capabilities, depth: int) -> int | None:
    """Return how many tokens to draft ahead: all that can be, none where nobody drafts; None where none can be."""
    if not capabilities.frontier:
        return None
    return capabilities.frontier if depth else 0


def _placed(
    acceptance: Floats, view: PlanningView, worths: Floats, threshold: int, depth: int
) -> tuple[Ints, int]:  # fmt: skip
    """Return (n,) lengths, as deep as survival is worth a row, and that of who is not known or not decoding."""
    lengths = np.empty(view.size, np.int64)
    mean = view.population.mean
    return lengths, place(acceptance, view.decoding, worths, mean, least_survival(threshold), depth, lengths)


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
