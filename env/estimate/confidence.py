"""What the drafter's confidence is worth: chance of acceptance by confidence, and what a stop rule would bring.

Called by env/estimate/engine_state.py (learning, after the answer is out) and by policies (asking). Calibrates online
per draft position and keeps recent drafts to predict other thresholds. Reads no clock, file or random source.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...engine_adapter.arrays import Floats, Ints
from ...engine_adapter.protocol import StopRule
from ...engine_adapter.steering.stop_rule import LEAST
from ..estimate import confidence_kernel as kernel
from .acceptance import FIRST_GUESS
from .confidence_kernel import CALIBRATION_ROWS, CAME, DEPTH, HIT, INTERCEPT, RING, SLOPE, TRIALS, TRIED
from .step_rows import Confidences

SAMPLED_ROWS = 16  # of a record at most, in turn: more teach little more and cost time
FIRST_ROWS = 64  # ... and until there is a forecast
FIRST_DRAFTS = 160  # worked off at once until there is a forecast
BATCH_RECORDS = 16  # taken in together: numpy's cost is per call
MEMORY_RECORDS = 1000.0  # a remembered draft fades over this many records
MEMORY_DRAFTS = 4096.0  # ... and a forecast over this many newer drafts
FORECAST_RECORDS = 48  # records between forecasts
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


@dataclass(slots=True)
class DraftRows:
    """One record's drafts: confidences of what was drafted, and what became of what was verified, n requests."""

    confidences: Confidences  # of the verified tokens and of a dropped one behind them
    limit: Ints  # draft length in force when these tokens were drafted; 0: not known
    trials: Floats  # (n, k_max) as from `count_trials`
    successes: Floats
    rule: StopRule | None  # in force when these were drafted
    record: int


@dataclass(slots=True)
class Confidence:
    """p = sigmoid(intercept + slope * logit(confidence)) per draft position, and a ring of recent drafts."""

    k_max: int
    is_ready: bool = False  # calibrated and informative enough to be acted upon
    forecast: Forecast | None = None
    _calibration: Floats = field(init=False)  # (CALIBRATION_ROWS, k_max)
    _waiting: int = 0  # rows to be taken in
    _records: int = 0  # that they came in
    _notes: Ints = field(init=False)  # (3, rows) depth, limit and record
    _drawn: Floats = field(init=False)  # (rows, k_max) logits
    _tests: Floats = field(init=False)  # (2, rows, k_max) trials and successes
    _logits: Floats = field(init=False)  # (RING, k_max)
    _remembered: Ints = field(init=False)  # (2, RING) depth and record
    _inserted: int = 0
    _forecast_record: int = 0
    _foreseen: int = 0  # inserted drafts at the last forecast

    def __post_init__(self) -> None:
        self._calibration = np.zeros((CALIBRATION_ROWS, self.k_max))
        self._calibration[SLOPE] = 1.0
        self._notes = np.zeros((3, BATCH_RECORDS * SAMPLED_ROWS), np.int64)
        self._drawn = np.zeros((BATCH_RECORDS * SAMPLED_ROWS, self.k_max))
        self._tests = np.zeros((2, BATCH_RECORDS * SAMPLED_ROWS, self.k_max))
        self._logits = np.zeros((RING, self.k_max))
        self._remembered = np.zeros((2, RING), np.int64)

    @property
    def slopes(self) -> Floats:
        """Slope of each position's curve, (k_max,); changed in place by `learn`."""
        slopes: Floats = self._calibration[SLOPE]
        return slopes

    @property
    def intercepts(self) -> Floats:
        """Intercept of each position's curve, (k_max,); changed in place by `learn`."""
        intercepts: Floats = self._calibration[INTERCEPT]
        return intercepts

    @property
    def trials(self) -> Floats:
        """Trials of each position, with forgetting, (k_max,); changed in place by `learn`."""
        trials: Floats = self._calibration[TRIALS]
        return trials

    def learn(self, rows: DraftRows) -> None:
        """Take in one record, of many requests some, others in each; batches are worked off together."""
        counts, values = rows.confidences
        if self.k_max == 0 or not len(values) or not np.count_nonzero(rows.limit):
            if self._waiting and rows.record - self._notes.item(CAME, 0) >= FORECAST_RECORDS:
                self._work_off(rows.record)  # nobody may draft again
            return
        assert rows.trials.shape == rows.successes.shape == (len(rows.limit), self.k_max)  # the kernel does not look
        assert len(counts) == len(rows.limit)
        step = -(-len(counts) // (FIRST_ROWS if self.forecast is None else SAMPLED_ROWS))
        self._waiting = kernel.gather(
            self._notes, self._drawn, self._tests, self._waiting, counts, values, rows.limit, rows.trials,
            rows.successes, rows.record, rows.record % step, step, LEAST,
        )  # fmt: skip
        self._records += 1
        is_enough = self.forecast is None and self._waiting >= FIRST_DRAFTS
        is_old = rows.record - self._notes.item(CAME, 0) >= FORECAST_RECORDS
        if is_enough or self._records >= BATCH_RECORDS or is_old:
            self._work_off(rows.record)

    def probability(self, logits: Floats) -> Floats:
        """Return the chance of acceptance, (..., k_max), given that the token before it was accepted."""
        chance: Floats = 1.0 / (1.0 + np.exp(-(self.intercepts + self.slopes * logits)))
        return chance

    def rule(self, keep: float, go_on: Floats) -> StopRule:
        """Return the rule for one threshold to keep and (k_max,) thresholds to go on."""
        return StopRule(self.slopes.tolist(), self.intercepts.tolist(), [keep] * self.k_max, go_on.tolist())

    def _work_off(self, record: int) -> None:
        size, self._records, self._waiting = self._waiting, 0, 0
        logits, notes = self._drawn[:size], self._notes[:, :size].copy()
        kernel.calibrate(self._calibration, logits, notes[DEPTH], self._tests[TRIED, :size], self._tests[HIT, :size])
        self._inserted += kernel.insert(self._logits, self._remembered, self._inserted, logits, notes)
        if self.forecast is None or record - self._forecast_record >= FORECAST_RECORDS:
            self._foresee(record)

    def _foresee(self, record: int) -> None:
        size = min(self._inserted, RING)
        if size < LEAST_DRAFTS or self.trials[0] < LEAST_TRIALS:
            return
        chance = self.probability(self._logits[:size])
        depth, inserted = self._remembered[:, :size]
        complete(chance, depth)
        age = np.minimum((record - inserted) / MEMORY_RECORDS, 50.0)
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


def unfold(confidences: Confidences, k_max: int) -> tuple[Floats, Ints]:
    """Return logits (n, k_max), 0 where there is none, and how many each row has, (n,); at most k_max count."""
    return kernel.read(*confidences, k_max, LEAST)


def complete(chance: Floats, depth: Ints) -> None:
    """Fill in (n, k_max) chances beyond each draft's known depth, in place, from drafts that had survived alike."""
    kernel.complete(chance, depth, FIRST_GUESS)


def foresee(chance: Floats, weight: Floats) -> Forecast:
    """Return the forecast from (n, k_max) chances of acceptance and (n,) weights that sum to 1."""
    shape = (chance.shape[1], len(EDGES), len(EDGES))
    kept, gain, worth = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    kernel.count(chance, weight, EDGES, kept, gain, worth)
    mean = float(weight @ chance[:, 0])
    variance = float(weight @ np.square(chance[:, 0] - mean))
    reach = np.ascontiguousarray(kept[:, :, -1])
    return Forecast(reach, kept, gain, worth, variance / max(mean * (1.0 - mean), 1e-6))
