"""What drafting costs, learned online: rounds, rows and tokens to seconds, in units of an empty step.

Called by env/cost/cost_table.py. The first run of anything is slow (lazy allocation, cold caches), by ten times
at worst, and deep drafts are tried so rarely that a mean would never forget it. So evidence is kept in cells by
rounds and batch size, each the median of its last few steps (of those with few rows, and of those with many), and the
coefficients are fitted to the cells.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from ...engine_adapter.arrays import Floats, Ints
from ...engine_adapter.compiled import compiled

PRIOR = np.array([0.02, 0.0006, 0.05, 0.0006, 0.05, 0.005])  # guesses, see `features`
PRIOR_WEIGHT = 0.0003  # what the guesses count for, in cells
CELL_STEPS = 31  # a cell holds so many, and counts fully with so many
SPLIT_STEPS, SPLIT_ROWS = 12, 4  # a cell with so many steps, that far apart in rows, tells what a row costs
NEW_STEPS = 5  # the first steps of a cell, each of which is fitted at once
FLOOR = 0.05  # relative errors count, those far below this do not
FADE_RECORDS = 8000.0  # a cell not visited is doubted again
LOCALITY = 0.6  # weight of cells of half or twice the batch size in the fit
LEAST_CELL = 1e-4  # what the farthest cell still counts for
EVIDENT_STEPS = 20.0  # a cell with so many steps is no surer with more
NEAR_BATCH, NEAR_ROUNDS = 0.5, 0.1  # what evidence from half the batch, or from a round more or less, tells
READ_STEPS = 15  # the cost of a row that is read is the median of so many steps
SLACK = 1e-9  # in the fit's optimality
LEAST_READ = 64  # rows; of fewer the cost drowns in the step's own
SOLVE_ALWAYS, SOLVE_EVERY = 64, 16  # steps: each of the first, then every so many, and those of a new cell
FIRST_CELLS = 16  # room for so many, doubled when it is taken

# Columns of a cell: number of rounds, octave of the batch size, steps seen, the last of them, and how many medians
# (0: not computed since then); then one or two medians, each with the columns of a step.
ROUNDS, OCTAVE, COUNT, LAST, HALVES, MEDIANS = range(6)
CELL_COLUMNS = MEDIANS + 6
UNITS, ROWS, TOKENS = range(3)  # columns of a step: what it cost, rows of the first pass, draft tokens


class DraftCost:
    """units = coefficients . features(rows, rounds, drafted), coefficients >= 0."""

    def __init__(self) -> None:
        self.steps = 0
        self._places: dict[tuple[int, int], int] = {}  # of cells, by rounds and octave
        self._cells = np.zeros((FIRST_CELLS, CELL_COLUMNS))
        self._last_steps = np.zeros((FIRST_CELLS, CELL_STEPS, 3))  # a ring per cell
        self._coefficients = PRIOR.copy()
        self._read: deque[float] = deque(maxlen=READ_STEPS)  # units per row read beside the drafting
        self._idly_read: deque[float] = deque(maxlen=READ_STEPS)  # units per prompt row where nothing is drafted

    def units(self, rows: npt.ArrayLike, rounds: npt.ArrayLike, drafted: npt.ArrayLike) -> Floats:
        """Return the cost after a step of `rows`, for `rounds` rounds over `drafted` tokens in all; any one shape."""
        units = np.array(drafted, np.float64, order="C")
        wide, deep = np.asarray(rows, np.float64), np.asarray(rounds, np.float64)
        shape = units.shape
        if not (shape[units.ndim - wide.ndim :] == wide.shape and shape[units.ndim - deep.ndim :] == deep.shape):
            shape = np.broadcast_shapes(wide.shape, deep.shape, shape)
            wide, deep, units = (np.array(np.broadcast_to(part, shape), order="C") for part in (wide, deep, units))
        _price(self._coefficients, wide.reshape(-1), deep.reshape(-1), units.reshape(-1))
        return units

    @property
    def per_read(self) -> float:
        """Cost of a row that is read to draft behind it, skipped or of a prompt; before any was, that of a row."""
        return _lower_median(self._read) if self._read else float(self._coefficients[3])

    @property
    def per_idly_read(self) -> float:
        """Cost of a prompt row where nothing is drafted: 0 for drafters that skip it then."""
        return _lower_median(self._idly_read) if self._idly_read else 0.0

    @property
    def per_round(self) -> float:
        """Cost of one more round."""
        return float(self._coefficients[-2])

    @property
    def per_token(self) -> float:
        """Cost of one more token."""
        return float(self._coefficients[-1])

    def doubt(self, rounds: Floats, requests: float) -> Floats:
        """Return 0 (measured) .. 1 (a guess) for each number of rounds, (m,), at one batch size."""
        doubt = np.array(rounds, np.float64)
        _doubt(self._cells, len(self._places), float(self.steps), float(_octave(requests)), doubt)
        return doubt

    def learn(self, rows: int, requests: int, rounds: int, drafted: int, units: float) -> None:
        """Take in one step that cost `units`."""
        place = self._places.get((rounds, octave := _octave(requests)))
        if place is None:
            place = self._new_cell(rounds, octave)
        self.steps += 1
        _learn(
            self._cells, self._last_steps, self._coefficients, place, len(self._places), self.steps, units,
            float(rows), float(drafted),
        )  # fmt: skip

    def learn_reading(self, rows: int, rounds: int, drafted: int, read: int, units: float) -> None:
        """Take in a step in which the drafter read `read` rows, of prompts or skipped before, beside its work."""
        if read >= LEAST_READ:
            beside = float(self.units(rows, rounds, drafted))
            self._read.append(max(units - beside, 0.0) / read)

    def learn_idle_reading(self, prompt_rows: int, units: float) -> None:
        """Take in a step of `prompt_rows` in which nothing was drafted."""
        if prompt_rows >= LEAST_READ:
            self._idly_read.append(units / prompt_rows)

    def rescale(self, factor: float) -> None:
        """Express everything in a unit that is 1 / `factor` of the one so far."""
        self._coefficients *= factor
        self._read = deque((units * factor for units in self._read), maxlen=READ_STEPS)
        self._idly_read = deque((units * factor for units in self._idly_read), maxlen=READ_STEPS)
        self._last_steps[:, :, UNITS] *= factor
        self._cells[:, MEDIANS + UNITS :: 3] *= factor

    def _new_cell(self, rounds: int, octave: int) -> int:
        place = len(self._places)
        if place == len(self._cells):
            self._cells = np.concatenate([self._cells, np.zeros_like(self._cells)])
            self._last_steps = np.concatenate([self._last_steps, np.zeros_like(self._last_steps)])
        self._places[rounds, octave] = place
        self._cells[place, ROUNDS], self._cells[place, OCTAVE] = rounds, octave
        return place


def _lower_median(units: deque[float]) -> float:
    return sorted(units)[(len(units) - 1) // 2]


def _octave(requests: float) -> int:
    return int(max(requests, 1.0)).bit_length()


@compiled
def _price(coefficients: Floats, rows: Floats, rounds: Floats, units: Floats) -> None:
    """Turn draft tokens, (m,), into units in place; rows and rounds begin again where they are shorter."""
    once, always_per_row, any_round, per_row, per_round, per_token = coefficients
    row = deep = 0
    for i in range(len(units)):
        first = any_round + per_row * rows[row] if rounds[deep] > 0.0 else 0.0
        further = per_round * max(rounds[deep] - 1.0, 0.0)
        units[i] = once + always_per_row * rows[row] + first + further + per_token * units[i]
        row = row + 1 if row + 1 < len(rows) else 0
        deep = deep + 1 if deep + 1 < len(rounds) else 0


@compiled
def _doubt(cells: Floats, used: int, steps: float, octave: float, rounds: Floats) -> None:
    """Turn numbers of rounds, (m,), into doubts in place."""
    for i in range(len(rounds)):
        evidence = 0.0
        for cell in cells[:used]:
            seen = min(cell[COUNT], EVIDENT_STEPS) * NEAR_BATCH ** abs(cell[OCTAVE] - octave)
            age = (steps - cell[LAST]) / FADE_RECORDS
            evidence += seen / (1.0 + age) * NEAR_ROUNDS ** abs(rounds[i] - cell[ROUNDS])
        rounds[i] = min(1.0, 1.5 / (evidence + 0.5))


@compiled
def _learn(
    cells: Floats, last_steps: Floats, coefficients: Floats, place: int, used: int, number: int, units: float,
    rows: float, drafted: float,
) -> None:  # fmt: skip
    """Put a step, the `number`-th, into the cell at `place`; fit the coefficients if it is time."""
    cell = cells[place]
    step = last_steps[place, int(cell[COUNT]) % CELL_STEPS]
    step[UNITS], step[ROWS], step[TOKENS] = units, rows, drafted
    cell[COUNT] += 1.0
    cell[LAST], cell[HALVES] = number, 0.0
    if number < SOLVE_ALWAYS or cell[COUNT] <= NEW_STEPS or number % SOLVE_EVERY == 0:
        _fit(cells[:used], last_steps, coefficients, cell[OCTAVE])


@compiled
def _fit(cells: Floats, last_steps: Floats, coefficients: Floats, octave: float) -> None:
    """Fit the coefficients to the medians of all cells, most of all to those of this batch size."""
    size = len(PRIOR)
    information, moment, total, plain = np.zeros((size, size)), np.zeros(size), np.zeros(size), np.zeros(size)
    many = 0.0
    for place in range(len(cells)):
        cell = cells[place]
        if cell[HALVES] == 0.0:
            _find_medians(cell, last_steps[place])
        share = min(cell[COUNT] / CELL_STEPS, 1.0) * LOCALITY ** abs(cell[OCTAVE] - octave) + LEAST_CELL
        for half in range(int(cell[HALVES])):
            median = cell[MEDIANS + 3 * half : MEDIANS + 3 * half + 3]
            features(median[ROWS], cell[ROUNDS], median[TOKENS], plain)
            weight = share / cell[HALVES] / (median[UNITS] + FLOOR) ** 2
            many += 1.0
            for i in range(size):
                total[i] += plain[i]
                moment[i] += weight * plain[i] * median[UNITS]
                for j in range(size):
                    information[i, j] += weight * plain[i] * plain[j]
    for i in range(size):
        usual = max(total[i] / many, 1.0)  # a guess per row counts for what it makes of a step
        prior_weight = PRIOR_WEIGHT / (PRIOR[i] + FLOOR / usual) ** 2
        information[i, i] += prior_weight
        moment[i] += prior_weight * PRIOR[i]
    coefficients[:] = _non_negative(information, moment)


@compiled
def _find_medians(cell: Floats, ring: Floats) -> None:
    """Find the median step of the half with few rows and of that with many; one for all where they are alike.

    Rounds and rows rise together from cell to cell: only within a cell is it seen what a row costs alone.
    """
    count = int(cell[COUNT])
    size, oldest = min(count, CELL_STEPS), max(count - CELL_STEPS, 0)
    order = np.empty(size, np.int64)
    for i in range(size):
        order[i] = (oldest + i) % CELL_STEPS
    _sort(order, ring, ROWS)
    is_split = size >= SPLIT_STEPS and ring[order[size - 1], ROWS] >= ring[order[0], ROWS] + SPLIT_ROWS
    half = size // 2 if is_split else size
    _find_median(order[:half], ring, cell[MEDIANS : MEDIANS + 3])
    if is_split:
        _find_median(order[half:], ring, cell[MEDIANS + 3 : MEDIANS + 6])
    cell[HALVES] = 2.0 if is_split else 1.0


@compiled
def _find_median(steps: Ints, ring: Floats, median: Floats) -> None:
    """Find the median cost, the lower of two, and the mean rows and tokens: what disturbs a step only slows it."""
    median[ROWS] = median[TOKENS] = 0.0
    for step in steps:
        median[ROWS] += ring[step, ROWS] / len(steps)
        median[TOKENS] += ring[step, TOKENS] / len(steps)
    _sort(steps, ring, UNITS)
    median[UNITS] = ring[steps[(len(steps) - 1) // 2], UNITS]


@compiled
def _sort(steps: Ints, ring: Floats, column: int) -> None:
    """Sort a few steps by one of their columns, by insertion: those alike stay in their order."""
    for i in range(1, len(steps)):
        step, place = steps[i], i
        while place > 0 and ring[steps[place - 1], column] > ring[step, column]:
            steps[place] = steps[place - 1]
            place -= 1
        steps[place] = step


@compiled
def _non_negative(information: Floats, moment: Floats) -> Floats:
    """Return the x >= 0 that minimises x' information x / 2 - moment' x, by Murty's least-index pivots (1974).

    The last entry that is out of place changes sides, free or 0, until none is: it ends for positive definite matrices.
    """
    size = len(moment)
    is_free, values = np.ones(size, np.bool_), np.zeros(size)
    for _ in range(1 << size):
        values = _solve(information, moment, np.flatnonzero(is_free))
        wrong = -1
        for i in range(size):
            slope = moment[i]
            for j in range(size):
                slope -= information[i, j] * values[j]
            if (values[i] < 0.0) if is_free[i] else (slope > SLACK):
                wrong = i
        if wrong < 0:
            break
        is_free[wrong] = not is_free[wrong]
    return np.maximum(values, 0.0)


@compiled
def _solve(information: Floats, moment: Floats, free: Ints) -> Floats:
    """Return the solution in the entries that are free, with 0 elsewhere: Gaussian elimination, positive definite."""
    size = len(free)
    rows = np.empty((size, size + 1))
    for i in range(size):
        for j in range(size):
            rows[i, j] = information[free[i], free[j]]
        rows[i, size] = moment[free[i]]
    for i in range(size):
        for k in range(i + 1, size):
            factor = rows[k, i] / rows[i, i]
            for j in range(i, size + 1):
                rows[k, j] -= factor * rows[i, j]
    values = np.zeros(len(moment))
    for i in range(size - 1, -1, -1):
        rest = rows[i, size]
        for j in range(i + 1, size):
            rest -= rows[i, j] * values[free[j]]
        values[free[i]] = rest / rows[i, i]
    return values


@compiled
def features(rows: float, rounds: float, drafted: float, into: Floats) -> None:
    """Fill in (6,): 1, rows, any round, rows if any round, further rounds, draft tokens.

    Drafters that skip their first pass where nothing is drafted pay for rows only with a round, others always.
    """
    any_round = 1.0 if rounds > 0.0 else 0.0
    into[0], into[1], into[2], into[3] = 1.0, rows, any_round, rows * any_round
    into[4], into[5] = max(rounds - 1.0, 0.0), drafted
