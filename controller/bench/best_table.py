"""The best table of lengths by batch size, as vLLM's Dynamic SD takes it, from a sweep of fixed lengths. Pure.

Called by controller/bench/course.py: a tuned table is the rival that a careful operator would configure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Final

from ...models.evaluation.best_table import first_and_length

NEAR_BEST: Final = 0.8  # of the best length's tokens/s

Table = tuple[tuple[int, int, int], ...]  # first and last batch size, both included, and the length between them


def best_lengths(levels: Mapping[int, Mapping[int, float]]) -> dict[int, int]:
    """Return the best length at each load; of equal ones the shorter.

    :param levels: load -> length -> tokens/s, or anything that grows with it
    """
    return {load: max(sorted(by_length), key=by_length.__getitem__) for load, by_length in sorted(levels.items())}


def best_table(levels: Mapping[int, Mapping[int, float]], max_requests: int) -> Table:
    """Return the table of the best length at each load."""
    if not levels:
        raise ValueError("no load was swept; expected at least one")
    rows = [*first_and_length(list(best_lengths(levels).items())), (max_requests + 1, 0)]
    return tuple((first, after - 1, length) for (first, length), (after, _) in itertools.pairwise(rows))


def worth_sweeping(levels: Mapping[int, float]) -> set[int]:
    """Return the lengths that may still be the best where more requests run, from what each gave where fewer did.

    Rows cost more the more of them there are, so the best length falls with the load: who is longer than the best one
    and far behind it will not catch up. Sweeping them all the same is where an operator's hours would go.

    :param levels: length -> log tokens/s
    """
    if not levels:
        return set()
    best = best_lengths({0: levels})[0]
    least = levels[best] + math.log(NEAR_BEST)
    return {length for length, level in levels.items() if length <= best or level >= least}


def longest(table: Table) -> int:
    """Return the longest length, at least 1: vLLM wants room for one draft token even where none is drafted."""
    return max(1, *(length for _, _, length in table))


def described(table: Sequence[Sequence[int]]) -> str:
    """Return the table as one line: `1-5=3,6-64=0`."""
    return ",".join(f"{first}-{last}={length}" for first, last, length in table)
