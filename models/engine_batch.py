"""Many simulated engines as stable-baselines3 takes them, and its rollout buffer for steps of unequal length.

Called by models/train.py only.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer
from stable_baselines3.common.vec_env import VecEnv

from ..env.acceptance import Floats
from ..env.reward import advantages
from ..env.simulator import Simulator
from ..env.world import NAMED, PRICED
from .learned import outside_of
from .network import GLOBAL_INPUTS, OUTPUTS, REQUEST_INPUTS, Singles
from .train_config import TrainConfig
from .worlds import training_scenario

RATE_MEMORY_S: Final = 40.0  # of an engine's mean tokens per second, in steps of a full batch


class EngineBatch(VecEnv):
    """Many engines that never end: before each rollout some are replaced, and values carry over its last step.

    Reward of a step: (tokens - rate * seconds) / tokens of a step without drafts, rate the engine's own mean. Summed,
    it is what a policy gains over its mean rate, whatever the engine's speed.
    """

    def __init__(self, config: TrainConfig, seed: int) -> None:
        self.config = config
        scenario = training_scenario(config.worlds, seed, config.slots, config.exits_share)
        self.k_max = scenario.positions
        self.simulator = Simulator(
            scenario, config.engines, mode=PRICED if config.head == "price" else NAMED, seed=seed
        )
        bounded = {"requests": (config.slots, REQUEST_INPUTS), "globals": (GLOBAL_INPUTS,)}
        observation = spaces.Dict({name: spaces.Box(-1.0, 1.0, shape) for name, shape in bounded.items()})
        action: spaces.Space[Any] = (
            spaces.Box(-1.0, 1.0, (len(OUTPUTS),))
            if config.head == "price"
            else spaces.MultiDiscrete([self.k_max + 1] * config.slots)
        )
        super().__init__(config.engines, observation, action)
        self._random = np.random.default_rng([seed, 1])
        self._actions: np.ndarray[Any, Any] = np.zeros(0)
        self.rate: Floats = np.zeros(config.engines)
        self.paces: Floats = np.ones(config.engines)  # seconds of the last step, in steps of a full batch

    def reset(self) -> dict[str, Singles]:
        """Begin with new engines."""
        self.simulator.reset()
        self._settle(np.arange(self.num_envs))
        return self.observe()

    def renew(self) -> dict[str, Singles]:
        """Replace some engines by others."""
        chosen = np.flatnonzero(self._random.random(self.num_envs) < self.config.renewed_share)
        if len(chosen):
            self.simulator.reset(chosen)
            self._settle(chosen)
        return self.observe()

    def _settle(self, engines: np.ndarray[Any, Any]) -> None:
        self.simulator.warm(engines)
        state = self.simulator.state.engines[engines]
        self.rate[engines] = np.maximum(state["emitted"], 1) / (state["step_s"] + state["host_s"])

    def observe(self) -> dict[str, Singles]:
        """Return copies: the simulator writes into its arrays."""
        return {
            "requests": np.ascontiguousarray(self.simulator.requests()),
            "globals": self.simulator.state.globals.copy(),
        }

    def step_async(self, actions: np.ndarray[Any, Any]) -> None:
        """Note the actions."""
        self._actions = actions

    def step_wait(self) -> tuple[dict[str, Singles], Singles, np.ndarray[Any, Any], list[dict[str, Any]]]:
        """Step every engine."""
        if self.config.head == "price":
            self.simulator.step(outside_of(self._actions.astype(np.float32)))
        else:
            self.simulator.step(None, self._actions.astype(np.int8))
        engines, terms = self.simulator.state.engines, self.simulator.state.terms
        seconds = engines["step_s"] + engines["host_s"]
        tokens = terms[:, 1]
        pace_s = self.simulator.origins.pace_s[engines["profile"]]
        self.paces = seconds / pace_s
        rewards = (tokens - self.rate * seconds) / np.maximum(engines["decode_tokens"], 1.0)
        keep = np.exp(-self.paces / RATE_MEMORY_S)
        self.rate = self.rate * keep + (1.0 - keep) * tokens / np.maximum(seconds, 1e-9)
        rewards = np.where(engines["decode_tokens"] > 0, np.clip(rewards, -10.0, 10.0), 0.0)
        return self.observe(), rewards.astype(np.float32), np.zeros(self.num_envs, bool), [{} for _ in tokens]

    def close(self) -> None:
        """End the simulator's threads."""
        self.simulator.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute, once for each engine."""
        return [getattr(self, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of the batch."""
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Call a method of the batch."""
        return [getattr(self, method_name)(*args, **kwargs)]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Nothing is wrapped."""
        return [False] * self.num_envs


class SemiMarkovBuffer(DictRolloutBuffer):
    """A rollout whose steps last unequal times."""

    engines: EngineBatch

    def reset(self) -> None:
        """Empty it."""
        super().reset()
        self.paces = np.zeros((self.buffer_size, self.n_envs))

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Take in a step, and how long it took."""
        self.paces[self.pos] = self.engines.paces
        super().add(*args, **kwargs)

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: np.ndarray[Any, Any]) -> None:
        """Fill in advantages and returns."""
        values = self.values.astype(np.float64)
        following = np.concatenate([values[1:], last_values.detach().numpy().reshape(1, -1)])
        config = self.engines.config
        ends = np.zeros(values.shape, bool)
        self.advantages = advantages(
            self.rewards.astype(np.float64), values, following, self.paces, ends, config.discount, config.trace_decay
        ).astype(np.float32)
        self.returns = self.advantages + self.values
