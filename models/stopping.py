"""What stop rules would give: tokens per second by threshold to keep and deepest round, from recent confidences.

Called by the price policy once there are calibrated confidences. For each price of a row the thresholds to go on are
those that pay best on the recent drafts; the best price is found by predicting whole steps. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..engine_adapter.protocol import StopRule
from ..env.acceptance import GUESS_TRIALS, Floats, Ints
from ..env.confidence import EDGES, Confidence, Forecast
from ..env.state import EngineState
from .probe import Chances

BINS = np.arange(len(EDGES))
FREE = len(EDGES) - 1  # the bin that lets everything pass


@dataclass(frozen=True, slots=True)
class StopGrid:
    """Predictions per (threshold to keep, deepest round), all (bins, k_max + 1)."""

    go_on: Ints  # (k_max, bins): bin of the survival before each position from which it is drafted
    tokens: Floats
    drafted: Floats
    step_s: Floats

    @property
    def rate(self) -> Floats:
        """Tokens per second."""
        return self.tokens / self.step_s

    def rule(self, confidence: Confidence, keep: int, depth: int) -> StopRule | None:
        """Return the cell's rule, None where it lets everything pass."""
        bins = self.go_on[:, keep]
        if keep == FREE and (bins[1:depth] == FREE).all():
            return None
        thresholds = np.append(EDGES[bins[1:]], EDGES[FREE])  # entry j judges whether j + 1 is drafted
        return confidence.rule(float(EDGES[keep]), thresholds)


def predict_stops(state: EngineState, forecast: Forecast, requests: int, rate: float, begin_s: float = 0.0) -> StopGrid:
    """Return the predictions for a batch of `requests`; `rate`, tokens/s, prices a second of drafting.

    :param begin_s: what a step with drafts is charged for what the drafter must make up for
    """
    worth, reach = forecast.worth, forecast.reach
    token_s, round_s = state.cost.draft_prices_s()
    is_alone = requests == 1  # what it keeps is the whole batch: every row at its own price, not at that of a mean
    if is_alone:
        alone_s = state.cost.verify_time_s(np.arange(len(reach) + 1) + (1.0 + state.prompt_rows()))
        worth = (forecast.gain - forecast.kept * (rate * np.diff(alone_s))[:, None, None]).transpose(0, 2, 1)
    position = np.arange(len(reach))[:, None]
    # A round that others want anyway costs little more; who goes alone pays all of it.
    go_on = _best_start(worth, (reach * (rate * token_s))[:, None, :])
    others = np.power(1.0 - np.minimum(reach[position, go_on], 1.0), requests - 1)
    price = others * (rate * round_s) + rate * token_s
    go_on = _best_start(worth, reach[:, None, :] * price[:, :, None])
    # The price of going on rises with depth, or the thresholds would not nest; only kept tokens are followed.
    go_on = np.minimum(np.minimum.accumulate(go_on, axis=0), np.maximum(BINS, FREE * (position == 0)))
    wanted = reach[position, go_on]
    any_wants = 1.0 - np.power(1.0 - np.minimum(wanted, 1.0), requests)
    kept, gain = forecast.kept[position, go_on, BINS], forecast.gain[position, go_on, BINS]
    quantities = np.array([wanted, kept, gain, any_wants])
    sums = np.zeros((4, len(BINS), len(reach) + 1))
    np.cumsum(quantities.transpose(0, 2, 1), axis=2, out=sums[:, :, 1:])
    drafted, kept, gain = sums[:3] * requests
    rows = kept + (requests + state.prompt_rows())
    verify_s = _of_one(alone_s, kept) if is_alone else state.cost.verify_time_s(rows)
    step_s = verify_s + state.cost.draft_time_s(rows, sums[3], drafted)
    step_s = step_s - state.cost.prefill_time_s(requests, state.prompt_rows())
    step_s[:, 1:] += begin_s
    return StopGrid(go_on, gain + requests, drafted, step_s)


def _of_one(alone_s: Floats, kept: Floats) -> Floats:
    """Return the mean time of steps whose rows are one request's: (bins, k_max + 1) from its kept tokens so far.

    :param alone_s: (k_max + 1,) seconds with 0, 1, ... draft rows
    """
    share = np.diff(kept, axis=1)  # of drafts that keep the token at each position
    extra = np.concatenate([np.zeros((len(kept), 1)), (share * np.diff(alone_s)).cumsum(axis=1)], axis=1)
    verify_s: Floats = float(alone_s[0]) + extra
    return verify_s


def all_drafts(state: EngineState, forecast: Forecast) -> Chances:
    """Return the acceptance of drafts that no rule ends, which under a rule nobody sees."""
    survival = forecast.gain[:, FREE, FREE]
    mean = np.clip(survival / np.append(1.0, survival[:-1]), 0.005, 0.995)
    return Chances(mean, np.sqrt(mean * (1.0 - mean) / (state.confidence.trials + GUESS_TRIALS)))


def _best_start(worth: Floats, price: Floats) -> Ints:
    """Return (k_max, bins) from where to go on, for each threshold to keep: sums are cumulative over the bins."""
    start: Ints = (worth - price).argmax(axis=2)
    start[0] = FREE  # every draft begins
    return start
