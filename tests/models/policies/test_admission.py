"""Engines with adaptive verification: what they are told of their own steps, and how many rounds they are asked for."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from faser.controller.cli.evaluate import decided
from faser.engine_adapter.protocol import ActionSet, Admission, StopRule
from faser.engine_adapter.steering.lease import is_sound
from faser.env.estimate.engine_state import EngineState
from faser.env.estimate.planning_view import PlanningView
from faser.env.simulator.simulated_engine import SimulatedEngine
from faser.models.evaluation.evaluate import scenario_of
from faser.models.evaluation.worlds import WorldSpec, held_out
from faser.models.policies.admission import LEAST_S, POINTS, TAIL, admission, row_points
from faser.models.policies.price import PricePolicy


def adaptive_world(is_adaptive: bool = True) -> WorldSpec:
    world = next(world for world in held_out() if world.name == "gpu-8b-eagle")
    return WorldSpec(world.name, world.note, msgspec.structs.replace(world.profile, is_adaptive=is_adaptive))


def run(is_adaptive: bool, steps: int = 400) -> tuple[list[Any], list[Any]]:
    """Return records and action sets of eight requests under `price`."""
    engine = SimulatedEngine(scenario_of(adaptive_world(is_adaptive), 8), 3)
    policy, state = PricePolicy(engine.capabilities), EngineState(engine.capabilities)
    records, actions = [], [None]
    for _ in range(steps):
        records.append(engine.step(actions[-1]))
        actions.append(decided(state, records[-1], policy, records[-1].counter))
    return records, actions[1:]


@pytest.mark.parametrize(
    ("requests", "depth", "graphs"), [(1, 1, ()), (8, 6, ()), (256, 8, ()), (8, 6, (1, 8, 16, 64))]
)
def test_rows_rise_from_one_a_request_to_beyond_what_all_would_verify(
    requests: int, depth: int, graphs: tuple[int, ...]
) -> None:
    rows = row_points(requests, depth, graphs).tolist()
    assert rows[0] == requests
    assert rows[-1] > 8 * requests * (depth + 1)
    assert requests * (depth + 1) in rows
    assert all(low < high for low, high in pairwise(rows))
    assert len(rows) <= 64
    beyond = {requests * (depth + 1) << power for power in range(TAIL + 1)}
    assert not graphs or set(rows) - beyond == {8, 16}  # a step takes as long as the next captured size
    assert len(rows) > POINTS or requests < 256


def told(verify_s: list[float]) -> list[float]:
    """Return what is told of two requests' drafts of one token: a round takes 0.01 s, a drafted token 0.001 s."""
    view = SimpleNamespace(
        requests=2, capabilities=SimpleNamespace(graph_sizes=()), verify_s=lambda rows: np.array(verify_s),
        cost=SimpleNamespace(draft_time_s=lambda rows, rounds, drafted: rounds * 0.01 + drafted * 0.001),
    )  # fmt: skip
    found = admission(cast(PlanningView, view), 1)
    assert found.rows == [2, 3, 4, 8, 16, 32, 64]
    return found.seconds


def test_seconds_are_those_of_verifying_and_of_all_rounds() -> None:
    assert told([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == pytest.approx([row + 0.012 for row in range(1, 8)])


def test_more_rows_are_never_told_to_take_less_and_no_step_to_take_nothing() -> None:
    assert told([3.0, 1.0, 2.0, 4.0, 0.5, 5.0, 6.0]) == pytest.approx([3.012, 3.012, 3.012, 4.012, 4.012, 5.012, 6.012])
    assert told([-0.012] * 7) == [LEAST_S] * 7


def test_price_tells_what_rows_cost_and_never_ends_a_draft_early() -> None:
    _, actions = run(is_adaptive=True)
    told = [action for action in actions if action.admission is not None]
    assert len(told) > 200
    assert all(is_sound(action.admission, len(action.handles)) for action in told)
    assert all(low <= high for action in told for low, high in pairwise(action.admission.seconds))
    stops = [action.stop for action in told if action.stop is not None]
    assert stops
    assert all(set(stop.go_on) == {0.0} for stop in stops)
    assert any(set(stop.keep) != {0.0} for stop in stops)


def drawn_and_asked(is_adaptive: bool) -> tuple[int, int]:
    """Return tokens drawn, and tokens asked for, where four each are asked for and the unsure ones are dropped."""
    engine = SimulatedEngine(scenario_of(adaptive_world(is_adaptive), 8), 3)
    rule, drawn, asked = StopRule([1.0], [0.0], [0.6], [0.0]), 0, 0
    record = engine.step(None)
    for _ in range(200):
        action = ActionSet(record.boot_id, 1, record.counter, 1 << 40, 1e9, 4, [], [], stop=rule)
        record = engine.step(action)
        drawn += record.drawn_tokens or 0
        asked += sum(row.draft_limit for row in record.rows)
    return drawn, asked


def test_a_draft_costs_all_its_rounds_where_verification_is_adaptive_and_only_there() -> None:
    drawn, asked = drawn_and_asked(is_adaptive=True)
    fewer, as_many = drawn_and_asked(is_adaptive=False)
    assert drawn == asked
    assert fewer < 0.9 * as_many


def test_the_wire_bounds_costs_and_weights() -> None:
    for bad in (Admission([1], [0.0]), Admission([1], [0.1], [0.0]), Admission([], [])):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(bad), type=Admission)
