"""Price asks for drafting ahead where it can pay, and the gate leaves it where it does not, on simulated engines."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import msgspec
import pytest

from faser.controller.cli.evaluate import decided
from faser.env.estimate.engine_state import EngineState
from faser.env.profile.engine_profile import Split
from faser.env.simulator.simulated_engine import SimulatedEngine
from faser.models.evaluation.worlds import WorldSpec, going_ahead
from faser.models.registry import make_policy


@pytest.fixture(scope="module")
def frontiers(load_script: Callable[[str], ModuleType]) -> Any:
    """Return the benchmark's choice."""
    return load_script("worth").FRONTIERS


def good_drafter(**ahead: float) -> WorldSpec:
    """Return the world with a good drafter, whose drafting ahead is otherwise."""
    world, _ = going_ahead()
    assert world.profile.ahead is not None
    changed = msgspec.structs.replace(world.profile.ahead, **ahead)
    return WorldSpec(world.name, world.note, msgspec.structs.replace(world.profile, ahead=changed))


def test_a_drafter_is_hidden_where_every_frontier_is_of_use(frontiers: Any) -> None:
    """The control is the same engine that cannot."""
    perfect = good_drafter(ready=1.0, hidden=1.0, verify_factor=1.0, acceptance=1.0)
    rate, (_, _, ahead) = frontiers.run(perfect, 2, 7, 1200)
    plain, none = frontiers.run(frontiers.without(perfect), 2, 7, 1200)
    assert rate > 1.1 * plain
    assert ahead > 0.7  # finding out takes some hundred steps
    assert none == [1.0, 0.0, 0.0]


def test_the_gate_leaves_what_only_slows_the_target(frontiers: Any) -> None:
    """`price` knows nothing of that, so it asks for it all the same."""
    hopeless = good_drafter(ready=0.1, verify_factor=1.3)
    rate, (_, asked, ahead) = frontiers.run(hopeless, 2, 7, 2400)
    assert asked > 0.6
    assert ahead < 0.2  # what finding out takes, and trying again
    assert rate > 0.95 * frontiers.run(frontiers.without(hopeless), 2, 7, 2400)[0]


def test_the_gate_is_what_keeps_it_from_losing() -> None:
    """Negative control of the above: an engine whose gate says yes to everything is slower."""
    hopeless = good_drafter(ready=0.1, verify_factor=1.3)
    times = {}
    for is_gated in (True, False):
        engine = SimulatedEngine(hopeless.closed(2), 7)
        if not is_gated:
            engine._gate.ask = lambda requests: True  # type: ignore[method-assign]
        policy, state = make_policy("price", engine.capabilities), EngineState(engine.capabilities)
        actions = None
        for sequence in range(1, 1500):
            actions = decided(state, engine.step(actions), policy, sequence)
        times[is_gated] = engine.clock_s / float(engine.simulator.state.engines["emitted"][0])
    assert times[False] > 1.1 * times[True]


def test_an_engine_that_cannot_offers_nothing(frontiers: Any) -> None:
    able, unable = (SimulatedEngine(w.closed(2), 1) for w in (good_drafter(), frontiers.without(good_drafter())))
    assert able.capabilities.frontier == able.capabilities.k_max
    assert unable.capabilities.frontier == 0


def test_the_pairs_own_world_is_its_measured_profile() -> None:
    _, pair = going_ahead()
    assert pair.profile.name == "embedded_ahead"
    assert pair.profile.ahead is not None


def test_two_groups_leave_no_evidence() -> None:
    """Under a split nobody asks the gate, so it learns nothing of such steps."""
    splits = (Split("unsplit"), Split("1:3", 1.1, 1.1, 0.95))
    profile = msgspec.structs.replace(good_drafter().profile, splits=splits)
    engine = SimulatedEngine(WorldSpec("both", "", profile).closed(4), 3)
    policy, state = make_policy("fixed:3", engine.capabilities), EngineState(engine.capabilities)
    actions = None
    for sequence in range(1, 40):
        decision = decided(state, engine.step(actions), policy, sequence)
        actions = msgspec.structs.replace(decision, split=1, frontier=engine.capabilities.frontier)
    assert engine._gate._shapes == {}
    engine.step(msgspec.structs.replace(actions, split=0))
    assert engine._gate._shapes
