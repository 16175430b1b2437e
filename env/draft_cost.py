"""What drafting costs, learned online: rounds, rows and tokens to seconds, in units of an empty step.

Called by env/cost_table.py. The first run of anything is slow (lazy allocation, cold caches), by ten times at worst,
and deep drafts are tried so rarely that a mean would never forget it. So evidence is kept in cells by rounds and batch
size, each the median of its last few steps, and the coefficients are fitted to the cells.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

PRIOR = np.array([0.02, 0.0006, 0.05, 0.0006, 0.05, 0.005])  # guesses, see `features`
PRIOR_WEIGHT = 0.003  # what the guesses count for, in cells
CELL_STEPS = 31  # a cell is the median of so many
FULL_STEPS = 5  # steps after which a cell counts fully
FLOOR = 0.05  # relative errors count, those far below this do not
FADE_RECORDS = 8000.0  # a cell not visited is doubted again
LOCALITY = 0.6  # weight of cells of half or twice the batch size in the fit
NEAR_BATCH, NEAR_ROUNDS = 0.5, 0.1  # what evidence from half the batch, or from a round more or less, tells
MISSED_STEPS = 15  # the cost of a missed token is the median of so many steps
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

    def median(self) -> tuple[float, int, int]:
        """Return the step in the middle, the lower of two: what disturbs a step only ever slows it."""
        return sorted(self.steps)[(len(self.steps) - 1) // 2]


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
        if self.steps < SOLVE_ALWAYS or cell.count <= FULL_STEPS or self.steps % SOLVE_EVERY == 0:
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
        cells = list(self._cells.values())
        medians = [cell.median() for cell in cells]
        target = np.array([units for units, _, _ in medians])
        trust = np.array(
            [min(cell.count / FULL_STEPS, 1.0) * LOCALITY ** abs(cell.octave - octave) + 1e-4 for cell in cells]
        )
        weight = np.sqrt(trust) / (target + FLOOR)
        rounds, rows, drafted = (
            np.array(values, np.float64)
            for values in ([c.rounds for c in cells], [m[1] for m in medians], [m[2] for m in medians])
        )
        design = features(rows, rounds, drafted) * weight[:, None]
        prior_weight = PRIOR_WEIGHT / np.square(PRIOR + FLOOR)
        information = design.T @ design + np.diag(prior_weight)
        moment = design.T @ (target * weight) + prior_weight * PRIOR
        self._coefficients = _non_negative(information, moment).tolist()


def _non_negative(information: Floats, moment: Floats) -> Floats:
    """Return x >= 0 with information x = moment where x > 0, dropping the most negative entry until none is left."""
    kept = np.arange(len(moment))
    while True:
        solution = np.linalg.solve(information[np.ix_(kept, kept)], moment[kept])
        if (solution >= 0.0).all():
            values = np.zeros(len(moment))
            values[kept] = solution
            return values
        kept = np.delete(kept, int(solution.argmin()))


def features(rows: Floats, rounds: Floats, drafted: Floats) -> Floats:
    """Return (m, 6): 1, rows, any round, rows if any round, further rounds, draft tokens.

    Drafters that skip their first pass where nothing is drafted pay for rows only with a round, others always.
    """
    any_round = rounds > 0.0
    columns = (np.ones(len(rows)), rows, any_round, rows * any_round, np.maximum(rounds - 1.0, 0.0), drafted)
    return np.stack([np.asarray(column, np.float64) for column in columns], axis=1)


def _octave(requests: float) -> int:
    return int(max(requests, 1.0)).bit_length()
