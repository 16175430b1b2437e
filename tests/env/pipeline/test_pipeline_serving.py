"""The pipeline environment keeps gymnasium's and SB3's contracts, repeats by seed, and says what it means."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3

from faser.env.pipeline.cluster import PipelineMove
from faser.env.pipeline.constants import PipelineConstants
from faser.env.pipeline.pipeline_actions import action_of, move_of
from faser.env.pipeline.pipeline_serving import PIPELINE_ENV_ID, PipelineServingEnv
from faser.env.pipeline.view import PIPELINE_FEATURES

SMALL = {"loads": ("gamma-2",), "duration_s": 20.0}


def test_gymnasium_and_sb3_accept_the_environment() -> None:
    environment = gymnasium.make(PIPELINE_ENV_ID, render_mode="ansi", **SMALL)
    check_env(environment.unwrapped)
    with warnings.catch_warnings():
        # SB3 warns of the ansi render mode's text when it expects an image.
        warnings.filterwarnings("ignore", category=UserWarning, module="stable_baselines3")
        check_env_for_sb3(environment.unwrapped)
    environment.close()


def test_the_docstring_documents_every_observation() -> None:
    text = PipelineServingEnv.__doc__ or ""
    assert all(f"| {feature.name} |" in text for feature in PIPELINE_FEATURES)
    for heading in ("Action Space", "Observation Space", "Rewards", "Starting State", "Episode End", "Arguments"):
        assert f"## {heading}" in text


def test_the_vector_has_a_number_for_every_feature_and_stays_in_its_bounds() -> None:
    environment = gymnasium.make(PIPELINE_ENV_ID, **SMALL)
    observation, _ = environment.reset(seed=3)
    assert observation.shape == (len(PIPELINE_FEATURES),)
    random, truncated = np.random.default_rng(0), False
    while not truncated:
        assert environment.observation_space.contains(observation)
        observation, _, _, truncated, _ = environment.step(random.integers(0, (4, 7, 2)))


def test_episodes_are_cut_off_and_repeat_by_seed() -> None:
    def run(seed: int) -> list[Any]:
        environment = gymnasium.make(PIPELINE_ENV_ID, **SMALL)
        observation, _ = environment.reset(seed=seed)
        seen: list[Any] = [observation.tobytes()]
        random, truncated = np.random.default_rng(0), False
        while not truncated:
            observation, gain, terminated, truncated, _ = environment.step(random.integers(0, (4, 7, 2)))
            assert not terminated
            seen += [observation.tobytes(), gain]
        assert len(seen) == 1 + 2 * 20
        return seen

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_the_reward_is_misses_gpu_seconds_and_bytes_by_hand() -> None:
    environment = PipelineServingEnv(**SMALL)  # type: ignore[arg-type]
    environment.reset(seed=0)
    for action in ([1, 4, 0], [1, 4, 1], [0, 3, 0]):
        _, reward, _, _, info = environment.step(np.array(action))
        by_hand = info["missed"] + 0.02 * info["gpu_s"] + info["moved_bytes"] / 12.5e9
        assert reward == pytest.approx(-by_hand)
    assert PipelineConstants().cost(3, 50.0, 25e9) == pytest.approx(3 + 1 + 2)


def test_an_action_and_its_move_are_the_same_thing_both_ways() -> None:
    for stages in (4, 8, 16, 32):
        for count in (-3, 0, 2):
            for is_refactor in (False, True):
                move = PipelineMove(stages, count, is_refactor)
                assert move_of(action_of(move)) == move
    assert move_of(action_of(PipelineMove(8, 9))) == PipelineMove(8, 3)
    with pytest.raises(ValueError, match="expected each below"):
        move_of(np.array([4, 0, 0]))
