"""What the drafter proposes and what of it the target would accept; compiled.

Called by env/simulator/step.py. The acceptance model is env/profile/acceptance_model.py's, read from tables: one
score per token, its rank is the drafter's confidence, and acceptance is a coin. A token's luck is keyed by request
and place in the answer, so that two policies meet the same luck, and how one's draft ended does not follow it into
the next.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...engine_adapter.arrays import Floats, Ints, Singles
from ..layout.action_vector import AHEAD, KEEP, OVERLAP, OVERLAPS, PRUNE, RULED_FROM
from ..vectorised import apart
from .action import stranger_length
from .constants import CELLS, RECORDED, SIGMOID_CELLS, VALUES
from .schedule import GOLDEN, NORMAL_SHIFT, gaussian, mixed, uniform
from .state import (
    ACCEPTED,
    ALIVE,
    CELL,
    COMPUTED,
    CONTEXT,
    DRAFT_LIMIT,
    DRAFTER,
    DRAWN_TOKENS,
    EMITTED,
    FRESH,
    GO_ON_FROM,
    GOES_ON,
    HANDLE,
    IS_AHEAD,
    KEEP_FROM,
    KEPT,
    LENGTH,
    LEVEL,
    LIMIT,
    LUCK,
    LUCKY,
    NUMBER,
    PLACE,
    RESIDUAL,
    SCHEDULED,
    SCORE,
    SURVIVAL,
    VERIFIED,
    WANT,
    Bytes,
    Cells,
    Column,
    Shorts,
    Words,
)

_S8, _LOW_24, FIRST_TOKEN = np.uint64(8), np.uint64(0xFFFFFF), np.uint64(16)
_ONE, _HALF_RANGE = np.float32(1.0), np.float32(12.0)
_PER_LOGIT, _PER_SIGMA, _UNIT = np.float32(SIGMOID_CELLS / 24.0), np.float32(CELLS / 8.0), np.float32(2.0**-24)
_AHEAD_KEY = np.uint64(0xD1342543DE82EF95)
# What drafting does, in `work`; see verify.py. The last: tokens that were drafted while the target verified.
DRAFTING, ROUNDS, DRAWN, FIRST_ROWS, KEPT_ROWS, DRAFT_ATTENDED, AHEAD_TOKENS = range(7)
KEEP_BAR, GO_ON_BAR, BARS = range(3)  # by position: survivals below which a draft ends before, or behind, a token


@apart
def draft(
    engine: Any, profile: Any, settings: Any, ints: Shorts, traits: Singles, keys: Words, population: Floats,
    named: Bytes, vector: Singles, rules: Singles, chances: Singles, cells: Cells, values: Singles, sigmoid: Singles,
    normal: Singles, offsets: Ints, decisions: Bytes, told: Singles, work: Floats, notes: Shorts, token: Singles,
    bars: Singles,
) -> None:  # fmt: skip
    """Draft for the next step: fill each slot's draft limit, kept and lucky tokens, and `work` (DRAFTING ...).

    The step's tokens are emitted already; the column CONTEXT still holds what was computed before the step.
    :param notes: (NOTES, slots) scratch
    :param token: (TOKEN, slots) scratch
    :param bars: (BARS, positions) scratch
    """
    engine.is_ruled = 1 if vector[KEEP] >= np.float32(RULED_FROM) else 0
    engine.prunes = 1 if vector[PRUNE] > 0.0 else 0
    goes_ahead = profile.ahead_verify > 0.0 and int(vector[OVERLAP] * OVERLAPS) >= AHEAD
    engine.frontier = settings.positions if goes_ahead else 0
    _want(settings, ints, named, stranger_length(settings, population, vector), offsets, decisions, notes)
    _catch_up(engine, profile, ints, notes, work)
    _go_ahead(profile, ints, keys, goes_ahead, notes)
    _first_token(engine, profile, ints, traits, keys, chances, values, sigmoid, normal, notes, token)
    _further_tokens(
        engine, profile, traits, keys, ints, rules, chances, cells, values, sigmoid, normal, notes, token, bars
    )
    if len(told) > 0:
        _toss_as_told(profile, ints, traits, keys, sigmoid, offsets, told, notes)
    _count_drafts(engine, profile, ints, notes, work)


@apart
def _want(
    settings: Any, ints: Shorts, named: Bytes, default: int, offsets: Ints, decisions: Bytes, notes: Shorts
) -> None:
    """Note how long each draft may be: the draft length in force, less what could never be emitted."""
    length, want, size = notes[LENGTH], notes[WANT], ints.shape[1]
    if settings.mode == RECORDED:
        for i in range(size):
            chosen = recorded(offsets, decisions, ints[HANDLE, i], ints[EMITTED, i]) if ints[SCHEDULED, i] > 0 else 0
            length[i] = -chosen - 1 if chosen < 0 else chosen
    else:
        for i in range(size):
            chosen = named[i]
            length[i] = chosen if chosen >= 0 else default
    _limit(
        settings.positions, ints[LIMIT], ints[EMITTED], ints[FRESH], ints[SCHEDULED], ints[DRAFT_LIMIT], length, want
    )


@apart
def _limit(
    positions: int, limit: Column, emitted: Column, fresh: Column, scheduled: Column, draft_limit: Column,
    length: Column, want: Column,
) -> None:  # fmt: skip
    for i in range(len(length)):
        longest, before = min(length[i], positions), draft_limit[i]
        left = min(longest, max(limit[i] - (emitted[i] - fresh[i]) - 2, 0))
        samples = fresh[i] > 0
        length[i], allowed = left if samples else longest, left if samples else 0
        want[i], draft_limit[i] = allowed, allowed if scheduled[i] > 0 else before


@apart
def _catch_up(engine: Any, profile: Any, ints: Shorts, notes: Shorts, work: Floats) -> None:
    """Count what the drafter's first pass computes; where it lags too far behind, a request cannot draft yet."""
    first_rows = kept_rows = caught_up = 0
    room, length, want = profile.catch_up, notes[LENGTH], notes[WANT]
    if room <= 0:
        for i in range(ints.shape[1]):
            rows = ints[COMPUTED, i] - ints[CONTEXT, i]
            first_rows += rows if ints[SCHEDULED, i] > 0 else 0
    else:
        for i in range(ints.shape[1]):
            if ints[SCHEDULED, i] == 0:
                continue
            done, lag = ints[COMPUTED, i] - ints[CONTEXT, i], ints[CONTEXT, i] - ints[DRAFTER, i]
            if length[i] == 0:
                kept_rows += done
            elif lag > room:  # it makes up for a part
                want[i] = 0
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
    engine.caught_up = caught_up
    work[FIRST_ROWS], work[KEPT_ROWS] = first_rows, kept_rows


@apart
def _go_ahead(profile: Any, ints: Shorts, keys: Words, goes_ahead: bool, notes: Shorts) -> None:
    """Note whose draft was made while the target verified: behind drafts that were accepted as a whole."""
    ahead = notes[IS_AHEAD]
    ahead[:] = 0
    if goes_ahead:
        for i in range(ints.shape[1]):
            key = keys[i] + (np.uint64(ints[EMITTED, i]) + FIRST_TOKEN) * GOLDEN
            is_ready = uniform(mixed(key ^ _AHEAD_KEY)) < profile.ahead_ready
            is_behind = ints[VERIFIED, i] > 0 and ints[ACCEPTED, i] == ints[VERIFIED, i]
            ahead[i] = 1 if is_ready and is_behind else 0


@apart
def _first_token(
    engine: Any, profile: Any, ints: Shorts, traits: Singles, keys: Words, chances: Singles, values: Singles,
    sigmoid: Singles, normal: Singles, notes: Shorts, token: Singles,
) -> None:  # fmt: skip
    """Draw every slot's first token, whoever drafts: loops of few arrays, which compilers turn into vectors."""
    place, cell, score, number, survival = notes[PLACE], notes[CELL], token[SCORE], token[NUMBER], token[SURVIVAL]
    _draw(keys, ints[EMITTED], place, token[LUCK])
    for i in range(len(place)):
        score[i] = normal[np.uint64(place[i])]  # numba takes signed ones from the end where below 0: it need not look
    _rank(profile, np.float32(engine.hardness_now), traits[LEVEL], score, cell)
    for i in range(len(place)):
        number[i] = values[VALUES, 0, np.uint64(cell[i])]
        survival[i] = chances[0, np.uint64(cell[i])]
    _lean(profile.hidden, number, traits[RESIDUAL], place)
    for i in range(len(place)):
        number[i] = sigmoid[np.uint64(place[i])]
    _toss(np.float32(profile.ahead_acceptance), token[LUCK], number, notes[IS_AHEAD], notes[ALIVE])


@apart
def _draw(keys: Words, emitted: Column, place: Column, luck: Singles) -> None:
    for i in range(len(place)):
        bits = mixed(keys[i] + (np.uint64(emitted[i]) + FIRST_TOKEN) * GOLDEN)
        place[i], luck[i] = np.int32(bits >> NORMAL_SHIFT), luck_of(bits)


@apart
def _rank(profile: Any, hardness: np.float32, level: Singles, score: Singles, cell: Column) -> None:
    request_share, token_share = profile.request_share, profile.token_share
    for i in range(len(cell)):
        cell[i] = score_cell(request_share * (level[i] + hardness) + token_share * score[i])


@apart
def _lean(hidden: np.float32, logit: Singles, residual: Singles, place: Column) -> None:
    for i in range(len(place)):
        place[i] = sigmoid_cell(logit[i] + hidden * residual[i])


@apart
def _toss(factor: np.float32, luck: Singles, chance: Singles, ahead: Column, alive: Column) -> None:
    for i in range(len(alive)):
        alive[i] = 1 if luck[i] < chance[i] * (factor if ahead[i] != 0 else _ONE) else 0


@apart
def _further_tokens(
    engine: Any, profile: Any, traits: Singles, keys: Words, ints: Shorts, rules: Singles, chances: Singles,
    cells: Cells, values: Singles, sigmoid: Singles, normal: Singles, notes: Shorts, token: Singles,
    bars: Singles,
) -> None:  # fmt: skip
    """End each draft where the stop rule or its length says; note what is kept, drawn and lucky."""
    want, drawn, order, size = notes[WANT], notes[DRAWN_TOKENS], notes[PLACE], ints.shape[1]
    for j in range(rules.shape[1]):  # without a stop rule no survival is too small
        bars[KEEP_BAR, j] = rules[KEEP_FROM, j] if engine.is_ruled != 0 else -_ONE
        bars[GO_ON_BAR, j] = rules[GO_ON_FROM, j] if engine.is_ruled != 0 else -_ONE
    survival, goes_on, ahead, alive = token[SURVIVAL], notes[GOES_ON], notes[IS_AHEAD], notes[ALIVE]
    _keep(
        bars[KEEP_BAR, 0], bars[GO_ON_BAR, 0], ints[SCHEDULED], want, survival, alive, drawn, goes_on, ints[KEPT],
        ints[LUCKY],
    )  # fmt: skip
    going = 0
    for i in range(size):
        cells[i, 0] = notes[CELL, i] if drawn[i] != 0 else cells[i, 0]
        order[np.uint64(going)] = i
        going += goes_on[i]
    hardness, factor, hidden = np.float32(engine.hardness_now), np.float32(profile.ahead_acceptance), profile.hidden
    carry, fresh, request_share, token_share = profile.carry, profile.fresh, profile.request_share, profile.token_share
    longest = 0
    for at in range(going):
        longest = max(longest, want[np.uint64(order[np.uint64(at)])])
    for at in range(going):
        slot = np.uint64(order[np.uint64(at)])
        base, residual = request_share * (traits[LEVEL, slot] + hardness), hidden * traits[RESIDUAL, slot]
        score, lucky, is_alive, now, kept, draws = token[SCORE, slot], alive[slot], alive[slot], survival[slot], 1, 1
        last, is_on, factor_here = want[slot], 1, factor if ahead[slot] != 0 else _ONE
        key = keys[slot] + (np.uint64(ints[EMITTED, slot]) + FIRST_TOKEN) * GOLDEN
        for j in range(1, longest):  # as often for every draft: processors would guess each one's own end wrongly
            place = np.uint64(j)
            key += GOLDEN
            bits = mixed(key)
            score = carry * score + fresh * gaussian(normal, bits)
            cell = np.uint64(score_cell(base + token_share * score))
            chance = sigmoid[np.uint64(sigmoid_cell(values[VALUES, place, cell] + residual))] * factor_here
            is_on = is_on if j < last else 0
            cells[slot, place] = cell if is_on != 0 else cells[slot, place]
            is_alive = is_alive if luck_of(bits) < chance else 0
            lucky += is_alive & is_on
            draws += is_on
            now *= chances[place, cell]
            is_kept = 0 if now < bars[KEEP_BAR, place] else is_on
            kept += is_kept
            is_on = 0 if now < bars[GO_ON_BAR, place] else is_kept
        ints[KEPT, slot], ints[LUCKY, slot], drawn[slot] = kept, min(lucky, kept), draws


@apart
def _toss_as_told(
    profile: Any, ints: Shorts, traits: Singles, keys: Words, sigmoid: Singles, offsets: Ints, told: Singles,
    notes: Shorts,
) -> None:  # fmt: skip
    """Toss again for drafts whose confidences were recorded: with the same luck, at the chances they give."""
    for i in range(ints.shape[1]):
        kept = ints[KEPT, i]
        if ints[SCHEDULED, i] == 0 or notes[DRAWN_TOKENS, i] == 0 or kept == 0:
            continue
        place = entry(offsets, ints[HANDLE, i], ints[EMITTED, i])
        if place < 0 or np.isnan(told[place, kept - 1]):
            continue
        factor = np.float32(profile.ahead_acceptance) if notes[IS_AHEAD, i] != 0 else _ONE
        key, lean, lucky = keys[i] + np.uint64(ints[EMITTED, i]) * GOLDEN, profile.hidden * traits[RESIDUAL, i], 0
        for j in range(kept):
            bits = mixed(key + (FIRST_TOKEN + np.uint64(j)) * GOLDEN)
            if luck_of(bits) >= sigmoid[np.uint64(sigmoid_cell(told[place, j] + lean))] * factor:
                break
            lucky += 1
        ints[LUCKY, i] = lucky


@apart
def _keep(
    keep_from: np.float32, go_on_from: np.float32, scheduled: Column, want: Column, survival: Singles, alive: Column,
    drawn: Column, goes_on: Column, kept: Column, lucky: Column,
) -> None:  # fmt: skip
    """Decide on each first token."""
    for i in range(len(want)):  # loads before choices: a choice between numbers is no branch
        chance, longest, lucky_before, lucky_now = survival[i], want[i], lucky[i], alive[i]
        drafts = (scheduled[i] > 0) & (longest > 0)
        keeps = drafts & (not chance < keep_from)
        drawn[i], kept[i] = drafts, keeps
        goes_on[i] = keeps & (not chance < go_on_from) & (longest > 1)
        lucky[i] = (lucky_now if keeps else 0) if drafts else lucky_before


@apart
def _count_drafts(engine: Any, profile: Any, ints: Shorts, notes: Shorts, work: Floats) -> None:
    """Sum up what was drawn; under adaptive verification every draft is as long as was asked for."""
    drafting = rounds = tokens = hits = ahead_tokens = attended = 0
    drawn, ahead, want = notes[DRAWN_TOKENS], notes[IS_AHEAD], notes[WANT]
    if profile.is_adaptive != 0:
        for i in range(len(drawn)):
            drawn[i] = want[i] if drawn[i] > 0 else 0
    for i in range(ints.shape[1]):
        drafting += 1 if drawn[i] > 0 else 0
        tokens += drawn[i]
        rounds = max(rounds, drawn[i])
        attended += drawn[i] * ints[COMPUTED, i]
    for i in range(ints.shape[1]):
        is_ahead, length = ahead[i], drawn[i]
        hits += is_ahead if length > 0 else 0
        ahead_tokens += is_ahead * length
    engine.rounds, engine.drawn, engine.frontier_hits = rounds, tokens, hits
    work[DRAFTING], work[ROUNDS], work[DRAWN] = drafting, rounds, tokens
    work[DRAFT_ATTENDED], work[AHEAD_TOKENS] = attended, ahead_tokens


@apart
def luck_of(bits: np.uint64) -> np.float32:
    """Return a number in [0, 1) from bits that a quantile does not use."""
    return np.float32(np.int32((bits >> _S8) & _LOW_24)) * _UNIT


@apart
def sigmoid_cell(logit: np.float32) -> int:
    return min(max(int((logit + _HALF_RANGE) * _PER_LOGIT), 0), SIGMOID_CELLS - 1)


@apart
def score_cell(score: np.float32) -> int:
    """Return the table's cell of a score."""
    return min(max(int((score + np.float32(4.0)) * _PER_SIGMA), 0), CELLS - 1)


@apart
def recorded(offsets: Ints, decisions: Bytes, handle: int, emitted: int) -> int:
    """Return the recorded length of what is drafted at so many tokens, less than 0 where it is pruned: see World."""
    place = entry(offsets, handle, emitted)
    return int(decisions[place]) if place >= 0 else 0


@apart
def entry(offsets: Ints, handle: int, emitted: int) -> int:
    """Return where a recording has what was decided at so many tokens, -1 if it has nothing of that request."""
    if handle >= len(offsets):
        return -1
    first, last = offsets[handle - 1], offsets[handle]
    return int(first + min(emitted, last - first - 1)) if last > first else -1
