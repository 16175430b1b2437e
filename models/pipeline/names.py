"""Names to pipeline policies: the parser of `faser evaluate --pipeline --policies`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from ...env.pipeline.arrivals import Arrivals
from ...env.pipeline.constants import STAGES, PipelineConstants
from ..policies.policy import PolicyError
from .flexpipe import FlexPipe
from .hindsight_plan import HindsightPlan
from .learned_policy import RELEASED, LearnedPipeline, load_pipeline_network
from .pipeline_policy import PipelinePolicy
from .rules import ReactiveScaler, StaticStages
from .shadows import LATENCY_WEIGHT
from .weigh import Weigh, WeighSettings

PIPELINE_POLICIES: Final = {
    "static:S": "pipelines of S stages for 75 % of the peak; static:S:N for N of them",
    "reactive:S": "as many pipelines of S stages as requests under way ask for, as Ray Serve scales",
    "flexpipe": "rival: the rule of FlexPipe (arXiv 2510.11938)",
    "weigh": "changes stages and pipelines where that saves more than the move costs; weigh:W counts each second of "
    f"latency as W late requests, weigh as {LATENCY_WEIGHT:g}",
    "learned": "a network trained by imitation of weigh, then PPO; learned:PATH takes another manifest",
    "hindsight": "bound: plans with the whole trace known; hindsight:W weighs latency as weigh:W does",
}
MOST_WEIGHT: Final = 100.0  # missed requests that a second of one request is worth
DEFAULT: Final = (
    *(f"static:{stages}" for stages in STAGES), *(f"reactive:{stages}" for stages in STAGES), "flexpipe", "weigh",
    "weigh:1.5", "learned", "hindsight",
)  # fmt: skip


def make_pipeline_policy(spec: str, constants: PipelineConstants, arrivals: Arrivals, seed: int) -> PipelinePolicy:
    """Return the policy that `spec` names; raise PolicyError with the possible names otherwise.

    :param arrivals, seed: what it will serve; hindsight alone looks at them
    """
    name, _, argument = spec.strip().partition(":")
    if name == "learned":
        return LearnedPipeline(load_pipeline_network(Path(argument) if argument else RELEASED), constants, spec.strip())
    if not argument:
        if name == "flexpipe":
            return FlexPipe(constants)
        if name == "weigh":
            return Weigh(constants)
        if name == "hindsight":
            return HindsightPlan(arrivals, constants, seed)
    if name == "weigh":
        return Weigh(constants, WeighSettings(latency_weight=_weight(name, argument)), spec.strip())
    if name == "hindsight":
        return HindsightPlan(arrivals, constants, seed, _weight(name, argument), spec.strip())
    numbers = [int(part) for part in argument.split(":") if part.isdecimal()]
    if len(numbers) == argument.count(":") + 1 and numbers[0] in STAGES:
        if name == "static" and len(numbers) <= 2 and numbers[-1] > 0:
            return StaticStages(numbers[0], numbers[1] if len(numbers) == 2 else None, constants)
        if name == "reactive" and len(numbers) == 1:
            return ReactiveScaler(numbers[0], constants)
    raise PolicyError(f"unknown pipeline policy {spec!r}: possible are {', '.join(PIPELINE_POLICIES)}")


def _weight(name: str, text: str) -> float:
    """Return what a second is worth; raise PolicyError for what is no number in the bounds."""
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0.0 <= weight <= MOST_WEIGHT:
        raise PolicyError(f"pipeline policy '{name}:{text}'", f"a number from 0 to {MOST_WEIGHT:g} behind the colon")
    return weight
