"""Steps that could be, tabulated by what is asked for, and which of them emits most tokens per second.

Called by the price policy (models/policies/price.py, models/policies/stop_rules.py) every few records. A table holds,
per threshold and deepest round, what the step would do; the cost table says how long that takes.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from ...engine_adapter.arrays import Bools, Floats, Ints
from ...engine_adapter.compiled import compiled
from ...env.estimate.planning_view import PlanningView

# Planes of a table, (4, thresholds, k_max + 1), each expected of one step: draft tokens, emitted tokens, rows through
# the target (without prompts), drafting rounds.
DRAFTED, TOKENS, ROWS, ROUNDS = range(4)
PLANES: Final = 4
BINS: Final = 48  # survival thresholds, log-spaced
LOWEST_SURVIVAL: Final = 0.01  # the last of these: a row that seldom brings a token is worth its time nowhere


def least_survival(edge: int) -> float:
    """Return the survival above which a draft token is worth its row at the threshold `edge`, 0..BINS."""
    return LOWEST_SURVIVAL ** (edge / BINS) if edge < BINS else -1.0


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


def choose(table: Floats, view: PlanningView, reading_s: float, verify_s: Floats | None = None) -> Choice:
    """Return the best cell.

    :param table: whose last threshold lets everything pass
    :param reading_s: what a step in which all draft is charged for what the drafter missed, and for new prompts
    :param verify_s: seconds of everything but drafting and prompts per cell, where they are not those of its rows
    """
    drafted, _, rows, rounds = table
    if verify_s is None:
        verify_s = view.verify_s(rows)
    draft_s = view.draft_s(rows, rounds, drafted, view.requests)
    even_rates = np.empty(table.shape[2])
    chosen = _best(table, verify_s, draft_s, reading_s, view.requests, even_rates)
    return Choice(*chosen, even_rates)


@compiled
def _best(
    table: Floats, verify_s: Floats, draft_s: Floats, reading_s: float, requests: int, even_rates: Floats
) -> tuple[int, int, float, float]:
    best, threshold, depth = -np.inf, 0, 0
    for i in range(table.shape[1]):
        for j in range(table.shape[2]):
            step_s = verify_s[i, j] + draft_s[i, j]
            if j > 0:
                step_s += reading_s * min(table[DRAFTED, i, 1] / requests, 1.0)
            rate = table[TOKENS, i, j] / step_s
            even_rates[j] = rate  # at last that of the last threshold
            if rate > best:
                best, threshold, depth = rate, i, j
    return threshold, depth, best, table[DRAFTED, threshold, depth]


@compiled
def tabulate(
    acceptance: Floats, decoding: Bools, worths: Floats, delivery: Floats, requests: int, base: float, table: Floats
) -> None:
    """Fill in the table, (4, BINS + 1, k_max + 1) of zeros; its first row and column: none drafted.

    :param worths: (n,) of a token of each request; tokens are counted by these
    :param base: what the tokens are worth that come without drafts
    """
    scale = BINS / -math.log(LOWEST_SURVIVAL)
    k_max = acceptance.shape[1]
    for i in range(len(decoding)):
        if not decoding[i]:
            continue
        survival = worths[i]
        for j in range(k_max):
            survival *= acceptance[i, j]
            cell = 1 + int(max(min(math.log(max(survival, 1e-9)) * -scale, BINS - 1.0), 0.0))
            table[0, cell, j + 1] += 1.0
            table[1, cell, j + 1] += survival
    for cell in range(BINS + 1):
        drafted = tokens = 0.0
        for j in range(k_max + 1):
            if cell > 0 and j > 0:
                for plane in range(2):  # sums over the thresholds, kept in the other planes for the next of them
                    table[2 + plane, cell, j] = table[2 + plane, cell - 1, j] + table[plane, cell, j] * delivery[j - 1]
                drafted += table[2, cell, j]
                tokens += table[3, cell, j]
            table[0, cell, j], table[1, cell, j] = drafted, tokens + base
    for cell in range(BINS + 1):
        for j in range(k_max + 1):
            table[2, cell, j], table[3, cell, j] = table[0, cell, j] + requests, j


@compiled
def place(
    acceptance: Floats, decoding: Bools, worths: Floats, mean: Floats, least: float, depth: int, lengths: Ints
) -> int:
    """Fill in (n,) lengths; return the default."""
    depth = min(depth, len(mean))
    survival, default = 1.0, 0
    for i in range(len(worths)):
        survival = min(survival, worths[i])  # a newcomer is worth as much as who is worth least
    while default < depth and survival * mean[default] > least:
        survival *= mean[default]
        default += 1
    for i in range(len(lengths)):
        lengths[i] = default
        if decoding[i]:
            survival, length = worths[i], 0
            while length < depth and survival * acceptance[i, length] > least:
                survival *= acceptance[i, length]
                length += 1
            lengths[i] = length
    return default
