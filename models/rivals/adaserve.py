"""AdaServe's order of drafts: first those that each request needs to be in time, then those that make the batch faster.

Source: AdaServe (arXiv 2501.12162, section 4: tokens are chosen for the objectives first, then by probability, within
a budget of tokens). Here the budget is the time of the step, and what it makes faster is what `price` asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from ...engine_adapter.arrays import Bools, Floats, Ints
from ...env.estimate.engine_state import EngineState
from ...env.estimate.planning_view import PlanningView
from ...env.spaces import Action
from ..policies.price import PricePolicy

SETTLE_STEPS = 16.0  # in which a request should have made up for what it is behind
MOST_ROUNDS = 12  # of making lengths fit the time of the step that they make longer


@dataclass(frozen=True, slots=True)
class Needs:
    """Who has to be how fast, of the requests that decode."""

    tpot_s: Floats  # (n,) seconds per token; infinite without an objective
    slack_tokens: Floats  # (n,) ahead (+) of the schedule

    def tokens(self, step_s: float) -> Floats:
        """Return (n,) tokens that a step of so many seconds must bring each request, 0 where nobody asked."""
        has_any = self.tpot_s < np.inf
        return np.where(has_any, step_s / self.tpot_s - np.where(has_any, self.slack_tokens, 0.0) / SETTLE_STEPS, 0.0)


@dataclass(frozen=True, slots=True)
class StepForecast:
    """What lengths would do in the next step, by each request's own acceptance."""

    view: PlanningView
    tokens: Floats  # (n, k_max + 1) that a request emits, by its length
    prompts_s: float  # that a step takes longer in the mean for the prompts beside

    @classmethod
    def of(cls, view: PlanningView) -> StepForecast:
        """Return the forecast of those who decode."""
        accepted = np.cumsum(np.cumprod(view.acceptance()[view.decoding], axis=1), axis=1)
        prompts = view.prompts()
        prompts_s = prompts.share * view.unsplit_cost.prefill_time_s(view.requests, prompts.rows)
        return cls(view, 1.0 + np.pad(accepted, ((0, 0), (1, 0))), prompts_s)

    def step_s(self, lengths: Ints) -> float:
        """Return the seconds of a step with these lengths, (n,)."""
        view, drafted = self.view, float(lengths.sum())
        rows, rounds = view.requests + drafted, int(lengths.max(initial=0))
        return float(view.verify_s(rows)) + float(view.draft_s(rows, rounds, drafted, view.requests)) + self.prompts_s


def in_time(forecast: StepForecast, needs: Needs, wished: Ints) -> tuple[Ints, Bools]:
    """Return (n,) lengths, at least as long as wished, and (n,) who gets by them what it needs.

    Longer drafts make the step longer, and then more is needed: repeated until nothing changes. Of those who then need
    more than their longest draft brings, half are given up, and keep their wish.
    """
    hoped = needs.tpot_s < np.inf
    while True:
        lengths, lacks = _settled(forecast, needs, wished, hoped)
        late = np.flatnonzero(hoped & (lacks > 0.0))
        if not len(late):
            return lengths, hoped
        worst = late[np.argsort(-lacks[late], kind="stable")[: (len(late) + 1) // 2]]
        hoped = hoped.copy()
        hoped[worst] = False


def _settled(forecast: StepForecast, needs: Needs, wished: Ints, hoped: Bools) -> tuple[Ints, Floats]:
    """Return (n,) lengths that bring the hopeful what they need, and (n,) tokens that the longest draft lacks."""
    tokens, lengths = forecast.tokens, wished
    longest = tokens.shape[1] - 1
    for _ in range(MOST_ROUNDS):
        needed = np.where(hoped, needs.tokens(forecast.step_s(lengths)), 0.0)
        enough = tokens >= needed[:, None]
        fewest = np.where(enough.any(axis=1), enough.argmax(axis=1), longest)
        longer = np.maximum(lengths, fewest)
        if np.array_equal(longer, lengths):
            break
        lengths = longer
    return lengths, needed - tokens[:, longest]


class AdaServe:
    """First the tokens that are needed, then price's."""

    name = "adaserve"

    def __init__(self, inner: PricePolicy) -> None:
        self._inner = inner

    def act(self, state: EngineState) -> Action:
        """Return what price asks for where all are in time by it, else the most of it that leaves them in time."""
        action, view = self._inner.act(state), state.view()
        tpot_s = view.table.column("tpot_s")[view.decoding]
        if not (tpot_s < np.inf).any() or self._inner.plan is None:
            return action
        needs, forecast = Needs(tpot_s, view.slack().tokens[view.decoding]), StepForecast.of(view)
        asked = action.lengths[view.decoding]
        alone, saved = in_time(forecast, needs, np.zeros_like(asked))
        for deepest in range(int(asked.max(initial=0)), 0, -1):
            lengths, also = in_time(forecast, needs, np.minimum(asked, deepest))
            if also.sum() >= saved.sum():
                is_wish = np.array_equal(lengths, asked)
                return action if is_wish else _with(action, view, lengths)
        return _with(action, view, alone)


def _with(action: Action, view: PlanningView, lengths: Ints) -> Action:
    whole = action.lengths.copy()
    whole[view.decoding] = lengths
    reason = f"{action.reason}; {np.count_nonzero(lengths)} drafted for, by their objectives"
    # A rule ends drafts that somebody needs; copies are anybody's, and their rows take the time that was found.
    return msgspec.structs.replace(
        action, lengths=whole, default_length=int(lengths.min(initial=0)), stop=None, match=None, reason=reason,
        favours=True,
    )  # fmt: skip
