"""The loops behind texts.py, compiled: reading new tokens into a text's table, and looking up what followed its end.

A text is a region of `tokens`, its table one of `table`: an entry for each n-gram of ORDERS that something followed,
in an open hash table of ENTRIES per token. Everything here is a function of the text alone, and so of tokens that
are confirmed: which tokens a match drafts, how many, and how sure it is (DESIGN section 5).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ..arrays import Bools, Floats, Ints
from ..compiled import compiled

Tokens = npt.NDArray[np.int32]

ORDERS = (8, 5, 3, 2)  # lengths of the n-grams that are looked up, the longest first
ENTRIES = 8  # of the table per token of the text: twice as many as there can be n-grams
KEY, LAST, AGREED, OTHERS, COLUMNS = range(5)
# LAST: where the token is that followed last; AGREED: how often in a row it was that one; OTHERS: how often another.
LONGEST = 32  # tokens: what matches beyond is not counted
MANY = 1 << 20

# logit(chance) = BASE + BY_LENGTH * ln(length) + BY_AGREED * ln(agreed) + BY_OTHERS * ln(1 + others), fitted to what
# SmolLM2-135M-Instruct answered to 600 prompts (benchmarks/matches.py). Sidecars calibrate it by what they see.
BASE, BY_LENGTH, BY_AGREED, BY_OTHERS = -0.42, 0.98, 1.65, -1.71


@compiled
def _hash(tokens: Tokens, begin: int, order: int) -> int:
    """Return 63 bits of an n-gram: FNV-1a over its tokens."""
    value = np.uint64(14695981039346656037) ^ np.uint64(order)
    for place in range(begin, begin + order):
        value = (value ^ np.uint64(tokens[place])) * np.uint64(1099511628211)
    return int((value ^ (value >> np.uint64(29))) & np.uint64(0x7FFFFFFFFFFFFFFF))


@compiled
def _find(table: Tokens, first: int, size: int, value: int) -> int:
    """Return the entry of an n-gram by its hash, or the empty one for it; `size` is a power of two."""
    place = (value >> 31) & (size - 1)
    while table[first + place, KEY] != 0 and table[first + place, KEY] != _key(value):
        place = (place + 1) & (size - 1)
    return first + place


@compiled
def _key(value: int) -> int:
    """Return what an entry keeps of a hash; 0 is an empty entry's."""
    return (value & 0x7FFFFFFF) | 1


@compiled
def _read(tokens: Tokens, table: Tokens, begin: int, first: int, size: int, start: int, end: int) -> None:
    """Enter what tokens `start` to `end` of a text followed."""
    for at in range(max(start, 1), end):
        for order in ORDERS:
            if at < order:
                continue
            value = _hash(tokens, begin + at - order, order)
            entry = _find(table, first, size, value)
            last = table[entry, LAST]
            if table[entry, KEY] == 0:
                table[entry, KEY], table[entry, AGREED], table[entry, OTHERS] = _key(value), 1, 0
            elif tokens[begin + last] == tokens[begin + at]:
                table[entry, AGREED] = min(table[entry, AGREED] + 1, MANY)
            else:
                table[entry, OTHERS] = min(table[entry, OTHERS] + table[entry, AGREED], MANY)
                table[entry, AGREED] = 1
            table[entry, LAST] = at


@compiled
def _look_up(tokens: Tokens, table: Tokens, begin: int, first: int, size: int, end: int) -> tuple[int, int, int, int]:
    """Return what followed the longest known end of a text: its place, the length of the match, agreed and others.

    A length of 0: nothing did.
    """
    for order in ORDERS:
        if end <= order:
            continue
        entry = _find(table, first, size, _hash(tokens, begin + end - order, order))
        if table[entry, KEY] == 0:
            continue
        at, length = int(table[entry, LAST]), 0
        while length < min(LONGEST, at) and tokens[begin + at - 1 - length] == tokens[begin + end - 1 - length]:
            length += 1
        if length >= order:  # else another n-gram has the same hash
            return at, length, int(table[entry, AGREED]), int(table[entry, OTHERS])
    return 0, 0, 0, 0


@compiled
def _agreement(
    tokens: Tokens, table: Tokens, begin: int, first: int, size: int, at: int, length: int
) -> tuple[int, int]:
    """Return how often what is at a place followed the `length` tokens before it, and how often something else did."""
    for order in ORDERS:
        if order > length or order > at:
            continue
        entry = _find(table, first, size, _hash(tokens, begin + at - order, order))
        if table[entry, KEY] == 0:
            continue
        if tokens[begin + table[entry, LAST]] == tokens[begin + at]:
            return int(table[entry, AGREED]), int(table[entry, OTHERS])
        return 1, int(table[entry, AGREED] + table[entry, OTHERS])
    return 1, 0


@compiled
def _chance_logit(length: int, agreed: int, others: int) -> float:
    return BASE + BY_LENGTH * math.log(length) + BY_AGREED * math.log(agreed) + BY_OTHERS * math.log(1.0 + others)


@compiled
def read_new(
    tokens: Tokens, table: Tokens, begins: Ints, capacities: Ints, sizes: Ints, was_read: Ints, fresh: Tokens,
    is_read: Bools,
) -> None:  # fmt: skip
    """Append `fresh` (n, width; negative: none) to the texts of those with `is_read`, and enter it into their tables.

    Changes `sizes` and `was_read`, tokens of each text: those that it has, and those that its table knows.
    """
    for i in range(len(begins)):
        if not is_read[i]:
            continue
        begin, end = begins[i], sizes[i]
        for j in range(fresh.shape[1]):
            if fresh[i, j] < 0 or end >= capacities[i]:
                break
            tokens[begin + end] = fresh[i, j]
            end += 1
        _read(tokens, table, begin, ENTRIES * begin, ENTRIES * capacities[i], was_read[i], end)
        sizes[i] = was_read[i] = end


@compiled
def draft_all(
    tokens: Tokens,
    table: Tokens,
    begins: Ints,
    capacities: Ints,
    sizes: Ints,
    most: Ints,
    drafts: Tokens,
    logits: Floats,
    lengths: Ints,
) -> None:
    """Draft what followed the end of each text: tokens and logits of their chances, (n, width); lengths, (n,).

    :param most: (n,) tokens to draft at most
    """
    for i in range(len(begins)):
        lengths[i] = 0
        if most[i] <= 0:
            continue
        begin, first, size, end = begins[i], ENTRIES * begins[i], ENTRIES * capacities[i], sizes[i]
        at, length, agreed, others = _look_up(tokens, table, begin, first, size, end)
        if length == 0:
            continue
        for j in range(min(most[i], drafts.shape[1])):
            place = at + j
            if place < end:
                drafts[i, j] = tokens[begin + place]
            else:  # behind the end of the text comes what was just drafted: it repeats itself
                drafts[i, j] = drafts[i, place - end]
            if j > 0 and place < end:
                agreed, others = _agreement(tokens, table, begin, first, size, place, min(length + j, LONGEST))
            logits[i, j] = _chance_logit(min(length + j, LONGEST), agreed, others)
            lengths[i] = j + 1


@compiled
def cut_all(
    logits: Floats, lengths: Ints, slopes: Floats, intercepts: Floats, keep: Floats, kept: Ints, net: Floats
) -> None:
    """Write how many tokens of each draft are worth their rows, (n,), and what they bring beyond these, (n,) tokens."""
    for i in range(len(lengths)):
        survival, kept[i], net[i] = 1.0, 0, 0.0
        for j in range(lengths[i]):
            survival /= 1.0 + math.exp(-(intercepts[j] + slopes[j] * logits[i, j]))
            if survival < keep[j]:
                break
            kept[i] = j + 1
            net[i] += survival - keep[j]
