"""Worlds around the knee: engines on which not everybody can be fast, and requests of two classes, urgent and batch.

Called by models/evaluation/attainment.py and by training, which never sees the held-out ones. An objective is a share
of what a token takes without speculation at the same load, prompts between the steps included: 1.0 is what an engine
that drafts nothing just about keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ...env.layout.action_vector import outside
from ...env.simulator.scenario import Scenario, ServiceClass, idle_times_s
from ...env.simulator.simulator import Simulator
from .worlds import WorldSpec, held_out

CLASSES: Final = ("urgent", "batch")  # by priority
BATCH_PACE: Final = 2.0
URGENT_SHARES: Final = (0.1, 0.25, 0.5)
URGENT_PACES: Final = (0.7, 0.85)  # which need drafts
ANY_TTFT: Final = 1e6  # of an idle engine's: how long a closed loop's requests queue is no matter of drafts
PACE_STEPS, PACE_SEED = 4000, 77  # of the look at the engine without speculation


@dataclass(frozen=True, slots=True)
class ObjectiveWorld:
    """One engine, how many requests run on it, and what these want."""

    world: WorldSpec
    requests: int
    urgent_share: float
    urgent_pace: float  # of what a token takes without speculation
    batch_pace: float = BATCH_PACE

    @property
    def name(self) -> str:
        """Say which: engine, requests, share and pace of the urgent."""
        return f"{self.world.name} x{self.requests}, {self.urgent_share:.0%} at {self.urgent_pace:.2f}"

    def scenario(self) -> Scenario:
        """Return a closed loop of so many requests."""
        return with_paces(self.world.closed(self.requests), self.urgent_share, self.urgent_pace, self.batch_pace)


def with_paces(scenario: Scenario, urgent_share: float, urgent_pace: float, batch_pace: float) -> Scenario:
    """Return the scenario with an urgent class and a batch class of these paces."""
    _, idle_s = idle_times_s(scenario.profiles[0], scenario.workloads)
    plain_s = plain_pace_s(scenario)
    paces = ((urgent_share, urgent_pace), (1.0 - urgent_share, batch_pace))
    classes = tuple(
        ServiceClass(name, share, ANY_TTFT, pace * plain_s / idle_s, priority)
        for priority, (name, (share, pace)) in enumerate(zip(CLASSES, paces, strict=True))
    )
    return replace(scenario, classes=classes, tells_objectives=True)


def plain_pace_s(scenario: Scenario) -> float:
    """Return seconds per token and request without speculation, where so many run as can."""
    simulator = Simulator(scenario, 1, seed=PACE_SEED)
    simulator.reset()
    nothing, engine = outside(), simulator.state.engines[0]
    tokens = request_s = 0.0
    for number in range(PACE_STEPS):
        if number == PACE_STEPS // 4:
            tokens, request_s = float(engine["emitted"]), 0.0
        before_s = float(engine["clock_s"])
        simulator.step(nothing)
        request_s += float(engine["running"]) * (float(engine["clock_s"]) - before_s)
    return request_s / max(float(engine["emitted"]) - tokens, 1.0)


def knee_worlds() -> tuple[ObjectiveWorld, ...]:
    """Return the worlds that policies are judged in; never trained or searched in."""
    known = {world.name: world for world in held_out()}
    places = (("cpu-embedded", 8), ("gpu-small-knee", 64), ("gpu-8b-eagle", 128), ("cpu-weak-drafter", 8))
    return tuple(
        ObjectiveWorld(known[name], requests, share, pace)
        for name, requests in places
        for share in URGENT_SHARES
        for pace in URGENT_PACES
    )
