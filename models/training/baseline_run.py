"""Pairs of simulated engines with the same requests and the same luck: one is served under advice, one without.

Called by models/training/advised.py. Engines run through the decision core, as in a daemon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...engine_adapter.arrays import Floats
from ...engine_adapter.protocol import ActionSet
from ...env.estimate.engine_state import EngineState
from ...env.simulator.simulated_engine import SimulatedEngine
from ..evaluation.evaluate import DRIFT, FULL, Decide
from ..evaluation.worlds import WorldSpec, training
from ..policies.advice import SPAN_DECISIONS
from ..policies.policy import Policy
from ..policies.price import PricePolicy
from .config import TrainConfig

DRIFTING: Final = 0.2  # of the tasks, have a load that drifts
BLIND: Final = 0.2  # of the tasks, have a drafter without confidence
FILL_STEPS: Final = 600  # a batch that is not full by then never will be
SETTLE_STEPS: Final = 40  # of a drifting load, instead of filling
BASELINE_SHARE: Final = 1.5  # of an episode's decisions: a baseline run in no hurry makes fewer in the same time


@dataclass(frozen=True, slots=True, eq=False)
class BaselineTask:
    """One engine under one load."""

    world: WorldSpec
    load: int  # running requests, or DRIFT
    seed: int

    def engine(self, slots: int) -> SimulatedEngine:
        """Return the engine at its beginning."""
        scenario = self.world.drifting(slots) if self.load == DRIFT else self.world.closed(self.load)
        return SimulatedEngine(scenario, self.seed, has_confidence=self.world.has_confidence)


def tasks(config: TrainConfig, seed: int, count: int) -> list[BaselineTask]:
    """Return random engines of the training worlds under random loads."""
    random = np.random.default_rng([seed, 5])
    profiles = training(config.worlds, seed, config.exits_share, config.copies_share)
    found = []
    for _ in range(count):
        profile = profiles[int(random.integers(len(profiles)))]
        world = WorldSpec(profile.name, "training", profile, has_confidence=bool(random.random() >= BLIND))
        load = min(int(2.0 ** random.uniform(0.0, math.log2(config.slots) + 0.5)), config.slots)
        found.append(BaselineTask(world, DRIFT if random.random() < DRIFTING else load, int(random.integers(1 << 31))))
    return found


class Course:
    """An engine that is served under a policy, and what it has emitted by when."""

    def __init__(self, task: BaselineTask, slots: int, decide: Decide) -> None:
        self.engine = task.engine(slots)
        self.state = EngineState(self.engine.capabilities)
        self._decide, self._is_drifting = decide, task.load == DRIFT
        self._full = int(FULL * task.load)
        self._actions: ActionSet | None = None
        self.steps = 0
        self.good = 0.0

    @property
    def amount(self) -> float:
        """Tokens so far; where the load drifts those of requests within their objectives."""
        return self.good if self._is_drifting else float(self.engine.simulator.state.engines["emitted"][0])

    def step(self, policy: Policy) -> None:
        """Make one engine step, and the decision for the next."""
        record = self.engine.step(self._actions)
        self.steps += 1
        self.good += float(self.engine.simulator.state.terms[0, 0])
        self._actions = self._decide(self.state, record, policy, self.steps)

    def begin(self, policy: Policy) -> None:
        """Fill the batch."""
        while not self.is_begun():
            self.step(policy)

    def is_begun(self) -> bool:
        """Return whether the batch is full."""
        if self._is_drifting:
            return self.steps >= SETTLE_STEPS
        running = int(self.engine.simulator.state.engines["running"][0])
        return running >= self._full or self.steps >= FILL_STEPS


@dataclass(frozen=True, slots=True)
class BaselineRun:
    """What price without advice emits of a task by when: (steps,) each."""

    seconds: Floats
    amounts: Floats
    rate: float  # per second, from where the batch is full

    @classmethod
    def of(cls, task: BaselineTask, config: TrainConfig, decide: Decide) -> BaselineRun:
        """Serve the task."""
        course, spans = Course(task, config.slots, decide), config.spans
        policy = PricePolicy(course.engine.capabilities)
        found, begun, left = [(0.0, 0.0)], 0, int(BASELINE_SHARE * spans * SPAN_DECISIONS)
        while left:
            course.step(policy)
            found.append((course.engine.clock_s, course.amount))
            begun = begun or (course.is_begun() and course.steps)
            left -= begun > 0
        seconds, amounts = np.array(found).T
        span_s = max(float(seconds[-1] - seconds[begun]), 1e-9)
        return cls(seconds, amounts, float(amounts[-1] - amounts[begun]) / span_s)

    def by(self, seconds: float) -> float:
        """Return the amount by a time; behind its end it goes on at its rate."""
        beyond = max(seconds - float(self.seconds[-1]), 0.0)
        return float(np.interp(seconds, self.seconds, self.amounts)) + beyond * self.rate
