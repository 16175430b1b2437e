"""What env/estimate/engine_state.py and env/layout/observation.py would make of a step's record, computed in the
kernel; compiled.

Called at the end of every simulated step. The formulas are theirs (acceptance.shrink, Population, Load, StepOctaves);
tests/env/simulator/test_parity.py pushes the same steps through both and compares.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...engine_adapter.arrays import Floats, Singles
from ...engine_adapter.protocol import TPOT_MS
from ..cost.cost_curve import LEAST_GAIN, OCTAVES, STEPS
from ..cost.cost_table import MAX_STEP_S, MIN_STEP_S
from ..estimate.acceptance import (
    FIRST_GUESS,
    GUESS_TRIALS,
    LEVEL_MEMORY_RECORDS,
    MEMORY_TRIALS,
    POSITION_TRIALS,
    REQUEST_MEMORY_STEPS,
    UNTRIED_RECORDS,
)
from ..estimate.engine_state import ARRIVAL_WINDOW_S, LOAD_STEPS
from ..layout.observation import POSITIONS
from ..vectorised import apart
from .state import (
    ACCEPTANCE,
    ACCEPTED,
    ARRIVED,
    BEGAN,
    CONTEXT,
    DRAFT_LIMIT,
    EMITTED,
    FREE,
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
    Column,
    Shorts,
)

_KEEP = np.float32(1.0 - 1.0 / REQUEST_MEMORY_STEPS)
_FADE = np.float32(1.0 - 1.0 / UNTRIED_RECORDS)
_ZERO, _ONE, _LOW, _HIGH = np.float32(0.0), np.float32(1.0), np.float32(0.005), np.float32(0.995)
_TINY, _WEIGHT, _FORTY = np.float32(1e-9), np.float32(POSITION_TRIALS), np.float32(40.0)
# Rows of the scratch that only this file uses, (SCRATCH, slots).
EXPECTED, VARIANCE, HAD, SCALE, TRIES, HITS, KEEPS, LIVE, SCRATCH = range(9)
_SHORTEST_S, _LONGEST_MS = TPOT_MS[0] * 1e-3, TPOT_MS[1]  # what a client may ask for
_CONTEXT, _ANSWER, _AGE, _EIGHT = np.float32(1024.0), np.float32(128.0), np.float32(10.0), np.float32(8.0)


@apart
def observe(
    engine: Any, profile: Any, settings: Any, ints: Shorts, times: Floats, evidence: Singles, population: Floats,
    octaves: Floats, priority: Floats, objectives: Floats, shown: Singles, overall: Singles, scratch: Singles,
    counts: Floats, emitted: float,
) -> None:  # fmt: skip
    """See, show, learn: the order in which the decision core does it."""
    is_fair = engine.was_ruled == 0
    _count_trials(ints, evidence, population, scratch, counts, is_fair)
    _see_load(engine, emitted)
    _shrink(engine, evidence, population, scratch)
    _show_requests(engine, ints, times, evidence, priority, shown, scratch[LIVE])
    if settings.tells_objectives != 0:
        _show_objectives(engine, ints, times, objectives, shown[9 + POSITIONS], shown[10 + POSITIONS], scratch[LIVE])
    _show_engine(engine, profile, settings, ints, population, octaves, overall)
    if is_fair:
        _learn_population(population, counts)
        _learn_levels(engine, ints, evidence, population, scratch)
    _learn_octaves(engine, octaves)


@apart
def _count_trials(
    ints: Shorts, evidence: Singles, population: Floats, scratch: Singles, counts: Floats, is_fair: bool
) -> None:
    """Add this step's trials to each request's evidence, with forgetting, and to the sums; see what is expected."""
    tries, hits, keeps = scratch[TRIES], scratch[HITS], scratch[KEEPS]
    expected, variance, had = scratch[EXPECTED], scratch[VARIANCE], scratch[HAD]
    deepest = _try(ints[SCHEDULED], ints[VERIFIED], ints[PRUNED], ints[ACCEPTED], is_fair, tries, hits, keeps)
    weight = _ONE if is_fair else _ZERO
    expected[:], variance[:], had[:] = _ZERO, _ZERO, _ZERO
    for j in range(evidence.shape[1]):
        mean = np.float32(population[MEAN, j])
        _add(
            np.float32(j), weight, mean, tries, hits, keeps, evidence[TRIALS, j], evidence[SUCCESSES, j], expected,
            variance, had,
        )  # fmt: skip
        counts[0, j] = _deeper(j, tries) if j < deepest else 0.0
        counts[1, j] = _deeper(j, hits) if j < deepest else 0.0


@apart
def _try(
    scheduled: Column, verified: Column, pruned: Column, accepted: Column, is_fair: bool, tries: Singles,
    hits: Singles, keeps: Singles,
) -> int:  # fmt: skip
    """Fill in how deep drafts were tested and accepted and what each request keeps of its evidence; the deepest."""
    remembers, deepest = _KEEP if is_fair else _FADE, 0
    for i in range(len(tries)):
        tested, hit, rows = verified[i] - max(pruned[i] - 1, 0), accepted[i], scheduled[i]
        hits[i], tries[i] = min(hit, tested), min(hit + 1, tested)
        keep = remembers if tested > 0 else _FADE
        keeps[i] = keep if rows > 0 else _ONE
        deepest = max(deepest, tested)
    return deepest


@apart
def _add(
    place: np.float32, weight: np.float32, mean: np.float32, tries: Singles, hits: Singles, keeps: Singles,
    trials: Singles, successes: Singles, expected: Singles, variance: Singles, had: Singles,
) -> None:  # fmt: skip
    """Add one position's trials, and what the population would have had of all so far."""
    spread = mean * (_ONE - mean)
    for i in range(len(had)):
        keep = keeps[i]
        tried = trials[i] * keep + (weight if place < tries[i] else _ZERO)
        hit = successes[i] * keep + (weight if place < hits[i] else _ZERO)
        trials[i], successes[i] = tried, hit
        expected[i] += tried * mean
        variance[i] += tried * spread
        had[i] += hit


@apart
def _deeper(j: int, depth: Singles) -> int:
    count = 0
    for i in range(len(depth)):
        count += 1 if depth[i] > j else 0
    return count


@apart
def _see_load(engine: Any, emitted: float) -> None:
    total = engine.prefill_tokens + engine.decode_tokens + engine.draft_tokens
    share = 1.0 / LOAD_STEPS
    engine.mean_prefill_rows += share * (engine.prefill_tokens - engine.mean_prefill_rows)
    engine.mean_prefill_share += share * (engine.prefill_tokens / max(total, 1) - engine.mean_prefill_share)
    engine.mean_step_s += share * (engine.step_s - engine.mean_step_s)
    if engine.step_s > 0.0:
        engine.mean_tokens_per_s += share * (emitted / engine.step_s - engine.mean_tokens_per_s)
    passed_s = max(engine.clock_s - engine.observed_s, 0.0) if engine.steps > 1 else 0.0
    fade = math.exp(-min(passed_s / ARRIVAL_WINDOW_S, 50.0))
    engine.arrival_rate = engine.arrival_rate * fade + engine.new_arrivals / ARRIVAL_WINDOW_S
    engine.observed_s = engine.clock_s


@apart
def _expect(mean: np.float32, trials: Singles, expected: Singles, variance: Singles) -> None:
    spread = mean * (_ONE - mean)
    for i in range(len(trials)):
        expected[i] += trials[i] * mean
        variance[i] += trials[i] * spread


@apart
def _level_variance(engine: Any) -> float:
    return float(min(max(engine.excess / max(engine.leverage, 1e-9), 1e-4), 1.0))


@apart
def _shrink(engine: Any, evidence: Singles, population: Floats, scratch: Singles) -> None:
    """Fill the estimated acceptance of every slot, as acceptance.shrink does."""
    scale = scratch[SCALE]
    _scale(np.float32(_level_variance(engine)), scratch[EXPECTED], scratch[VARIANCE], scratch[HAD], scale)
    for j in range(evidence.shape[1]):
        mean = np.float32(population[MEAN, j])
        _accepts(mean, scale, evidence[TRIALS, j], evidence[SUCCESSES, j], evidence[ACCEPTANCE, j])


@apart
def _scale(variance: np.float32, expected: Singles, spread: Singles, had: Singles, scale: Singles) -> None:
    for i in range(len(scale)):
        trust = variance * expected[i] / (variance * expected[i] * expected[i] + spread[i] + _TINY)
        scale[i] = _ONE + (had[i] - expected[i]) * trust


@apart
def _accepts(mean: np.float32, scale: Singles, trials: Singles, successes: Singles, acceptance: Singles) -> None:
    for i in range(len(scale)):
        prior = min(max(scale[i] * mean, _LOW), _HIGH)
        value = (successes[i] + _WEIGHT * prior) / (trials[i] + _WEIGHT)
        acceptance[i] = min(max(value, _LOW), _HIGH)


@apart
def _show_requests(
    engine: Any, ints: Shorts, times: Floats, evidence: Singles, priority: Floats, shown: Singles, live: Singles
) -> None:
    positions, survival = evidence.shape[1], shown[7 + POSITIONS]
    _show_phases(ints[PHASE], ints[IS_PREFILL], live, shown[0], shown[1], survival)
    _show_sizes(engine.clock_s, live, ints[CONTEXT], ints[EMITTED], times[ARRIVED], shown[2], shown[3], shown[4])
    _show_drafts(
        np.float32(positions), live, ints[IS_PREFILL], ints[KEPT], ints[DRAFT_LIMIT], evidence[TRIALS, 0], shown[6],
        shown[8 + POSITIONS],
    )  # fmt: skip
    for i in range(len(live)):
        urgency = np.float32(priority[np.uint64(ints[SERVICE, i])])
        shown[5, i] = live[i] * min(max(urgency / _EIGHT, -_ONE), _ONE)
    for j in range(POSITIONS):
        _show_acceptance(j < positions, live, evidence[ACCEPTANCE, min(j, positions - 1)], shown[7 + j], survival)
    for j in range(POSITIONS, positions):
        survival *= evidence[ACCEPTANCE, j]


@apart
def _show_objectives(
    engine: Any, ints: Shorts, times: Floats, objectives: Floats, slack: Singles, pace: Singles, live: Singles
) -> None:
    """Fill in how far ahead of its schedule each request is, and how fast that goes; 0 where nobody told."""
    now_s, step_s = engine.clock_s, max(engine.mean_step_s, 1e-6)
    for i in range(len(live)):
        slack[i], pace[i] = _ZERO, _ZERO
        tpot_s = objectives[np.uint64(ints[SERVICE, i]), 1]
        if live[i] == _ZERO or tpot_s * 1e3 > _LONGEST_MS:
            continue
        wanted_s = max(tpot_s, _SHORTEST_S)
        pace[i] = step_s / (step_s + wanted_s)
        if ints[EMITTED, i] > 0:
            ahead = ints[EMITTED, i] - 1 - (now_s - times[BEGAN, i]) / wanted_s
            slack[i] = ahead / (abs(ahead) + 8.0)


@apart
def _show_phases(
    phase: Column, is_prefill: Column, live: Singles, decoding: Singles, prompting: Singles, survival: Singles
) -> None:
    for i in range(len(live)):
        is_live = _ONE if phase[i] == RUNNING else _ZERO
        prefill = is_live * np.float32(is_prefill[i])
        live[i], survival[i], decoding[i], prompting[i] = is_live, is_live, is_live - prefill, prefill


@apart
def _show_sizes(
    now_s: float, live: Singles, context: Column, emitted: Column, arrived_s: Floats, tokens: Singles,
    answers: Singles, ages: Singles,
) -> None:  # fmt: skip
    for i in range(len(live)):
        token, answer = live[i] * np.float32(context[i]), live[i] * np.float32(emitted[i])
        age = live[i] * np.float32(max(now_s - arrived_s[i], 0.0))
        tokens[i] = token / (token + _CONTEXT)
        answers[i] = answer / (answer + _ANSWER)
        ages[i] = age / (age + _AGE)


@apart
def _show_drafts(
    share: np.float32, live: Singles, is_prefill: Column, kept: Column, limit: Column, trials: Singles,
    limits: Singles, trust: Singles,
) -> None:  # fmt: skip
    for i in range(len(live)):
        is_idle = (is_prefill[i] != 0) & (kept[i] == 0)
        length = live[i] * np.float32(limit[i]) / share
        limits[i] = _ZERO if is_idle else length
        trust[i] = live[i] * trials[i] / (trials[i] + _FORTY)


@apart
def _show_acceptance(is_drafted: bool, live: Singles, acceptance: Singles, row: Singles, survival: Singles) -> None:
    for i in range(len(live)):
        row[i] = acceptance[i] * live[i]
        survival[i] *= acceptance[i] if is_drafted else _ONE


@apart
def _show_engine(
    engine: Any, profile: Any, settings: Any, ints: Shorts, population: Floats, octaves: Floats, overall: Singles
) -> None:
    decoding = 0
    for i in range(ints.shape[1]):
        decoding += 1 if ints[PHASE, i] == RUNNING and ints[IS_PREFILL, i] == 0 else 0
    step_s = max(engine.mean_step_s, 1e-6)
    log_step = math.log(step_s)
    overall[0] = min(math.log2(1.0 + engine.running) / 10.0, 1.0)
    overall[1] = min(math.log2(1.0 + decoding) / 10.0, 1.0)
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


@apart
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


@apart
def _learn_levels(engine: Any, ints: Shorts, evidence: Singles, population: Floats, scratch: Singles) -> None:
    scratch[EXPECTED] = scratch[VARIANCE] = _ZERO
    for j in range(evidence.shape[1]):
        _expect(np.float32(population[MEAN, j]), evidence[TRIALS, j], scratch[EXPECTED], scratch[VARIANCE])
    surplus = leverage = 0.0
    for i in range(ints.shape[1]):
        if ints[PHASE, i] != FREE:  # those that just ended are gone
            off = scratch[HAD, i] - scratch[EXPECTED, i]
            surplus += off * off - scratch[VARIANCE, i]
            leverage += scratch[EXPECTED, i] * scratch[EXPECTED, i]
    keep = 1.0 - 1.0 / LEVEL_MEMORY_RECORDS
    engine.excess = engine.excess * keep + surplus
    engine.leverage = engine.leverage * keep + leverage


@apart
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
