"""What the drafter's confidence is worth: chance of acceptance by confidence, and what a stop rule would bring.

Called by env/state.py (learning, after the answer is out) and by policies (asking). Calibrates online per draft
position and keeps recent drafts to predict other thresholds. Reads no clock, file or random source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from ..engine_adapter.protocol import StopRule
from ..engine_adapter.stop_rule import LEAST
from .acceptance import FIRST_GUESS, Floats, Ints
from .compiled import compiled

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

# Rows of the calibration, one column per position: the curve; trials with forgetting, and all there ever were; sums of
# w, w x and w x^2; and the working response against 1 and x.
INTERCEPT, SLOPE, TRIALS, SEEN, WEIGHT, WEIGHT_X, WEIGHT_XX, MOMENT, MOMENT_X, CALIBRATION_ROWS = range(10)
DEPTH, RECORD = range(2)  # of a draft in the ring: confidences known, and when it was inserted

_encoder = msgspec.msgpack.Encoder(enc_hook=float)


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
    is_ready: bool = False  # calibrated and informative enough to be acted upon
    forecast: Forecast | None = None
    _calibration: Floats = field(init=False)  # (CALIBRATION_ROWS, k_max)
    _waiting: list[tuple[DraftRows, bytes]] = field(default_factory=list)  # with their confidences, see `_unfold`
    _logits: Floats = field(init=False)  # (RING, k_max)
    _remembered: Ints = field(init=False)  # (2, RING) depth and record
    _inserted: int = 0
    _forecast_record: int = 0
    _foreseen: int = 0  # inserted drafts at the last forecast

    def __post_init__(self) -> None:
        self._calibration = np.zeros((CALIBRATION_ROWS, self.k_max))
        self._calibration[SLOPE] = 1.0
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
        """Take in one record; batches are worked off together."""
        if self.k_max == 0 or not any(rows.confidences) or not np.count_nonzero(rows.limit):
            return
        sample = rows.sampled()
        self._waiting.append((sample, _encoder.encode(sample.confidences)))
        if len(self._waiting) >= BATCH_RECORDS or rows.record - self._waiting[0][0].record >= FORECAST_RECORDS:
            self._work_off()

    def probability(self, logits: Floats) -> Floats:
        """Return the chance of acceptance, (..., k_max), given that the token before it was accepted."""
        chance: Floats = 1.0 / (1.0 + np.exp(-(self.intercepts + self.slopes * logits)))
        return chance

    def rule(self, keep: float, go_on: Floats) -> StopRule:
        """Return the rule for one threshold to keep and (k_max,) thresholds to go on."""
        return StopRule(self.slopes.tolist(), self.intercepts.tolist(), [keep] * self.k_max, go_on.tolist())

    def _work_off(self) -> None:
        waiting, frames = [rows for rows, _ in self._waiting], [frame for _, frame in self._waiting]
        self._waiting = []
        limit = np.concatenate([rows.limit for rows in waiting])
        logits, depth = _unfold(b"".join(frames), len(limit), self.k_max)
        trials, successes = (
            np.concatenate([getattr(rows, name) for rows in waiting]) for name in ("trials", "successes")
        )
        assert trials.shape == successes.shape == logits.shape  # kernels do not look
        _calibrate(self._calibration, logits, depth, trials, successes)
        records = np.repeat([rows.record for rows in waiting], [len(rows.limit) for rows in waiting])
        self._inserted += _insert(self._logits, self._remembered, self._inserted, logits, depth, limit, records)
        record = waiting[-1].record
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


def unfold(confidences: list[tuple[float, ...]], k_max: int) -> tuple[Floats, Ints]:
    """Return logits (n, k_max), 0 where there is none, and how many each row has, (n,); at most k_max count."""
    return _unfold(_encoder.encode(confidences), len(confidences), k_max)


def _unfold(frame: bytes, n: int, k_max: int) -> tuple[Floats, Ints]:
    """Unfold from msgpack: msgspec writes it and a kernel reads it faster than Python takes tuples apart."""
    logits, depth, end = _read(np.frombuffer(frame, np.uint8), n, k_max, LEAST)
    assert end == len(frame), "the confidences are not one tuple of floats for each request"
    return logits, depth


def complete(chance: Floats, depth: Ints) -> None:
    """Fill in (n, k_max) chances beyond each draft's known depth, in place, from drafts that had survived alike."""
    _complete(chance, depth, FIRST_GUESS)


def foresee(chance: Floats, weight: Floats) -> Forecast:
    """Return the forecast from (n, k_max) chances of acceptance and (n,) weights that sum to 1."""
    shape = (chance.shape[1], len(EDGES), len(EDGES))
    kept, gain, worth = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    _count(chance, weight, kept, gain, worth)
    mean = float(weight @ chance[:, 0])
    variance = float(weight @ np.square(chance[:, 0] - mean))
    reach = np.ascontiguousarray(kept[:, :, -1])
    return Forecast(reach, kept, gain, worth, variance / max(mean * (1.0 - mean), 1e-6))


@compiled
def _read(frame: npt.NDArray[np.uint8], n: int, k_max: int, least: float) -> tuple[Floats, Ints, int]:
    """Return logits, depth, and where these lists of n drafts in all end.

    Anything but lists of lists of floats, as msgspec writes them, ends beyond the frame; nothing is read there.
    """
    logits, depth = np.zeros((n, k_max)), np.zeros(n, np.int64)
    at = i = 0
    while at < len(frame):
        drafts, at = _header(frame, at)
        for _ in range(drafts):
            many, at = _header(frame, at)
            if i >= n or at + 9 * many > len(frame):
                return logits, depth, len(frame) + 1
            for j in range(min(many, k_max)):
                logits[i, j] = _logit(frame, at + 9 * j, least)
            depth[i] = min(many, k_max)
            at, i = at + 9 * many, i + 1
    return logits, depth, at if i == n else len(frame) + 1


@compiled
def _header(frame: npt.NDArray[np.uint8], at: int) -> tuple[int, int]:
    """Return the length of the list that begins here, and where its first entry does."""
    end = len(frame)
    code = int(np.int64(frame[at])) if at < end else 0  # numba's int of a byte would be unsigned
    if 0x90 <= code <= 0x9F:
        return code - 0x90, at + 1
    if code != 0xDC or at + 3 > end:
        return 0, end + 1
    return int(np.int64(frame[at + 1])) * 256 + int(np.int64(frame[at + 2])), at + 3


@compiled
def _logit(frame: npt.NDArray[np.uint8], at: int, least: float) -> float:
    value = np.uint64(_bits(frame, at + 1)).view(np.float64) if frame[at] == 0xCB else math.nan
    value = 0.5 if math.isnan(value) else min(max(value, least), 1.0 - least)
    return math.log(value / (1.0 - value))


@compiled
def _bits(frame: npt.NDArray[np.uint8], at: int) -> np.uint64:
    bits = np.uint64(0)
    for place in range(at, at + 8):
        bits = bits << np.uint64(8) | np.uint64(frame[place])
    return bits


@compiled
def _calibrate(calibration: Floats, logits: Floats, depth: Ints, trials: Floats, successes: Floats) -> None:
    """One Newton step of a logistic regression with forgetting; positions lean on all positions together.

    A verified token without a confidence counts for nothing.
    """
    pooled = np.zeros((CALIBRATION_ROWS, 1))
    for j in range(calibration.shape[1]):
        _take_in(calibration[:, j], logits, depth, trials, successes, j)
        for row in range(WEIGHT, CALIBRATION_ROWS):
            pooled[row, 0] += calibration[row, j]
    _solve(pooled[:, 0], POOL_PRIOR, 0.0, 1.0)
    for j in range(calibration.shape[1]):
        _solve(calibration[:, j], POSITION_PRIOR, pooled[INTERCEPT, 0], pooled[SLOPE, 0])


@compiled
def _take_in(sums: Floats, logits: Floats, depth: Ints, trials: Floats, successes: Floats, j: int) -> None:
    """Add a batch's trials at one position to the position's sums."""
    intercept, slope = sums[INTERCEPT], sums[SLOPE]
    tried = first = mixed = second = residual = residual_x = 0.0
    for i in range(len(logits)):
        if depth[i] <= j or trials[i, j] == 0.0:
            continue
        x = logits[i, j]
        chance = 1.0 / (1.0 + math.exp(-(intercept + slope * x)))
        weight, off = max(chance * (1.0 - chance), 1e-3) * trials[i, j], (successes[i, j] - chance) * trials[i, j]
        tried += trials[i, j]
        first, mixed, second = first + weight, mixed + weight * x, second + weight * x * x
        residual, residual_x = residual + off, residual_x + off * x
    memory = min(FIRST_MEMORY_TRIALS + 0.5 * sums[SEEN], MEMORY_TRIALS)
    keep = min(1.0, memory / (sums[TRIALS] + tried + 1.0))
    sums[TRIALS], sums[SEEN] = sums[TRIALS] * keep + tried, sums[SEEN] + tried
    sums[WEIGHT], sums[WEIGHT_X] = sums[WEIGHT] * keep + first, sums[WEIGHT_X] * keep + mixed
    sums[WEIGHT_XX] = sums[WEIGHT_XX] * keep + second
    sums[MOMENT] = sums[MOMENT] * keep + first * intercept + mixed * slope + residual
    sums[MOMENT_X] = sums[MOMENT_X] * keep + mixed * intercept + second * slope + residual_x


@compiled
def _solve(sums: Floats, trust: Floats, intercept: float, slope: float) -> None:
    """Set the curve that the sums ask for, drawn to `intercept` and `slope` as far as `trust` goes."""
    first, mixed, second = sums[WEIGHT] + trust[0], sums[WEIGHT_X], sums[WEIGHT_XX] + trust[1]
    drawn, drawn_x = sums[MOMENT] + trust[0] * intercept, sums[MOMENT_X] + trust[1] * slope
    determinant = first * second - mixed * mixed
    intercept, slope = (second * drawn - mixed * drawn_x) / determinant, (first * drawn_x - mixed * drawn) / determinant
    # Limited one after the other: the best intercept for a limited slope, not that of the free one.
    limited = min(max(slope, LEAST_SLOPE), LARGEST_SLOPE)
    if limited != slope:
        intercept = (drawn - mixed * limited) / first
    sums[INTERCEPT], sums[SLOPE] = min(max(intercept, -LARGEST_INTERCEPT), LARGEST_INTERCEPT), limited


@compiled
def _insert(
    ring: Floats, remembered: Ints, inserted: int, logits: Floats, depth: Ints, limit: Ints, records: Ints
) -> int:
    """Remember drafts, as deep as their confidences are known; return how many of them were of use."""
    useful = 0
    for i in range(len(logits)):
        known = min(depth[i], limit[i])
        if known > 0:
            place = (inserted + useful) % RING
            ring[place] = logits[i]
            remembered[DEPTH, place], remembered[RECORD, place] = known, records[i]
            useful += 1
    return useful


@compiled
def _complete(chance: Floats, depth: Ints, first_guess: float) -> None:
    n, k_max = chance.shape
    survival = np.ones(n)
    for j in range(k_max):
        known, missing = np.flatnonzero(depth > j), np.flatnonzero(depth <= j)
        if len(known) < WINDOW:
            for i in missing:
                # As spread as the position before, but not the same drafts: lucky ones need not stay lucky.
                chance[i, j] = chance[(i * 37 + 11) % n, j - 1] if j else first_guess
        elif len(missing):
            known = _sorted(known, survival)
            near = np.searchsorted(survival[known], survival[missing])
            for m in range(len(missing)):
                place = near[m] + (missing[m] * 7) % WINDOW - WINDOW // 2
                chance[missing[m], j] = chance[known[min(max(place, 0), len(known) - 1)], j]
        survival *= chance[:, j]


@compiled
def _sorted(known: Ints, survival: Floats) -> Ints:
    """Return the drafts `known` by rising survival, those alike in their order: by slots, and then by insertion."""
    ends, order = np.zeros(RING + 1, np.int64), np.empty_like(known)
    slots = np.empty_like(known)
    for m in range(len(known)):
        slots[m] = min(max(int(math.sqrt(survival[known[m]]) * RING), 0), RING - 1)  # low ones are many
        ends[slots[m] + 1] += 1
    for slot in range(RING):
        ends[slot + 1] += ends[slot]
    for m in range(len(known)):
        order[ends[slots[m]]] = known[m]
        ends[slots[m]] += 1
    for m in range(1, len(order)):
        draft, place = order[m], m
        while place > 0 and survival[order[place - 1]] > survival[draft]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = draft
    return order


@compiled
def _count(chance: Floats, weight: Floats, kept: Floats, gain: Floats, worth: Floats) -> None:
    """Fill in what is kept and gained, (k_max, bins, bins), cumulative over both bins, and the net worth of it."""
    n, k_max = chance.shape
    bins = len(EDGES)
    for i in range(n):
        survival, go_on = 1.0, 0
        for j in range(k_max):
            survival *= chance[i, j]
            keep = go_on
            while keep < bins - 1 and EDGES[keep] > survival:
                keep += 1
            kept[j, go_on, keep] += weight[i]
            gain[j, go_on, keep] += weight[i] * survival
            go_on = keep
    for j in range(k_max):
        for go_on in range(bins):
            kept_here = gain_here = 0.0
            for keep in range(bins):
                kept_here, gain_here = kept_here + kept[j, go_on, keep], gain_here + gain[j, go_on, keep]
                kept[j, go_on, keep] = kept_here + (kept[j, go_on - 1, keep] if go_on else 0.0)
                gain[j, go_on, keep] = gain_here + (gain[j, go_on - 1, keep] if go_on else 0.0)
                # Turned: policies search along the last axis in every step.
                worth[j, keep, go_on] = gain[j, go_on, keep] - kept[j, go_on, keep] * EDGES[keep]
