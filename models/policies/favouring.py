"""Stop rules where some requests' tokens are worth more than others': who is favoured may draft deeper.

Called by the price policy. One rule ends drafts by confidence, whoever's they are; what tells requests apart is how
long a draft may get. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...engine_adapter.arrays import Bools, Floats
from ...env.estimate.planning_view import PlanningView
from .step_grid import DRAFTED, ROUNDS, ROWS, TOKENS


class FavouredGroups(NamedTuple):
    """Those who decode in two groups."""

    favoured: Bools  # (n,) of all live requests
    sizes: tuple[int, int]  # the favoured, the others
    worths: tuple[float, float]  # of a token, in the mean

    @classmethod
    def of(cls, values: Floats, decoding: Bools) -> FavouredGroups:
        """Split where values lie about as far from the largest as from the least; both groups may be empty."""
        own = values[decoding]
        favoured = decoding & (values > float(np.sqrt(own.max() * own.min())))
        parts = values[favoured], values[decoding & ~favoured]
        return cls(
            favoured,
            (len(parts[0]), len(parts[1])),
            (float(parts[0].mean()) if len(parts[0]) else 1.0, float(parts[1].mean()) if len(parts[1]) else 1.0),
        )


class FavouredChoice(NamedTuple):
    """The best cell."""

    threshold: int
    depth: int  # deepest round of the favoured
    others_depth: int
    rate: float  # value per second, in tokens of the dearest
    drafted: float  # draft tokens
    even_rates: Floats  # (k_max + 1,) of one length for all, of which everything is verified


def choose_favouring(table: Floats, view: PlanningView, groups: FavouredGroups, reading_s: float) -> FavouredChoice:
    """Return how deep each group should draft, and above which survival to keep.

    :param table: (PLANES, thresholds, k_max + 1) of steps in which all draft, models/policies/step_grid.py
    :param reading_s: what a step in which all draft is charged for what the drafter missed, and for new prompts
    """
    requests = view.requests
    (some, others), (dear, cheap) = groups.sizes, groups.worths
    each = (table - np.array([0.0, requests, requests, 0.0])[:, None, None]) / requests
    # (PLANES, thresholds, depth of the favoured, depth of the others)
    mixed = some * each[:, :, :, None] + others * each[:, :, None, :]
    rows, drafted = requests + mixed[ROWS], mixed[DRAFTED]
    rounds = np.maximum(table[ROUNDS][:, :, None], table[ROUNDS][:, None, :])
    value = some * dear * (1.0 + each[TOKENS][:, :, None]) + others * cheap * (1.0 + each[TOKENS][:, None, :])
    step_s = view.verify_s(rows) + view.draft_s(rows, rounds, drafted, requests)
    first = each[DRAFTED, :, min(1, each.shape[2] - 1)]
    share = np.where(np.arange(each.shape[2]) > 0, 1.0, 0.0)
    drafting = (some * share[:, None] + others * share[None, :]) / requests
    step_s += reading_s * np.minimum(first[:, None, None] * drafting, 1.0)
    rates = value / step_s
    threshold, depth, others_depth = (int(place) for place in np.unravel_index(np.argmax(rates), rates.shape))
    return FavouredChoice(
        threshold, depth, others_depth, float(rates[threshold, depth, others_depth]),
        float(drafted[threshold, depth, others_depth]), np.ascontiguousarray(np.diagonal(rates[-1])),
    )  # fmt: skip


def told_favoured(view: PlanningView, favoured: Bools) -> str:
    """Say how many are favoured, and who is the latest."""
    who = np.flatnonzero(favoured)
    if not len(who):
        return "nobody's objective brings it a draft"
    slack = view.slack().tokens[who]
    latest = int(np.argmin(slack))
    name = int(view.table.column("handle")[who[latest]])
    return f"{len(who)} favoured for their objectives, first request {name} ({slack[latest]:+.1f} tokens)"
