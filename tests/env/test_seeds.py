"""Environments without a seed differ and tell theirs; with one they repeat. An action that is no number is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest

from faser.env.layout.action_vector import ACTION, meant
from faser.env.profile.engine_profile import synthetic_profile
from faser.env.simulator.scenario import Scenario, with_mechanisms
from faser.env.speculative_serving import ENV_ID, SpeculativeServingEnv, SpeculativeServingVectorEnv
from faser.env.vec_env import SimulatedVecEnv
from faser.models.learned.advice import Advice
from faser.models.training.advised import AdvisedServing

NEUTRAL = np.zeros(len(ACTION), np.float32)


def small(episode_steps: int = 30) -> Scenario:
    return Scenario(
        profiles=(with_mechanisms(synthetic_profile(max_requests=8)),), slots=8, episode_steps=episode_steps
    )


def single() -> gymnasium.Env[Any, Any]:
    return gymnasium.make(ENV_ID, scenario=small())


def vector(mode: str = "vector_entry_point", engines: int = 3) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    return gymnasium.make_vec(ENV_ID, engines, vectorization_mode=mode, scenario=small())


def episode(environment: Any, seed: int | None = None) -> list[bytes]:
    """Return what a few steps of an episode show."""
    seen = [environment.reset(seed=seed)[0]]
    actions = np.zeros(environment.action_space.shape, np.float32)
    seen += [environment.step(actions)[0] for _ in range(8)]
    return [each[name].tobytes() for each in seen for name in ("globals", "requests")]


@pytest.mark.parametrize("make", [single, vector, lambda: vector("sync")], ids=["single", "vector", "sync"])
def test_two_environments_without_a_seed_differ(make: Callable[[], Any]) -> None:
    assert episode(make()) != episode(make())


def test_no_two_environments_in_a_vector_are_alike() -> None:
    environments = vector("sync")
    environments.reset()
    for _ in range(8):
        seen = environments.step(np.tile(NEUTRAL, (3, 1)))[0]
    assert len({engine.tobytes() for engine in seen["globals"]}) == 3


@pytest.mark.parametrize("make", [single, vector], ids=["single", "vector"])
def test_the_seed_that_was_drawn_is_told_and_gives_the_same_again(make: Callable[[], Any]) -> None:
    environment = make()
    seen = episode(environment)
    assert episode(make(), environment.np_random_seed) == seen


@pytest.mark.parametrize("make", [single, vector], ids=["single", "vector"])
@pytest.mark.parametrize("seed", [None, 5])
def test_a_later_reset_without_a_seed_goes_on_from_the_one_before(make: Callable[[], Any], seed: int | None) -> None:
    environment = make()
    first, told = episode(environment, seed), environment.np_random_seed
    second, third = episode(environment), episode(environment)
    assert environment.np_random_seed == told
    assert len({str(first), str(second), str(third)}) == 3
    again = make()
    assert [episode(again, told), episode(again), episode(again)] == [first, second, third]


def test_a_seed_that_was_looked_at_before_the_first_reset_is_the_one_in_force() -> None:
    environment = single()
    told = environment.unwrapped.np_random_seed
    assert episode(environment) == episode(single(), told)


@pytest.mark.parametrize("make", [SpeculativeServingEnv, SpeculativeServingVectorEnv])
def test_a_generator_that_a_caller_sets_decides(make: Callable[..., Any]) -> None:
    def run(seed: int) -> list[bytes]:
        environment = make(scenario=small())
        environment.np_random = np.random.default_rng(seed)
        return episode(environment)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_list_of_seeds_counts_by_its_first_and_one_of_nones_is_none() -> None:
    assert episode(vector(), [None, 4, 9]) == episode(vector(), 4)  # type: ignore[arg-type]
    assert episode(vector(), [None] * 3) != episode(vector(), [None] * 3)  # type: ignore[arg-type]


def test_sb3s_batch_draws_a_seed_and_tells_it_unless_one_is_given() -> None:
    def run(batch: SimulatedVecEnv) -> bytes:
        batch.reset()
        for _ in range(8):
            seen = batch.step(np.tile(NEUTRAL, (2, 1)))[0]
        assert isinstance(seen, dict)
        return seen["globals"].tobytes() + seen["requests"].tobytes()

    unseeded = SimulatedVecEnv(2, small())
    shown = run(unseeded)
    assert shown != run(SimulatedVecEnv(2, small()))
    again = SimulatedVecEnv(2, small())
    again.seed(unseeded.np_random_seed)
    assert run(again) == shown
    assert again.get_attr("np_random_seed") == [unseeded.np_random_seed] * 2
    assert run(again) != shown, "a later reset goes on"
    assert run(SimulatedVecEnv(2, small(), seed=0)) == run(SimulatedVecEnv(2, small(), seed=0))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [np.float32, np.float64, list])
def test_an_action_that_is_no_number_is_refused_by_its_name(value: float, kind: type) -> None:
    action = NEUTRAL.copy()
    action[2] = value
    given: Any = action.tolist() if kind is list else action.astype(kind)
    environment = SpeculativeServingEnv(small())
    environment.reset(seed=0)
    with pytest.raises(ValueError, match=rf"action: keep is {value}; expected numbers from -1 to 1; look at"):
        environment.step(given)
    before = environment.step(NEUTRAL)[0]["globals"].tobytes()
    other = SpeculativeServingEnv(small())
    other.reset(seed=0)
    assert other.step(NEUTRAL)[0]["globals"].tobytes() == before, "what was refused left no trace"


@pytest.mark.parametrize("make", [vector, lambda: vector("sync"), lambda: SimulatedVecEnv(3, small())])
def test_a_batch_refuses_it_too(make: Callable[[], Any]) -> None:
    environments = make()
    environments.reset()
    actions = np.tile(NEUTRAL, (3, 1))
    actions[1, 0] = np.nan
    with pytest.raises(ValueError, match=r"action(?: of engine 1)?: threshold is nan"):
        environments.step(actions)


def test_advice_that_is_no_number_is_refused() -> None:
    unmade = AdvisedServing.__new__(AdvisedServing)  # refused before anything of it is looked at
    with pytest.raises(ValueError, match=f"{Advice._fields[1]} is nan"):
        unmade.step(np.array([0.0, np.nan, 0.0, 0.0], np.float32))


def test_numbers_beyond_the_bounds_are_clipped_as_before() -> None:
    beyond, within = SpeculativeServingEnv(small()), SpeculativeServingEnv(small())
    far = np.where(np.arange(len(ACTION)) % 2, 7.0, -7.0).astype(np.float32)
    for environment in (beyond, within):
        environment.reset(seed=2)
    for _ in range(5):
        seen = beyond.step(far)[0]["requests"]
        assert seen.tobytes() == within.step(np.clip(far, -1.0, 1.0))[0]["requests"].tobytes()
    np.testing.assert_array_equal(meant(far), meant(np.clip(far, -1.0, 1.0)))
