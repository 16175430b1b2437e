"""How much equal arms differ: known answers for a steady machine, a fast noise and a slow one."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture(scope="module")
def slices(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("slices")


def test_a_steady_machine_makes_no_difference(slices: ModuleType) -> None:
    found = slices.summary(np.full(6000, 0.01), (1.0, 4.0))
    assert [row["spread"] for row in found["lengths"]] == pytest.approx([0.0, 0.0], abs=1e-3)
    assert (found["seconds"], found["pieces"]) == (60.0, 6000)


def test_moods_that_last_are_not_averaged_out_by_longer_slices(slices: ModuleType) -> None:
    random = np.random.default_rng(0)
    moods = np.repeat(np.exp(random.normal(0.0, 0.1, 60)), 100 * 8)  # of about eight seconds
    rows = slices.summary(0.01 * moods, (1.0, 8.0))["lengths"]
    assert rows[0]["half_width"] < 0.7 * rows[1]["half_width"]
    noise = np.exp(random.normal(0.0, 0.1, 60 * 800))  # of every piece: any length averages it
    quick = slices.summary(0.01 * noise, (1.0, 8.0))["lengths"]
    assert quick[1]["spread"] < 0.7 * quick[0]["spread"]


def test_lengths_of_which_the_run_holds_too_few_are_left_out(slices: ModuleType) -> None:
    assert [row["slice_s"] for row in slices.summary(np.full(800, 0.01), (1.0, 2.0))["lengths"]] == [1.0]
