"""Calibration: known coefficients are found again from noisy steps, and what cannot be fitted is refused."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest

from faser.env.calibration.step_fit import CalibrationError, cells_of, domain_of, fit_phase, solve
from faser.env.calibration.step_samples import StepSamples
from faser.env.profile.engine_profile import Range
from faser.env.profile.step_basis import DRAFT_BASIS, HOST_BASIS, VERIFY_BASIS, Phase

VERIFY = {"step": 0.02, "requests": 1e-4, "rows 0..2": 4e-4, "rows 16..32": 5e-4, "rows 32..64": 6e-4,
          "sampled rows": 2e-4, "any drafts": 1e-3, "KV tokens": 2e-7}  # fmt: skip
DRAFT = {"step": 5e-4, "first pass": 3e-3, "first rows 0..4": 2e-4, "first rows 4..16": 2e-4, "further rounds": 2e-3,
         "drafting requests": 1e-4}  # fmt: skip


def coefficients(basis: tuple[str, ...], known: dict[str, float]) -> np.ndarray:
    assert set(known) <= set(basis)
    return np.array([known.get(name, 0.0) for name in basis])


def make_steps(repeats: int = 9, noise: float = 0.01, seed: int = 0) -> StepSamples:
    """Return steps of a grid over requests, lengths and contexts, with times from VERIFY and DRAFT."""
    rows = []
    for requests in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
        for length in (0, 1, 2, 4):
            for context in (64, 600):
                tokens = requests * context
                drafts = requests * length
                rows.append((
                    requests, requests + drafts, drafts, 0, 0, requests + drafts, tokens, (requests + drafts) * context,
                    0, requests * (length > 0), length, drafts, 2 * requests * (length > 0), 0, drafts * context, 0,
                ))  # fmt: skip
    grid = np.array(rows * repeats, np.float64)
    names = [item.name for item in fields(StepSamples)]
    zero = np.zeros(len(grid))
    steps = StepSamples(**dict(zip(names, [*grid.T, zero, zero, zero, zero, zero, zero], strict=True)))
    chance = np.random.default_rng(seed)
    verify_s = steps.basis("verify") @ coefficients(VERIFY_BASIS, VERIFY)
    draft_s = steps.basis("draft") @ coefficients(DRAFT_BASIS, DRAFT)
    host_s = np.full(len(grid), 1e-3)
    scatter = np.exp(noise * chance.standard_normal((3, len(grid))))
    return replace(steps, verify_s=verify_s * scatter[0], draft_s=draft_s * scatter[1], host_s=host_s * scatter[2])


@pytest.mark.parametrize("phase", ["verify", "draft"])
def test_held_out_cells_are_predicted_within_the_noise(phase: Phase) -> None:
    fit = fit_phase(make_steps(), phase)
    errors = fit.errors()
    assert len(errors) >= 12
    assert np.median(errors) < 0.01
    assert np.percentile(errors, 90) < 0.03
    assert 0.007 < fit.model.noise < 0.02


def test_coefficients_are_not_negative_and_near_the_known_ones_where_only_they_explain_the_times() -> None:
    fit = fit_phase(make_steps(noise=1e-6), "verify")
    found = dict(zip(VERIFY_BASIS, fit.model.coefficients, strict=True))
    assert min(found.values()) >= 0.0
    assert found["any drafts"] == pytest.approx(VERIFY["any drafts"], rel=0.1)
    assert found["KV tokens"] == pytest.approx(VERIFY["KV tokens"], rel=0.1)


def test_a_cell_is_the_median_of_its_repeats_so_that_a_stalled_step_does_not_count() -> None:
    steps = make_steps(noise=0.0)
    stalled = steps.verify_s.copy()
    stalled[:80] *= 50.0  # the first of nine repeats of every cell
    np.testing.assert_allclose(
        cells_of(replace(steps, verify_s=stalled), "verify", 7).measured_s, cells_of(steps, "verify", 7).measured_s
    )


def test_no_held_out_cell_influences_the_fit() -> None:
    steps = make_steps()
    fit = fit_phase(steps, "verify")
    cells = fit.cells
    again = solve(
        cells.basis[~cells.held_out], cells.measured_s[~cells.held_out],
        np.sqrt(np.minimum(cells.repeats, 50) / 50.0)[~cells.held_out],
    )  # fmt: skip
    np.testing.assert_allclose(again, fit.model.coefficients)
    assert 0.25 < cells.held_out.mean() < 0.55


def test_outliers_among_the_cells_move_the_fit_little() -> None:
    basis = np.stack([np.ones(60), np.arange(60.0)], axis=1)
    measured = basis @ [0.02, 0.001]
    measured[::10] *= 3.0
    np.testing.assert_allclose(solve(basis, measured), [0.02, 0.001], rtol=0.03)


def test_steps_without_a_known_time_are_left_out_and_too_few_cells_are_refused() -> None:
    steps = make_steps()
    few = replace(steps, verify_s=np.where(steps.requests == 1, steps.verify_s, math.nan))
    assert len(cells_of(few, "verify", 7)) == 8
    with pytest.raises(CalibrationError, match=r"0 kinds .* 1000 repeats to fit verify times to; .* longer$"):
        fit_phase(steps, "verify", least_repeats=1000)
    unknown = np.isnan(few.verify_s).sum()
    with pytest.raises(
        CalibrationError, match=rf"\({unknown} of {len(few)} steps left out: .* or on a quieter machine$"
    ):
        fit_phase(few, "verify", least_repeats=1000)


def test_few_kinds_are_fitted_though_all_of_them_would_be_held_out() -> None:
    steps = make_steps()
    few = steps.where(np.isin(steps.requests, (1, 2)) & (steps.arrivals == 0))
    few = replace(few, host_s=np.full(len(few), 1e-3))
    assert len(cells_of(few, "host", 1)) == 2
    fit = fit_phase(few, "host")
    assert not fit.cells.held_out.any()
    np.testing.assert_allclose(fit.predicted_s, 1e-3, rtol=0.01)


def test_the_domain_is_what_was_measured() -> None:
    domain = domain_of(make_steps())
    assert domain["rows"] == Range(1.0, 160.0)
    assert domain["rounds"] == Range(0.0, 4.0)


def test_the_host_basis_counts_requests_and_arrivals() -> None:
    fit = fit_phase(make_steps(), "host", least_repeats=5)
    assert len(fit.model.coefficients) == len(HOST_BASIS)
    assert fit.predicted_s == pytest.approx(1e-3, rel=0.01)
