"""What stop rules would give: steps by threshold to keep and deepest round, from recent confidences.

Called by the price policy once there are calibrated confidences. For each price of a row the thresholds to go on are
those that pay best on the recent drafts; the best price is found by predicting whole steps. Pure.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from ..engine_adapter.protocol import StopRule
from ..env.acceptance import GUESS_TRIALS, Floats, Ints
from ..env.compiled import compiled
from ..env.confidence import EDGES, Confidence, Forecast
from ..env.state import EngineState
from .probe import Chances
from .step_grid import PLANES, ROWS

EDGE_LIST: Final[list[float]] = EDGES.tolist()
FREE: Final = len(EDGES) - 1  # the bin that lets everything pass
EVERY_ROW_ALIKE: Final = np.zeros(0)


class Stops(NamedTuple):
    """What a batch would do under stop rules."""

    go_on: Ints  # (k_max, bins): bin of the survival before each position from which it is drafted, by bin to keep
    table: Floats  # (PLANES, bins, k_max + 1), see models/step_grid.py
    verify_s: Floats | None  # (bins, k_max + 1), None: what the cost table says of the rows


def predict_stops(state: EngineState, forecast: Forecast, requests: int, rate: float) -> Stops:
    """Return the predictions for a batch of `requests`; `rate`, tokens/s, prices a second of drafting."""
    k_max, bins = forecast.reach.shape
    token_s, round_s = state.cost.draft_prices_s()
    alone_s = None
    if requests == 1:  # what it keeps is the whole batch: every row at its own price, not at that of a mean
        alone_s = state.cost.beside_prompts_s(np.arange(k_max + 1) + 1.0, 1, state.prompt_rows())
    row_prices = EVERY_ROW_ALIKE if alone_s is None else rate * np.diff(alone_s)
    go_on, table = np.empty((k_max, bins), np.int64), np.empty((PLANES, bins, k_max + 1))
    _tabulate(
        forecast.worth, forecast.reach, forecast.kept, forecast.gain, row_prices, float(rate * token_s),
        float(rate * round_s), requests, go_on, table,
    )  # fmt: skip
    return Stops(go_on, table, None if alone_s is None else _of_one(alone_s, table[ROWS]))


def rule_of(go_on: Ints, confidence: Confidence, keep: int, depth: int) -> StopRule | None:
    """Return the rule of a cell, None where it lets everything pass."""
    bins = go_on[1:, keep].tolist()
    if keep == FREE and all(place == FREE for place in bins[: depth - 1]):
        return None
    # Entry j judges whether j + 1 is drafted.
    return confidence.rule(EDGE_LIST[keep], np.array([EDGE_LIST[place] for place in (*bins, FREE)]))


def all_drafts(state: EngineState, forecast: Forecast) -> Chances:
    """Return the acceptance of drafts that no rule ends, which under a rule nobody sees."""
    mean, deviation = np.empty((2, len(forecast.gain)))
    _free_drafts(forecast.gain, state.confidence.trials, GUESS_TRIALS, mean, deviation)
    return Chances(mean, deviation)


def _of_one(alone_s: Floats, rows: Floats) -> Floats:
    """Return the mean time of steps whose rows are one request's: (bins, k_max + 1) from its rows so far.

    :param alone_s: (k_max + 1,) seconds with 0, 1, ... draft rows
    """
    share = np.diff(rows, axis=1)  # of drafts that keep the token at each position
    extra = np.concatenate([np.zeros((len(rows), 1)), (share * np.diff(alone_s)).cumsum(axis=1)], axis=1)
    verify_s: Floats = float(alone_s[0]) + extra
    return verify_s


@compiled
def _tabulate(
    worth: Floats, reach: Floats, kept: Floats, gain: Floats, row_prices: Floats, token_price: float,
    round_price: float, requests: int, go_on: Ints, table: Floats,
) -> None:  # fmt: skip
    """Fill in where to go on, and the table, with planes as in models/step_grid.py.

    The first four are a Forecast's; prices are in tokens.
    """
    k_max, bins = reach.shape
    free = bins - 1
    for keep in range(bins):
        drafted = rounds = rows = tokens = 0.0
        place = free  # every draft begins
        table[0, keep, 0], table[1, keep, 0] = 0.0, requests
        table[2, keep, 0], table[3, keep, 0] = requests, 0.0
        for j in range(k_max):
            if j > 0:
                # A round that others want anyway costs little more; who goes alone pays all of it.
                start = _best_start(worth, reach, kept, gain, row_prices, j, keep, token_price)
                others = (1.0 - min(reach[j, start], 1.0)) ** (requests - 1)
                price = others * round_price + token_price
                start = _best_start(worth, reach, kept, gain, row_prices, j, keep, price)
                # The price of going on rises with depth, or the thresholds would not nest.
                place = min(place, start)
            used = place if j == 0 else min(place, keep)  # only kept tokens are followed
            go_on[j, keep] = used
            wanted = reach[j, used]
            drafted += wanted
            rows += kept[j, used, keep]
            tokens += gain[j, used, keep]
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
def _free_drafts(gain: Floats, trials: Floats, guess_trials: float, mean: Floats, deviation: Floats) -> None:
    before, free = 1.0, gain.shape[1] - 1
    for j in range(len(mean)):
        survival = gain[j, free, free]
        mean[j] = min(max(survival / before, 0.005), 0.995)
        deviation[j] = math.sqrt(mean[j] * (1.0 - mean[j]) / (trials[j] + guess_trials))
        before = survival
