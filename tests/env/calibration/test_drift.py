"""A machine's drift is found from equal steps minutes apart, and from nothing else."""

import numpy as np
import pytest

from faser.engine_adapter.arrays import Floats
from faser.env.calibration.drift import WINDOW_S, drift

COST_S = np.array([0.05, 0.1, 0.2, 0.4, 0.8, 1.6])


def batches(minutes: float = 40.0, batch_s: float = 12.0, seed: int = 0) -> tuple[Floats, Floats, Floats]:
    """Return when steps ended, which kind each was, and what it would take: batches of one kind, in random order."""
    chance, now_s = np.random.default_rng(seed), 0.0
    time_s, kind = [], []
    while now_s < 60.0 * minutes:
        own, end_s = int(chance.integers(len(COST_S))), now_s + batch_s
        while now_s < end_s:
            now_s += COST_S[own]
            time_s.append(now_s)
            kind.append(own)
    noise = np.exp(0.05 * chance.standard_normal(len(kind)))
    return np.array(time_s), np.array(kind), COST_S[kind] * noise


def swing(time_s: Floats) -> Floats:
    return np.exp(0.1 * np.sin(2.0 * np.pi * time_s / 900.0))


def test_a_drift_is_found_and_taken_out() -> None:
    time_s, kind, step_s = batches()
    found = drift(time_s, step_s * swing(time_s), kind)
    missed = np.log(found / swing(time_s))
    assert np.std(np.log(swing(time_s))) > 0.06
    assert np.std(missed) < 0.015
    assert np.median(found) == pytest.approx(1.0)


def test_a_steady_machine_has_none() -> None:
    time_s, kind, step_s = batches()
    found = drift(time_s, step_s, kind)
    assert np.quantile(np.abs(np.log(found)), 0.95) < 0.02


def test_held_out_kinds_have_no_say() -> None:
    time_s, kind, step_s = batches()
    told = np.where(kind < 3, kind, -1)
    spoilt = np.where(kind < 3, step_s, step_s * (1.0 + time_s / time_s[-1]))
    assert (drift(time_s, step_s, told) == drift(time_s, spoilt, told)).all()
    assert (drift(time_s, spoilt, kind) != drift(time_s, step_s, kind)).any()


def test_kinds_that_never_come_again_tell_nothing() -> None:
    time_s = np.arange(0.0, 3600.0, 0.5)
    kind = (time_s // (WINDOW_S / 2.0)).astype(np.int64)  # load and time are one: which of them it was, nobody knows
    assert (drift(time_s, 1.0 + time_s / 3600.0, kind) == 1.0).all()


def test_unknown_times_and_an_empty_file_are_no_drift() -> None:
    time_s, kind, step_s = batches()
    step_s[::7] = np.nan
    assert np.isfinite(drift(time_s, step_s, kind)).all()
    nothing = np.zeros(0)
    assert len(drift(nothing, nothing, nothing.astype(np.int64))) == 0
    assert (drift(time_s, step_s, np.full(len(time_s), -1)) == 1.0).all()
