"""What env/state.py and env/observation.py would make of a step's record, computed in the kernel; compiled.

Called at the end of every simulated step. The formulas are theirs (acceptance.shrink, Population, Load, StepOctaves);
tests/env/test_parity.py pushes the same steps through both and compares.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .acceptance import (
    FIRST_GUESS,
    GUESS_TRIALS,
    LEVEL_MEMORY_RECORDS,
    MEMORY_TRIALS,
    POSITION_TRIALS,
    REQUEST_MEMORY_STEPS,
    UNTRIED_RECORDS,
)
from .cost_table import MAX_STEP_S, MIN_STEP_S
from .observation import POSITIONS
from .simulator_state import (
    ACCEPTANCE,
    ACCEPTED,
    ARRIVED,
    CONTEXT,
    DRAFT_LIMIT,
    EMITTED,
    FREE,
    FRESH,
    HIT,
    IS_PREFILL,
    KEPT,
    MEAN,
    OCTAVE_LOG,
    OCTAVE_VISITS,
    PHASE,
    PRUNED,
    RUNNING,
    SCHEDULED,
    SERVICE,
    SUCCESSES,
    TRIALS,
    TRIED,
    VERIFIED,
    Floats,
    Shorts,
    Singles,
)
from .state import ARRIVAL_WINDOW_S, LOAD_STEPS
from .step_octaves import LEAST_GAIN, OCTAVES, STEPS
from .world import compiled

_KEEP = np.float32(1.0 - 1.0 / REQUEST_MEMORY_STEPS)
_FADE = np.float32(1.0 - 1.0 / UNTRIED_RECORDS)
_ZERO, _ONE, _LOW, _HIGH = np.float32(0.0), np.float32(1.0), np.float32(0.005), np.float32(0.995)
_TINY, _WEIGHT, _FORTY = np.float32(1e-9), np.float32(POSITION_TRIALS), np.float32(40.0)
# Rows of the kernel's scratch, (SCRATCH, slots).
EXPECTED, VARIANCE, HAD, SCALE, TRIES, HITS, KEEPS, SCRATCH = range(8)
_CONTEXT, _ANSWER, _AGE, _EIGHT = np.float32(1024.0), np.float32(128.0), np.float32(10.0), np.float32(8.0)


@compiled
def observe(
    engine: Any, profile: Any, settings: Any, ints: Shorts, times: Floats, evidence: Singles, population: Floats,
    octaves: Floats, priority: Floats, shown: Singles, overall: Singles, scratch: Singles, counts: Floats,
) -> None:  # fmt: skip
    """See, show, learn: the order in which the decision core does it."""
    is_fair = engine.was_ruled == 0
    _count_trials(ints, evidence, scratch, counts, is_fair)
    _see_load(engine, ints)
    _shrink(engine, evidence, population, scratch)
    _show_requests(engine, ints, times, evidence, priority, shown)
    _show_engine(engine, profile, settings, ints, population, octaves, overall)
    if is_fair:
        _learn_population(population, counts)
        _learn_levels(engine, ints, evidence, population, scratch)
    _learn_octaves(engine, octaves)


@compiled
def _count_trials(ints: Shorts, evidence: Singles, scratch: Singles, counts: Floats, is_fair: bool) -> None:
    """Add this step's trials to each request's evidence, with forgetting, and to the sums."""
    positions, size = evidence.shape[1], ints.shape[1]
    for j in range(positions):
        counts[0, j] = counts[1, j] = 0.0
    tries, hits, keeps = scratch[TRIES], scratch[HITS], scratch[KEEPS]
    for i in range(size):
        tested = ints[VERIFIED, i] - max(ints[PRUNED, i] - 1, 0)
        hit = min(ints[ACCEPTED, i], tested)
        tried = min(tested, hit + 1)
        keep = _KEEP if tested > 0 and is_fair else _FADE
        tries[i], hits[i], keeps[i] = tried, hit, keep if ints[SCHEDULED, i] > 0 else _ONE
        if tried > 0:  # the last position each reaches; summed up below
            counts[0, tried - 1] += 1.0
        if hit > 0:
            counts[1, hit - 1] += 1.0
    for j in range(positions - 2, -1, -1):
        counts[0, j] += counts[0, j + 1]
        counts[1, j] += counts[1, j + 1]
    weight = _ONE if is_fair else _ZERO
    for j in range(positions):
        place = np.float32(j)
        trials, successes = evidence[TRIALS, j], evidence[SUCCESSES, j]
        for i in range(size):
            trials[i] = trials[i] * keeps[i] + (weight if place < tries[i] else _ZERO)
            successes[i] = successes[i] * keeps[i] + (weight if place < hits[i] else _ZERO)


@compiled
def _see_load(engine: Any, ints: Shorts) -> None:
    total = engine.prefill_tokens + engine.decode_tokens + engine.draft_tokens
    share = 1.0 / LOAD_STEPS
    engine.mean_prefill_rows += share * (engine.prefill_tokens - engine.mean_prefill_rows)
    engine.mean_prefill_share += share * (engine.prefill_tokens / max(total, 1) - engine.mean_prefill_share)
    engine.mean_step_s += share * (engine.step_s - engine.mean_step_s)
    emitted = 0
    for i in range(ints.shape[1]):
        emitted += ints[FRESH, i]
    if engine.step_s > 0.0:
        engine.mean_tokens_per_s += share * (emitted / engine.step_s - engine.mean_tokens_per_s)
    passed_s = max(engine.clock_s - engine.observed_s, 0.0) if engine.steps > 1 else 0.0
    fade = math.exp(-min(passed_s / ARRIVAL_WINDOW_S, 50.0))
    engine.arrival_rate = engine.arrival_rate * fade + engine.new_arrivals / ARRIVAL_WINDOW_S
    engine.observed_s = engine.clock_s


@compiled
def _expectation(evidence: Singles, population: Floats, scratch: Singles) -> None:
    """Fill scratch with the successes the population would have had in each request's trials, and their variance."""
    expected, variance = scratch[EXPECTED], scratch[VARIANCE]
    for j in range(evidence.shape[1]):
        p = np.float32(population[MEAN, j])
        q = p * (_ONE - p)
        trials = evidence[TRIALS, j]
        if j == 0:
            for i in range(len(expected)):
                expected[i], variance[i] = trials[i] * p, trials[i] * q
        else:
            for i in range(len(expected)):
                expected[i] += trials[i] * p
                variance[i] += trials[i] * q


@compiled
def _successes(evidence: Singles, scratch: Singles) -> None:
    """Fill scratch with what each request has had accepted."""
    had = scratch[HAD]
    had[:] = evidence[SUCCESSES, 0]
    for j in range(1, evidence.shape[1]):
        successes = evidence[SUCCESSES, j]
        for i in range(len(had)):
            had[i] += successes[i]


@compiled
def _level_variance(engine: Any) -> float:
    return float(min(max(engine.excess / max(engine.leverage, 1e-9), 1e-4), 1.0))


@compiled
def _shrink(engine: Any, evidence: Singles, population: Floats, scratch: Singles) -> None:
    """Fill the estimated acceptance of every slot, as acceptance.shrink does."""
    _successes(evidence, scratch)
    _expectation(evidence, population, scratch)
    expected, spread, had, scale = scratch[EXPECTED], scratch[VARIANCE], scratch[HAD], scratch[SCALE]
    variance = np.float32(_level_variance(engine))
    for i in range(len(scale)):
        trust = variance * expected[i] / (variance * expected[i] * expected[i] + spread[i] + _TINY)
        scale[i] = _ONE + (had[i] - expected[i]) * trust
    for j in range(evidence.shape[1]):
        p = np.float32(population[MEAN, j])
        trials, successes, acceptance = evidence[TRIALS, j], evidence[SUCCESSES, j], evidence[ACCEPTANCE, j]
        for i in range(len(scale)):
            prior = min(max(scale[i] * p, _LOW), _HIGH)
            value = (successes[i] + _WEIGHT * prior) / (trials[i] + _WEIGHT)
            acceptance[i] = min(max(value, _LOW), _HIGH)


@compiled
def _show_requests(
    engine: Any, ints: Shorts, times: Floats, evidence: Singles, priority: Floats, shown: Singles
) -> None:
    now_s, positions, size = engine.clock_s, evidence.shape[1], ints.shape[1]
    live, share = shown[7 + POSITIONS], np.float32(positions)  # `live` becomes the survival below
    for i in range(size):
        live[i] = _ONE if ints[PHASE, i] == RUNNING else _ZERO
    for i in range(size):
        prefill = live[i] * np.float32(ints[IS_PREFILL, i])
        shown[0, i], shown[1, i] = live[i] - prefill, prefill
    for i in range(size):
        tokens, answer = live[i] * np.float32(ints[CONTEXT, i]), live[i] * np.float32(ints[EMITTED, i])
        shown[2, i] = tokens / (tokens + _CONTEXT)
        shown[3, i] = answer / (answer + _ANSWER)
    for i in range(size):
        age = live[i] * np.float32(max(now_s - times[ARRIVED, i], 0.0))
        shown[4, i] = age / (age + _AGE)
    for i in range(size):
        shown[5, i] = live[i] * min(max(np.float32(priority[ints[SERVICE, i]]) / _EIGHT, -_ONE), _ONE)
        is_idle = ints[IS_PREFILL, i] != 0 and ints[KEPT, i] == 0
        shown[6, i] = _ZERO if is_idle else live[i] * np.float32(ints[DRAFT_LIMIT, i]) / share
    for j in range(POSITIONS):
        acceptance, row = evidence[ACCEPTANCE, min(j, positions - 1)], shown[7 + j]
        for i in range(size):
            row[i] = acceptance[i] * live[i]
    trials, row = evidence[TRIALS, 0], shown[8 + POSITIONS]
    for i in range(size):
        row[i] = live[i] * trials[i] / (trials[i] + _FORTY)
    for j in range(positions):
        acceptance = evidence[ACCEPTANCE, j]
        for i in range(size):
            live[i] *= acceptance[i]


@compiled
def _show_engine(
    engine: Any, profile: Any, settings: Any, ints: Shorts, population: Floats, octaves: Floats, overall: Singles
) -> None:
    most, decoding = float(profile.most_requests), 0
    for i in range(ints.shape[1]):
        decoding += 1 if ints[PHASE, i] == RUNNING and ints[IS_PREFILL, i] == 0 else 0
    step_s = max(engine.mean_step_s, 1e-6)
    log_step = math.log(step_s)
    overall[0] = min(engine.running / most, 1.0)
    overall[1] = min(decoding / most, 1.0)
    overall[2] = engine.waiting / (engine.waiting + 16.0)
    overall[3] = 1.0 - engine.free_blocks / profile.kv_blocks
    overall[4] = engine.arrival_rate / (engine.arrival_rate + 10.0)
    overall[5] = engine.mean_prefill_rows / (engine.mean_prefill_rows + 256.0)
    overall[6] = engine.mean_prefill_share
    overall[7] = min(max((log_step - math.log(0.01)) / 5.0, -1.0), 1.0)
    overall[8] = min(math.log1p(engine.mean_tokens_per_s) / 12.0, 1.0)
    for j in range(POSITIONS):
        overall[9 + j] = population[MEAN, min(j, settings.positions - 1)]
    at = 9 + POSITIONS
    overall[at] = math.sqrt(_level_variance(engine))
    overall[at + 1] = min(engine.mean_draft_s / step_s, 1.0)
    overall[at + 2] = min(engine.mean_rounds / settings.positions, 1.0)
    at += 3
    for j in range(OCTAVES):
        visits = octaves[OCTAVE_VISITS, j]
        cost = min(max((octaves[OCTAVE_LOG, j] - log_step) / 4.0, -1.0), 1.0)
        overall[at + j] = cost if visits > 0.0 else 0.0
        overall[at + OCTAVES + j] = visits / (visits + 8.0)


@compiled
def _learn_population(population: Floats, counts: Floats) -> None:
    guess = FIRST_GUESS
    for j in range(population.shape[1]):
        tried, hit = counts[0, j], counts[1, j]
        keep = 1.0 if tried > 0.0 else 1.0 - 1.0 / UNTRIED_RECORDS
        keep = min(keep, MEMORY_TRIALS / (population[TRIED, j] + tried + 1.0))
        population[TRIED, j] = population[TRIED, j] * keep + tried
        population[HIT, j] = population[HIT, j] * keep + hit
        guess = (population[HIT, j] + GUESS_TRIALS * guess) / (population[TRIED, j] + GUESS_TRIALS)
        population[MEAN, j] = min(max(guess, 0.005), 0.995)


@compiled
def _learn_levels(engine: Any, ints: Shorts, evidence: Singles, population: Floats, scratch: Singles) -> None:
    _expectation(evidence, population, scratch)
    surplus = leverage = 0.0
    for i in range(ints.shape[1]):
        if ints[PHASE, i] != FREE:  # those that just ended are gone
            off = scratch[HAD, i] - scratch[EXPECTED, i]
            surplus += off * off - scratch[VARIANCE, i]
            leverage += scratch[EXPECTED, i] * scratch[EXPECTED, i]
    keep = 1.0 - 1.0 / LEVEL_MEMORY_RECORDS
    engine.excess = engine.excess * keep + surplus
    engine.leverage = engine.leverage * keep + leverage


@compiled
def _learn_octaves(engine: Any, octaves: Floats) -> None:
    rows = engine.prefill_tokens + engine.decode_tokens + engine.draft_tokens
    verify_s = engine.step_s - engine.draft_s + engine.overlap_s
    if not (MIN_STEP_S < verify_s < MAX_STEP_S and 0.0 <= engine.draft_s < MAX_STEP_S and rows > 0):
        return
    engine.mean_draft_s += (engine.draft_s - engine.mean_draft_s) / STEPS
    engine.mean_rounds += (engine.rounds - engine.mean_rounds) / STEPS
    if engine.prefill_tokens * 2 > rows:
        return
    octave = 0
    while octave < OCTAVES - 1 and rows >= 2 << octave:
        octave += 1
    visits = octaves[OCTAVE_VISITS, octave]
    gain = max(1.0 / (visits + 1.0), LEAST_GAIN)
    octaves[OCTAVE_LOG, octave] += gain * (math.log(verify_s) - octaves[OCTAVE_LOG, octave])
    octaves[OCTAVE_VISITS, octave] = visits + 1.0
