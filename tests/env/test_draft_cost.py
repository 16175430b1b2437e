"""The cost of drafting is learnt from few, partly cold steps, and what was hardly measured is doubted."""

from __future__ import annotations

import numpy as np
import pytest

from faser.env.cost_table import CostTable, StepCost
from faser.env.draft_cost import DraftCost, features

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


def test_rows_of_the_first_pass_count_only_where_something_is_drafted() -> None:
    table = features(np.array([8.0, 8.0]), np.array([0.0, 2.0]), np.array([0.0, 16.0]))
    assert table.tolist() == [[1, 8, 0, 0, 0, 0], [1, 8, 1, 8, 1, 16]]
