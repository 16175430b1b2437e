"""Pairs of simulated engines with the same requests and the same luck: one is served under advice, one without.

Called by models/training/advised.py. Engines run through the decision core, as in a daemon. Some of their requests
want tokens at a pace that only drafts can keep; half of the engines are always full, the others come and go.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np

from ...engine_adapter.arrays import Floats
from ...engine_adapter.protocol import ActionSet
from ...env.estimate.engine_state import EngineState
from ...env.simulator.scenario import Scenario
from ...env.simulator.simulated_engine import SimulatedEngine
from ..evaluation.evaluate import FULL, Decide
from ..evaluation.objective_worlds import with_paces
from ..evaluation.worlds import WorldSpec, training
from ..learned.advice import SPAN_DECISIONS
from ..policies.policy import Policy
from ..policies.price import PricePolicy
from .config import TrainConfig

BLIND: Final = 0.2  # of the tasks, have a drafter without confidence
FULL_SHARE: Final = 0.5  # of the tasks, have always a full batch
RATES: Final = (0.5, 1.1)  # of the others: arrivals, as a share of what a full batch without speculation serves
KV_ROOM: Final = (1.2, 20.0)  # KV blocks, in those of a full batch
KV_BLOCKS, LEAST_KV_BLOCKS = 20, 256  # of a request; of an engine
URGENT_SHARES: Final = (0.05, 0.6)
URGENT_PACES: Final = (0.6, 0.95)  # of what a token takes without speculation
BATCH_PACES: Final = (1.2, 3.0)
FILL_STEPS: Final = 200  # a batch that is not full by then will not be
MOST_GAIN: Final = 2.0  # and loss, that counts of a span: in some a baseline run emits next to nothing
BASELINE_SHARE: Final = 1.5  # of an episode's decisions: a baseline run in no hurry makes fewer in the same time


@dataclass(frozen=True, slots=True, eq=False)
class BaselineTask:
    """One engine and the requests that it gets."""

    scenario: Scenario
    load: int  # running requests at most
    seed: int
    has_confidence: bool = True

    def engine(self) -> SimulatedEngine:
        """Return the engine at its beginning."""
        return SimulatedEngine(self.scenario, self.seed, has_confidence=self.has_confidence)


def tasks(config: TrainConfig, seed: int, count: int) -> list[BaselineTask]:
    """Return random engines of the training worlds under random loads and objectives."""
    random = np.random.default_rng([seed, 5])
    profiles = training(config.worlds, seed, config.exits_share, config.copies_share)
    found = []
    for _ in range(count):
        profile = profiles[int(random.integers(len(profiles)))]
        load = min(int(2.0 ** random.uniform(0.0, math.log2(config.slots) + 0.5)), config.slots)
        share, pace, batch_pace, rate, room = (
            float(random.uniform(*bounds))
            for bounds in (URGENT_SHARES, URGENT_PACES, BATCH_PACES, RATES, np.log(KV_ROOM))
        )
        blocks = max(int(math.exp(room) * KV_BLOCKS * load), LEAST_KV_BLOCKS)
        closed = WorldSpec(profile.name, "training", msgspec.structs.replace(profile, kv_blocks=blocks)).closed(load)
        if random.random() >= FULL_SHARE:
            closed = replace(closed, load=(rate, rate))
        scenario = with_paces(closed, share, pace, batch_pace)
        found.append(
            BaselineTask(scenario, load, int(random.integers(1 << 31)), has_confidence=bool(random.random() >= BLIND))
        )
    return found


class Course:
    """An engine that is served under a policy, and what that is worth so far."""

    def __init__(self, task: BaselineTask, config: TrainConfig, decide: Decide) -> None:
        self.engine, self._late_cost = task.engine(), config.late_cost
        self.state = EngineState(self.engine.capabilities)
        self._decide, self._full = decide, int(FULL * task.load)
        self._actions: ActionSet | None = None
        self.steps = 0
        self.worth = 0.0  # tokens of requests that are in time so far, less what those of others cost

    @property
    def tokens(self) -> float:
        """Emitted so far."""
        return float(self.engine.simulator.state.engines["emitted"][0])

    def step(self, policy: Policy) -> None:
        """Make one engine step, and the decision for the next."""
        record = self.engine.step(self._actions)
        self.steps += 1
        good, tokens = self.engine.simulator.state.terms[0, :2].tolist()
        self.worth += good - self._late_cost * (tokens - good)
        self._actions = self._decide(self.state, record, policy, self.steps)

    def begin(self, policy: Policy) -> None:
        """Fill the batch."""
        while not self.is_begun():
            self.step(policy)

    def is_begun(self) -> bool:
        """Return whether the batch is full."""
        running = int(self.engine.simulator.state.engines["running"][0])
        return running >= self._full or self.steps >= FILL_STEPS


@dataclass(frozen=True, slots=True)
class BaselineRun:
    """What price without advice has earned of a task by when: (steps,) each."""

    seconds: Floats
    worths: Floats  # tokens in time less what late ones cost
    worth_rate: float  # ... per second, from where the batch is full
    token_rate: float  # tokens/s from there

    @classmethod
    def of(cls, task: BaselineTask, config: TrainConfig, decide: Decide) -> BaselineRun:
        """Serve the task."""
        course, spans = Course(task, config, decide), config.spans
        policy = PricePolicy(course.engine.capabilities)
        found, begun, left = [(0.0, 0.0, 0.0)], 0, int(BASELINE_SHARE * spans * SPAN_DECISIONS)
        while left:
            course.step(policy)
            found.append((course.engine.clock_s, course.worth, course.tokens))
            begun = begun or (course.is_begun() and course.steps)
            left -= begun > 0
        seconds, worths, tokens = np.array(found).T
        span_s = max(float(seconds[-1] - seconds[begun]), 1e-9)
        worth_rate, token_rate = (float(each[-1] - each[begun]) / span_s for each in (worths, tokens))
        return cls(seconds, worths, worth_rate, token_rate)

    def by(self, seconds: float) -> float:
        """Return the worth by a time; behind its end it goes on at its rate."""
        beyond = max(seconds - float(self.seconds[-1]), 0.0)
        return float(np.interp(seconds, self.seconds, self.worths)) + beyond * self.worth_rate

    def gain(self, course: Course, since: tuple[float, float]) -> float:
        """Return by how much a course earned more since (seconds, worth) than this run did, in its tokens, -2..2."""
        before_s, before = since
        after_s = course.engine.clock_s
        own, baseline = course.worth - before, self.by(after_s) - self.by(before_s)
        gain = (own - baseline) / max(self.token_rate * (after_s - before_s), 1e-9)
        return min(max(gain, -MOST_GAIN), MOST_GAIN)
