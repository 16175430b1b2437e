"""The simulator as a stable-baselines3 VecEnv, without a wrapper in between; and semi-Markov returns for PPO.

For training of one's own: `faser train` learns in models/training/advised.py. Needs stable-baselines3 (extra
`train`), which nothing else in env/ imports. SB3 expects that an episode that ends begins anew in the same step, with
the last observation in `infos[i]["terminal_observation"]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.utils.seeding import np_random
from stable_baselines3.common.buffers import DictRolloutBuffer
from stable_baselines3.common.vec_env import VecEnv

from ..engine_adapter.arrays import Singles
from .layout.action_vector import ACTION, require_numbers
from .layout.reward import advantages
from .simulator.scenario import Scenario
from .simulator.simulator import Simulator
from .simulator.state import TERMS
from .speculative_serving import action_space, is_over, observation_space, observations


class SimulatedVecEnv(VecEnv):
    """Engines in a batch; `elapsed_s` and `raw_rewards` (engines,) are those of the last step.

    Without a seed one is drawn. `np_random_seed` is the one in force: `seed` with it, and a reset repeats what was met.
    """

    def __init__(
        self, num_envs: int = 64, scenario: Scenario | None = None, threads: int = 1, seed: int | None = None
    ) -> None:
        self.scenario = scenario or Scenario()
        self.render_mode = None
        super().__init__(num_envs, observation_space(self.scenario.slots), action_space())
        self.simulator = Simulator(self.scenario, num_envs, threads=threads, seed=seed or 0, copies=True)
        self.np_random_seed = np_random()[1] if seed is None else seed
        self.simulator.seed(self.np_random_seed)
        self.elapsed_s = np.zeros(num_envs)
        self.raw_rewards = np.zeros(num_envs)
        self._actions: Singles = np.zeros((num_envs, len(ACTION)), np.float32)
        self._returns, self._lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)

    def reset(self) -> dict[str, Singles]:
        """Begin an episode everywhere."""
        seed = next((each for each in self._seeds if each is not None), None)
        if seed is not None:
            self.np_random_seed = seed
            self.simulator.seed(seed)
        self._reset_seeds()
        self.simulator.reset()
        self.simulator.warm()
        self._returns[:], self._lengths[:] = 0.0, 0
        return observations(self.simulator)

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        """Take the actions for the next step; raise ValueError if they hold NaN or infinity."""
        self._actions = require_numbers(actions).astype(np.float32, copy=False)

    def step_wait(self) -> Any:
        """Simulate one step of every engine."""
        simulator = self.simulator
        self.raw_rewards = simulator.step(self._actions).copy()
        self.elapsed_s = simulator.state.engines["elapsed_s"].copy()
        over, shown = is_over(simulator), observations(simulator)
        terms, elapsed_s = simulator.state.terms.tolist(), self.elapsed_s.tolist()
        infos: list[dict[str, Any]] = [
            {**dict(zip(TERMS, each, strict=True)), "elapsed_s": passed}
            for each, passed in zip(terms, elapsed_s, strict=True)
        ]
        self._returns += self.raw_rewards
        self._lengths += 1
        if over.any():
            ended = np.flatnonzero(over)
            for e in ended.tolist():
                infos[e]["terminal_observation"] = {name: values[e].copy() for name, values in shown.items()}
                infos[e]["TimeLimit.truncated"] = True
                infos[e]["episode"] = {"r": float(self._returns[e]), "l": int(self._lengths[e]), "t": 0.0}
            self._returns[ended], self._lengths[ended] = 0.0, 0
            simulator.reset(ended)
            simulator.warm(ended)
            fresh = observations(simulator)
            for name, values in shown.items():
                values[ended] = fresh[name][ended]
        return shown, self.raw_rewards.astype(np.float32), over, infos

    def close(self) -> None:
        """End the threads."""
        self.simulator.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute once per engine."""
        return [getattr(self, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of the batch: engines have none of their own."""
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Call a method of the batch, once."""
        result = getattr(self, method_name)(*method_args, **method_kwargs)
        return [result] * len(list(self._get_indices(indices)))

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """No engine is wrapped."""
        return [False] * len(list(self._get_indices(indices)))

    def get_images(self) -> Sequence[npt.NDArray[np.uint8] | None]:
        """Return no images: render a single environment instead."""
        return [None] * self.num_envs


class SemiMarkovBuffer(DictRolloutBuffer):
    """PPO's rollouts with steps of unequal length: exp(-rho * dt) in place of a constant discount.

    Use `PPO(..., gamma=1.0, rollout_buffer_class=SemiMarkovBuffer, rollout_buffer_kwargs={"source": vec_env})`. SB3
    adds gamma times the terminal value to the reward where an episode was cut off; here that value is taken out again
    and discounted by the step's own length.
    """

    def __init__(self, *args: Any, source: SimulatedVecEnv, **kwargs: Any) -> None:
        self.source = source
        super().__init__(*args, **kwargs)

    def reset(self) -> None:
        """Forget the rollout."""
        super().reset()
        self.elapsed_s = np.zeros((self.buffer_size, self.n_envs))
        self.terminal_values = np.zeros((self.buffer_size, self.n_envs))

    def add(self, obs: Any, action: Any, reward: Any, *args: Any, **kwargs: Any) -> None:
        """Take in one step; called right after the environment's."""
        self.elapsed_s[self.pos] = self.source.elapsed_s
        raw = self.source.raw_rewards.astype(np.float32)
        self.terminal_values[self.pos] = np.asarray(reward) - raw  # gamma is 1
        super().add(obs, action, raw, *args, **kwargs)

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: npt.NDArray[Any]) -> None:
        """Fill advantages and returns."""
        values = self.values.astype(np.float64)
        ends = np.concatenate([self.episode_starts[1:] > 0, np.asarray(dones, bool)[None]])
        following = np.concatenate([values[1:], last_values.clone().cpu().numpy().reshape(1, -1)])
        following = np.where(ends, self.terminal_values, following)
        rho = self.source.scenario.weights.discount_per_s
        self.advantages = advantages(
            self.rewards.astype(np.float64), values, following, self.elapsed_s, ends, rho, self.gae_lambda
        ).astype(np.float32)
        self.returns = self.advantages + self.values
