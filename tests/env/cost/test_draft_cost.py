"""The cost of drafting is learnt from few, partly cold steps, and what was hardly measured is doubted."""

from __future__ import annotations

import numpy as np
import pytest

from faser.env.cost.cost_table import CostTable, StepCost
from faser.env.cost.draft_cost import DraftCost, _non_negative, features

EMPTY_S, ROUND_S = 0.026, 0.0035  # a small model with an EAGLE-3 head on one core


def step(rounds: int, slow: float = 1.0, cold: float = 1.0, batch: int = 1) -> StepCost:
    """Return a step of `batch` requests that draft `rounds` tokens each; `cold` slows only the drafting."""
    draft_s = (5e-4 + ROUND_S * rounds) * cold
    rows = batch * (1 + rounds)
    return StepCost(rows, 0, batch, 100, rounds, batch * rounds, EMPTY_S * slow + draft_s, draft_s, 0.0)


def draft_s(table: CostTable, rounds: int) -> float:
    return float(table.draft_time_s(1.0 + rounds, rounds, rounds))


def test_a_cold_first_step_and_cold_first_deep_drafts_are_forgotten() -> None:
    table = CostTable()
    table.learn(StepCost(45, 45, 1, 45, 0, 0, 0.614, 0.003, 0.0))  # a prompt on a cold engine, as seen with vLLM 0.32
    for rounds in (3, 2, 1, 4):
        table.learn(step(rounds, cold=5.0))
        for _ in range(6):
            table.learn(step(1))
    for rounds in (2, 3, 4):
        table.learn(step(rounds))
        table.learn(step(rounds))
    assert table.level_s == pytest.approx(EMPTY_S, rel=0.2)
    assert float(table.verify_time_s(1.0)) == pytest.approx(EMPTY_S, rel=0.1)
    for rounds in (1, 2, 3, 4):
        assert draft_s(table, rounds) == pytest.approx(5e-4 + ROUND_S * rounds, rel=0.15)


def test_what_was_seen_once_is_nearly_as_doubtful_as_what_was_never_seen() -> None:
    cost = DraftCost()
    rounds = np.arange(5.0)
    assert cost.doubt(rounds, 1.0).tolist() == [1.0] * 5
    cost.learn(4, 1, 3, 3, 0.9)
    assert cost.doubt(rounds, 1.0)[3] == 1.0
    for _ in range(8):
        cost.learn(4, 1, 3, 3, 0.9)
    doubt = cost.doubt(rounds, 1.0)
    assert doubt[3] < 0.2
    assert doubt[4] > 0.6
    assert cost.doubt(rounds, 16.0)[3] > doubt[3]


@pytest.mark.parametrize("row", [0.0, 0.004])
def test_rounds_and_rows_that_rise_together_are_told_apart(row: float) -> None:
    """Deeper drafts verify more rows; prompts vary them too, and only that tells what a row of the drafter costs."""
    cost, rng = DraftCost(), np.random.default_rng(2)
    for _ in range(400):
        rounds = int(rng.choice([1, 2, 3], p=[0.45, 0.45, 0.1]))
        rows = 16 * (1 + rounds) + int(rng.integers(0, 24))
        cost.learn(rows, 16, rounds, 16 * rounds, (0.35 * rounds + row * rows) * rng.normal(1.0, 0.03))
    more_rows = float(cost.units(80.0, 2.0, 32.0) - cost.units(40.0, 2.0, 32.0)) / 40.0
    assert more_rows == pytest.approx(row, abs=0.001)
    assert float(cost.units(48.0, 2.0, 32.0) - cost.units(48.0, 1.0, 16.0)) == pytest.approx(0.35, rel=0.1)


def test_the_fit_is_the_best_one_without_negative_entries() -> None:
    rng = np.random.default_rng(4)
    for _ in range(200):
        design, target = rng.normal(size=(8, 6)), rng.normal(size=8)
        information, moment = design.T @ design + 1e-3 * np.eye(6), design.T @ target
        found = _non_negative(information, moment)
        slope = moment - information @ found
        assert (found >= 0.0).all()
        assert (slope < 1e-6).all(), "some entry should be larger"
        assert np.abs(slope[found > 0.0]).max(initial=0.0) < 1e-6, "some entry should be smaller"


def test_a_change_of_the_unit_changes_no_time() -> None:
    cost, rng = DraftCost(), np.random.default_rng(0)
    for _ in range(200):
        rounds, batch = int(rng.integers(0, 5)), int(rng.choice([1, 4, 16]))
        cost.learn(batch * (1 + rounds), batch, rounds, batch * rounds, 0.01 + 0.1 * rounds + 0.002 * batch * rounds)
    before = cost.units([20.0, 5.0], [4.0, 0.0], [16.0, 0.0])
    cost.rescale(2.0)
    assert cost.units([20.0, 5.0], [4.0, 0.0], [16.0, 0.0]) == pytest.approx(2.0 * before)
    cost.learn(20, 4, 4, 16, 2.0 * (0.01 + 0.4 + 0.032))
    assert cost.units(20.0, 4.0, 16.0) == pytest.approx(2.0 * (0.01 + 0.4 + 0.032), rel=0.05)


@pytest.mark.parametrize(
    ("rounds", "drafted", "expected"), [(0.0, 0.0, [1, 8, 0, 0, 0, 0]), (2.0, 16.0, [1, 8, 1, 8, 1, 16])]
)
def test_rows_of_the_first_pass_count_only_where_something_is_drafted(
    rounds: float, drafted: float, expected: list[int]
) -> None:
    found = np.zeros(6)
    features(8.0, rounds, drafted, found)
    assert found.tolist() == expected


def test_many_cells_are_all_remembered() -> None:
    cost = DraftCost()
    for number in range(600):
        rounds, batch = number % 9, 1 << number % 7
        drafted = rounds * batch
        cost.learn(batch + drafted, batch, rounds, drafted, 0.01 + 0.1 * rounds + 0.002 * drafted)
    assert (cost.doubt(np.arange(9.0), 64.0) < 0.5).all()
    assert cost.units(9.0, 8.0, 8.0) == pytest.approx(0.01 + 0.8 + 0.016, rel=0.05)
    assert cost.units(64.0 * 9, 8.0, 64.0 * 8) == pytest.approx(0.01 + 0.8 + 1.024, rel=0.05)


def test_rows_rounds_and_drafts_may_have_any_shapes_that_fit() -> None:
    cost = DraftCost()
    cost.learn(40, 8, 4, 32, 0.7)
    rows, rounds, drafted = np.arange(6.0).reshape(2, 3), np.arange(3.0), np.arange(2.0)[:, None]
    expected = [[float(cost.units(rows[i, j], rounds[j], drafted[i, 0])) for j in range(3)] for i in range(2)]
    assert cost.units(rows, rounds, drafted) == pytest.approx(np.array(expected))
    assert cost.units(rows, rounds[:, None][:2], drafted[:, :, None][0]).shape == (2, 3)
    assert cost.units(np.zeros((0, 3)), rounds, np.zeros((0, 3))).shape == (0, 3)
