"""A choice of stages beside a policy's lengths: what it asks for, what it refuses, and which cut a trial follows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from faser.engine_adapter.protocol import Stages
from faser.env.estimate.engine_state import EngineState, StageSight
from faser.env.spaces import Action, Capabilities, clamp
from faser.models.policies.policy import PolicyError
from faser.models.registry import make_policy
from faser.models.stages.staged_policy import even_cut, possible
from faser.models.stages.trials import SETTLE_STEPS, TRIAL_STEPS, Trials

STAGES = Stages(30, (15,))
MOVABLE = Capabilities(k_max=2, stages=STAGES)


def test_an_even_cut_lies_on_the_last_ranks() -> None:
    four = Stages(30, (8, 15, 22))
    assert [even_cut(count, four) for count in possible(four)] == [(0, 0, 0), (0, 0, 15), (0, 10, 20), (8, 15, 22)]
    assert list(possible(Stages(2, (1, 1, 1)))) == [1, 2]


def test_a_number_of_stages_is_asked_for_beside_the_lengths() -> None:
    policy = make_policy("fixed:2+stages:1", MOVABLE)
    assert policy.name == "fixed:2+stages:1"
    action = policy.act(EngineState(MOVABLE))
    assert (action.stage_bounds, action.default_length) == ((0,), 2)
    assert action.reason.endswith("; into 1 stage")
    assert make_policy("off+stages:2", MOVABLE).act(EngineState(MOVABLE)).stage_bounds == (15,)


def test_an_engine_whose_stages_cannot_move_is_asked_for_nothing() -> None:
    fixed = Capabilities(k_max=2)
    assert make_policy("fixed:2+stages:measured", fixed).act(EngineState(fixed)).stage_bounds is None
    asked = Action(np.zeros(0, np.int64), 0, stage_bounds=(15,))
    assert clamp(asked, fixed).stage_bounds is None
    assert clamp(asked, MOVABLE) is asked


@pytest.mark.parametrize("bounds", [(31,), (-1,), (1, 2), (), (1.5,)])
def test_bounds_that_cannot_be_had_become_no_opinion(bounds: tuple[int, ...]) -> None:
    assert clamp(Action(np.zeros(0, np.int64), 0, stage_bounds=bounds), MOVABLE).stage_bounds is None


@pytest.mark.parametrize(
    ("spec", "seen"),
    [
        ("off+stages:3", "3 stages; this engine's pipeline has 1 to 2"),
        ("off+stages:0", "stages '0'; expected a number of stages, turns:STEPS or measured"),
        ("off+stages:", "stages ''; expected"),
        ("off+stages:half", "stages 'half'; expected"),
        ("nobody+stages:2", "unknown policy 'nobody'"),
    ],
)
def test_what_cannot_be_chosen_is_one_line(spec: str, seen: str) -> None:
    with pytest.raises(PolicyError, match=seen):
        make_policy(spec, MOVABLE)


def test_turns_go_on_when_a_cut_has_been_in_force_for_its_steps() -> None:
    state, policy = EngineState(MOVABLE), make_policy("off+stages:turns:3", MOVABLE)
    asked = []
    for _ in range(12):
        bounds = policy.act(state).stage_bounds
        assert bounds is not None
        asked.append(bounds)
        sight = state.stages
        sight.steady_steps = sight.steady_steps + 1 if bounds == sight.bounds else 0
        sight.bounds = bounds
    assert {(0,), (15,)} == set(asked)
    assert 2 <= sum(one != other for one, other in pairwise(asked)) <= 5


def served(trials: Trials, rates: dict[int, float], running: int, steps: int, sight: StageSight) -> list[int]:
    """Serve steps of 10 ms, each move taking three; return what was chosen."""
    chosen, left, in_force = [], 0, 2 - sum(bound == 0 for bound in sight.bounds)
    for _ in range(steps):
        wanted = trials.choose(sight)
        chosen.append(wanted)
        if wanted != in_force and left == 0:
            left = 3
        sight.is_moving = left > 0
        sight.steady_steps = 0 if left else sight.steady_steps + 1
        if left:
            left -= 1
            if left == 0:
                in_force = wanted
                sight.bounds = even_cut(in_force, STAGES)
        sight.emitted, sight.elapsed_s, sight.running = round(rates[in_force] * 0.01), 0.01, running
    return chosen


@pytest.mark.parametrize("best", [1, 2])
def test_the_number_of_stages_that_brings_most_is_followed_and_the_other_tried_rarely(best: int) -> None:
    sight, rates = StageSight((15,)), {best: 4000.0, 3 - best: 3000.0}
    chosen = served(Trials(2), rates, 8, 3000, sight)
    assert set(chosen[: 3 * (TRIAL_STEPS + SETTLE_STEPS)]) == {1, 2}
    assert np.mean(np.array(chosen[300:]) == best) > 0.95


def test_each_load_has_its_own() -> None:
    trials, sight = Trials(2), StageSight((15,))
    served(trials, {1: 3000.0, 2: 2000.0}, 1, 400, sight)
    served(trials, {1: 3000.0, 2: 9000.0}, 32, 400, sight)
    assert served(trials, {1: 3000.0, 2: 2000.0}, 1, 50, sight)[-1] == 1
    assert served(trials, {1: 3000.0, 2: 9000.0}, 32, 50, sight)[-1] == 2


def test_nearly_as_good_is_no_reason_to_move() -> None:
    chosen = served(Trials(2), {1: 3010.0, 2: 3000.0}, 8, 1500, StageSight((15,)))
    assert np.mean(np.array(chosen[300:]) == 2) > 0.95


def test_steps_around_a_move_are_nobodys_fault() -> None:
    """The first steps behind a switch to the better cut take five seconds and bring nothing."""
    trials, sight, chosen = Trials(2), StageSight((15,), running=8), []
    for _ in range(400):
        chosen.append(trials.choose(sight))
        bounds = even_cut(chosen[-1], STAGES)
        sight.steady_steps = sight.steady_steps + 1 if bounds == sight.bounds else 0
        sight.bounds = bounds
        is_settling = sight.stages == 1 and sight.steady_steps < SETTLE_STEPS
        sight.emitted, sight.elapsed_s = (0.0, 5.0) if is_settling else ({1: 40.0, 2: 30.0}[sight.stages], 0.01)
    assert np.mean(np.array(chosen[200:]) == 1) > 0.95
