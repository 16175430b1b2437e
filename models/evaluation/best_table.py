"""The strongest thing an operator can tune by hand: the best length for each load, found by trying them all.

Called by the evaluation with the simulator, or with measured figures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence


def best_table(rate: Callable[[int, int], float], loads: Sequence[int], k_max: int) -> str:
    """Return the specification of the table of the best lengths, e.g. table:1-5=3,6-=0.

    :param rate: tokens per second at (running requests, length for all)
    :param loads: running requests to try, ascending; a length holds to half way (geometric) to the next load
    """
    if not loads or list(loads) != sorted({load for load in loads if load > 0}):
        raise ValueError(f"loads {list(loads)}; expected ascending numbers from 1")
    best = [max(range(k_max + 1), key=lambda length: rate(load, length)) for load in loads]
    rows: list[tuple[int, int]] = []  # first batch size, length
    for place, length in enumerate(best):
        first = 1 if place == 0 else int((loads[place - 1] * loads[place]) ** 0.5) + 1
        if not rows or rows[-1][1] != length:
            rows.append((first, length))
    parts = [f"{first}-{after - 1}={length}" for (first, length), (after, _) in itertools.pairwise(rows)]
    return "table:" + ",".join([*parts, f"{rows[-1][0]}-={rows[-1][1]}"])
