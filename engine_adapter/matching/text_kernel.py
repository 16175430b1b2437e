"""The loops behind texts.py, compiled: reading new tokens into a text's table, and looking up what followed its end.

A text is a region of `tokens`, its table one of `table`: an entry for each n-gram of ORDERS that something followed,
in an open hash table of ENTRIES per token. Everything here is a function of the text alone, and so of tokens that
are confirmed: which tokens a match drafts, how many, and how sure it is (DESIGN section 5).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ..arrays import Floats, Ints
from ..compiled import compiled

Tokens = npt.NDArray[np.int32]

ORDERS = (8, 5, 3, 2)  # lengths of the n-grams that are looked up, the longest first
ENTRIES = 8  # of the table per token of the text: twice as many as there can be n-grams
KEY, LAST, AGREED, OTHERS, COLUMNS = range(5)
# LAST: where the token is that followed last; AGREED: how often in a row it was that one; OTHERS: how often another.
LONGEST = 32  # tokens: what matches beyond is not counted
MANY = 1 << 20

# logit(chance) = BASE + BY_LENGTH * ln(length) + BY_AGREED * ln(agreed) + BY_OTHERS * ln(1 + others), fitted to what
# SmolLM2-135M-Instruct answers to 150 training prompts (benchmarks/matches.py). Sidecars calibrate it by what they see.
BASE, BY_LENGTH, BY_AGREED, BY_OTHERS = -0.39, 1.03, 1.52, -1.70


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
def _look_up(tokens: Tokens, table: Tokens, text: Ints, other: Ints) -> tuple[int, int, int, int]:
    """Return what followed the longest known end of a text in another, or in itself.

    :param text: ... and `other`: begin, capacity and size, (3,)
    :returns: its place, the length of the match, agreed and others; a length of 0: nothing did
    """
    behind, begin = text[0] + text[2], other[0]
    first, size = ENTRIES * begin, ENTRIES * other[1]
    for order in ORDERS:
        if text[2] <= order:
            continue
        entry = _find(table, first, size, _hash(tokens, behind - order, order))
        if table[entry, KEY] == 0:
            continue
        at, length = int(table[entry, LAST]), 0
        longest = min(LONGEST, at, text[2])
        while length < longest and tokens[begin + at - 1 - length] == tokens[behind - 1 - length]:
            length += 1
        if length >= order:  # else another n-gram has the same hash
            return at, length, int(table[entry, AGREED]), int(table[entry, OTHERS])
    return 0, 0, 0, 0


@compiled
def _agreement(tokens: Tokens, table: Tokens, text: Ints, at: int, length: int) -> tuple[int, int]:
    """Return how often what is at a place followed the `length` tokens before it, and how often something else did."""
    begin, first, size = text[0], ENTRIES * text[0], ENTRIES * text[1]
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
def read_new(tokens: Tokens, table: Tokens, texts: Ints, was_read: Ints, fresh: Tokens) -> None:
    """Append `fresh` (n, width; negative: none) to texts, (n, 3), and enter what is new into their tables.

    Changes the sizes of the texts and `was_read`, (n,) tokens that their tables know; a capacity of 0: no text.
    """
    for i in range(len(texts)):
        begin, capacity, end = texts[i]
        if capacity == 0:
            continue
        for j in range(fresh.shape[1]):
            if fresh[i, j] < 0 or end >= capacity:
                break
            tokens[begin + end] = fresh[i, j]
            end += 1
        _read(tokens, table, begin, ENTRIES * begin, ENTRIES * capacity, was_read[i], end)
        texts[i, 2] = was_read[i] = end


@compiled
def read_all(tokens: Tokens, table: Tokens, begin: int, capacity: int, start: int, end: int) -> None:
    """Enter what tokens `start` to `end` of one text followed into its table."""
    _read(tokens, table, begin, ENTRIES * begin, ENTRIES * capacity, start, end)


@compiled
def draft_all(
    tokens: Tokens, table: Tokens, texts: Ints, most: Ints, drafts: Tokens, logits: Floats, lengths: Ints
) -> None:
    """Draft what followed the end of each text: tokens and logits of their chances, (n, width); lengths, (n,).

    :param texts: (n, where to look, 3) begin, capacity and size of its own text, and behind it of others
    :param most: (n,) tokens to draft at most
    """
    for i in range(len(texts)):
        lengths[i] = 0
        at = length = agreed = others = where = 0
        for each in range(texts.shape[1]):
            if most[i] > 0 and texts[i, 0, 1] > 0 and texts[i, each, 1] > 0:
                found = _look_up(tokens, table, texts[i, 0], texts[i, each])
                if found[1] > length:
                    where, (at, length, agreed, others) = each, found
        if length == 0:
            continue
        begin, end = texts[i, where, 0], texts[i, where, 2]
        for j in range(min(most[i], drafts.shape[1])):
            place = at + j
            if place < end:
                drafts[i, j] = tokens[begin + place]
            elif where == 0:  # behind the end of its own text comes what was just drafted: it repeats itself
                drafts[i, j] = drafts[i, place - end]
            if (place >= end and where > 0) or drafts[i, j] < 0:  # another's text ends here
                break
            if j > 0 and place < end:
                agreed, others = _agreement(tokens, table, texts[i, where], place, min(length + j, LONGEST))
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
            if survival < keep[i, j]:
                break
            kept[i] = j + 1
            net[i] += survival - keep[i, j]
