"""What the drafter's confidence is worth: chance of acceptance by confidence, and what a stop rule would bring.

Called by env/state.py (learning, after the answer is out) and by policies (asking). Calibrates online per draft
position and keeps recent drafts to predict other thresholds. Reads no clock, file or random source.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..engine_adapter.protocol import StopRule
from ..engine_adapter.stop_rule import LEAST
from .acceptance import FIRST_GUESS, Floats, Ints

MEMORY_TRIALS = 2000.0  # a position's calibration forgets beyond this many trials
FIRST_MEMORY_TRIALS = 100.0  # ... and sooner while it is far from its end: the early steps were rough
POOL_PRIOR = np.array([4.0, 12.0])  # trust in intercept 0 and slope 1, about 20 trials' information
POSITION_PRIOR = np.array([6.0, 18.0])  # trust of a position in all positions together, about 30 trials' information
LEAST_SLOPE, LARGEST_SLOPE, LARGEST_INTERCEPT = 0.05, 4.0, 8.0
SAMPLED_ROWS = 16  # of a record at most, in turn: more teach little more and cost time
BATCH_RECORDS = 16  # taken in together: numpy's cost is per call
RING = 512  # drafts remembered
MEMORY_RECORDS = 1000.0  # a remembered draft fades over this many records
MEMORY_DRAFTS = 4096.0  # ... and a forecast over this many newer drafts
FORECAST_RECORDS = 48  # records between forecasts
WINDOW = 16  # drafts of similar survival from which an unseen continuation is taken
EDGES = np.array([
    0.98, 0.95, 0.91, 0.87, 0.82, 0.77, 0.72, 0.67, 0.62, 0.57, 0.52, 0.47, 0.42, 0.37, 0.32, 0.27, 0.22, 0.18,
    0.14, 0.10, 0.07, 0.04, 0.0,
])  # fmt: skip
LEAST_DRAFTS, LEAST_TRIALS = 64, 150.0  # before a forecast is trusted
INFORMATIVE, UNINFORMATIVE = 0.03, 0.015  # explained share of the variance: trusted from, until


@dataclass(frozen=True, slots=True)
class Forecast:
    """What thresholds on survival would do to one request's draft, as means over recent drafts.

    Axes: draft position (k_max), bin of the survival one position before (go on if at least EDGES[bin]), and bin of
    the position's own survival (keep if at least EDGES[bin]). Cumulative over both bins.
    """

    reach: Floats  # (k_max, bins) share of drafts in which this position is drafted
    kept: Floats  # (k_max, bins, bins) ... in which it is also kept
    gain: Floats  # (k_max, bins, bins) accepted tokens it brings
    worth: Floats  # (k_max, keep, go on) gain net of a row's price, which is the threshold to keep
    informativeness: float  # 0..1, explained share of the first position's variance

    def blended(self, newer: Forecast, share: float) -> Forecast:
        """Return the mean of both, `share` (0..1) of it the newer: the ring alone is a small sample."""
        names = ("reach", "kept", "gain", "worth", "informativeness")
        old, new = ([getattr(forecast, name) for name in names] for forecast in (self, newer))
        return Forecast(*((1.0 - share) * before + share * now for before, now in zip(old, new, strict=True)))


@dataclass(frozen=True, slots=True)
class DraftRows:
    """One record's drafts: confidences of what was drafted, and what became of what was verified, n requests."""

    confidences: list[tuple[float, ...]]  # of the verified tokens and of a dropped one behind them
    limit: Ints  # draft length in force when these tokens were drafted; 0: not known
    trials: npt.NDArray[np.float64]  # (n, k_max) as from `count_trials`
    successes: npt.NDArray[np.float64]
    rule: StopRule | None  # in force when these were drafted
    record: int

    def sampled(self) -> DraftRows:
        """Return some of the rows, others in each record."""
        step = -(-len(self.limit) // SAMPLED_ROWS)
        if step <= 1:
            return self
        part = slice(self.record % step, None, step)
        limit, trials, successes = self.limit[part], self.trials[part], self.successes[part]
        return DraftRows(self.confidences[part], limit, trials, successes, self.rule, self.record)


@dataclass(slots=True)
class Confidence:
    """p = sigmoid(intercept + slope * logit(confidence)) per draft position, and a ring of recent drafts."""

    k_max: int
    slopes: Floats = field(init=False)  # (k_max,)
    intercepts: Floats = field(init=False)
    trials: Floats = field(init=False)  # (k_max,) with forgetting
    is_ready: bool = False  # calibrated and informative enough to be acted upon
    forecast: Forecast | None = None
    _information: Floats = field(init=False)  # (3, k_max): sums of w, w x, w x^2
    _moment: Floats = field(init=False)  # (2, k_max): working response against 1 and x
    _seen: Floats = field(init=False)
    _waiting: list[DraftRows] = field(default_factory=list)
    _logits: Floats = field(init=False)  # (RING, k_max)
    _depth: Ints = field(init=False)  # (RING,) confidences known
    _record: Ints = field(init=False)  # (RING,) when it was inserted
    _inserted: int = 0
    _forecast_record: int = 0
    _foreseen: int = 0  # inserted drafts at the last forecast

    def __post_init__(self) -> None:
        self.slopes, self.intercepts = np.ones(self.k_max), np.zeros(self.k_max)
        self.trials, self._seen = np.zeros((2, self.k_max))
        self._information, self._moment = np.zeros((3, self.k_max)), np.zeros((2, self.k_max))
        self._logits = np.zeros((RING, self.k_max))
        self._depth, self._record = np.zeros((2, RING), np.int64)

    def learn(self, rows: DraftRows) -> None:
        """Take in one record; batches are worked off together."""
        if self.k_max == 0 or not rows.limit.any() or not any(rows.confidences):
            return
        self._waiting.append(rows.sampled())
        if len(self._waiting) >= BATCH_RECORDS or rows.record - self._waiting[0].record >= FORECAST_RECORDS:
            self._work_off()

    def probability(self, logits: Floats) -> Floats:
        """Return the chance of acceptance, (..., k_max), given that the token before it was accepted."""
        chance: Floats = 1.0 / (1.0 + np.exp(-(self.intercepts + self.slopes * logits)))
        return chance

    def rule(self, keep: float, go_on: Floats) -> StopRule:
        """Return the rule for one threshold to keep and (k_max,) thresholds to go on."""
        return StopRule(self.slopes.tolist(), self.intercepts.tolist(), [keep] * self.k_max, go_on.tolist())

    def _work_off(self) -> None:
        waiting, self._waiting = self._waiting, []
        confidences = [values for rows in waiting for values in rows.confidences]
        logits, depth = unfold(confidences, self.k_max)
        trials = np.concatenate([rows.trials for rows in waiting])
        trials *= np.arange(self.k_max) < depth[:, None]
        self._calibrate(logits, trials, np.concatenate([rows.successes for rows in waiting]))
        self._insert(waiting, logits, depth)
        record = waiting[-1].record
        if self.forecast is None or record - self._forecast_record >= FORECAST_RECORDS:
            self._foresee(record)

    def _calibrate(self, logits: Floats, trials: Floats, successes: Floats) -> None:
        """One Newton step of a logistic regression with forgetting; positions lean on all positions together."""
        chance = self.probability(logits)
        weight = np.maximum(chance * (1.0 - chance), 1e-3) * trials
        weighted = weight * logits
        added = np.stack([weight.sum(0), weighted.sum(0), (weighted * logits).sum(0)])
        residual = (successes - chance) * trials
        tried = trials.sum(axis=0)
        memory = np.minimum(FIRST_MEMORY_TRIALS + 0.5 * self._seen, MEMORY_TRIALS)
        keep = np.minimum(1.0, memory / (self.trials + tried + 1.0))
        self.trials, self._seen = self.trials * keep + tried, self._seen + tried
        before = np.stack([self.intercepts, self.slopes])
        self._moment = self._moment * keep + _times(added, before)
        self._moment += np.stack([residual.sum(0), (residual * logits).sum(0)])
        self._information = self._information * keep + added
        pooled = _solve(
            self._information.sum(1, keepdims=True), self._moment.sum(1, keepdims=True), POOL_PRIOR, [[0.0], [1.0]]
        )
        self.intercepts, self.slopes = _solve(self._information, self._moment, POSITION_PRIOR, pooled)

    def _insert(self, waiting: list[DraftRows], logits: Floats, depth: Ints) -> None:
        """Remember drafts, as deep as their confidences are known."""
        limit = np.concatenate([rows.limit for rows in waiting])
        record = np.repeat([rows.record for rows in waiting], [len(rows.limit) for rows in waiting])
        depth = np.minimum(depth, limit)
        useful = np.flatnonzero(depth > 0)
        place = (self._inserted + np.arange(len(useful))) % RING
        self._logits[place], self._depth[place] = logits[useful], depth[useful]
        self._record[place] = record[useful]
        self._inserted += len(useful)

    def _foresee(self, record: int) -> None:
        size = min(self._inserted, RING)
        if size < LEAST_DRAFTS or self.trials[0] < LEAST_TRIALS:
            return
        chance = self.probability(self._logits[:size])
        complete(chance, self._depth[:size])
        age = np.minimum((record - self._record[:size]) / MEMORY_RECORDS, 50.0)
        weight = np.exp(-age)
        forecast = foresee(chance, weight / weight.sum())
        if self.forecast is not None:
            fresh = (self._inserted - self._foreseen) / MEMORY_DRAFTS + (
                record - self._forecast_record
            ) / MEMORY_RECORDS
            forecast = self.forecast.blended(forecast, min(fresh, 1.0))
        self.forecast, self._foreseen, self._forecast_record = forecast, self._inserted, record
        bar = UNINFORMATIVE if self.is_ready else INFORMATIVE
        self.is_ready = self.forecast.informativeness >= bar


def unfold(confidences: list[tuple[float, ...]], k_max: int) -> tuple[Floats, Ints]:
    """Return logits (n, k_max), 0 where there is none, and how many each row has, (n,); at most k_max count."""
    depth = np.fromiter(map(len, confidences), np.int64, len(confidences))
    flat = np.fromiter([value for values in confidences for value in values], np.float64, int(depth.sum()))
    flat = np.clip(np.nan_to_num(flat, nan=0.5), LEAST, 1.0 - LEAST)
    width = max(int(depth.max(initial=0)), k_max)
    logits = np.zeros((len(confidences), width))
    logits[np.arange(width) < depth[:, None]] = np.log(flat / (1.0 - flat))
    return logits[:, :k_max], np.minimum(depth, k_max)


def complete(chance: Floats, depth: Ints) -> None:
    """Fill in (n, k_max) chances beyond each draft's known depth, in place, from drafts that had survived alike."""
    n, k_max = chance.shape
    survival, order = np.ones(n), np.arange(n)
    for j in range(k_max):
        column = chance[:, j]
        is_known = depth > j
        missing = np.flatnonzero(~is_known)
        if len(missing):
            known = np.flatnonzero(is_known)
            if len(known) < WINDOW:
                # As spread as the position before, but not the same drafts: lucky ones need not stay lucky.
                column[missing] = chance[(missing * 37 + 11) % n, j - 1] if j else FIRST_GUESS
            else:
                known = known[np.argsort(survival[known], kind="stable")]
                near = np.searchsorted(survival[known], survival[missing]) + (order[missing] * 7) % WINDOW - WINDOW // 2
                column[missing] = column[known[np.clip(near, 0, len(known) - 1)]]
        survival = survival * column


def foresee(chance: Floats, weight: Floats) -> Forecast:
    """Return the forecast from (n, k_max) chances of acceptance and (n,) weights that sum to 1."""
    n, k_max = chance.shape
    bins = len(EDGES)
    survival = np.concatenate([np.ones((n, 1)), chance.cumprod(axis=1)], axis=1)
    place = np.minimum(bins - np.searchsorted(EDGES[::-1], survival, side="right"), bins - 1)
    cell = ((np.arange(k_max) * bins + place[:, :-1]) * bins + place[:, 1:]).ravel()
    weights = np.repeat(weight, k_max)
    shape = (k_max, bins, bins)
    kept, gain = (
        np.bincount(cell, values, k_max * bins * bins).reshape(shape).cumsum(axis=1).cumsum(axis=2)
        for values in (weights, weights * survival[:, 1:].ravel())
    )
    mean = float(weight @ chance[:, 0])
    variance = float(weight @ np.square(chance[:, 0] - mean))
    reach = np.ascontiguousarray(kept[:, :, -1])
    return Forecast(reach, kept, gain, _turned(gain - kept * EDGES), variance / max(mean * (1.0 - mean), 1e-6))


def _turned(values: Floats) -> Floats:
    """Return the last two axes swapped, in memory too: policies search along the last one in every step."""
    return np.ascontiguousarray(values.transpose(0, 2, 1))


def _times(information: Floats, values: Floats) -> Floats:
    """Return the (2, k) product of symmetric 2 x 2 matrices, (3, k), with (2, k) vectors."""
    first, mixed, second = information
    return np.stack([first * values[0] + mixed * values[1], mixed * values[0] + second * values[1]])


def _solve(information: Floats, moment: Floats, trust: Floats, prior: npt.ArrayLike) -> Floats:
    """Return (2, k) intercepts and slopes, drawn to `prior`, (2, 1), as far as `trust` goes."""
    first, mixed, second = information[0] + trust[0], information[1], information[2] + trust[1]
    drawn = moment + trust[:, None] * np.asarray(prior)
    scale = 1.0 / (first * second - mixed * mixed)
    intercept = (second * drawn[0] - mixed * drawn[1]) * scale
    slope = (first * drawn[1] - mixed * drawn[0]) * scale
    # Limited one after the other: the best intercept for a limited slope, not that of the free one.
    limited = np.clip(slope, LEAST_SLOPE, LARGEST_SLOPE)
    intercept = np.where(limited == slope, intercept, (drawn[0] - mixed * limited) / first)
    return np.stack([np.clip(intercept, -LARGEST_INTERCEPT, LARGEST_INTERCEPT), limited])
