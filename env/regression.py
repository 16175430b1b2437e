"""Non-negative least squares that learns online, for the handful of coefficients of a cost model.

Called by env/cost_table.py. Evidence is kept in groups that forget separately, so that a long time without
drafting does not wash out what was learned while drafting. Robust: surprises are clipped at their usual size.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

PRIOR_WEIGHT = 0.02  # what the first guess counts for, in observations at scale 1
SWEEPS = 3  # of coordinate descent per observation, from where the last one ended
SOLVE_ALWAYS, SOLVE_EVERY = 64, 4  # observations: each of the first, then every so many
NOISE_STEPS = 100.0  # observations that average noise out; older ones may be out of date
FREE_STEPS = 6  # observations before surprises are clipped


class Regression:
    """y = coefficients . (x / scale), coefficients >= 0; `prior` (p,) is the guess per scaled feature."""

    def __init__(self, prior: Floats, scale: Floats, groups: int, memory_steps: float) -> None:
        self.steps = np.zeros(groups, np.int64)
        self._coefficients: list[float] = prior.tolist()
        self._scale = scale
        self._scales: list[float] = scale.tolist()
        self._keep = 1.0 - 1.0 / memory_steps
        self._prior_moment = PRIOR_WEIGHT * prior
        self._prior_information = PRIOR_WEIGHT * np.eye(len(prior))
        self._information = np.zeros((groups, len(prior), len(prior)))
        self._moment = np.zeros((groups, len(prior)))
        self._spread = 1.0  # usual relative surprise

    @property
    def coefficients(self) -> Floats:
        """(p,) per scaled feature."""
        return np.array(self._coefficients)

    @property
    def per_unit(self) -> list[float]:
        """Coefficients per raw feature."""
        return [value / scale for value, scale in zip(self._coefficients, self._scales, strict=True)]

    def predict(self, features: Floats) -> Floats:
        """Return the predictions, (...), for raw features (..., p)."""
        prediction: Floats = (features / self._scale) @ self.coefficients
        return prediction

    def uncertainty(self, features: Floats) -> Floats:
        """Return the relative uncertainty, 0 (measured) to 1 (a guess), for raw features (..., p)."""
        scaled = features / self._scale
        information = self._information.sum(axis=0) + self._prior_information
        leverage = np.einsum("...i,ij,...j->...", scaled, np.linalg.inv(information), scaled)
        guess = np.einsum("...i,...i->...", scaled, scaled) / PRIOR_WEIGHT
        share = np.sqrt(np.clip(leverage / np.maximum(guess, 1e-12), 0.0, 1.0))
        noise = self._spread / math.sqrt(1.0 + min(float(self.steps[-1]), NOISE_STEPS))
        doubt: Floats = np.maximum(share, noise)
        return doubt

    def learn(self, features: Floats, target: float, group: int) -> None:
        """Take in one observation of raw features (p,), as evidence of `group`."""
        x = features / self._scale
        expected = float(x @ self.coefficients)
        unit = 1.0 / (expected + 0.05)  # relative errors count, tiny absolute ones do not
        surprise = (target - expected) * unit
        if self.steps[group] >= FREE_STEPS:
            limit = 3.0 * self._spread + 0.02
            target = expected + min(max(surprise, -limit), limit) / unit
        self._spread += 0.05 * (min(abs(surprise), 1.0) - self._spread)
        weighted = x * unit
        self._information[group] *= self._keep
        self._information[group] += np.outer(weighted, weighted)
        self._moment[group] = self._moment[group] * self._keep + weighted * (target * unit)
        self.steps[group] += 1
        seen = int(self.steps.sum())
        if seen < SOLVE_ALWAYS or seen % SOLVE_EVERY == 0:
            self._solve()

    def _solve(self) -> None:
        """Coordinate descent on the non-negative quadratic; plain floats are faster than numpy at this size."""
        information = (self._information.sum(axis=0) + self._prior_information).tolist()
        moment = (self._moment.sum(axis=0) + self._prior_moment).tolist()
        values = self._coefficients
        for _ in range(SWEEPS):
            for i, row in enumerate(information):
                rest = sum(a * v for a, v in zip(row, values, strict=True)) - row[i] * values[i]
                values[i] = max((moment[i] - rest) / row[i], 0.0)
