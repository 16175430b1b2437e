"""From measured steps to coefficients: cells, medians, held-out cells, non-negative least squares on relative error.

Called by env/calibration/profile_fit.py and tests. A cell is one kind of step, named by what really happened in
it; its value is the median of its repeats. Whole cells are held out, chosen by a hash of their name, and never
fitted.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from ...engine_adapter.arrays import Bools, Floats, Ints
from ...engine_adapter.errors import ModelError
from ..profile.engine_profile import PhaseModel, Range, Work
from ..profile.step_basis import BASES, Phase
from .step_samples import StepSamples

HELD_OUT_SHARE = 0.4
COUNTED_REPEATS = 7  # a cell of fewer may be fitted, but is no point to judge a model by
REWEIGHTINGS = 12  # towards the least sum of absolute relative errors, which outliers move little
LEAST_RESIDUAL = 0.02  # relative; below this a cell counts by squares
RESAMPLES = 40  # for the covariance of the coefficients
LEAST_CELLS: dict[Phase, int] = {"verify": 8, "draft": 8, "host": 2}


class CalibrationError(ModelError):
    """Measurements that no model can be fitted to; the message says what was seen and what was expected."""


@dataclass(frozen=True, slots=True)
class Cells:
    """m cells of one phase.

    :param basis: (m, terms) mean over the middle half of the cell's repeats
    :param measured_s: (m,) median of the repeats
    :param repeats: (m,) how many there are
    :param step_spread: (m,) relative standard deviation of one repeat, robust
    :param halves: (m,) relative difference of the medians of the earlier and the later half of the repeats
    :param held_out: (m,) never fitted
    :param counts: (m,) whether the cell counts in error figures: enough repeats, and for draft that anything is drafted
    """

    basis: Floats
    measured_s: Floats
    repeats: Ints
    step_spread: Floats
    halves: Floats
    held_out: Bools
    counts: Bools

    def __len__(self) -> int:
        return len(self.measured_s)


@dataclass(frozen=True, slots=True)
class Fit:
    """One phase's model and how well it does."""

    model: PhaseModel
    cells: Cells
    predicted_s: Floats  # (m,)

    def errors(self, held_out: bool = True) -> Floats:
        """Return |predicted / measured - 1| of the cells that count."""
        chosen = self.cells.counts & (self.cells.held_out == held_out)
        errors: Floats = np.abs(self.predicted_s / self.cells.measured_s - 1.0)[chosen]
        return errors

    def spread(self) -> float:
        """Return the real engine's own spread: half the difference of a cell's halves, median over held-out cells.

        Two medians of half the repeats each differ by twice what the median of all of them is off, on average.
        """
        chosen = self.cells.counts & self.cells.held_out & np.isfinite(self.cells.halves)
        return float(np.median(self.cells.halves[chosen])) / 2.0 if chosen.any() else float("nan")


def cells_of(samples: StepSamples, phase: Phase, least_repeats: int, held_out_share: float = HELD_OUT_SHARE,
             graph_sizes: tuple[int, ...] = ()) -> Cells:  # fmt: skip
    """Group steps into cells of at least so many repeats."""
    times = samples.times(phase)
    keys = _keys(samples, phase)
    groups: dict[tuple[int, ...], list[int]] = {}
    for index in np.flatnonzero(np.isfinite(times)).tolist():
        groups.setdefault(_name(phase, keys[index].tolist()), []).append(index)
    kept = {key: places for key, places in groups.items() if len(places) >= least_repeats}
    basis = samples.basis(phase, graph_sizes)
    rows, measured, repeats, spreads, halves, held, counts = [], [], [], [], [], [], []
    for key, places in kept.items():
        own = times[places]
        median = float(np.median(own))
        # Pauses scatter widely and what adds up over a run is their mean.
        value = median if phase != "host" else float(np.minimum(own, np.quantile(own, 0.95)).mean())
        # Work varies a little within a cell: the basis is that of the repeats around the median.
        order = np.argsort(own, kind="stable")
        middle = order[len(own) // 4 : len(own) - len(own) // 4]
        rows.append(basis[np.array(places)[middle]].mean(axis=0))
        measured.append(value)
        repeats.append(len(places))
        spreads.append(1.4826 * float(np.median(np.abs(own / median - 1.0))))
        half = len(own) // 2
        is_split = half >= 2
        halves.append(abs(float(np.median(own[:half]) / np.median(own[half:])) - 1.0) if is_split else np.nan)
        held.append(_share_of(phase, key) < held_out_share)
        counts.append(len(own) >= COUNTED_REPEATS and (phase != "draft" or key[0] > 0))
    if len(rows) < LEAST_CELLS[phase]:
        unknown = len(times) - sum(map(len, groups.values()))
        left_out = f" ({unknown} of {len(times)} steps left out: disturbed, or without this time)" if unknown else ""
        raise CalibrationError(
            f"{len(rows)} kinds of steps with at least {least_repeats} repeats to fit {phase} times to{left_out}; "
            f"expected {LEAST_CELLS[phase]} or more; measure longer{', or on a quieter machine' if unknown else ''}"
        )
    is_held = np.array(held) & (not all(held))  # of few kinds all may be: none would be left to fit
    return Cells(
        np.array(rows), np.array(measured), np.array(repeats), np.array(spreads), np.array(halves), is_held,
        np.array(counts),
    )  # fmt: skip


def fit_phase(samples: StepSamples, phase: Phase, least_repeats: int = 3, held_out_share: float = HELD_OUT_SHARE,
              graph_sizes: tuple[int, ...] = ()) -> Fit:  # fmt: skip
    """Fit one phase to the cells that are not held out."""
    cells = cells_of(samples, phase, least_repeats, held_out_share, graph_sizes)
    fitted = ~cells.held_out
    weight = np.sqrt(np.minimum(cells.repeats, 50) / 50.0)[fitted]
    coefficients = solve(cells.basis[fitted], cells.measured_s[fitted], weight)
    predicted = cells.basis @ coefficients
    model = PhaseModel(
        basis=BASES[phase],
        coefficients=tuple(coefficients.tolist()),
        noise=_noise(samples, phase, coefficients, graph_sizes),
        covariance=_covariance(cells, fitted, weight, coefficients),
        fitted_cells=int(fitted.sum()),
    )
    fit = Fit(model, cells, predicted)
    errors = fit.errors()
    if len(errors):
        model = PhaseModel(
            model.basis, model.coefficients, model.noise, model.covariance,
            held_out_median=float(np.median(errors)), held_out_p90=float(np.percentile(errors, 90)),
            held_out_cells=len(errors), fitted_cells=model.fitted_cells,
        )  # fmt: skip
    return Fit(model, cells, predicted)


def solve(basis: Floats, measured_s: Floats, weight: Floats | None = None) -> Floats:
    """Return (terms,) coefficients >= 0 that keep the relative errors small, in absolute value and on average."""
    weight = np.ones(len(measured_s)) if weight is None else weight
    relative = basis / measured_s[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    current = weight.copy()
    coefficients = np.zeros(basis.shape[1])
    for _ in range(REWEIGHTINGS):
        found, _ = nnls(relative / scale * current[:, None], current, maxiter=30 * basis.shape[1])
        coefficients = found / scale
        residual = np.abs(relative @ coefficients - 1.0)
        current = weight / np.sqrt(np.maximum(residual, LEAST_RESIDUAL))
    return coefficients


def phase_level(samples: StepSamples, phase: Phase, coefficients: Floats, graph_sizes: tuple[int, ...] = ()) -> float:
    """Return measured over predicted time, in all; 1 where nothing was measured or predicted."""
    times = samples.times(phase)
    known = np.isfinite(times)
    predicted = float((samples.basis(phase, graph_sizes)[known] @ coefficients).sum())
    return float(times[known].sum()) / predicted if known.any() and predicted > 0.0 else 1.0


def domain_of(samples: StepSamples) -> dict[str, Range]:
    """Return the measured range of each quantity of Work.quantities."""
    values = {
        "requests": samples.requests,
        "rows": samples.decode_rows + samples.prompt_tokens,
        "prompt_tokens": samples.prompt_tokens,
        "kv_tokens": samples.kv_tokens,
        "draft_tokens": samples.draft_tokens,
        "rounds": samples.rounds,
        "draft_rows": samples.draft_rows,
        "first_rows": samples.first_rows,
    }
    assert set(values) == set(Work(1, 1).quantities())
    return {name: Range(float(found.min()), float(found.max())) for name, found in values.items()}


def fitted_kinds(samples: StepSamples, held_out_share: float = HELD_OUT_SHARE) -> Ints:
    """Return (n,) the number of each step's verify cell, -1 where the cell is held out."""
    keys, kind = np.unique(_keys(samples, "verify"), axis=0, return_inverse=True)
    is_held_out = np.array([_share_of("verify", _name("verify", key)) < held_out_share for key in keys.tolist()])
    kinds: Ints = np.where(is_held_out[kind], -1, kind)
    return kinds


def _name(phase: Phase, key: list[int]) -> tuple[int, ...]:
    """Return a cell's name; without pruning as before there was any, so that the same cells are held out."""
    return tuple(key[:-2] if phase == "verify" and key[-2:] == [0, 0] else key)


def _keys(samples: StepSamples, phase: Phase) -> Ints:
    """Return (n, parts) whole numbers that name each step's cell."""
    if phase == "verify":
        parts = [
            samples.requests, samples.decode_rows, samples.draft_tokens, samples.prompts,
            _octave(samples.prompt_tokens, 4), _octave(samples.kv_tokens, 2), samples.pruned_rows, samples.saved_rows,
        ]  # fmt: skip
    elif phase == "draft":
        is_few = samples.first_rows < 8.0  # these differ by what was accepted; more are prompts and catching up
        few = np.where(is_few, _octave(samples.first_rows, 1), 0.0)
        many = np.where(is_few, 0.0, _octave(samples.first_rows, 3))
        parts = [
            samples.drafting_requests, samples.rounds, samples.draft_rows, few, many,
            _octave(samples.draft_attended_tokens, 1), np.where(many + few > 0.0, 0.0, _octave(samples.kept_rows, 2)),
        ]  # fmt: skip
    else:
        parts = [samples.requests, samples.arrivals]
    return np.stack([np.rint(part).astype(np.int64) for part in parts], axis=1)


def _octave(values: Floats, parts: int) -> Floats:
    """Return 0 for 0 and else a whole number that grows by `parts` per doubling."""
    return np.where(values > 0, 1.0 + np.floor(parts * np.log2(np.maximum(values, 1.0))), 0.0)


def _share_of(phase: Phase, key: tuple[int, ...]) -> float:
    digest = hashlib.blake2b(repr((phase, key)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") / (1 << 32)


def _noise(samples: StepSamples, phase: Phase, coefficients: Floats, graph_sizes: tuple[int, ...]) -> float:
    """Return the standard deviation of the log of single steps around their prediction, without outliers."""
    times = samples.times(phase)
    known = np.isfinite(times)
    predicted = samples.basis(phase, graph_sizes)[known] @ coefficients
    ratio = np.log(times[known] / np.maximum(predicted, 1e-12))
    return float(1.4826 * np.median(np.abs(ratio - np.median(ratio))))


def _covariance(cells: Cells, fitted: Bools, weight: Floats, coefficients: Floats) -> tuple[tuple[float, ...], ...]:
    """Return the coefficients' relative covariance over refits on resampled cells."""
    basis, measured = cells.basis[fitted], cells.measured_s[fitted]
    chance = np.random.default_rng(0)
    refits = []
    for _ in range(RESAMPLES):
        chosen = chance.integers(len(measured), size=len(measured))
        refits.append(solve(basis[chosen], measured[chosen], weight[chosen]))
    spread = np.cov(np.array(refits).T)
    safe = np.where(coefficients > 0.0, coefficients, np.inf)
    relative = np.atleast_2d(spread / safe[:, None] / safe[None, :])
    return tuple(tuple(float(value) for value in row) for row in relative)
