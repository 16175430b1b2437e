"""Draws by seed on a CPU: the same noise and tokens as noise.py has them, in one pass over each row.

Called by noise.py, and compiled when a runner starts. Noise is computed only where its hash says that it may win: most
tokens have their logit, a hash and a comparison.
"""

from __future__ import annotations

import math
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..arrays import Ints
from ..compiled import compiled

Logits: TypeAlias = npt.NDArray[np.float32]
Words: TypeAlias = npt.NDArray[np.uint64]
Flags: TypeAlias = npt.NDArray[np.bool_]

GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32 = (np.uint64(bits) for bits in (30, 27, 31, 32))
_HALF, _UNIT, _BELOW_ONE = np.float32(0.5), np.float32(2.0**-32), np.float32(1.0 - 2.0**-24)
NO_DRAW, NOT_DRAWN = -1, -2  # no token can win, numbers are missing; behind a wrong draft nobody looks
MOST_NOISE: Final = 23.0  # -log(2^-33) is 22.87
# Noise of at least n takes a hash whose upper half is at most exp(-n) of all; a little more, for what floats round.
SHARES: Final = np.minimum(np.exp(-np.arange(0.0, MOST_NOISE + 1.0)) * 1.0001 * 2.0**32 + 1.0, 2.0**32).astype(
    np.uint64
)


@compiled
def mixed(number: np.uint64) -> np.uint64:
    """Return SplitMix64's mix."""
    number = (number ^ (number >> _30)) * _FIRST
    number = (number ^ (number >> _27)) * _SECOND
    return number ^ (number >> _31)


def draw_in(logits: Logits, keys: Ints, tokens: Ints) -> None:
    """Write the token that each row (rows, vocabulary) draws under its key (rows,) into `tokens`, or NO_DRAW."""
    draw_rows(logits, keys.view(np.uint64), SHARES, tokens)


@compiled
def draw_rows(logits: Logits, keys: Words, shares: Words, tokens: Ints) -> None:
    """Do so."""
    for row in range(len(keys)):
        tokens[row] = _drawn(logits[row], keys[row], shares)


def draw_while_right(logits: Logits, keys: Ints, drafts: Ints, is_first: Flags, is_greedy: Flags, tokens: Ints) -> None:
    """Write what each draft is held to into `tokens` (rows,): a draw, or the likeliest token where a row is greedy.

    A row stands for a draft, one behind the other for each request; behind one that was wrong comes NOT_DRAWN.

    :param is_first: (rows,) where a request's first draft is.
    """
    compare_rows(logits, keys.view(np.uint64), drafts, is_first, is_greedy, SHARES, tokens)


@compiled
def compare_rows(
    logits: Logits, keys: Words, drafts: Ints, is_first: Flags, is_greedy: Flags, shares: Words, tokens: Ints
) -> None:
    """Do so."""
    for row in range(len(keys)):
        if not is_first[row] and tokens[row - 1] != drafts[row - 1]:
            tokens[row] = NOT_DRAWN
        elif is_greedy[row]:
            tokens[row] = logits[row].argmax()
        else:
            tokens[row] = _drawn(logits[row], keys[row], shares)


@compiled
def _drawn(logits: Logits, key: np.uint64, shares: Words) -> int:
    most = -np.inf
    for token in range(len(logits)):
        most = max(most, logits[token])
    if not (-np.inf < most < np.inf):
        return NO_DRAW
    best, found = -np.inf, NO_DRAW
    floor = most - MOST_NOISE - 3.0  # the likeliest token's noise is at least -3
    state = key
    for token in range(len(logits)):
        state += GOLDEN
        logit = logits[token]
        if logit < floor:
            continue
        upper = mixed(state) >> _32
        lacking = best - logit
        if lacking > 0.0 and (lacking >= MOST_NOISE or upper > shares[int(lacking)]):
            continue
        share = min((np.float32(upper) + _HALF) * _UNIT, _BELOW_ONE)
        score = logit - math.log(-math.log1p(-share))
        if score > best:
            best, found = score, token
    return found
