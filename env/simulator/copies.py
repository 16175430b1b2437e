"""Drafts copied from a request's own text: whether it offers one, what of it is kept, and what would be accepted.

Compiled; called by env/simulator/step.py around draft.py, and only for profiles with a model of matches. The rule is
the engine's (engine_adapter/matching/matching_runner.py, text_kernel.cut_all). What a text offers, and its luck, is
keyed by request and place in the answer, so that two policies meet the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...engine_adapter.arrays import Floats, Singles
from ..layout.action_vector import THRESHOLD
from ..vectorised import apart
from .action import stranger_length
from .constants import LOGITS, VALUES
from .draft import FIRST_TOKEN, luck_of, score_cell, sigmoid_cell
from .schedule import GOLDEN, gaussian, mixed, uniform
from .state import (
    ACCEPTANCE,
    ACCEPTED,
    ASKED,
    BEHIND_WHOLE,
    COPIED,
    COPIES_ACCEPTED,
    COPIES_PRUNED,
    COPIES_VERIFIED,
    COPY_INTERCEPT,
    COPY_KEPT,
    COPY_LUCKY,
    COPY_PRICE,
    COPY_SLOPE,
    DRAFT_LIMIT,
    EMITTED,
    FOUND,
    FRESH,
    KEPT,
    LIMIT,
    LUCKY,
    PRUNED,
    SCHEDULED,
    VERIFIED,
    WANTED,
    WAS_COPY,
    Bytes,
    Cells,
    Shorts,
    Words,
)

_TEXT_KEY, _MATCH_KEY, _LENGTH_KEY = (
    np.uint64(key) for key in (0x9FB21C651E98DF25, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB)
)
_LEVEL, _RESIDUAL, _PROPENSITY = np.uint64(1), np.uint64(2), np.uint64(3)
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
LEAST_PRICE = np.float32(0.15)  # of a row, in tokens, where no rule says it: the action's may be none at all
LARGEST_PRICE = np.float32(0.97)


@apart
def copy(
    engine: Any, profile: Any, settings: Any, ints: Shorts, keys: Words, evidence: Singles, population: Floats,
    vector: Singles, named: Bytes, copies: Shorts, cells: Cells, rules: Singles, weights: Singles, tables: Singles,
    lengths: Floats, sigmoid: Singles, normal: Singles,
) -> None:  # fmt: skip
    """Choose whose next draft is a copy; the drafter is not asked for theirs, nor for any if too few are left.

    What copies did in the step is out of sight until `show_copies`.
    :param named: (slots,) lengths in force, changed until `hand_over_copies`
    :param lengths: (longest copy,) as World has them
    """
    _note_verified(ints, copies)
    _note_asked(settings, ints, named, stranger_length(settings, population, vector), copies)
    if settings.copies != 0:
        _ask_at_price(engine, profile, vector, rules)
    if engine.copy_most == 0:
        return
    left, total, is_asked = 0, 0.0, False
    for i in range(ints.shape[1]):
        most, wanted = min(engine.copy_most, _room(ints, i)), copies[WANTED, i]
        if ints[SCHEDULED, i] > 0 and ints[FRESH, i] > 0 and most > 0:
            found = _found(profile, keys[i], i, int(most), ints, copies, lengths, sigmoid, normal)
            if found > 0:
                copies[FOUND, i] = found
                net = _cut(profile, keys[i], i, ints, copies, cells, rules, weights[i], tables, sigmoid, normal)
                worth = engine.copy_worth
                if settings.copies != 0:
                    worth = _drafters_worth(i, wanted, evidence, rules)
                if copies[COPY_KEPT, i] > 0 and (net > worth or wanted == 0):
                    copies[COPIED, i], named[i] = 1, 0
                    total += net * weights[i]
        left += 1 if wanted > 0 and named[i] != 0 else 0
        is_asked |= wanted > 0
    if left < engine.copy_fewest:
        named[:] = 0
    if not is_asked and total <= engine.copy_least:
        _leave_all(ints, copies)


@apart
def _leave_all(ints: Shorts, copies: Shorts) -> None:
    """Take back the copies of this step."""
    for i in range(ints.shape[1]):
        if ints[SCHEDULED, i] > 0:
            copies[COPIED, i] = 0


@apart
def hand_over_copies(engine: Any, ints: Shorts, named: Bytes, copies: Shorts) -> None:
    """Hand the copies over beside what was drafted."""
    if engine.copy_most == 0:
        return
    for i in range(ints.shape[1]):
        named[i] = copies[ASKED, i]
        if ints[SCHEDULED, i] > 0:
            ints[DRAFT_LIMIT, i] = 0 if copies[COPIED, i] != 0 else copies[WANTED, i]
            if copies[COPIED, i] != 0:
                ints[KEPT, i], ints[LUCKY, i] = copies[COPY_KEPT, i], copies[COPY_LUCKY, i]


@apart
def show_copies(ints: Shorts, copies: Shorts) -> None:
    """Let what copies did be seen: the drafter's acceptance has been learnt."""
    for i in range(ints.shape[1]):
        if copies[WAS_COPY, i] != 0:
            ints[VERIFIED, i], ints[ACCEPTED, i] = copies[COPIES_VERIFIED, i], copies[COPIES_ACCEPTED, i]
            ints[PRUNED, i] = copies[COPIES_PRUNED, i]
        if copies[COPIED, i] != 0 and ints[SCHEDULED, i] > 0:
            ints[DRAFT_LIMIT, i] = copies[WANTED, i]


@apart
def _note_verified(ints: Shorts, copies: Shorts) -> None:
    """Note what copies did, and put it out of sight."""
    for i in range(ints.shape[1]):
        is_scheduled, verified = ints[SCHEDULED, i] > 0, ints[VERIFIED, i]
        was_copy = is_scheduled and verified > 0 and copies[COPIED, i] != 0
        copies[COPIED, i] = 0 if is_scheduled else copies[COPIED, i]
        copies[WAS_COPY, i] = 1 if was_copy else 0
        copies[BEHIND_WHOLE, i] = 1 if was_copy and ints[ACCEPTED, i] == verified else 0
        if was_copy:
            copies[COPIES_VERIFIED, i], copies[COPIES_ACCEPTED, i] = verified, ints[ACCEPTED, i]
            copies[COPIES_PRUNED, i] = ints[PRUNED, i]
            ints[VERIFIED, i] = ints[ACCEPTED, i] = ints[PRUNED, i] = 0


@apart
def _note_asked(settings: Any, ints: Shorts, named: Bytes, default: int, copies: Shorts) -> None:
    """Note the lengths in force, and what of them could be emitted."""
    for i in range(ints.shape[1]):
        copies[ASKED, i] = named[i]
        longest = min(named[i] if named[i] >= 0 else default, settings.positions)
        copies[WANTED, i] = min(longest, _room(ints, i)) if ints[FRESH, i] > 0 else 0


@apart
def _room(ints: Shorts, i: int) -> int:
    """Return how many tokens of a draft could be emitted, as draft.py has it."""
    room: int = max(ints[LIMIT, i] - (ints[EMITTED, i] - ints[FRESH, i]) - 2, 0)
    return room


@apart
def _ask_at_price(engine: Any, profile: Any, vector: Singles, rules: Singles) -> None:
    """Fill in the rule of an action without one: the engine's own chances, and a row at the action's price."""
    engine.copy_most, engine.copy_fewest = profile.match_longest, 1
    price = min(max(vector[THRESHOLD], LEAST_PRICE), LARGEST_PRICE)
    for j in range(rules.shape[1]):
        rules[COPY_SLOPE, j], rules[COPY_INTERCEPT, j], rules[COPY_PRICE, j] = _ONE, _ZERO, price


@apart
def _drafters_worth(i: int, length: int, evidence: Singles, rules: Singles) -> float:
    """Return what a draft of the drafter's brings beyond its rows, in tokens."""
    survival, worth = _ONE, 0.0
    for j in range(length):
        survival *= evidence[ACCEPTANCE, j, i]
        worth += survival - rules[COPY_PRICE, 0]
    return max(worth, 0.0)


@apart
def _found(
    profile: Any, key: np.uint64, i: int, most: int, ints: Shorts, copies: Shorts, lengths: Floats, sigmoid: Singles,
    normal: Singles,
) -> int:  # fmt: skip
    """Return how many tokens a request's text offers now, `most` at most; 0: nothing follows its end."""
    own = mixed(key ^ _TEXT_KEY)
    place = own + (np.uint64(ints[EMITTED, i]) + FIRST_TOKEN) * GOLDEN
    after = profile.match_after_whole if copies[BEHIND_WHOLE, i] != 0 else profile.match_after_other
    logit = after + profile.match_spread * gaussian(normal, mixed(own + _PROPENSITY))
    if uniform(mixed(place ^ _MATCH_KEY)) >= sigmoid[np.uint64(sigmoid_cell(logit))]:
        return 0
    luck, found = uniform(mixed(place ^ _LENGTH_KEY)), 1
    while found < profile.match_longest and luck >= lengths[found - 1]:
        found += 1
    return min(found, most)


@apart
def _cut(
    profile: Any, key: np.uint64, i: int, ints: Shorts, copies: Shorts, cells: Cells, rules: Singles,
    weight: np.float32, tables: Singles, sigmoid: Singles, normal: Singles,
) -> float:  # fmt: skip
    """Draw what was found; note what is kept, and accepted of that. Return what it brings beyond its rows."""
    own = mixed(key ^ _TEXT_KEY)
    base = profile.match_request_share * gaussian(normal, mixed(own + _LEVEL))
    residual = profile.match_hidden * gaussian(normal, mixed(own + _RESIDUAL))
    place = own + (np.uint64(ints[EMITTED, i]) + FIRST_TOKEN) * GOLDEN
    score, survival, net, kept, lucky, is_kept, is_alive = _ZERO, _ONE, 0.0, 0, 0, 1, 1
    behind = copies[BEHIND_WHOLE, i]
    for j in range(copies[FOUND, i]):
        bits = mixed(place + np.uint64(j) * GOLDEN)
        fresh = gaussian(normal, bits)
        score = profile.match_carry * score + profile.match_fresh * fresh if j > 0 else fresh
        cell = np.uint64(score_cell(base + profile.match_token_share * score))
        cells[i, j] = cell
        chance = sigmoid[np.uint64(sigmoid_cell(tables[behind, VALUES, j, cell] + residual))]
        is_alive = is_alive if luck_of(bits) < chance else 0
        said = rules[COPY_INTERCEPT, j] + rules[COPY_SLOPE, j] * tables[behind, LOGITS, j, cell]
        survival *= sigmoid[np.uint64(sigmoid_cell(said))]
        price = rules[COPY_PRICE, j] / weight
        is_kept = is_kept if survival >= price else 0
        kept += is_kept
        lucky += is_alive
        net += float(survival - price) if is_kept != 0 else 0.0
    copies[COPY_KEPT, i], copies[COPY_LUCKY, i] = kept, min(lucky, kept)
    return net
