"""One step of many simulated engines; compiled. Called by env/simulator/simulator.py.

Order as in the real engine: arrivals, schedule, verify, emit, draft, clock, record. What a policy decides on this
step's record is in force when the next step drafts, or `staleness` steps later.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ...engine_adapter.arrays import Floats, Singles
from ...engine_adapter.compiled import kept
from ..imported_sources import digest_of
from ..layout.action_vector import OVERLAP, OVERLAPS, PING_PONG, SPLIT
from ..layout.reward import reward
from ..profile.step_basis import (
    DRAFT_BASIS,
    HOST_BASIS,
    VERIFY_BASIS,
    fill_cut_basis,
    fill_draft_basis,
    fill_host_basis,
    padded_rows,
)
from ..vectorised import apart, borrowed, hold, row
from .action import take_action
from .constants import World
from .copies import copy, hand_over_copies, show_copies
from .draft import AHEAD_TOKENS, BARS, DRAFT_ATTENDED, DRAFTING, DRAWN, FIRST_ROWS, KEPT_ROWS, ROUNDS, draft
from .observe import SCRATCH, observe
from .schedule import arrive, drawn, gaussian, move_in, next_admission, schedule, set_verified
from .state import (
    ARRIVED,
    BEGAN,
    BLOCKS,
    COMPUTED,
    CONTEXT,
    DRAFTS,
    EMITTED,
    FINISHED,
    FIRST,
    FREE,
    FRESH,
    HANDLE,
    KEPT,
    NOTES,
    OUTPUT,
    PHASE,
    PREEMPTED,
    RUNNING,
    SCHEDULED,
    SERVICE,
    TOKEN,
    Bytes,
    Column,
    Shorts,
    State,
)
from .verify import (
    ALL_FRESH,
    ALL_PRUNED,
    ATTENDED,
    ATTENDED_PROMPT,
    DECODE_ROWS,
    DRAFT_TOKENS,
    KV_TOKENS,
    PROMPT_TOKENS,
    PROMPTS,
    REQUESTS,
    SAMPLED,
    WASTED,
    WORK,
    verify,
)

_V, _D, _H = len(VERIFY_BASIS), len(DRAFT_BASIS), len(HOST_BASIS)


@apart
def _pause(engine: Any, profile: Any, settings: Any, coefficients: Floats, normal: Singles, basis: Floats) -> None:
    """Let the time between two steps pass."""
    fill_host_basis(basis, float(engine.running), float(engine.new_arrivals))
    host_s = 0.0
    for t in range(_H):
        host_s += basis[t] * coefficients[_V + _D + t]
    sigma = settings.noise * profile.noise_host
    if sigma > 0.0:
        host_s *= math.exp(sigma * gaussian(normal, drawn(engine)))
    engine.host_s = host_s
    engine.clock_s += host_s
    engine.in_system_s += (engine.running + engine.waiting) * host_s


@apart
def _hand_over(ints: Shorts) -> None:
    """Hand the drafts over to the next step."""
    _pass_on(ints[SCHEDULED], ints[COMPUTED], ints[KEPT], ints[CONTEXT], ints[DRAFTS])


@apart
def _pass_on(scheduled: Column, computed: Column, kept: Column, context: Column, drafts: Column) -> None:
    for i in range(len(kept)):
        length, before = kept[i], drafts[i]
        context[i], drafts[i] = computed[i], length if scheduled[i] > 0 else before


@apart
def _time(
    engine: Any, profile: Any, settings: Any, vector: Singles, coefficients: Floats, graphs: Floats, splits: Floats,
    normal: Singles, work: Floats, basis: Floats, scratch: Floats,
) -> None:  # fmt: skip
    """Fill in how long the step takes: its phases, and how much of them ran side by side.

    Beside every verification of drafts the drafter goes on for as long as drafting in turn takes; what nobody had to
    wait for is that of requests whose draft was there.
    """
    in_groups = int(vector[OVERLAP] * OVERLAPS) == PING_PONG
    split = splits[min(int(vector[SPLIT] * profile.splits), profile.splits - 1)]
    parts = 2.0 if in_groups and work[REQUESTS] > 1.0 else 1.0
    verify_s = parts * _verify_time(profile, coefficients, graphs, work, basis, scratch, 1.0 / parts) * split[0]
    draft_s = parts * _draft_time(coefficients, work, basis, 1.0 / parts) * split[1]
    sigma = settings.noise * profile.noise_verify
    if sigma > 0.0:
        verify_s *= math.exp(sigma * gaussian(normal, drawn(engine)))
    sigma = settings.noise * profile.noise_draft
    if sigma > 0.0:
        draft_s *= math.exp(sigma * gaussian(normal, drawn(engine)))
    engine.prune_s = profile.look_s + profile.look_token_s * engine.looked if engine.looked > 0 else 0.0
    verify_s += engine.prune_s
    overlap_s = 0.0
    if in_groups:
        overlap_s = split[2] * min(verify_s, draft_s)
    elif engine.frontier > 0 and work[DRAFT_TOKENS] > 0.0:
        verify_s *= profile.ahead_verify
        overlap_s = min(verify_s, draft_s)
        share = work[AHEAD_TOKENS] / work[DRAWN] if work[DRAWN] > 0.0 else 0.0
        draft_s += overlap_s - profile.ahead_hidden * min(verify_s, draft_s * share)
    engine.verify_s, engine.draft_s, engine.overlap_s = verify_s, draft_s, overlap_s
    engine.step_s = verify_s + draft_s - overlap_s


@apart
def _verify_time(
    profile: Any, coefficients: Floats, graphs: Floats, work: Floats, basis: Floats, scratch: Floats, share: float
) -> float:
    """Return seconds of everything but drafting and looking, for a share of the step's work."""
    decode_rows, prompt_tokens = work[DECODE_ROWS] * share, work[PROMPT_TOKENS] * share
    rows = decode_rows + prompt_tokens
    decode_rows += padded_rows(rows, graphs) - rows
    fill_cut_basis(
        basis, scratch, work[ALL_PRUNED] * share, profile.saved, work[REQUESTS] * share, decode_rows,
        work[DRAFT_TOKENS] * share, work[PROMPTS] * share, prompt_tokens, work[SAMPLED] * share,
        work[KV_TOKENS] * share, work[ATTENDED] * share, work[ATTENDED_PROMPT] * share,
    )  # fmt: skip
    total = 0.0
    for t in range(_V):
        total += basis[t] * coefficients[t]
    return total


@apart
def _draft_time(coefficients: Floats, work: Floats, basis: Floats, share: float) -> float:
    """Return seconds of drafting, for a share of the step's work."""
    fill_draft_basis(
        basis, work[DRAFTING] * share, work[ROUNDS], work[DRAWN] * share, work[FIRST_ROWS] * share,
        work[KEPT_ROWS] * share, work[DRAFT_ATTENDED] * share,
    )  # fmt: skip
    total = 0.0
    for t in range(_D):
        total += basis[t] * coefficients[_V + t]
    return total


@apart
def _account(engine: Any, ints: Shorts, times: Floats, objectives: Floats, results: Floats) -> int:
    """Note first tokens and ends at the clock; free what ended; return the tokens that were in time."""
    now_s = engine.clock_s
    good = running = preempted = 0
    for i in range(ints.shape[1]):
        if ints[PHASE, i] != RUNNING:
            preempted += 1 if ints[PHASE, i] == PREEMPTED else 0
            continue
        running += 1
        fresh, emitted = ints[FRESH, i], ints[EMITTED, i]
        if fresh == 0:
            continue
        arrival_s = times[ARRIVED, i]
        if ints[FIRST, i] != 0:
            times[BEGAN, i] = now_s
            engine.ttft_sum_s += now_s - arrival_s
            engine.ttft_count += 1
        first_s, service = times[BEGAN, i], ints[SERVICE, i]
        in_time = first_s - arrival_s <= objectives[service, 0]
        in_time = in_time and now_s - first_s <= objectives[service, 1] * (emitted - 1)
        good += fresh if in_time else 0
        if emitted < ints[OUTPUT, i]:
            continue
        running -= 1
        ints[PHASE, i], ints[FINISHED, i] = FREE, 1
        engine.free_blocks += ints[BLOCKS, i]
        ints[BLOCKS, i] = ints[DRAFTS, i] = 0
        engine.finished += 1
        engine.finished_good += 1 if in_time else 0
        engine.e2e_sum_s += now_s - arrival_s
        if emitted > 1:
            engine.tpot_sum_s += (now_s - first_s) / (emitted - 1)
            engine.tpot_count += 1
        number = ints[HANDLE, i] - 1
        if number < len(results):
            results[number, 0], results[number, 1] = arrival_s, first_s
            results[number, 2], results[number, 3] = now_s, emitted
    engine.running, engine.waiting = running, engine.queue_length + preempted
    return good


def _entry(sources: str) -> Any:
    """Return the compiled entry, which takes `tuple(state)` and `tuple(world)`.

    Numba's cache is keyed by `sources` too, so that a change in any part renews it.
    """

    def step_engines(
        first: int, last: int, count: int, until_s: float, raw: Singles, named: Bytes, rewards: Floats,
        state_arrays: tuple[Any, ...], world_arrays: tuple[Any, ...],
    ) -> None:  # fmt: skip
        if len(sources) == 0:
            return
        # Numba unpacks a plain tuple 2 us sooner than a NamedTuple, a third of a step of one engine.
        state, world = State(*state_arrays), World(*world_arrays)
        slots, positions, terms_most = state.ints.shape[2], state.rules.shape[2], max(_V, _D, _H)
        own = (
            np.zeros(WORK), np.zeros(terms_most), np.zeros(terms_most), np.zeros((NOTES, slots), np.int32),
            np.zeros((TOKEN, slots), np.float32), np.zeros((BARS, positions), np.float32),
            np.zeros((SCRATCH, slots), np.float32), np.zeros((2, positions)),
        )  # fmt: skip
        work, basis, scratch_basis, notes = borrowed(own[0]), borrowed(own[1]), borrowed(own[2]), borrowed(own[3])
        token, bars, scratch, counts = borrowed(own[4]), borrowed(own[5]), borrowed(own[6]), borrowed(own[7])
        settings = world.settings[0]
        sigmoid, normal, rows, priority = world.sigmoid, world.normal, world.rows, world.priority
        offsets, decisions, told = world.offsets, world.decisions, world.told
        for turn in range(count * (last - first)):  # all steps of one engine, then the next engine
            e = first + turn // count
            engine = state.engines[e]
            is_done = engine.exhausted != 0 and engine.running + engine.waiting + engine.queue_length == 0
            if engine.clock_s >= until_s or is_done:
                continue
            profile = world.profiles[engine.profile]
            ints, times, traits, keys = (
                row(state.ints, e),
                row(state.times, e),
                row(state.traits, e),
                row(state.keys, e),
            )
            evidence, population = row(state.evidence, e), row(state.population, e)
            lengths, vectors = row(state.lengths, e), row(state.vectors, e)
            queue_s, queue_row, coefficients = (
                row(state.queue_s, e),
                row(state.queue_row, e),
                row(state.coefficients, e),
            )
            rules, terms = row(state.rules, e), row(state.terms, e)
            place = take_action(
                engine, settings, ints, evidence, lengths, vectors, rules, row(raw, e), row(named, e), notes, token
            )
            vector = vectors[place]
            end_s, idle_s, served_s = engine.clock_s, engine.idle_s, engine.in_system_s
            in_system = engine.running + engine.waiting
            if in_system > 0:
                _pause(engine, profile, settings, coefficients, normal, basis)
            span = row(world.spans, engine.workload)
            arrive(engine, profile, settings, rows, span[0], span[1], queue_s, queue_row)
            engine.began_s = engine.clock_s
            phase = 2.0 * math.pi * (engine.clock_s / engine.swing_period_s + engine.swing_phase)
            engine.hardness_now = engine.hardness + engine.hardness_swing * math.sin(phase)
            did_preempt, running, total = schedule(engine, profile, ints, row(state.rests, e), notes)
            while not did_preempt:
                slot = next_admission(engine, profile, ints, rows, queue_row, running, total)
                if slot < 0:
                    break
                if ints[PHASE, slot] == FREE:
                    move_in(
                        engine, slot, ints, traits, keys, times, evidence, population, lengths, rows, queue_s,
                        queue_row, normal,
                    )  # fmt: skip
                ints[PHASE, slot] = RUNNING
                running += 1
                total += ints[SCHEDULED, slot]
            set_verified(ints)
            engine.was_ruled = engine.is_ruled
            verify(engine, profile, settings, ints, keys, offsets, decisions, work, notes)
            if profile.match_longest > 0:
                copy(
                    engine, profile, settings, ints, keys, evidence, population, vector, lengths[place],
                    row(state.copies, e), row(state.copy_cells, e), row(state.copy_rules, e),
                    row(state.copy_weights, e), row(world.match_tables, engine.profile),
                    row(world.match_lengths, engine.profile), sigmoid, normal,
                )  # fmt: skip
            draft(
                engine, profile, settings, ints, traits, keys, population, lengths[place], vector, rules,
                row(state.chances, e), row(state.cells, e), row(world.tables, engine.profile), sigmoid, normal, offsets,
                decisions, told, work, notes, token, bars,
            )  # fmt: skip
            if profile.match_longest > 0:
                hand_over_copies(engine, ints, lengths[place], row(state.copies, e))
            _hand_over(ints)
            _time(
                engine, profile, settings, vector, coefficients, row(world.graphs, engine.profile),
                row(world.splits, engine.profile), normal, work, basis, scratch_basis,
            )  # fmt: skip
            engine.clock_s += engine.step_s
            engine.in_system_s += (in_system + engine.new_arrivals) * engine.step_s
            good = _account(engine, ints, times, row(world.objectives, engine.profile), row(state.results, e))
            engine.elapsed_s = engine.clock_s - end_s
            engine.busy_s += engine.elapsed_s - (engine.idle_s - idle_s)
            engine.steps += 1
            observe(
                engine, profile, settings, ints, times, evidence, population, row(state.octaves, e), priority,
                row(world.objectives, engine.profile), row(state.shown, e), row(state.globals, e), scratch, counts,
                work[ALL_FRESH],
            )  # fmt: skip
            if profile.match_longest > 0:
                show_copies(ints, row(state.copies, e))
            terms[0], terms[1], terms[2], terms[3] = (
                good, work[ALL_FRESH], engine.in_system_s - served_s, work[WASTED],
            )  # fmt: skip
            rewards[e] = reward(
                terms[0], terms[1], terms[2], terms[3], engine.elapsed_s, settings.discount_per_s,
                settings.good_weight, settings.token_weight, settings.request_weight, settings.waste_weight,
            )  # fmt: skip
        hold(own)

    return kept(step_engines, nogil=True, error_model="numpy")


step_engines = _entry(digest_of(Path(__file__)))
