"""The loops behind env/estimate/confidence.py, compiled: confidences, their calibration, and the forecast's sums.

They use nothing of other files, because numba's cache looks at this one only. n rows or drafts, k_max positions.
"""

from __future__ import annotations

import math

import numpy as np

from ...engine_adapter.arrays import Floats, Ints
from ...engine_adapter.compiled import compiled

MEMORY_TRIALS = 2000.0  # a position's calibration forgets beyond this many trials
FIRST_MEMORY_TRIALS = 100.0  # ... and sooner while it is far from its end: the early steps were rough
POOL_PRIOR = np.array([4.0, 12.0])  # trust in intercept 0 and slope 1, about 20 trials' information
POSITION_PRIOR = np.array([6.0, 18.0])  # trust of a position in all positions together, about 30 trials' information
LEAST_SLOPE, LARGEST_SLOPE, LARGEST_INTERCEPT = 0.05, 4.0, 8.0
LEAST_VARIANCE = 1e-3  # of a trial whose outcome the curve takes for sure
RING = 512  # drafts remembered
WINDOW = 16  # drafts of similar survival from which an unseen continuation is taken

# Rows of the calibration, one column per position: the curve; trials with forgetting, and all there ever were; sums of
# w, w x and w x^2; and the working response against 1 and x.
INTERCEPT, SLOPE, TRIALS, SEEN, WEIGHT, WEIGHT_X, WEIGHT_XX, MOMENT, MOMENT_X, CALIBRATION_ROWS = range(10)
DEPTH, RECORD = range(2)  # of a draft in the ring: confidences known, and when it was inserted
# Of a row that waits: confidences known, draft length in force when it was drafted (0: not known), and in which record
# it came; what of it was tried and accepted by position.
LIMIT, CAME = range(1, 3)
TRIED, HIT = range(2)


@compiled
def read(counts: Ints, values: Floats, k_max: int, least: float) -> tuple[Floats, Ints]:
    """Return logits (n, k_max), 0 where there is none, and depth (n,) of n drafts; at most k_max of each count."""
    logits, depth = np.zeros((len(counts), k_max)), np.zeros(len(counts), np.int64)
    start = 0
    for i in range(len(counts)):
        depth[i] = _unfold(logits[i], counts[i], values, start, least)
        start += counts[i]
    return logits, depth


@compiled
def _unfold(logits: Floats, count: int, values: Floats, start: int, least: float) -> int:
    """Fill in the logits of one draft, (k_max,); return how many there are."""
    depth = min(count, len(logits))
    for j in range(len(logits)):
        logits[j] = _logit(values[start + j], least) if j < depth else 0.0
    return depth


@compiled
def _logit(value: float, least: float) -> float:
    value = 0.5 if math.isnan(value) else min(max(value, least), 1.0 - least)
    return math.log(value / (1.0 - value))


@compiled
def gather(
    notes: Ints, logits: Floats, tests: Floats, waiting: int, counts: Ints, values: Floats, limit: Ints,
    trials: Floats, successes: Floats, record: int, first: int, step: int, least: float,
) -> int:  # fmt: skip
    """Let every `step`-th row from the `first` on wait behind the others; return how many do."""
    start = 0
    for i in range(len(limit)):
        if i >= first and (i - first) % step == 0:
            notes[DEPTH, waiting] = _unfold(logits[waiting], counts[i], values, start, least)
            notes[LIMIT, waiting], notes[CAME, waiting] = limit[i], record
            for j in range(tests.shape[2]):
                tests[TRIED, waiting, j], tests[HIT, waiting, j] = trials[i, j], successes[i, j]
            waiting += 1
        start += counts[i]
    return waiting


@compiled
def calibrate(calibration: Floats, logits: Floats, depth: Ints, trials: Floats, successes: Floats) -> None:
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
        weight = max(chance * (1.0 - chance), LEAST_VARIANCE) * trials[i, j]
        off = (successes[i, j] - chance) * trials[i, j]
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
def insert(ring: Floats, remembered: Ints, inserted: int, logits: Floats, notes: Ints) -> int:
    """Remember drafts, as deep as their confidences are known; return how many of them were of use."""
    useful = 0
    for i in range(len(logits)):
        known = min(notes[DEPTH, i], notes[LIMIT, i])
        if known > 0:
            place = (inserted + useful) % RING
            ring[place] = logits[i]
            remembered[DEPTH, place], remembered[RECORD, place] = known, notes[CAME, i]
            useful += 1
    return useful


@compiled
def complete(chance: Floats, depth: Ints, first_guess: float) -> None:
    """Fill in chances beyond each draft's known depth, (n, k_max), in place."""
    n, k_max = chance.shape
    survival = np.ones(n)
    for j in range(k_max):
        known, missing = np.flatnonzero(depth > j), np.flatnonzero(depth <= j)
        if len(known) < WINDOW:
            for i in missing:
                # As spread as the position before, but not the same drafts: lucky ones need not stay lucky.
                chance[i, j] = chance[(i * 37 + 11) % n, j - 1] if j else first_guess
        elif len(missing):
            ends, known = _sorted(known, survival)
            for i in missing:
                slot = _slot(survival[i])
                place = ends[slot - 1] if slot else 0
                while place < ends[slot] and survival[known[place]] < survival[i]:
                    place += 1
                place += (i * 7) % WINDOW - WINDOW // 2
                chance[i, j] = chance[known[min(max(place, 0), len(known) - 1)], j]
        survival *= chance[:, j]


@compiled
def _sorted(drafts: Ints, survival: Floats) -> tuple[Ints, Ints]:
    """Return drafts by rising survival, those alike in their order, and where each slot of survivals ends."""
    ends, order = np.zeros(RING, np.int64), np.empty_like(drafts)
    for draft in drafts:
        ends[_slot(survival[draft])] += 1
    before = 0
    for slot in range(RING):
        ends[slot], before = before, before + ends[slot]
    for draft in drafts:
        slot = _slot(survival[draft])
        order[ends[slot]] = draft
        ends[slot] += 1
    for m in range(1, len(order)):
        draft, place = order[m], m
        while place > 0 and survival[order[place - 1]] > survival[draft]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = draft
    return ends, order


@compiled
def _slot(survival: float) -> int:
    return min(max(int(math.sqrt(survival) * RING), 0), RING - 1)  # low ones are many


@compiled
def count(chance: Floats, weight: Floats, edges: Floats, kept: Floats, gain: Floats, worth: Floats) -> None:
    """Fill in what is kept and gained, (k_max, bins, bins), cumulative over both bins, and the net worth of it."""
    n, k_max = chance.shape
    bins = len(edges)
    for i in range(n):
        survival, go_on = 1.0, 0
        for j in range(k_max):
            survival *= chance[i, j]
            keep = go_on
            while keep < bins - 1 and edges[keep] > survival:
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
                worth[j, keep, go_on] = gain[j, go_on, keep] - kept[j, go_on, keep] * edges[keep]
