"""When a draft is copied from a request's own text, and what that leaves to the drafter.

Called by the price policy. A copied token costs its row and nothing else; so it is worth verifying while the chance
that it brings a token is above the price of a row, and worth more than a drafter's draft if it promises more tokens
beyond these prices. What a step with copies does is by what the last ones did.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np

from ...engine_adapter.arrays import Floats
from ...engine_adapter.protocol import MAX_REQUESTS, MatchRule
from ...env.estimate.matches import Matches
from ...env.estimate.planning_view import PlanningView
from .favouring import FavouredGroups
from .step_grid import DRAFTED, ROUNDS, ROWS, TOKENS, Choice

LEAST_KEEP: Final = 0.03  # survival: a row is never free, whatever a flat piece of a cost curve says
LARGEST_KEEP: Final = 0.97
HIGHEST_PRICE: Final = 10.0  # tokens for a row of who is not favoured; nothing is as sure as that
LEAST_WEIGHT: Final = 1e-3  # protocol.Weight
LARGEST_WEIGHT: Final = 1e3
NEXT_ROWS: Final = 1.0  # per request, over which the price of a row is taken: curves have steps


def with_copies(table: Floats, requests: int, matches: Matches) -> Floats:
    """Return the table (step_grid.py) of a batch in which some requests have copies and leave the drafter's batch."""
    mixed, left = table.copy(), 1.0 - matches.share
    mixed[DRAFTED] *= left
    mixed[TOKENS] = requests * (1.0 + matches.gain) + left * (table[TOKENS] - requests)
    mixed[ROWS] = requests * (1.0 + matches.rows) + left * (table[ROWS] - requests)
    mixed[ROUNDS] *= 1.0 - matches.share**requests
    return mixed


def match_rule(view: PlanningView, matches: Matches, table: Floats, choice: Choice) -> MatchRule:
    """Return when to copy beside what was chosen.

    :param table: steps without copies
    """
    longest, requests = matches.longest, view.requests
    slopes, intercepts = matches.curve()
    cell = table[:, choice.threshold, choice.depth]
    rows = float(with_copies(table, requests, matches)[ROWS, choice.threshold, choice.depth])
    keep = _row_price(view, rows, choice.rate)
    worth, fewest = _drafters_worth(view, cell, keep, choice.rate) if choice.depth else (0.0, 1)
    least = _first_row_price(view, rows, keep, choice.rate)
    return MatchRule(slopes.tolist(), intercepts.tolist(), [keep] * longest, longest, worth, fewest, least=least)


def beside_favoured(rule: MatchRule, view: PlanningView, groups: FavouredGroups, rate: float) -> MatchRule:
    """Return the rule where some requests' tokens are worth more than others': each group's rows have its own price.

    Whoever is not favoured may be left without copies: a row's time is the favoured ones' too. Rounds are made for
    however few of the favoured want drafts.

    :param rule: where all count alike
    :param rate: what the step brings in value per second, over what it would bring in tokens where all count alike
    """
    dear, cheap = groups.worths
    keep = min(max(rule.keep[0] * rate / cheap, LEAST_KEEP), HIGHEST_PRICE)
    favoured = min(max(rule.keep[0] * rate / dear, LEAST_KEEP), LARGEST_KEEP)
    handles = view.table.column("handle")[groups.favoured][:MAX_REQUESTS].tolist()
    weights = (min(max(keep / favoured, LEAST_WEIGHT), LARGEST_WEIGHT),) * len(handles)
    least = min(rule.least * rate / cheap, HIGHEST_PRICE * view.requests)
    return msgspec.structs.replace(
        rule, keep=[keep] * len(rule.keep), fewest=1, handles=tuple(handles), weights=weights, least=least
    )


def _row_price(view: PlanningView, rows: float, rate: float) -> float:
    """Return what one more row costs, in tokens."""
    more = max(NEXT_ROWS * view.requests, 1.0)
    low_s, high_s = map(float, view.verify_s(np.array([rows, rows + more])))
    return min(max(rate * (high_s - low_s) / more, LEAST_KEEP), LARGEST_KEEP)


def _first_row_price(view: PlanningView, rows: float, row_price: float, rate: float) -> float:
    """Return what a step with copies costs beside a plain one before their rows are counted, in tokens.

    :param rows: a usual step with copies has
    """
    requests = float(view.requests)
    plain_s, copied_s = map(float, view.verify_s(np.array([requests, max(rows, requests + 1.0)])))
    return max(rate * (copied_s - plain_s) - row_price * max(rows - requests, 1.0), 0.0)


def _drafters_worth(view: PlanningView, cell: Floats, row_price: float, rate: float) -> tuple[float, int]:
    """Return what a draft of the drafter's brings in tokens, net of its rows and its share of the rounds that grows
    with the batch; and for how many such drafts the rounds themselves are worth it.
    """
    requests = view.requests
    token_s, round_s = view.cost.draft_prices_s()
    tokens, rows, drafted = ((cell[TOKENS] - requests) / requests, (cell[ROWS] - requests) / requests,
                             cell[DRAFTED] / requests)  # fmt: skip
    worth = float(tokens - rows * row_price - rate * token_s * drafted)
    rounds = rate * round_s * cell[ROUNDS]
    if worth <= 0.0:
        return 0.0, requests
    return worth, min(max(math.ceil(rounds / worth), 1), requests)
