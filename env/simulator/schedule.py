"""Arrivals, the batch and its KV blocks, as vLLM's V1 scheduler has them; compiled. Called by env/simulator/step.py.

Source: vllm/v1/core/sched/scheduler.py of vLLM 0.32: running requests first, in order of admission; where blocks are
missing the newest one is preempted and computed again later; the queue is served in order, prompts in chunks of what
the token budget leaves, and only if the whole prompt fits. Arrays are one engine's part of the State in
env/simulator/state.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...engine_adapter.arrays import Floats, Ints, Singles
from ..vectorised import apart
from .constants import NORMAL_CELLS
from .state import (
    ACCEPTANCE,
    ARRIVED,
    BEGAN,
    BLOCKS,
    COMPUTED,
    DRAFT_LIMIT,
    DRAFTER,
    DRAFTS,
    EMITTED,
    FREE,
    HANDLE,
    IS_PREFILL,
    LEVEL,
    LIMIT,
    LUCKY,
    MEAN,
    NEEDED,
    ORDER,
    OUTPUT,
    PHASE,
    PREEMPTED,
    PREEMPTED_NOW,
    PROMPT,
    QUEUE,
    RESIDUAL,
    ROW,
    RUNNING,
    SCHEDULED,
    SERVICE,
    SUCCESSES,
    TRIALS,
    VERIFIED,
    Bytes,
    Column,
    Records,
    Shorts,
    Words,
)

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S11, _S27, _S30, _S31 = (np.uint64(bits) for bits in (11, 27, 30, 31))
NORMAL_SHIFT = np.uint64(65 - NORMAL_CELLS.bit_length())  # what is left says where in such a table
FAR_S = 1e300  # no arrival any more


@apart
def mixed(key: np.uint64) -> np.uint64:
    """Return 64 well-mixed bits (the finaliser of splitmix64)."""
    key = (key ^ (key >> _S30)) * _MIX_1
    key = (key ^ (key >> _S27)) * _MIX_2
    return key ^ (key >> _S31)


@apart
def drawn(engine: Any) -> np.uint64:
    """Return the next 64 bits of the engine's own stream."""
    engine.draws = engine.draws + GOLDEN
    return mixed(engine.draws)


@apart
def uniform(bits: np.uint64) -> float:
    """Return a number in [0, 1)."""
    return float(bits >> _S11) * (1.0 / 9007199254740992.0)


@apart
def gaussian(normal: Singles, bits: np.uint64) -> np.float32:
    """Return a standard normal number from the table of quantiles; takes the highest bits."""
    number: np.float32 = normal[bits >> NORMAL_SHIFT]
    return number


@apart
def arrive(
    engine: Any, profile: Any, settings: Any, rows: Records, first: int, last: int, queue_s: Floats, queue_row: Ints
) -> None:
    """Take in what has arrived by now; with nothing to do, wait for the next arrival."""
    before = engine.arrived
    _await_arrival(engine)
    while engine.next_arrival_s <= engine.clock_s:
        row = rows[engine.cursor]
        blocks = (row.prompt + row.output + profile.lookahead) // profile.block_size + 2
        fits = blocks <= profile.kv_blocks and row.prompt + row.output <= profile.most_context
        if engine.queue_length < QUEUE and fits:
            tail = (engine.queue_head + engine.queue_length) % QUEUE
            queue_s[tail] = engine.next_arrival_s
            queue_row[tail] = engine.cursor
            engine.queue_length += 1
            engine.arrived += 1
            engine.in_system_s += engine.clock_s - engine.next_arrival_s
        else:
            engine.turned_away += 1
        _next_arrival(engine, settings, rows, first, last)
        _await_arrival(engine)
    engine.new_arrivals = engine.arrived - before


@apart
def _await_arrival(engine: Any) -> None:
    """With nothing to do, let the time pass until the next arrival."""
    is_empty = engine.running + engine.waiting + engine.queue_length == 0
    if is_empty and FAR_S > engine.next_arrival_s > engine.clock_s:
        engine.idle_s += engine.next_arrival_s - engine.clock_s
        engine.clock_s = engine.next_arrival_s


@apart
def _next_arrival(engine: Any, settings: Any, rows: Records, first: int, last: int) -> None:
    """Move on to the next row of the workload."""
    if engine.cursor + 1 < last:
        engine.cursor += 1
    elif settings.repeats != 0:
        engine.cursor = first
    else:
        engine.exhausted = 1
        engine.next_arrival_s = FAR_S
        return
    rate = engine.rate
    if engine.swing > 0.0:
        phase = engine.next_arrival_s / engine.swing_period_s + engine.swing_phase
        rate *= 1.0 + engine.swing * math.sin(2.0 * math.pi * phase)
    engine.next_arrival_s += rows[engine.cursor].gap_s / max(rate, 1e-9)


@apart
def schedule(engine: Any, profile: Any, ints: Shorts, rests: Bytes, notes: Shorts) -> tuple[bool, int, int]:
    """Choose what the running requests compute in this step and preempt where blocks are missing.

    Return whether one was preempted, how many run, and the rows they take; `next_admission` comes next.
    """
    blocks = notes[NEEDED]
    running, total = _want(
        ints[PHASE], ints[PROMPT], ints[EMITTED], ints[COMPUTED], ints[DRAFTS], ints[SCHEDULED], ints[PREEMPTED_NOW]
    )
    engine.rested = 0
    if engine.rested_steps < engine.rest_steps:
        engine.rested, rows = _leave_out(
            ints[PHASE], ints[PROMPT], ints[EMITTED], ints[COMPUTED], rests, ints[SCHEDULED]
        )
        total -= rows
    engine.rested_steps = engine.rested_steps + 1 if engine.rested > 0 else 0
    block, lookahead = float(profile.block_size), profile.lookahead
    missing = _need(block, lookahead, ints[COMPUTED], ints[SCHEDULED], ints[BLOCKS], blocks)
    if total > profile.token_budget or missing > engine.free_blocks:
        return _schedule_in_order(engine, profile, ints, notes[ORDER])
    ints[BLOCKS] = blocks
    engine.free_blocks -= missing
    return False, running, total


@apart
def _want(
    phase: Column, prompt: Column, emitted: Column, computed: Column, drafts: Column, scheduled: Column,
    preempted: Column,
) -> tuple[int, int]:  # fmt: skip
    """Fill in the rows that each running request has ready; return how many run, and their rows."""
    running = total = 0
    for i in range(len(phase)):
        left, is_running = prompt[i] + emitted[i] - computed[i] + drafts[i], phase[i] == RUNNING
        want = left if is_running else 0
        scheduled[i], preempted[i] = want, 0
        total += want
        running += is_running
    return running, total


@apart
def _leave_out(
    phase: Column, prompt: Column, emitted: Column, computed: Column, rests: Bytes, scheduled: Column
) -> tuple[int, int]:
    """Leave those who rest out of the step, unless nobody else would be in it; return how many, and their rows."""
    running = rested = rows = 0
    for i in range(len(phase)):
        running += phase[i] == RUNNING
        rested += _can_rest(phase[i], prompt[i], emitted[i], computed[i], rests[i])
    if rested == running:
        return 0, 0
    for i in range(len(phase)):
        if _can_rest(phase[i], prompt[i], emitted[i], computed[i], rests[i]):
            rows += scheduled[i]
            scheduled[i] = 0
    return rested, rows


@apart
def _can_rest(phase: int, prompt: int, emitted: int, computed: int, is_named: int) -> bool:
    """Tell whether a request is to rest and decodes."""
    return phase == RUNNING and is_named != 0 and emitted > 0 and prompt + emitted - computed == 1


@apart
def _need(block: float, lookahead: int, computed: Column, scheduled: Column, blocks: Column, needed: Column) -> int:
    """Fill in the blocks that each request needs; return how many are missing."""
    missing = 0
    for i in range(len(blocks)):  # quotients of such small whole numbers are exact enough to be cut off
        rows, held = scheduled[i], blocks[i]
        most = max(np.int32((computed[i] + rows + lookahead + block - 1.0) / block), held)
        needed[i] = most if rows > 0 else held
        missing += needed[i] - held
    return missing


@apart
def _schedule_in_order(engine: Any, profile: Any, ints: Shorts, order: Column) -> tuple[bool, int, int]:
    """Schedule the running requests one by one; return as `schedule` does."""
    count = 0
    for i in range(ints.shape[1]):  # insertion sort by handle: requests are admitted in order of arrival
        if ints[PHASE, i] == RUNNING:
            at = count
            while at > 0 and ints[HANDLE, order[at - 1]] > ints[HANDLE, i]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = i
            count += 1
    budget, block = profile.token_budget, profile.block_size
    last, at = count, 0
    while at < last:
        i = order[at]
        new = min(ints[SCHEDULED, i], budget)
        ints[SCHEDULED, i] = new
        needed = 0
        if new > 0:
            needed = (ints[COMPUTED, i] + new + profile.lookahead + block - 1) // block - ints[BLOCKS, i]
            needed = max(needed, 0)
        while needed > engine.free_blocks and last > at:
            last -= 1
            victim = order[last]
            engine.free_blocks += ints[BLOCKS, victim]
            engine.preemptions += 1
            ints[PHASE, victim], ints[PREEMPTED_NOW, victim] = PREEMPTED, 1
            ints[BLOCKS, victim] = ints[COMPUTED, victim] = ints[DRAFTER, victim] = 0
            ints[DRAFTS, victim] = ints[SCHEDULED, victim] = 0
        if last <= at:
            break  # it preempted itself
        ints[BLOCKS, i] += needed
        engine.free_blocks -= needed
        budget -= new
        at += 1
    return last < count, last, profile.token_budget - budget


@apart
def next_admission(
    engine: Any, profile: Any, ints: Shorts, rows: Records, queue_row: Ints, running: int, total: int
) -> int:
    """Admit the oldest preempted request, or the head of the queue, if slots, tokens and blocks suffice.

    Return its slot, or -1; a request from the queue is still to be moved in (`move_in`).
    """
    size, block = ints.shape[1], profile.block_size
    if running >= min(profile.most_requests, size) or total >= profile.token_budget:
        return -1
    chosen = free = -1
    if engine.waiting > engine.queue_length - engine.new_arrivals or engine.preemptions > 0:
        for i in range(size):
            if ints[PHASE, i] == PREEMPTED and (chosen < 0 or ints[HANDLE, i] < ints[HANDLE, chosen]):
                chosen = i
    if chosen >= 0:
        needed = ints[PROMPT, chosen] + ints[EMITTED, chosen]
    else:
        if engine.queue_length == 0:
            return -1
        needed = rows[queue_row[engine.queue_head]].prompt
        for i in range(size):
            if ints[PHASE, i] == FREE:
                free = i
                break
        if free < 0:
            return -1
    new = min(needed, profile.token_budget - total)
    blocks = (new + profile.lookahead + block - 1) // block
    if max((needed + block - 1) // block, blocks) > engine.free_blocks:
        return -1
    slot = chosen if chosen >= 0 else free
    ints[SCHEDULED, slot] = new
    ints[BLOCKS, slot] = blocks
    engine.free_blocks -= blocks
    return slot


@apart
def move_in(
    engine: Any, i: int, ints: Shorts, traits: Singles, keys: Words, times: Floats, evidence: Singles,
    population: Floats, lengths: Bytes, rows: Records, queue_s: Floats, queue_row: Ints, normal: Singles,
) -> None:  # fmt: skip
    """Take the head of the queue into slot `i`."""
    number = queue_row[engine.queue_head]
    row = rows[number]
    handle = engine.arrived - engine.queue_length + 1
    times[ARRIVED, i], times[BEGAN, i] = queue_s[engine.queue_head], 0.0
    engine.queue_head = (engine.queue_head + 1) % QUEUE
    engine.queue_length -= 1
    ints[HANDLE, i], ints[ROW, i] = handle, number
    ints[PROMPT, i], ints[OUTPUT, i], ints[LIMIT, i] = row.prompt, row.output, row.limit
    ints[SERVICE, i] = row.service
    ints[EMITTED, i] = ints[COMPUTED, i] = ints[DRAFTER, i] = ints[DRAFTS, i] = ints[LUCKY, i] = 0
    ints[DRAFT_LIMIT, i], ints[IS_PREFILL, i] = 0, 1
    # Keyed by the request, not by the order of draws: the same requests are as lucky under any policy.
    key = mixed(engine.seed ^ (np.uint64(handle) * GOLDEN))
    keys[i] = key
    traits[LEVEL, i] = gaussian(normal, mixed(key + np.uint64(1))) + row.ease
    traits[RESIDUAL, i] = gaussian(normal, mixed(key + np.uint64(2)))
    for j in range(evidence.shape[1]):
        evidence[TRIALS, j, i] = evidence[SUCCESSES, j, i] = np.float32(0.0)
        evidence[ACCEPTANCE, j, i] = np.float32(population[MEAN, j])
    for d in range(lengths.shape[0]):
        lengths[d, i] = -1  # action sets on their way do not name it


@apart
def set_verified(ints: Shorts) -> None:
    """Fill in how many drafts the scheduled rows verify."""
    _split_off(ints[PROMPT], ints[EMITTED], ints[COMPUTED], ints[SCHEDULED], ints[DRAFTS], ints[VERIFIED])


@apart
def _split_off(
    prompt: Column, emitted: Column, computed: Column, scheduled: Column, drafts: Column, verified: Column
) -> None:
    for i in range(len(verified)):
        answer, rows, length = emitted[i], scheduled[i], drafts[i]
        need, most = prompt[i] + answer - computed[i], min(length, rows - 1)
        verified[i] = most if (need == 1) & (answer > 0) & (most > 0) else 0
