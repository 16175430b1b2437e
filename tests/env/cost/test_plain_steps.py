"""Steps without a draft where the first draft makes the time jump: what the curve says of them, and what is said."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from faser.env.cost.cost_table import CostTable, StepCost
from faser.env.cost.plain_steps import PlainSteps
from faser.env.estimate.engine_state import EngineState
from faser.env.spaces import Capabilities


def measured(requests: int, jump_s: float, steps: int = 600, noise: float = 0.03) -> tuple[CostTable, float]:
    """Return what was learnt of steps, one in ten without a draft, and how long such a step takes."""
    random, table = np.random.default_rng(7), CostTable()
    plain_s, row_s = 0.0036 * requests, 0.0025
    for number in range(steps):
        drafts = 0 if number % 10 == 0 else int(random.integers(1, requests // 2))
        step_s = plain_s + (jump_s + row_s * drafts) * bool(drafts)
        step_s *= float(np.exp(random.normal(0.0, noise)))
        table.learn(StepCost(requests + drafts, 0, requests, 100, 0, 0, step_s, 0.0, 0.0))
    return table, plain_s


@pytest.mark.parametrize("requests", [8, 10, 12, 16])
def test_steps_of_a_few_drafts_do_not_make_the_step_without_any_look_dear(requests: int) -> None:
    table, plain_s = measured(requests, 0.004)
    by_curve_s = float(table.verify_time_s(float(requests)))
    assert by_curve_s > 1.04 * plain_s
    assert by_curve_s * table.plain_factor(requests) == pytest.approx(plain_s, rel=0.02)


def test_where_nothing_jumps_the_curve_is_believed_to_the_bit() -> None:
    random, table = np.random.default_rng(3), CostTable()
    for number in range(600):
        drafts = number % 5
        step_s = (0.01 + 0.001 * (16 + drafts)) * float(np.exp(random.normal(0.0, 0.05)))
        table.learn(StepCost(16 + drafts, 0, 16, 100, 0, 0, step_s, 0.0, 0.0))
    assert table.plain_factor(16) == 1.0
    assert table.plain_factor(15) == 1.0, "never seen"


def test_a_few_steps_or_an_outlier_prove_nothing() -> None:
    plain = PlainSteps()
    for _ in range(3):
        plain.learn(4, 0.06)
    assert plain.factor(4) == 1.0
    plain.learn(8, 5.0)
    assert plain.factor(8) == 1.0
    for _ in range(100):
        plain.learn(4, 0.06)
    assert plain.factor(4) == pytest.approx(np.exp(0.06), rel=0.01)
    for _ in range(300):
        plain.learn(4, 0.0)
    assert plain.factor(4) == pytest.approx(1.0, abs=0.005), "what is no more is forgotten"


def test_the_plan_compares_with_the_step_as_it_is() -> None:
    state = EngineState(Capabilities(k_max=4))
    state.unsplit_cost, plain_s = measured(16, 0.004)
    view = msgspec.structs.replace(state.view(), requests=16)
    times_s = view.verify_s(np.array([[16.0, 17.0], [15.0, 20.0]]))
    curve_s = state.unsplit_cost.verify_time_s(np.array([[16.0, 17.0], [15.0, 20.0]]))
    assert times_s[0, 0] == pytest.approx(plain_s, rel=0.02)
    assert (times_s[:, 1] == curve_s[:, 1]).all()
    assert times_s[1, 0] < curve_s[1, 0]
