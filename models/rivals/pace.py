"""Objectives for the pace of answers, by class of requests: who loses drafts first when somebody is late.

Made by models/registry.py for `price:pace=...`; wraps the price policy. Tokens per second of the whole batch
is what `price` maximises: a draft of one request lengthens the step of all. Where a class of requests would miss its
objective under what `price` asks for, the least urgent lose their drafts first, then the longest drafts are cut for
everybody. Classes are vLLM's priorities, lower is more urgent. Pure, no clock.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
import numpy as np

from ...engine_adapter.arrays import Floats, Ints
from ...env.estimate.engine_state import EngineState
from ...env.estimate.planning_view import PlanningView
from ...env.spaces import Action
from ..policies.policy import PolicyError
from ..policies.price import Plan, PricePolicy

LIMIT: Final = re.compile(r"(-?\d+):(\d+(?:\.\d+)?)")
BETTER: Final = 0.99  # a class must get so much less late for another one's drafts to be taken


class Pace(msgspec.Struct, frozen=True):
    """Longest mean time per token of each class that has an objective."""

    limits_s: dict[int, float]  # by priority

    @classmethod
    def parse(cls, text: str) -> Pace:
        """Read priorities and milliseconds per token, such as 0:40,1:400."""
        found = [LIMIT.fullmatch(part.strip()) for part in text.split(",")]
        limits = {int(match[1]): float(match[2]) * 1e-3 for match in found if match}
        if len(limits) != len(found) or not all(limits.values()):
            raise PolicyError(
                f"price:pace={text!r}: expected milliseconds per token by priority, each once and above 0, "
                "such as price:pace=0:40,1:400"
            )
        return cls(limits)


class ClassForecast:
    """What the next step would do for each class, by the lengths that are asked for.

    Under a stop rule drafts end before their length: what price expects of all of them together scales what each
    request's own acceptance says. A probe, which may stand in the plan's place, has no rule.
    """

    def __init__(self, pace: Pace, view: PlanningView, plan: Plan, *, is_ruled: bool) -> None:
        self._view, self._requests = view, view.requests
        self.priority: Ints = view.table.column("priority")[view.decoding]
        accepted = np.cumsum(np.cumprod(view.acceptance()[view.decoding], axis=1), axis=1)
        self._accepted = np.pad(accepted, ((0, 0), (1, 0)))  # (n, k_max + 1), tokens by length
        self._drafted = np.tile(np.arange(self._accepted.shape[1], dtype=np.float64), (self._requests, 1))
        if is_ruled and plan.drafted > 0.0:
            self._drafted[:, 1:] = 1.0 + self._accepted[:, :-1]  # a token is drafted behind those that were accepted
            self._drafted *= plan.drafted / self._drafted[:, plan.depth].sum()
            tokens = plan.rate * self._step_s(plan.drafted, plan.depth)
            self._accepted *= max(tokens - self._requests, 0.0) / self._accepted[:, plan.depth].sum()
        self._limits = [(limit_s, self.priority == each) for each, limit_s in pace.limits_s.items()]

    def lateness(self, lengths: Ints) -> tuple[float, int | None]:
        """Return the pace of the class that is latest over its objective, and its priority; 0 and None without any."""
        each = np.arange(self._requests)
        step_s = self._step_s(float(self._drafted[each, lengths].sum()), int(lengths.max(initial=0)))
        pace_s: Floats = step_s / (1.0 + self._accepted[each, lengths])
        classes = [(limit_s, own) for limit_s, own in self._limits if own.any()]
        late = [(float(pace_s[own].mean()) / limit_s, int(self.priority[own][0])) for limit_s, own in classes]
        return max(late, default=(0.0, None))

    def _step_s(self, drafted: float, rounds: int) -> float:
        """Return seconds of a step that verifies so many drafts and makes as many, with the prompts that come along."""
        rows = self._requests + drafted
        drafting_s = float(self._view.draft_s(rows, rounds, drafted, self._requests))
        return float(self._view.verify_s(rows)) + drafting_s


class PacedPolicy:
    """The price policy within objectives."""

    def __init__(self, inner: PricePolicy, pace: Pace, text: str) -> None:
        self.name = f"price:pace={text}"
        self._inner, self._pace = inner, pace

    def act(self, state: EngineState) -> Action:
        """Return what price asks for, with the drafts that make a class late taken out."""
        action, plan = self._inner.act(state), self._inner.plan
        view = state.view().under(state.cost_under(action.split or 0))
        decoding = view.decoding
        if plan is None or not action.lengths[decoding].any():
            return action
        lengths = action.lengths[decoding]
        forecast = ClassForecast(self._pace, view, plan, is_ruled=action.stop is not None)
        kept, who = _within(forecast, lengths)
        if who is None or np.array_equal(kept, lengths):
            return action
        whole = action.lengths.copy()
        whole[decoding] = kept
        reason = f"{action.reason}; drafts cut for the pace of priority {who}"
        default = min(action.default_length, int(kept.max(initial=0)))
        # Copies are of any length and anybody's: their rows would make late what the cut makes less late.
        return msgspec.structs.replace(action, lengths=whole, default_length=default, match=None, reason=reason)


def _within(forecast: ClassForecast, lengths: Ints) -> tuple[Ints, int | None]:
    """Return lengths under which nobody is late, or the latest class least, and who was; None if nobody was."""
    late, who = forecast.lateness(lengths)
    if who is None or late <= 1.0:
        return lengths, None
    return _cut(forecast, _stripped(forecast, lengths, who)), who


def _stripped(forecast: ClassForecast, lengths: Ints, who: int) -> Ints:
    """Take the drafts of less urgent classes, the least urgent first, while that makes the late one less late."""
    late, _ = forecast.lateness(lengths)
    for victim in sorted({int(each) for each in forecast.priority if each > who}, reverse=True):
        if late <= 1.0:
            break
        fewer = np.where(forecast.priority == victim, 0, lengths)
        then, _ = forecast.lateness(fewer)
        if then > BETTER * late:
            continue
        late, lengths = then, fewer
    return lengths


def _cut(forecast: ClassForecast, lengths: Ints) -> Ints:
    """Cut the longest drafts of everybody, as far as that makes the latest class less late."""
    late, _ = forecast.lateness(lengths)
    best = lengths
    for longest in range(int(lengths.max(initial=0)) - 1, -1, -1):
        if late <= 1.0:
            break
        fewer = np.minimum(lengths, longest)
        then, _ = forecast.lateness(fewer)
        if then < BETTER * late:
            late, best = then, fewer
    return best
