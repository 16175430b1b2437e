"""Objectives per request: first the tokens that each request needs to be in time, then tokens per second.

Made by models/registry.py for `price:slack`; wraps the price policy. `price` asks what makes the batch fastest; a
request's own drafts make it faster than the others, whose step they lengthen. So where some would be late under what
price asks for, these get the fewest drafts that keep them in time and the others as many as leave that room
(AdaServe, arXiv 2501.12162, section 4, decides in this order by a budget of tokens; here the budget is the time of the
step). Without objectives, or while all are in time anyway, the answer is price's to the bit. Pure, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from ...engine_adapter.arrays import Bools, Floats, Ints
from ...env.estimate.engine_state import EngineState
from ...env.estimate.planning_view import PlanningView
from ...env.spaces import Action
from .price import Plan, PricePolicy

RESERVE_TOKENS: Final = 1.0  # ahead of its schedule that a request should be: acceptance is luck
SETTLE_STEPS: Final = 8.0  # in which a request should be that far ahead, or may use up what it is ahead beyond
MOST_ROUNDS: Final = 12  # of making lengths fit the time of the step that they make longer


@dataclass(frozen=True, slots=True)
class Needs:
    """Who has to be how fast, of the requests that decode."""

    tpot_s: Floats  # (n,) seconds per token; infinite without an objective
    slack_tokens: Floats  # (n,) ahead (+) of the schedule

    @classmethod
    def of(cls, view: PlanningView) -> Needs | None:
        """Return the needs at one record, None if nobody has any."""
        tpot_s = view.table.column("tpot_s")[view.decoding]
        if not (tpot_s < np.inf).any():
            return None
        return cls(tpot_s, view.slack().tokens[view.decoding])

    @property
    def has_any(self) -> Bools:
        """Return (n,) who has an objective."""
        return self.tpot_s < np.inf

    def tokens(self, step_s: float) -> Floats:
        """Return (n,) tokens that a step of so many seconds must bring each request, 0 where nobody asked."""
        ahead = np.where(self.has_any, self.slack_tokens - RESERVE_TOKENS, 0.0)
        return np.where(self.has_any, step_s / self.tpot_s - ahead / SETTLE_STEPS, 0.0)


@dataclass(frozen=True, slots=True)
class StepForecast:
    """What lengths would do in the next step, by each request's own acceptance."""

    view: PlanningView
    tokens: Floats  # (n, k_max + 1) that a request emits, by its length
    drafted: Floats  # (n, k_max + 1) tokens that are drafted for it

    @classmethod
    def of(cls, view: PlanningView, plan: Plan, *, is_ruled: bool) -> StepForecast:
        """Return the forecast; under a stop rule drafts end early, all of them together as price expects."""
        requests = view.requests
        accepted = np.cumsum(np.cumprod(view.acceptance()[view.decoding], axis=1), axis=1)
        accepted = np.pad(accepted, ((0, 0), (1, 0)))
        drafted = np.tile(np.arange(accepted.shape[1], dtype=np.float64), (requests, 1))
        found = cls(view, 1.0 + accepted, drafted)
        if not is_ruled or plan.drafted <= 0.0:
            return found
        drafted[:, 1:] = 1.0 + accepted[:, :-1]  # a token is drafted behind those that were accepted
        drafted *= plan.drafted / drafted[:, plan.depth].sum()
        more = max(plan.rate * found.step_s_of(plan.drafted, plan.depth) - requests, 0.0)
        return cls(view, 1.0 + accepted * (more / accepted[:, plan.depth].sum()), drafted)

    def step_s(self, lengths: Ints) -> float:
        """Return the seconds of a step with these lengths, (n,)."""
        each = np.arange(len(lengths))
        return self.step_s_of(float(self.drafted[each, lengths].sum()), int(lengths.max(initial=0)))

    def step_s_of(self, drafted: float, rounds: int) -> float:
        """Return the seconds of a step that verifies so many drafts and makes as many."""
        rows = self.view.requests + drafted
        return float(self.view.verify_s(rows)) + float(self.view.cost.draft_time_s(rows, rounds, drafted))


def in_time(forecast: StepForecast, needs: Needs, wished: Ints) -> tuple[Ints, bool]:
    """Return (n,) lengths that bring all what they need, at least as long as wished, and whether they do.

    Longer drafts make the step longer, and then more is needed: repeated until nothing changes. Who cannot be in time
    by any length gets the longest.
    """
    lengths, longest = wished, forecast.tokens.shape[1] - 1
    for _ in range(MOST_ROUNDS):
        enough = forecast.tokens >= needs.tokens(forecast.step_s(lengths))[:, None]
        is_met = enough.any(axis=1)
        needed = np.maximum(np.where(is_met, enough.argmax(axis=1), longest), wished)
        needed = np.maximum(needed, lengths)
        if np.array_equal(needed, lengths):
            return lengths, bool(is_met.all())
        lengths = needed
    return lengths, False


class OnTimePolicy:
    """The price policy within the objectives of requests."""

    def __init__(self, inner: PricePolicy) -> None:
        self.name = f"{inner.name}:slack"
        self._inner = inner

    def act(self, state: EngineState) -> Action:
        """Return what price asks for, or what brings those who would be late the tokens they need."""
        action, plan = self._inner.act(state), self._inner.plan
        view = state.view().under(state.cost_under(action.split or 0))
        if plan is None or (needs := Needs.of(view)) is None:
            return action
        asked = action.lengths[view.decoding]
        forecast = StepForecast.of(view, plan, is_ruled=action.stop is not None)
        lengths, is_met = in_time(forecast, needs, asked)
        if is_met and np.array_equal(lengths, asked):
            return action
        return self._favouring(action, plan, forecast, needs)

    def _favouring(self, action: Action, plan: Plan, forecast: StepForecast, needs: Needs) -> Action:
        """Return the most of the asked drafts beside which all are in time, or the needed ones alone."""
        view = forecast.view
        asked = action.lengths[view.decoding]
        for deepest in range(int(asked.max(initial=0)), 0, -1):
            lengths, is_met = in_time(forecast, needs, np.minimum(asked, deepest))
            if is_met:
                return self._asking(action, view, lengths, needs)
        alone = StepForecast.of(view, plan, is_ruled=False)
        lengths, _ = in_time(alone, needs, np.zeros_like(asked))
        return self._asking(msgspec.structs.replace(action, stop=None), view, lengths, needs)

    def _asking(self, action: Action, view: PlanningView, lengths: Ints, needs: Needs) -> Action:
        whole = action.lengths.copy()
        whole[view.decoding] = lengths
        latest = int(np.argmin(np.where(needs.has_any, needs.slack_tokens, np.inf)))
        name = int(view.table.column("handle")[view.decoding][latest])
        reason = (
            f"{action.reason}; {int((needs.has_any & (lengths > 0)).sum())} favoured for their objectives, first "
            f"request {name} ({needs.slack_tokens[latest]:+.1f} tokens)"
        )
        default = min(action.default_length, int(lengths.max(initial=0)))
        # Copies are of any length and anybody's: their rows would take the time that was found for others.
        return msgspec.structs.replace(action, lengths=whole, default_length=default, match=None, reason=reason)
