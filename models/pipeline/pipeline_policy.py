"""The interface of every pipeline policy, and how a target becomes one move after another.

Policies get a ClusterView and nothing else: no clock, no random source, no future (models/pipeline/hindsight_plan.py is
the one exception, and says so).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from ...engine_adapter.arrays import Floats
from ...env.pipeline.arrivals import Arrivals
from ...env.pipeline.cluster import STAY, PipelineMove
from ...env.pipeline.constants import STAGES
from ...env.pipeline.view import MOVES, ClusterView

MOST: Final = MOVES[-1]


@dataclass(frozen=True, slots=True, eq=False)
class LoadHint:
    """What an operator knows of the load beforehand: another day of it."""

    arrival_s: Floats  # (n,) seconds
    peak_rps: float  # in windows of five seconds

    @classmethod
    def of(cls, arrivals: Arrivals) -> LoadHint:
        """Return what a day of arrivals teaches."""
        return cls(arrivals.arrival_s, arrivals.peak_rps())


class PipelinePolicy(Protocol):
    """Says once with what to begin, then one move a decision."""

    keeps_idle: bool  # idle pipelines are not reclaimed

    @property
    def name(self) -> str:
        """How it is asked for."""
        ...

    def start(self, hint: LoadHint) -> tuple[int, int]:
        """Return the stages and the number of pipelines that are loaded before the first request."""
        ...

    def decide(self, view: ClusterView) -> PipelineMove:
        """Return the move to begin now."""
        ...


def toward(view: ClusterView, stages: int, count: int) -> PipelineMove:
    """Return the next move on the way to `count` pipelines of so many stages and no others.

    Others are given so many stages in place first; what is too many goes last, when the rest serves.
    """
    place = STAGES.index(stages)
    here = view.settled()[place]
    others = [view.serving[k] - view.moving[k] if k != place else 0 for k in range(len(STAGES))]
    if here < count:
        if sum(others):
            return PipelineMove(stages, min(MOST, sum(others), count - here), is_refactor=True)
        return PipelineMove(stages, min(MOST, count - here))
    if view.serving[place] - view.moving[place] < count:
        return STAY
    for k, spare in enumerate(others):
        if spare:
            return PipelineMove(STAGES[k], -min(MOST, spare))
    return PipelineMove(stages, -min(MOST, here - count)) if here > count else STAY
