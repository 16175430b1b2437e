"""A policy for draft lengths, and beside it a choice of where the engine's pipeline is cut.

Made by models/registry.py. An engine whose stages cannot move is asked for nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from ...engine_adapter.protocol import Stages
from ...env.estimate.engine_state import EngineState, StageSight
from ...env.spaces import Action, Capabilities
from ..policies.policy import Policy, PolicyError
from .trials import Trials

SEPARATOR: Final = "+stages:"
CHOICES: Final = "a number of stages, turns:STEPS or measured"

Bounds = tuple[int, ...]


class StageChoice(Protocol):
    """Chooses a cut out of those that an engine can have."""

    def choose(self, sight: StageSight) -> int:
        """Return into how many stages to cut, from what the newest step shows."""


@dataclass(slots=True)
class FixedStages:
    """Always the same."""

    stages: int

    def choose(self, sight: StageSight) -> int:
        """Return them."""
        return self.stages


@dataclass(slots=True)
class StageTurns:
    """Each number of stages in turn, so many steps from move to move: to see what they take."""

    most: int
    steps: int
    _now: int = field(init=False)

    def __post_init__(self) -> None:
        self._now = self.most

    def choose(self, sight: StageSight) -> int:
        """Return the one whose turn it is."""
        if sight.stages == self._now and sight.steady_steps >= self.steps:
            self._now = self._now % self.most + 1
        return self._now


class StagedPolicy:
    """Lengths by another policy, bounds by a choice."""

    def __init__(self, inner: Policy, choice: StageChoice, stages: Stages | None, spec: str) -> None:
        self.name = f"{inner.name}{SEPARATOR}{spec}"
        self._inner, self._choice = inner, choice
        self._cuts = {} if stages is None else {count: even_cut(count, stages) for count in possible(stages)}

    @property
    def handed_over(self) -> int:
        """Observations that the inner policy left to another one."""
        return int(getattr(self._inner, "handed_over", 0))

    def act(self, state: EngineState) -> Action:
        """Return the inner policy's action, with bounds if the stages can move."""
        action = self._inner.act(state)
        if not self._cuts:
            return action
        count = self._choice.choose(state.stages)
        bounds = self._cuts[count]
        if bounds == state.stages.bounds:
            return msgspec.structs.replace(action, stage_bounds=bounds)
        reason = f"{action.reason}; into {count} stage{'s' * (count > 1)}"
        return msgspec.structs.replace(action, stage_bounds=bounds, reason=reason)


def possible(stages: Stages) -> range:
    """Return the numbers of stages that a pipeline can be cut into."""
    return range(1, min(len(stages.bounds) + 1, stages.layers) + 1)


def even_cut(count: int, stages: Stages) -> Bounds:
    """Return the bounds of so many equal stages, on the last ranks: an empty range in front costs no hop."""
    empty = len(stages.bounds) + 1 - count
    return (*[0] * empty, *(round(stages.layers * stage / count) for stage in range(1, count)))


def with_stages(inner: Policy, spec: str, capabilities: Capabilities) -> StagedPolicy:
    """Return the policy with the choice that `spec` names; raise PolicyError for one that is not."""
    stages = capabilities.stages
    most = possible(stages)[-1] if stages else None
    if spec == "measured":
        choice: StageChoice = Trials(most or 1)
    elif match := re.fullmatch(r"turns:(\d{1,6})", spec):
        choice = StageTurns(most or 1, max(int(match[1]), 1))
    elif re.fullmatch(r"\d{1,4}", spec) and int(spec) >= 1:
        if most is not None and int(spec) > most:
            raise PolicyError(f"{spec} stages; this engine's pipeline has 1 to {most}")
        choice = FixedStages(int(spec))
    else:
        raise PolicyError(f"stages {spec!r}; expected {CHOICES}")
    return StagedPolicy(inner, choice, stages, spec)
