"""What stop rules would give: steps by threshold to keep and deepest round, from recent confidences.

Called by the price policy once there are calibrated confidences. For each price of a row the thresholds to go on are
those that pay best on the recent drafts; the best price is found by predicting whole steps. Pure.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from ...engine_adapter.arrays import Floats, Ints
from ...engine_adapter.compiled import compiled
from ...engine_adapter.protocol import StopRule
from ...env.estimate.acceptance import GUESS_TRIALS, LARGEST_CHANCE, LEAST_CHANCE
from ...env.estimate.confidence import EDGES, Confidence, Forecast
from ...env.estimate.planning_view import PlanningView
from .probe import Chances
from .step_grid import DRAFTED, PLANES, ROUNDS, ROWS, TOKENS

EDGE_LIST: Final[list[float]] = EDGES.tolist()
FREE: Final = len(EDGES) - 1  # the bin that lets everything pass
NO_RULE: Final = len(EDGES)  # a threshold of the table: everything is kept, and every draft goes on
FEW_ROWS: Final = 32  # draft rows at most of a batch whose steps are told apart by their rows, not by the mean of these
NOT_FEW: Final = np.zeros(0)


class Stops(NamedTuple):
    """What a batch would do under stop rules."""

    go_on: Ints  # (k_max, bins + 1): bin of the survival before each position from which it is drafted, by bin to keep
    table: Floats  # (PLANES, bins + 1, k_max + 1), see models/policies/step_grid.py; NO_RULE is the last threshold
    verify_s: Floats | None  # (bins + 1, k_max + 1), None: what the cost table says of the mean rows


def predict_stops(view: PlanningView, forecast: Forecast, rate: float) -> Stops:
    """Return the predictions for those who decode; `rate`, tokens/s, prices a second of drafting."""
    k_max, bins = forecast.reach.shape
    requests = view.requests
    token_s, round_s = view.cost.draft_prices_s()
    few_s = NOT_FEW
    if requests * k_max <= FEW_ROWS:
        rows = np.arange(requests * k_max + 1) + float(requests)
        few_s = view.verify_s(rows)
    row_prices = rate * np.diff(few_s) if requests == 1 else NOT_FEW  # what it keeps is the whole batch
    go_on, table = np.empty((k_max, bins + 1), np.int64), np.empty((PLANES, bins + 1, k_max + 1))
    _tabulate(
        forecast.worth, forecast.reach, forecast.kept, forecast.gain, row_prices, float(rate * token_s),
        float(rate * round_s), requests, go_on, table,
    )  # fmt: skip
    verify_s = np.empty(table[ROWS].shape)
    time_of_few(few_s, table[ROWS], requests, verify_s)
    return Stops(go_on, table, verify_s if len(few_s) else None)


def predict_trims(view: PlanningView, forecast: Forecast) -> Stops:
    """Return the predictions for an engine that drafts in full, and then verifies what is above a threshold.

    How many rows that are is fixed before the step, so that the time of the mean rows is the mean time.
    """
    k_max, bins = forecast.reach.shape
    passed = np.minimum(np.arange(bins + 1), FREE)
    kept, gain = (values[:, FREE, passed].cumsum(axis=0).T for values in (forecast.kept, forecast.gain))
    table = np.zeros((PLANES, bins + 1, k_max + 1))
    table[DRAFTED] = table[ROUNDS] = np.arange(k_max + 1.0)
    table[DRAFTED] *= view.requests
    table[ROWS, :, 1:], table[TOKENS, :, 1:] = kept, gain
    table[ROWS] = (table[ROWS] + 1.0) * view.requests
    table[TOKENS] = (table[TOKENS] + 1.0) * view.requests
    return Stops(np.full((k_max, bins + 1), FREE), table, None)


def rule_of(go_on: Ints, confidence: Confidence, keep: int, depth: int) -> StopRule | None:
    """Return the rule of a cell, None where it lets everything pass."""
    if keep == NO_RULE:
        return None
    bins = go_on[1:, keep].tolist()
    if keep == FREE and all(place == FREE for place in bins[: depth - 1]):
        return None
    # Entry j judges whether j + 1 is drafted.
    return confidence.rule(EDGE_LIST[keep], np.array([EDGE_LIST[place] for place in (*bins, FREE)]))


def all_drafts(view: PlanningView, forecast: Forecast) -> Chances:
    """Return the acceptance of drafts that no rule ends, which under a rule nobody sees."""
    mean, deviation = np.empty((2, len(forecast.gain)))
    _free_drafts(forecast.gain, view.confidence.trials, GUESS_TRIALS, LEAST_CHANCE, LARGEST_CHANCE, mean, deviation)
    return Chances(mean, deviation)


@compiled
def time_of_few(few_s: Floats, rows: Floats, requests: int, verify_s: Floats) -> None:
    """Fill in the mean time of steps of a few requests, (bins, k_max + 1): nothing if `few_s` is empty.

    A step's rows are a sum over its requests, each of which keeps a draft of its own length, and the curve over rows
    has steps in it: the time of the mean rows is not the mean time.

    :param few_s: (requests x k_max + 1,) seconds with 0, 1, ... draft rows
    :param rows: (bins, k_max + 1) mean rows of a step by threshold to keep and deepest round
    """
    if len(few_s) == 0:
        return
    k_max = rows.shape[1] - 1
    one, whole = np.empty(k_max + 1), np.empty(len(few_s))
    for keep in range(rows.shape[0]):
        for depth in range(k_max + 1):
            longer = 1.0  # share of drafts that keep their first `length` tokens
            for length in range(depth + 1):
                share = longer
                longer = 0.0
                if length < depth:
                    longer = min(max((rows[keep, length + 1] - rows[keep, length]) / requests, 0.0), share)
                one[length] = share - longer
            most = 0
            whole[0] = 1.0
            for _ in range(requests):
                whole[most + 1 : most + depth + 1] = 0.0
                most += depth
                for total in range(most, -1, -1):  # downwards: what is still read lies below
                    chance = 0.0
                    for length in range(min(depth, total) + 1):
                        chance += one[length] * whole[total - length]
                    whole[total] = chance
            mean_s = 0.0
            for total in range(most + 1):
                mean_s += whole[total] * few_s[total]
            verify_s[keep, depth] = mean_s


@compiled
def _tabulate(
    worth: Floats, reach: Floats, kept: Floats, gain: Floats, row_prices: Floats, token_price: float,
    round_price: float, requests: int, go_on: Ints, table: Floats,
) -> None:  # fmt: skip
    """Fill in where to go on, and the table, with planes as in models/policies/step_grid.py.

    The first four are a Forecast's; prices are in tokens.
    """
    k_max, bins = reach.shape
    free = bins - 1
    for keep in range(bins + 1):
        drafted = rounds = rows = tokens = 0.0
        place = free  # every draft begins
        table[0, keep, 0], table[1, keep, 0] = 0.0, requests
        table[2, keep, 0], table[3, keep, 0] = requests, 0.0
        for j in range(k_max):
            if j > 0 and keep <= free:
                # A round that others want anyway costs little more; who goes alone pays all of it.
                start = _best_start(worth, reach, kept, gain, row_prices, j, keep, token_price)
                others = (1.0 - min(reach[j, start], 1.0)) ** (requests - 1)
                price = others * round_price + token_price
                start = _best_start(worth, reach, kept, gain, row_prices, j, keep, price)
                # The price of going on rises with depth, or the thresholds would not nest.
                place = min(place, start)
            used, passed = place if j == 0 else min(place, keep), min(keep, free)  # only kept tokens are followed
            go_on[j, keep] = used
            wanted = reach[j, used]
            drafted += wanted
            rows += kept[j, used, passed]
            tokens += gain[j, used, passed]
            rounds += 1.0 - (1.0 - min(wanted, 1.0)) ** requests
            table[0, keep, j + 1] = drafted * requests
            table[1, keep, j + 1] = tokens * requests + requests
            table[2, keep, j + 1] = rows * requests + requests
            table[3, keep, j + 1] = rounds


@compiled
def _best_start(
    worth: Floats, reach: Floats, kept: Floats, gain: Floats, row_prices: Floats, j: int, keep: int, price: float
) -> int:
    """Return the bin from where to go on: sums are cumulative over the bins."""
    best, place = -np.inf, 0
    for start in range(reach.shape[1]):
        if len(row_prices) > 0:
            value = gain[j, start, keep] - kept[j, start, keep] * row_prices[j]
        else:
            value = worth[j, keep, start]
        value -= reach[j, start] * price
        if value > best:
            best, place = value, start
    return place


@compiled
def _free_drafts(
    gain: Floats, trials: Floats, guess_trials: float, least: float, largest: float, mean: Floats, deviation: Floats
) -> None:  # fmt: skip
    before, free = 1.0, gain.shape[1] - 1
    for j in range(len(mean)):
        survival = gain[j, free, free]
        mean[j] = min(max(survival / before, least), largest)
        deviation[j] = math.sqrt(mean[j] * (1.0 - mean[j]) / (trials[j] + guess_trials))
        before = survival
