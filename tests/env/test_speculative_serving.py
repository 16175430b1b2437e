"""The environments keep gymnasium's and SB3's contracts; rewards do not depend on how time is cut into steps."""

from __future__ import annotations

import math
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3

from faser.env.layout.action_vector import ACTION
from faser.env.layout.observation import GLOBAL_FEATURES, REQUEST_FEATURES
from faser.env.layout.reward import advantages, discount, reward
from faser.env.profile.engine_profile import synthetic_profile
from faser.env.simulator.scenario import Scenario, with_mechanisms
from faser.env.simulator.speed import main
from faser.env.speculative_serving import ENV_ID, SpeculativeServingEnv
from faser.env.vec_env import SemiMarkovBuffer, SimulatedVecEnv

WEIGHTS = (0.02, 0.001, 0.01, 0.002)


def small(episode_steps: int = 30) -> Scenario:
    return Scenario(
        profiles=(with_mechanisms(synthetic_profile(max_requests=8)),), slots=8, episode_steps=episode_steps
    )


def test_gymnasium_and_sb3_accept_the_environment() -> None:
    environment = gymnasium.make(ENV_ID, render_mode="rgb_array", scenario=small())
    check_env(environment.unwrapped)
    with warnings.catch_warnings():
        # Advice to use a policy made for rows per request, which is what these are for.
        warnings.filterwarnings("ignore", "Your observation requests has an unconventional shape")
        check_env_for_sb3(environment.unwrapped)
    environment.close()


def test_the_docstring_documents_every_action_and_observation() -> None:
    text = SpeculativeServingEnv.__doc__ or ""
    headings = (
        "Description",
        "Action Space",
        "Observation Space",
        "Rewards",
        "Starting State",
        "Episode End",
        "Arguments",
    )
    assert all(f"## {heading}" in text for heading in headings)
    for each in (*ACTION, *REQUEST_FEATURES, *GLOBAL_FEATURES):
        assert f"| {each.name} |" in text


def test_episodes_are_cut_off_and_repeat_by_seed() -> None:
    def run(seed: int) -> list[Any]:
        environment = gymnasium.make(ENV_ID, scenario=small())
        observation, _ = environment.reset(seed=seed)
        seen: list[Any] = [observation["globals"].tobytes()]
        random, truncated, steps = np.random.default_rng(0), False, 0
        while not truncated:
            action = random.uniform(-1.0, 1.0, len(ACTION)).astype(np.float32)
            observation, gain, terminated, truncated, info = environment.step(action)
            assert environment.observation_space.contains(observation)
            assert not terminated
            assert info["discount"] == pytest.approx(math.exp(-0.1 * info["elapsed_s"]))
            seen += [observation["requests"].tobytes(), gain]
            steps += 1
        assert steps == 30
        return seen

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_the_first_episode_of_the_vector_matches_and_ends_in_the_same_step() -> None:
    vector = gymnasium.make_vec(ENV_ID, 3, vectorization_mode="vector_entry_point", scenario=small())
    single = gymnasium.make(ENV_ID, scenario=small())
    seen, _ = vector.reset(seed=4)
    alone, _ = single.reset(seed=4)
    random = np.random.default_rng(0)
    for step in range(30):
        assert seen["requests"][0].tobytes() == alone["requests"].tobytes()
        actions = random.uniform(-1.0, 1.0, (3, len(ACTION))).astype(np.float32)
        seen, gains, _, over, infos = vector.step(actions)
        alone, gain, *_ = single.step(actions[0])
        assert gains[0] == gain
        assert over.all() == (step == 29)
    assert infos["final_obs"]["requests"][0].tobytes() == alone["requests"].tobytes()
    assert seen["requests"][0].tobytes() != alone["requests"].tobytes()
    vector.close()


def test_sb3_gets_the_last_observation_of_an_episode_not_the_first_of_the_next() -> None:
    batch, single = SimulatedVecEnv(2, small(10)), gymnasium.make(ENV_ID, scenario=small(10))
    batch.seed(3)
    batch.reset()
    single.reset(seed=3)
    action = np.zeros((2, len(ACTION)), np.float32)
    for step in range(10):
        seen, _, over, infos = batch.step(action)
        alone, *_ = single.step(action[0])
        assert over.all() == (step == 9)
    assert infos[0]["TimeLimit.truncated"]
    assert infos[0]["terminal_observation"]["globals"].tobytes() == alone["globals"].tobytes()
    assert seen["globals"][0].tobytes() != alone["globals"].tobytes()


def test_ppo_learns_with_semi_markov_returns() -> None:
    torch.set_num_threads(1)
    batch = SimulatedVecEnv(4, small(7))
    model = PPO(
        "MultiInputPolicy", batch, n_steps=16, batch_size=32, n_epochs=1, gamma=1.0, seed=0, device="cpu",
        rollout_buffer_class=SemiMarkovBuffer, rollout_buffer_kwargs={"source": batch},
    )  # fmt: skip
    model.learn(64)
    buffer = model.rollout_buffer
    assert isinstance(buffer, SemiMarkovBuffer)
    assert np.isfinite(buffer.returns).all()
    assert (buffer.terminal_values != 0.0).sum() == 4 * (16 // 7)
    # Where an episode was cut off, the return is the step's reward and the terminal value, discounted by its length.
    step = 6
    expected = buffer.rewards[step] + discount(buffer.elapsed_s[step], 0.1) * buffer.terminal_values[step]
    returns = buffer.returns.reshape(4, 16).T  # SB3 has laid the engines one behind the other
    assert returns[step] == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("share", [0.5, 0.2])
@pytest.mark.parametrize("rho", [0.0, 0.1, 5.0])
def test_a_step_cut_in_two_leaves_the_return_unchanged(share: float, rho: float) -> None:
    """Equal total work and output, spread evenly over the same time."""
    work, seconds, following = np.array([12.0, 20.0, 1.5, 7.0]), 0.8, 3.0
    whole = reward(*work, seconds, rho, *WEIGHTS) + float(discount(seconds, rho)) * following
    first = reward(*(work * share), seconds * share, rho, *WEIGHTS)
    second = reward(*(work * (1 - share)), seconds * (1 - share), rho, *WEIGHTS)
    cut = first + float(discount(seconds * share, rho)) * (
        second + float(discount(seconds * (1 - share), rho)) * following
    )
    assert cut == pytest.approx(whole, rel=1e-12)
    gain = reward(*work, seconds, 0.0, *WEIGHTS) - 0.3 * seconds
    halves = [
        reward(*(work * part), seconds * part, 0.0, *WEIGHTS) - 0.3 * seconds * part for part in (share, 1 - share)
    ]
    assert sum(halves) == pytest.approx(gain)


def test_a_constant_discount_would_not_survive_the_cut() -> None:
    gamma, value, following = 0.99, 1.0, 3.0
    assert value + gamma * following != pytest.approx(value / 2 + gamma * (value / 2 + gamma * following))


def test_rewards_by_hand() -> None:
    assert reward(10.0, 12.0, 2.0, 3.0, 0.5, 0.0, 1.0, 0.1, 0.5, 0.2) == pytest.approx(10 + 1.2 - 1 - 0.6)
    assert reward(10.0, 0.0, 0.0, 0.0, 2.0, 1.0, 1.0, 0.0, 0.0, 0.0) == pytest.approx(5 * (1 - math.exp(-2)))


def test_advantages_by_hand() -> None:
    rewards, values = np.array([[1.0], [2.0]]), np.array([[0.5], [0.25]])
    elapsed_s, ends = np.array([[1.0], [2.0]]), np.array([[False], [True]])
    following = np.array([[0.25], [4.0]])
    last = 2.0 + math.exp(-0.2) * 4.0 - 0.25
    first = 1.0 + math.exp(-0.1) * 0.25 - 0.5 + math.exp(-0.1) * 0.9 * last
    assert advantages(rewards, values, following, elapsed_s, ends, 0.1, 0.9).ravel() == pytest.approx([first, last])


def test_pictures_and_text_of_an_episode() -> None:
    for mode in ("rgb_array", "ansi"):
        environment = SpeculativeServingEnv(small(), render_mode=mode)
        environment.reset(seed=0)
        for _ in range(10):
            environment.step(np.full(len(ACTION), 0.2, np.float32))
        drawn = environment.render()
        if mode == "ansi":
            assert all(name in drawn for name in ("running", "waiting", "draft length", "good tokens/s"))
        else:
            assert drawn.shape == (640, 640, 3)
            assert drawn.std() > 5
    with pytest.raises(ValueError, match="expected None"):
        SpeculativeServingEnv(small(), render_mode="human")


def test_the_benchmark_ends_with_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--seconds", "0.1", "--engines", "2"]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert '"requests": 64' in last
    assert '"steps_per_s_one_core"' in last
