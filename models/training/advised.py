"""Advising the price policy on what tokens are worth, as a gymnasium environment: `faser/AdvisedServing-v0`.

Importing this module registers it. models/training/train.py has many of them, each in a process of its own. Every
episode has a baseline run (baseline_run.py) under price without advice, so that nothing is learnt from an easy engine
or a lucky draft.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

from ...engine_adapter.arrays import Singles
from ...env.layout.action_vector import require_numbers
from ...env.layout.observation import Observation, observe_vector
from ...env.speculative_serving import Observations, observation_space
from ..evaluation.evaluate import Decide
from ..learned.advice import SPAN_DECISIONS, Advice
from ..learned.learned import LearnedPolicy
from ..learned.network import Network
from ..policies.price import PricePolicy
from .baseline_run import BaselineRun, BaselineTask, Course, tasks
from .config import TrainConfig

ENV_ID: Final = "faser/AdvisedServing-v0"
UNSEEN: Final = 7_000_000  # added to the seed: engines for judging, neither trained in nor held out for the table
TRAINED_SHARE, JUDGED_SHARE = 5 / 6, 1 / 4  # tasks of each process, of the worlds; their baseline runs are kept


class AdvisedServing(gymnasium.Env[Observations, Singles]):
    """
    A server whose draft lengths the price policy chooses, under the agent's advice; a step is a span of 16 decisions.

    ## Description
    Engines of a list of tasks (baseline_run.py), one after the other, served through the decision core as in
    a daemon. Some of their requests want tokens at a pace that only drafts can keep.

    ## Action Space
    `Box(-1, 1, (4,), float32)`: urgency, horizon, reserve, patience, see models/learned/advice.py. 0 is no advice.

    ## Observation Space
    That of `faser/SpeculativeServing-v0`, with `config.slots` rows of requests.

    ## Rewards
    Tokens of requests within their objectives less `config.late_cost` times those of others, less what the baseline
    run had of both in the same time; as a share of its tokens, within -2..2.

    ## Starting State
    A full batch, filled by price without advice. The task is drawn from the list.

    ## Episode End
    Never terminated. Truncated after `config.spans` steps.

    ## Arguments
    `config`: a `faser.models.training.config.TrainConfig`. `decide`: the decision core; it lies above this package, in
    `faser.controller.cli.evaluate.decided`. `number`: environments of other numbers have other tasks.

    ## Version History
    v0: first. Since observation version 2 the advice is on what tokens are worth.
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, config: TrainConfig, decide: Decide, number: int = 0) -> None:
        self._config, self._decide = config, decide
        seed = config.seed + 1000 * number
        self._tasks = tasks(config, seed, math.ceil(TRAINED_SHARE * config.worlds))
        self._judged = tasks(config, seed + UNSEEN, math.ceil(JUDGED_SHARE * config.worlds))
        self._baselines: dict[BaselineTask, BaselineRun] = {}
        self._random = np.random.default_rng([seed, 6])
        space: Any = observation_space(config.slots)
        self.observation_space = space
        self.action_space = spaces.Box(-1.0, 1.0, (len(Advice._fields),))
        self.render_mode = None

    def _baseline(self, task: BaselineTask) -> BaselineRun:
        if task not in self._baselines:
            self._baselines[task] = BaselineRun.of(task, self._config, self._decide)
        return self._baselines[task]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Begin another episode; with a seed, all that follows depends on seed and actions alone."""
        super().reset(seed=seed)
        if seed is not None:
            self._random = np.random.default_rng([seed, 6])
        task = self._tasks[int(self._random.integers(len(self._tasks)))]
        self._yardstick = self._baseline(task)
        self._course = Course(task, self._config, self._decide)
        self._policy = PricePolicy(self._course.engine.capabilities)
        self._course.begin(self._policy)
        self._spans = 0
        return self._seen(), {}

    def step(self, action: Singles) -> tuple[Observations, float, bool, bool, dict[str, Any]]:
        """Serve for a span under this advice; the reward is a share of the baseline run's tokens.

        Raises ValueError for advice that holds NaN or infinity.
        """
        advice = Advice.of(require_numbers(action, Advice._fields).astype(np.float32, copy=False))
        course = self._course
        before = course.engine.clock_s, course.worth
        self._policy.follow(advice.values())
        for _ in range(SPAN_DECISIONS):
            course.step(self._policy)
        self._spans += 1
        is_over = self._spans >= self._config.spans
        return self._seen(), self._yardstick.gain(course, before), False, is_over, {}

    def _seen(self) -> Observations:
        view = observe_vector(self._course.state, self._config.slots)
        return {"requests": view.requests, "globals": view.globals}

    def judged(self, network: Network) -> list[float]:
        """Return, for each task that is judged, the worth over the baseline run's as a share of its tokens."""
        return [self._gain(task, network) for task in self._judged]

    def _gain(self, task: BaselineTask, network: Network) -> float:
        baseline, course = self._baseline(task), Course(task, self._config, self._decide)
        policy = LearnedPolicy(network, course.engine.capabilities)
        course.begin(policy)
        before = course.engine.clock_s, course.worth
        for _ in range(self._config.spans * SPAN_DECISIONS):
            course.step(policy)
        return baseline.gain(course, before)

    def looks(self) -> tuple[Singles, Singles]:
        """Return the least and greatest of each global feature under price, (features,) each, over the tasks."""
        seen = np.stack([view.globals for task in self._tasks for view in self._looks_at(task)])
        return seen.min(axis=0), seen.max(axis=0)

    def _looks_at(self, task: BaselineTask) -> Iterator[Observation]:
        course = Course(task, self._config, self._decide)
        policy = PricePolicy(course.engine.capabilities)
        for _ in range(math.ceil(self._config.spans / 4) * SPAN_DECISIONS):
            course.step(policy)
            if course.steps % SPAN_DECISIONS == 0:
                yield observe_vector(course.state, self._config.slots)


def advised_batch(config: TrainConfig, decide: Decide) -> SubprocVecEnv:
    """Return the environments, each in a process of its own with tasks of its own."""
    makers: list[Callable[[], gymnasium.Env[Any, Any]]] = [
        partial(AdvisedServing, config, decide, number) for number in range(config.engines)
    ]
    return SubprocVecEnv(makers, start_method="spawn")


def judged_advice(batch: VecEnv, network: Network) -> float:
    """Return the mean worth over that of price without advice, in its tokens, on engines not trained in, greedily."""
    gains: Sequence[list[float]] = batch.env_method("judged", network)
    return float(np.mean([gain for own in gains for gain in own]))


def looks(batch: VecEnv) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return what the global features span in training."""
    lows, highs = zip(*batch.env_method("looks"), strict=True)
    return tuple(map(float, np.min(lows, axis=0))), tuple(map(float, np.max(highs, axis=0)))


gymnasium.register(id=ENV_ID, entry_point="faser.models.training.advised:AdvisedServing")
