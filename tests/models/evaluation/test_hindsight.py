"""Upper bounds: what is paid is what the simulator charges, and nothing is had for nothing."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from faser.controller.cli.evaluate import decided
from faser.env.profile.step_basis import DRAFT_BASIS, VERIFY_BASIS, fill_draft_basis, fill_verify_basis
from faser.env.simulator.simulator import Simulator
from faser.models.evaluation.evaluate import ORACLES, Cell, simulate
from faser.models.evaluation.hindsight import TrueCost
from faser.models.evaluation.worlds import K_MAX, acceptance, held_out

WORLDS = {world.name: world for world in held_out()}


@pytest.mark.parametrize("world", sorted(WORLDS))
def test_costs_are_those_of_the_simulators_own_terms(world: str) -> None:
    simulator = Simulator(WORLDS[world].closed(8), 1, seed=1)
    simulator.reset()
    simulator.state.coefficients[0] = np.linspace(1e-4, 9e-3, simulator.state.coefficients.shape[1])  # none is nothing
    cost, coefficients = TrueCost(simulator), simulator.state.coefficients[0]
    verify, draft = np.zeros(len(VERIFY_BASIS)), np.zeros(len(DRAFT_BASIS))
    for drafts, requests, rounds in ((0, 0, 0), (1, 1, 1), (7, 5, 2), (48, 8, 6)):
        fill_verify_basis(verify, 8, 8 + drafts, drafts, 0, 0, 8 + drafts, 0, 0, 0.0)
        assert cost.verify_s(8, drafts) == pytest.approx(verify @ coefficients[: len(verify)])
        skips = WORLDS[world].profile.catch_up_tokens > 0
        fill_draft_basis(draft, requests, rounds, drafts, requests if skips else 1, 0, 0)
        # Who leaves nothing out has the first pass's rows whatever is drafted.
        beside = 0.0 if skips else coefficients[len(verify) + 3]
        charged = draft @ coefficients[len(verify) : len(verify) + len(draft)] - beside
        assert cost.draft_s(requests, rounds, drafts) == pytest.approx(charged)


def test_a_drafter_that_is_always_wrong_leaves_every_bound_at_no_speculation() -> None:
    """The drafter's first pass comes whether or not it drafts: no bound may spare it."""
    world = WORLDS["gpu-8b-eagle"]
    profile = msgspec.structs.replace(world.profile, acceptance=acceptance(K_MAX, -12.0, 0.1, 0.1))
    hopeless = type(world)("hopeless", "", profile)
    for load in (1, 8):
        plain = simulate(Cell("off", "hopeless", load, 1, 20), decided, (hopeless,)).tokens_per_s
        for name in ORACLES:
            bound = simulate(Cell(name, "hopeless", load, 1, 20), decided, (hopeless,)).tokens_per_s
            assert bound == pytest.approx(plain, rel=0.02), name
