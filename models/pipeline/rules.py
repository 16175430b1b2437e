"""The plain rules: a fixed set of pipelines, and an autoscaler that follows what is under way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ...env.pipeline.cluster import STAY, PipelineMove
from ...env.pipeline.constants import PipelineConstants
from ...env.pipeline.view import ClusterView
from .pipeline_policy import LoadHint, toward
from .replicas import replicas_for

RESERVED: Final = 0.75  # of the peak: what the paper found always on
READY: Final = 0.3  # of the peak: what it says suffices with scaling


def pipelines_for(rate_rps: float, stages: int, constants: PipelineConstants) -> int:
    """Return how many pipelines serve a rate one by one, without batches; at least one."""
    return max(1, math.ceil(rate_rps * constants.of(stages).compute_s - 1e-9))


@dataclass(slots=True)
class StaticStages:
    """`static:S`: pipelines of S stages for 75 % of the peak; `static:S:N`: N of them. Nothing ever changes."""

    stages: int
    count: int | None
    constants: PipelineConstants
    keeps_idle: bool = True

    @property
    def name(self) -> str:
        """How it is asked for."""
        return f"static:{self.stages}" + ("" if self.count is None else f":{self.count}")

    def start(self, hint: LoadHint) -> tuple[int, int]:
        """Return the fixed set."""
        return self.stages, self.count or pipelines_for(RESERVED * hint.peak_rps, self.stages, self.constants)

    def decide(self, view: ClusterView) -> PipelineMove:
        """Stay."""
        return STAY


@dataclass(slots=True)
class ReactiveScaler:
    """`reactive:S`: as Ray Serve scales, ceil(requests waiting or under way / target of a pipeline), of S stages.

    Its numbers are sharper than Ray Serve's defaults (which wait 30 s before they add): the mean is over about 5 s, it
    adds at once, and releases after 60 s at less. A pipeline's target is 0.8 of its stages, one request in each.
    """

    stages: int
    constants: PipelineConstants
    keeps_idle: bool = False
    ongoing: float = 0.0
    least: int = 1
    low_since_s: float | None = None

    target: float = 0.8
    memory_s: float = 5.0
    patience_s: float = 60.0

    @property
    def name(self) -> str:
        """How it is asked for."""
        return f"reactive:{self.stages}"

    def start(self, hint: LoadHint) -> tuple[int, int]:
        """Begin with 30 % of the peak, which stay."""
        self.least = pipelines_for(READY * hint.peak_rps, self.stages, self.constants)
        return self.stages, self.least

    def decide(self, view: ClusterView) -> PipelineMove:
        """Follow the mean of what is under way."""
        self.ongoing += (view.waiting + view.running - self.ongoing) * self.constants.decision_s / self.memory_s
        wanted = replicas_for(self.ongoing, self.target * self.stages, self.least, self.constants.gpus // self.stages)
        settled = sum(view.settled())
        if wanted >= settled:
            self.low_since_s = None
            return toward(view, self.stages, wanted)
        if self.low_since_s is None:
            self.low_since_s = view.now_s
        return toward(view, self.stages, wanted) if view.now_s - self.low_since_s >= self.patience_s else STAY
