"""The strongest thing an operator can tune by hand: the best length for each load, found by trying them all.

Called by the evaluation with the simulator, and by the benchmark with what it measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence


def best_table(rate: Callable[[int, int], float], loads: Sequence[int], k_max: int) -> str:
    """Return the specification of the table of the best lengths, e.g. table:1-5=3,6-=0.

    :param rate: tokens per second at (running requests, length for all)
    :param loads: running requests to try, ascending; a length holds to half way (geometric) to the next load
    """
    if not loads or list(loads) != sorted({load for load in loads if load > 0}):
        raise ValueError(f"loads {list(loads)}; expected ascending numbers from 1")
    best = [max(range(k_max + 1), key=lambda length: rate(load, length)) for load in loads]
    rows = first_and_length(list(zip(loads, best, strict=True)))
    parts = [f"{first}-{after - 1}={length}" for (first, length), (after, _) in itertools.pairwise(rows)]
    return "table:" + ",".join([*parts, f"{rows[-1][0]}-={rows[-1][1]}"])


def first_and_length(chosen: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return a table's rows as (first batch size, length) from (load, its length), loads ascending.

    Between two loads the border is their geometric mean; neighbours alike are one row.
    """
    firsts = [1, *(math.isqrt(before * load) + 1 for (before, _), (load, _) in itertools.pairwise(chosen))]
    rows = [(first, length) for first, (_, length) in zip(firsts, chosen, strict=True)]
    return [row for place, row in enumerate(rows) if not place or rows[place - 1][1] != row[1]]
