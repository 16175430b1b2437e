"""How far `price` has an engine draft ahead: as far as it can where somebody drafts, else nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from faser.controller.cli.evaluate import decided
from faser.engine_adapter.protocol import ActionSet
from faser.env.estimate.engine_state import EngineState
from faser.env.simulator.simulated_engine import SimulatedEngine
from faser.models.evaluation.worlds import WorldSpec, held_out, side_by_side
from faser.models.registry import make_policy

HEAVY = side_by_side()[0]  # a drafter worth hiding, accepted often
FREE = next(world for world in held_out() if world.name == "gpu-ngram")  # the gate, not price, finds nothing to hide
WEAK = next(world for world in held_out() if world.name == "cpu-weak-drafter")


def asked(world: WorldSpec, requests: int, frontier: int, steps: int = 300) -> list[ActionSet]:
    """Return what a sidecar would have sent in the last third of a run."""
    engine = SimulatedEngine(world.closed(requests), 5)
    capabilities = replace(engine.capabilities, frontier=frontier, splits=("unsplit",))
    policy, state = make_policy("price", capabilities), EngineState(capabilities)
    found: list[ActionSet] = []
    for sequence in range(1, steps):
        found.append(decided(state, engine.step(found[-1] if found else None), policy, sequence))
    return found[-steps // 3 :]


@pytest.mark.parametrize(
    ("world", "requests", "frontier", "expected"),
    [(HEAVY, 8, 6, 6), (HEAVY, 8, 3, 3), (FREE, 8, 6, 6), (WEAK, 64, 6, 0), (HEAVY, 8, 0, None)],
)
def test_as_far_as_it_can_where_somebody_drafts(
    world: WorldSpec, requests: int, frontier: int, expected: int | None
) -> None:
    told = [each.frontier for each in asked(world, requests, frontier)]
    assert told.count(expected) >= 0.9 * len(told)  # a probe has no opinion
