"""Which arms a start of the servers measures at each load point. Pure.

Called by controller/bench/course.py. What a server is like for as long as it lives no interval over rounds would see,
so all are started anew several times; the first start measures every arm, later ones those whose ratio may still
change.
"""

from __future__ import annotations

from typing import Final

from .plan import contenders
from .result import Results, envelope_at

LEAST_STARTS: Final = 4  # before that a ratio may look sharp by luck
HALF_WIDTH: Final = (
    0.02  # at which a load is done: at the bar's own 3 % a ratio of 1.00 would often not be seen to meet it
)


def first_start(results: Results, starts: int) -> int:
    """Return the number of this run's first start.

    A run with a single start that goes on with a file adds rounds to the file's last start, and no new one.
    """
    last = max((turn.start for turn in results.turns), default=-1)
    return last + 1 if starts > 1 else max(last, 0)


def arms_at(arms: tuple[str, ...], results: Results, load: int | str, kinds: str) -> tuple[str, ...]:
    """Return the arms of a later start at a load point: FASER, no speculation and the rivals near the best, or none."""
    best = envelope_at(results, load, kinds).ratio
    if best.pairs >= LEAST_STARTS and best.half_width <= HALF_WIDTH:
        return ()
    return contenders(results.compared(load, kinds), arms)
