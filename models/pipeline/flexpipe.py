"""`flexpipe`: the rule of FlexPipe (arXiv 2510.11938), equations (4), (5), (9), (11) to (13), as read here.

The paper prints no value of a coefficient and is ambiguous in places. How each is read:

- nu_t of (4) is the coefficient of variation of the gaps between arrivals (section 6), not the "characteristic
  velocity" of Algorithm 1; over 15 s, the window of its figure 9.
- nu_k, "the optimal CV threshold", has no table: S = 8 sqrt(CV) fits both that S grows with the root of the CV and that
  4 or 8 stages suit a low CV and 16 stages CV 4. So nu is 0.25, 1, 4 and 16 for 4, 8, 16 and 32 stages.
- T_k and L_k of (4) are passes per second and the latency of an idle pipeline in Table 2, T longer by (9)'s gamma.
- mu_total of (5) is the arrival rate of the last 15 s: demand. mu_k = T_k / (beta_1 + beta_2 eta_k), eta_k stages.
- m_j of (11) is the number of stages of what is *added* while requests wait, cut down to 4, 8, 16 or 32.
- (12) is read as (T - S) * sum mu / Q >= r with r the share of the queue to be served by the deadline: as printed, r is
  "the number of requests" and the left side has no dimension. Where no number of pipelines meets it (S alone is 5 to
  47 s), the most are added that one decision can.
- (13) places stages in the world, for every policy (env/pipeline/gpus.py).
- "Wait for the next optimization interval" is 5 s. Between intervals nothing is remembered: no forecast, no price of a
  move, no hysteresis but (11)'s; that is the paper's rule.
- Of the peak 30 % is always ready (section 9.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from ...env.pipeline.cluster import STAY, PipelineMove
from ...env.pipeline.constants import STAGES, PipelineConstants
from ...env.pipeline.view import ClusterView
from .pipeline_policy import MOST, LoadHint, toward
from .rules import READY, pipelines_for

BEST_VARIATION: Final = (0.25, 1.0, 4.0, 16.0)  # nu_k by granularity


@dataclass(frozen=True, slots=True)
class FlexPipeCoefficients:
    """What the paper leaves open; every value is ours."""

    throughput_weight: float = 0.5  # alpha of (4)
    sensitivity: float = 2.0  # sigma of (4)
    base: float = 1.0  # beta_1 of (5)
    per_stage: float = 0.01  # beta_2 of (5)
    steepness: float = 2.0  # gamma of (11)
    offset: float = 7.0  # beta of (11): without a queue 32 / 8 = 4 stages
    most_waiting: float = 64.0  # Q_max of (11)
    deadline_s: float = 10.0  # T of (12)
    served_share: float = 0.9  # r of (12)
    interval_s: float = 5.0


@dataclass(slots=True)
class FlexPipe:
    """The paper's rule; see the module."""

    constants: PipelineConstants
    coefficients: FlexPipeCoefficients = field(default_factory=FlexPipeCoefficients)
    name: str = "flexpipe"
    keeps_idle: bool = False
    ready_rps: float = 0.0
    decided_s: float = -math.inf

    def start(self, hint: LoadHint) -> tuple[int, int]:
        """Begin with 30 % of the peak at what (4) says for CV 1."""
        self.ready_rps = READY * hint.peak_rps
        stages = STAGES[self.best(1.0)]
        return stages, pipelines_for(self.ready_rps, stages, self.constants)

    def decide(self, view: ClusterView) -> PipelineMove:
        """Score, and go one step toward what the scores say."""
        if view.now_s - self.decided_s < self.coefficients.interval_s:
            return STAY
        self.decided_s = view.now_s
        variation = view.variations[0]
        if view.waiting and not self.meets_deadline(view, 0.0):
            return self._relief(view, variation)
        best = self.best(variation)
        stages = STAGES[best]
        return toward(view, stages, max(self.replicas(view.rates[0], best), self._ready(stages)))

    def _ready(self, stages: int) -> int:
        return pipelines_for(self.ready_rps, stages, self.constants)

    def best(self, variation: float) -> int:
        """Return which granularity scores best by (4)."""
        scores = self.scores(variation)
        return scores.index(max(scores))

    def scores(self, variation: float) -> list[float]:
        """Return (4) by granularity."""
        own, rows = self.coefficients, self.constants.granularities
        slower = 1.0 + self.constants.sharing_penalty(variation)  # (9)
        throughput = [1.0 / (row.compute_s * slower) for row in rows]
        latency = [row.stages * row.compute_s * slower + row.communication_s for row in rows]
        return [
            (own.throughput_weight * rate / max(throughput) + (1 - own.throughput_weight) * min(latency) / seconds)
            * math.exp(-abs(variation - wanted) / own.sensitivity)
            for rate, seconds, wanted in zip(throughput, latency, BEST_VARIATION, strict=True)
        ]

    def replicas(self, rate_rps: float, granularity: int) -> int:
        """Return (5), at least one."""
        row = self.constants.granularities[granularity]
        each = 1.0 / row.compute_s / (self.coefficients.base + self.coefficients.per_stage * row.stages)
        return max(1, math.floor(rate_rps / each))

    def scaling_stages(self, variation: float, waiting: int) -> int:
        """Return (11), cut down to stages that there are."""
        own = self.coefficients
        urgency = variation * min(waiting / own.most_waiting, 1.0)
        most = math.floor(STAGES[-1] / (1.0 + own.offset * math.exp(-own.steepness * urgency)))
        return max((each for each in STAGES if each <= most), default=STAGES[0])

    def meets_deadline(self, view: ClusterView, load_s: float, added_rps: float = 0.0) -> bool:
        """Return whether (12) holds for what serves and what is added."""
        counts = zip(view.settled(), self.constants.granularities, strict=True)
        rate = sum(count / row.compute_s for count, row in counts) + added_rps
        left_s = self.coefficients.deadline_s - load_s
        return left_s * rate >= self.coefficients.served_share * view.waiting

    def _relief(self, view: ClusterView, variation: float) -> PipelineMove:
        """Return how many pipelines of (11)'s stages are added so that (12) holds."""
        stages = self.scaling_stages(variation, view.waiting)
        place = STAGES.index(stages)
        rate = 1.0 / self.constants.granularities[place].compute_s
        for count in range(1, MOST + 1):
            if self.meets_deadline(view, view.load_s[place], count * rate):
                return PipelineMove(stages, count)
        return PipelineMove(stages, MOST)
