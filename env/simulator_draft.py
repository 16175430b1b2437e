"""Which lengths are in force, what the drafter proposes and what of it the target would accept; compiled.

Called by env/simulator_step.py. The acceptance model is env/acceptance_model.py's, read from tables: one score per
token, its rank is the drafter's confidence, and acceptance is a coin. A token's luck is keyed by request and place in
the answer, so that two policies meet the same tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .action_vector import AHEAD, DEPTH, GO_ON, KEEP, OVERLAP, PRUNE, RULED_FROM, THRESHOLD
from .simulator_schedule import GOLDEN, gaussian, mixed, uniform
from .simulator_state import (
    ACCEPTANCE,
    ACCEPTED,
    CHAIN,
    COMPUTED,
    CONTEXT,
    DRAFT_LIMIT,
    DRAFTER,
    EMITTED,
    FRESH,
    GO_ON_FROM,
    HANDLE,
    KEEP_FROM,
    KEPT,
    LEVEL,
    LIMIT,
    LUCKY,
    MEAN,
    PHASE,
    RESIDUAL,
    RUNNING,
    SCHEDULED,
    VERIFIED,
    Bytes,
    Cells,
    Floats,
    Shorts,
    Singles,
    Words,
)
from .world import CELLS, NAMED, RECORDED, SIGMOID_CELLS, VALUES, Ints, compiled

_S8, _LOW_24, _FIRST_TOKEN = np.uint64(8), np.uint64(0xFFFFFF), np.uint64(16)
_ZERO, _ONE, _HALF_RANGE = np.float32(0.0), np.float32(1.0), np.float32(12.0)
_PER_LOGIT, _PER_SIGMA, _UNIT = np.float32(SIGMOID_CELLS / 24.0), np.float32(CELLS / 8.0), np.float32(2.0**-24)
_AHEAD_KEY = np.uint64(0xD1342543DE82EF95)
# What drafting does, in `work`; see simulator_step. The last: tokens that were drafted while the target verified.
DRAFTING, ROUNDS, DRAWN, FIRST_ROWS, KEPT_ROWS, DRAFT_ATTENDED, AHEAD_TOKENS = range(7)


@compiled
def take_action(
    engine: Any, settings: Any, ints: Shorts, evidence: Singles, lengths: Bytes, vectors: Singles, rules: Singles,
    vector: Singles, named: Bytes,
) -> int:  # fmt: skip
    """Put this decision on its way; return the place of the one that is in force now.

    :param vector: (len(ACTION),) meanings, as from action_vector.meant
    :param named: (slots,) draft lengths, read in the mode NAMED; -1: not named
    """
    place = engine.steps % len(lengths)
    vectors[place] = vector
    if settings.mode == NAMED:
        for i in range(ints.shape[1]):
            lengths[place, i] = named[i] if ints[PHASE, i] == RUNNING else -1
    elif settings.mode != RECORDED:
        deepest = min(int(vector[DEPTH] * settings.positions + 0.5), settings.positions)
        bar = vector[THRESHOLD]
        for i in range(ints.shape[1]):
            survival, length = _ONE, 0
            for j in range(deepest):
                survival *= evidence[ACCEPTANCE, j, i]
                length += 1 if survival >= bar else 0
            lengths[place, i] = length if ints[PHASE, i] == RUNNING else -1
    place = (engine.steps + 1) % len(lengths)
    if settings.own_rules == 0:
        for j in range(settings.positions):
            rules[KEEP_FROM, j], rules[GO_ON_FROM, j] = vectors[place, KEEP], vectors[place, GO_ON]
    return int(place)


@compiled
def _stranger_length(settings: Any, population: Floats, vector: Singles) -> int:
    """Return the draft length of requests that an action set does not name."""
    deepest = min(int(vector[DEPTH] * settings.positions + 0.5), settings.positions)
    survival, length = _ONE, 0
    for j in range(deepest):
        survival *= np.float32(population[MEAN, j])
        length += 1 if survival >= vector[THRESHOLD] else 0
    return length


@compiled
def draft(
    engine: Any, profile: Any, settings: Any, ints: Shorts, traits: Singles, keys: Words, population: Floats,
    named: Bytes, vector: Singles, rules: Singles, chances: Singles, cells: Cells, values: Singles, sigmoid: Singles,
    normal: Singles, offsets: Ints, decisions: Bytes, work: Floats,
) -> None:  # fmt: skip
    """Draft for the next step: fill each slot's draft limit, kept and lucky tokens, and `work` (DRAFTING ...).

    The step's tokens are emitted already; the column CONTEXT still holds what was computed before the step.
    """
    default = _stranger_length(settings, population, vector)
    room = profile.catch_up
    skips = room > 0
    engine.is_ruled = 1 if vector[KEEP] >= np.float32(RULED_FROM) else 0
    is_ruled = engine.is_ruled != 0
    engine.prunes = 1 if vector[PRUNE] > 0.0 else 0
    goes_ahead = profile.ahead_verify > 0.0 and int(vector[OVERLAP] * 3.0) >= AHEAD
    engine.frontier = settings.positions if goes_ahead else 0
    hardness = np.float32(engine.hardness_now)
    drafting = rounds = tokens = first_rows = kept_rows = caught_up = hits = ahead_tokens = 0
    attended = 0.0
    for i in range(ints.shape[1]):
        ints[KEPT, i] = 0
        if ints[SCHEDULED, i] == 0:
            continue
        length = int(named[i]) if named[i] >= 0 else default
        if settings.mode == RECORDED:
            length = recorded(offsets, decisions, ints[HANDLE, i], ints[EMITTED, i])
            length = -length - 1 if length < 0 else length
        length = min(length, settings.positions)
        samples = ints[FRESH, i] > 0
        if samples:  # a longer draft than what then remains could never be emitted
            length = max(min(length, ints[LIMIT, i] - (ints[EMITTED, i] - ints[FRESH, i]) - 2), 0)
        ints[DRAFT_LIMIT, i] = length if samples else 0
        done = ints[COMPUTED, i] - ints[CONTEXT, i]
        can_draft = samples and length > 0
        if not skips:
            first_rows += done
        elif length > 0:
            lag = ints[CONTEXT, i] - ints[DRAFTER, i]
            if lag > room:  # it makes up for a part and cannot draft yet
                can_draft = False
                ints[DRAFTER, i] += room
                first_rows += room
                caught_up += room
                kept_rows += done
                room = 0
            else:
                ints[DRAFTER, i] = ints[COMPUTED, i]
                first_rows += lag + done
                caught_up += lag
                room -= lag
        else:
            kept_rows += done
        if not can_draft:
            continue
        base = profile.request_share * (traits[LEVEL, i] + hardness)
        residual = profile.hidden * traits[RESIDUAL, i]
        chain, key = traits[CHAIN, i], keys[i] + (np.uint64(ints[EMITTED, i]) + _FIRST_TOKEN) * GOLDEN
        is_ahead = goes_ahead and ints[VERIFIED, i] > 0 and ints[ACCEPTED, i] == ints[VERIFIED, i]
        is_ahead = is_ahead and uniform(mixed(key ^ _AHEAD_KEY)) < profile.ahead_ready
        factor = np.float32(profile.ahead_acceptance) if is_ahead else _ONE
        survival, lucky, alive, kept, drawn_tokens = _ONE, 0, 1, length, length
        for j in range(length):
            bits = mixed(key)
            key += GOLDEN
            chain = profile.carry * chain + profile.fresh * gaussian(normal, bits)
            cell = score_cell(base + profile.token_share * chain)
            cells[i, j] = cell
            at = int((values[VALUES, j, cell] + residual + _HALF_RANGE) * _PER_LOGIT)
            chance = sigmoid[min(max(at, 0), SIGMOID_CELLS - 1)] * factor
            luck = np.float32((bits >> _S8) & _LOW_24) * _UNIT  # bits that the quantile did not use
            alive = alive if luck < chance else 0
            lucky += alive
            if is_ruled:
                survival *= chances[j, cell]
                if survival < rules[KEEP_FROM, j]:
                    kept, drawn_tokens = j, j + 1
                    break
                if survival < rules[GO_ON_FROM, j]:
                    kept = drawn_tokens = j + 1
                    break
        traits[CHAIN, i] = chain
        ints[KEPT, i], ints[LUCKY, i] = kept, min(lucky, kept)
        drafting += 1
        tokens += drawn_tokens
        hits += 1 if is_ahead else 0
        ahead_tokens += drawn_tokens if is_ahead else 0
        rounds = max(rounds, drawn_tokens)
        attended += float(drawn_tokens) * ints[COMPUTED, i]
    engine.caught_up, engine.rounds, engine.drawn, engine.frontier_hits = caught_up, rounds, tokens, hits
    work[DRAFTING], work[ROUNDS], work[DRAWN], work[FIRST_ROWS] = drafting, rounds, tokens, first_rows
    work[KEPT_ROWS], work[DRAFT_ATTENDED], work[AHEAD_TOKENS] = kept_rows, attended, ahead_tokens


@compiled
def score_cell(score: np.float32) -> int:
    """Return the table's cell of a score."""
    return min(max(int((score + np.float32(4.0)) * _PER_SIGMA), 0), CELLS - 1)


@compiled
def recorded(offsets: Ints, decisions: Bytes, handle: int, emitted: int) -> int:
    """Return the recorded length of what is drafted at so many tokens, less than 0 where it is pruned: see World."""
    if handle >= len(offsets):
        return 0
    first, last = offsets[handle - 1], offsets[handle]
    return int(decisions[first + min(emitted, last - first - 1)]) if last > first else 0
