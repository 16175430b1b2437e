"""What drafting costs, learned online: rounds, rows and tokens to seconds, in units of an empty step.

Called by env/cost_table.py. The first run of anything is slow (lazy allocation, cold caches), by ten times at worst,
and deep drafts are tried so rarely that a mean would never forget it. So evidence is kept in cells by rounds and batch
size, each the median of its last few steps (of those with few rows, and of those with many), and the coefficients are
fitted to the cells.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

PRIOR = np.array([0.02, 0.0006, 0.05, 0.0006, 0.05, 0.005])  # guesses, see `features`
PRIOR_WEIGHT = 0.0003  # what the guesses count for, in cells
CELL_STEPS = 31  # a cell holds so many, and counts fully with so many
SPLIT_STEPS, SPLIT_ROWS = 12, 4  # a cell with so many steps, that far apart in rows, tells what a row costs
NEW_STEPS = 5  # the first steps of a cell, each of which is fitted at once
FLOOR = 0.05  # relative errors count, those far below this do not
FADE_RECORDS = 8000.0  # a cell not visited is doubted again
LOCALITY = 0.6  # weight of cells of half or twice the batch size in the fit
NEAR_BATCH, NEAR_ROUNDS = 0.5, 0.1  # what evidence from half the batch, or from a round more or less, tells
MISSED_STEPS = 15  # the cost of a missed token is the median of so many steps
SLACK = 1e-9  # in the fit's optimality
LEAST_MISSED = 64  # tokens; of fewer the cost drowns in the step's own
SOLVE_ALWAYS, SOLVE_EVERY = 64, 16  # steps: each of the first, then every so many, and those of a new cell


@dataclass(slots=True)
class Cell:
    """The last steps of one number of rounds at one batch size."""

    rounds: int
    octave: int  # of the batch size
    # units, rows of the first pass, draft tokens
    steps: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=CELL_STEPS))
    count: float = 0.0
    last: int = 0  # step of the last visit

    def medians(self) -> list[tuple[float, float, float]]:
        """Return the median step of its half with few rows and of that with many; one for all where they are alike.

        Rounds and rows rise together from cell to cell: only within a cell is it seen what a row costs alone.
        """
        by_rows = sorted(self.steps, key=_rows_of)
        if len(by_rows) < SPLIT_STEPS or by_rows[-1][1] < by_rows[0][1] + SPLIT_ROWS:
            return [_median(by_rows)]
        half = len(by_rows) // 2
        return [_median(by_rows[:half]), _median(by_rows[half:])]


class DraftCost:
    """units = coefficients . features(rows, rounds, drafted), coefficients >= 0."""

    def __init__(self) -> None:
        self.steps = 0
        self._cells: dict[tuple[int, int], Cell] = {}
        self._coefficients: list[float] = PRIOR.tolist()
        self._missed: deque[float] = deque(maxlen=MISSED_STEPS)  # units per token made up for

    def units(self, rows: npt.ArrayLike, rounds: npt.ArrayLike, drafted: npt.ArrayLike) -> Floats:
        """Return the cost after a step of `rows`, for `rounds` rounds over `drafted` tokens in all; any one shape."""
        # Written out: stacking the features of a whole grid takes longer than the rest of a decision.
        once, always_per_row, any_round, per_row, per_round, per_token = self._coefficients
        deep, wide = np.asarray(rounds, np.float64), np.asarray(rows, np.float64)
        first = any_round + per_row * wide
        units: Floats = once + always_per_row * wide + first * (deep > 0.0) + per_round * np.maximum(deep - 1.0, 0.0)
        return units + per_token * np.asarray(drafted, np.float64)

    @property
    def per_missed(self) -> float:
        """Cost of a token that was skipped and is made up for; before any was, that of a row."""
        return sorted(self._missed)[(len(self._missed) - 1) // 2] if self._missed else self._coefficients[3]

    @property
    def per_round(self) -> float:
        """Cost of one more round."""
        return self._coefficients[-2]

    @property
    def per_token(self) -> float:
        """Cost of one more token."""
        return self._coefficients[-1]

    def doubt(self, rounds: Floats, requests: float) -> Floats:
        """Return 0 (measured) .. 1 (a guess) for each number of rounds, (m,), at one batch size."""
        evidence = np.zeros(len(rounds))
        octave = _octave(requests)
        for cell in self._cells.values():
            age = (self.steps - cell.last) / FADE_RECORDS
            seen = min(cell.count, 20.0) * NEAR_BATCH ** abs(cell.octave - octave) / (1.0 + age)
            evidence += seen * np.power(NEAR_ROUNDS, np.abs(rounds - cell.rounds))
        doubt: Floats = np.minimum(1.0, 1.5 / (evidence + 0.5))
        return doubt

    def learn(self, rows: int, requests: int, rounds: int, drafted: int, units: float) -> None:
        """Take in one step that cost `units`."""
        key = (rounds, _octave(requests))
        cell = self._cells.setdefault(key, Cell(*key))
        cell.steps.append((units, rows, drafted))
        cell.count += 1.0
        self.steps += 1
        cell.last = self.steps
        if self.steps < SOLVE_ALWAYS or cell.count <= NEW_STEPS or self.steps % SOLVE_EVERY == 0:
            self._fit(key[1])

    def learn_missed(self, rows: int, rounds: int, drafted: int, missed: int, units: float) -> None:
        """Take in a step in which the drafter made up for `missed` tokens beside its work."""
        if missed >= LEAST_MISSED:
            beside = float(self.units(rows, rounds, drafted))
            self._missed.append(max(units - beside, 0.0) / missed)

    def rescale(self, factor: float) -> None:
        """Express everything in a unit that is 1 / `factor` of the one so far."""
        self._coefficients = [value * factor for value in self._coefficients]
        self._missed = deque((units * factor for units in self._missed), maxlen=MISSED_STEPS)
        for cell in self._cells.values():
            for place, (units, rows, drafted) in enumerate(cell.steps):
                cell.steps[place] = (units * factor, rows, drafted)

    def _fit(self, octave: int) -> None:
        cells, medians, trusts = [], [], []
        for cell in self._cells.values():
            found = cell.medians()
            share = min(cell.count / CELL_STEPS, 1.0) * LOCALITY ** abs(cell.octave - octave) + 1e-4
            cells += [cell] * len(found)
            medians += found
            trusts += [share / len(found)] * len(found)
        target, trust = np.array([units for units, _, _ in medians]), np.array(trusts)
        weight = np.sqrt(trust) / (target + FLOOR)
        rounds, rows, drafted = (
            np.array(values, np.float64)
            for values in ([c.rounds for c in cells], [m[1] for m in medians], [m[2] for m in medians])
        )
        plain = features(rows, rounds, drafted)
        design = plain * weight[:, None]
        usual = np.maximum(plain.mean(axis=0), 1.0)  # a guess per row counts for what it makes of a step
        prior_weight = PRIOR_WEIGHT / np.square(PRIOR + FLOOR / usual)
        information = design.T @ design + np.diag(prior_weight)
        moment = design.T @ (target * weight) + prior_weight * PRIOR
        self._coefficients = _non_negative(information, moment).tolist()


def _non_negative(information: Floats, moment: Floats) -> Floats:
    """Return the x >= 0 that minimises x' information x / 2 - moment' x, by Murty's least-index pivots (1974).

    The last entry that is out of place changes sides, free or 0, until none is: it ends for positive definite matrices.
    """
    is_free, values = np.ones(len(moment), np.bool_), np.zeros(len(moment))
    for _ in range(1 << len(moment)):
        values = np.zeros(len(moment))
        free = np.flatnonzero(is_free)
        values[free] = np.linalg.solve(information[np.ix_(free, free)], moment[free])
        slope = moment - information @ values
        wrong = np.flatnonzero(np.where(is_free, values < 0.0, slope > SLACK))
        if not len(wrong):
            break
        is_free[wrong[-1]] ^= True
    return np.maximum(values, 0.0)


def features(rows: Floats, rounds: Floats, drafted: Floats) -> Floats:
    """Return (m, 6): 1, rows, any round, rows if any round, further rounds, draft tokens.

    Drafters that skip their first pass where nothing is drafted pay for rows only with a round, others always.
    """
    any_round = rounds > 0.0
    columns = (np.ones(len(rows)), rows, any_round, rows * any_round, np.maximum(rounds - 1.0, 0.0), drafted)
    return np.stack([np.asarray(column, np.float64) for column in columns], axis=1)


def _median(steps: list[tuple[float, int, int]]) -> tuple[float, float, float]:
    """Return the median cost, the lower of two, and the mean rows and tokens: what disturbs a step only slows it."""
    units, rows, drafted = zip(*steps, strict=True)
    return sorted(units)[(len(units) - 1) // 2], sum(rows) / len(rows), sum(drafted) / len(drafted)


def _rows_of(step: tuple[float, int, int]) -> int:
    return step[1]


def _octave(requests: float) -> int:
    return int(max(requests, 1.0)).bit_length()
