"""Steps that could be, tabulated by what is asked for, and which of them emits most tokens per second.

Called by the price policy (models/policies/price.py, models/policies/stop_rules.py) every few records. A table holds,
per threshold and deepest round, what the step would do; the cost table says how long that takes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ...engine_adapter.arrays import Floats
from ...engine_adapter.compiled import compiled
from ...env.estimate.planning_view import PlanningView

# Planes of a table, (4, thresholds, k_max + 1), each expected of one step: draft tokens, emitted tokens, rows through
# the target (without prompts), drafting rounds.
DRAFTED, TOKENS, ROWS, ROUNDS = range(4)
PLANES: Final = 4


class Choice(NamedTuple):
    """A cell, and what it promises."""

    threshold: int
    depth: int  # deepest round
    rate: float  # tokens/s
    drafted: float  # draft tokens
    even_rates: Floats  # (k_max + 1,) tokens/s of one length for all, of which everything is verified

    @property
    def gain_percent(self) -> float:
        """Over no drafts."""
        return (self.rate / self.even_rates.item(0) - 1.0) * 100.0


def choose(
    table: Floats, view: PlanningView, reading_s: float, verify_s: Floats | None = None, time_weight: float = 1.0
) -> Choice:  # fmt: skip
    """Return the best cell.

    :param table: whose last threshold lets everything pass
    :param reading_s: what a step in which all draft is charged for what the drafter missed, and for new prompts
    :param verify_s: seconds of everything but drafting and prompts per cell, where they are not those of its rows
    :param time_weight: tokens / seconds^time_weight is what decides; 1: tokens per second
    """
    drafted, _, rows, rounds = table
    if verify_s is None:
        verify_s = view.verify_s(rows)
    # Where all draft the longest, a short draft costs as much; only its verification is spared.
    drawn = drafted if view.capabilities.is_ragged else rounds * view.requests
    draft_s = view.cost.draft_time_s(rows, rounds, drawn)
    even_rates = np.empty(table.shape[2])
    chosen = _best(table, verify_s, draft_s, reading_s, view.requests, time_weight, even_rates)
    return Choice(*chosen, even_rates)


@compiled
def _best(
    table: Floats, verify_s: Floats, draft_s: Floats, reading_s: float, requests: int, time_weight: float,
    even_rates: Floats,
) -> tuple[int, int, float, float]:  # fmt: skip
    most, best, threshold, depth = -np.inf, 0.0, 0, 0
    for i in range(table.shape[1]):
        for j in range(table.shape[2]):
            step_s = verify_s[i, j] + draft_s[i, j]
            if j > 0:
                step_s += reading_s * min(table[DRAFTED, i, 1] / requests, 1.0)
            rate = table[TOKENS, i, j] / step_s
            worth = rate if time_weight == 1.0 else table[TOKENS, i, j] / step_s**time_weight
            even_rates[j] = rate  # at last that of the last threshold
            if worth > most:
                most, best, threshold, depth = worth, rate, i, j
    return threshold, depth, best, table[DRAFTED, threshold, depth]
