"""Pipeline policies against the best fixed set of pipelines at equal GPU seconds: loads x policies x seeds.

Called by controller/pipeline/evaluation.py.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from ...env.pipeline.arrivals import LOADS, RATE_RPS, Arrivals, draw_arrivals
from ...env.pipeline.cluster import Cluster
from ...env.pipeline.constants import PipelineConstants
from ..evaluation.standing import interval
from .names import DEFAULT, make_pipeline_policy
from .pipeline_policy import LoadHint, PipelinePolicy
from .rules import StaticStages
from .shadows import SETS

ANOTHER_DAY: Final = 1000  # added to a seed: what operators know of a load is another day of it


@dataclass(frozen=True, slots=True)
class PipelineCell:
    """One run to make."""

    load: str
    policy: str
    seed: int
    duration_s: float
    rate_rps: float = RATE_RPS
    is_serial: bool = False


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """What came of a cell."""

    cell: PipelineCell
    mean_s: float
    p50_s: float
    p99_s: float
    attainment: float  # share of the requests within the objective
    gpus: float  # held, mean over time
    cost: float  # per request: see PipelineConstants.cost
    moves: int
    refactored: int
    refused: int
    reclaimed: int
    moved_gb: float
    decision_ms: float  # the slowest per cent, CPU time


@dataclass(frozen=True, slots=True)
class PipelineComparison:
    """What is compared."""

    policies: tuple[str, ...] = DEFAULT
    loads: tuple[str, ...] = LOADS
    seeds: tuple[int, ...] = (101, 102, 103)
    duration_s: float = 1200.0
    rate_rps: float = RATE_RPS
    is_serial: bool = False

    def cells(self) -> list[PipelineCell]:
        """Return all runs, those of every fixed set included."""
        fixed = [f"static:{stages}:{count}" for stages, count in SETS]
        return [
            PipelineCell(load, policy, seed, self.duration_s, self.rate_rps, self.is_serial)
            for load in self.loads
            for policy in dict.fromkeys((*self.policies, *fixed))
            for seed in self.seeds
        ]


def run_cell(cell: PipelineCell) -> PipelineRun:
    """Serve a load under a policy."""
    constants = PipelineConstants(is_serial=cell.is_serial)
    arrivals = _drawn(cell.load, cell.seed, cell.duration_s, cell.rate_rps)
    day = _drawn(cell.load, cell.seed + ANOTHER_DAY, cell.duration_s, cell.rate_rps)
    policy = make_pipeline_policy(cell.policy, constants, arrivals, cell.seed)
    cluster, decision_ms = serve_load(policy, arrivals, LoadHint.of(day), constants, cell.seed)
    latency_s, totals = cluster.latency_s, cluster.totals
    cost = constants.cost(totals.missed, totals.gpu_s, totals.moved_bytes) / len(arrivals)
    p50_s, p99_s = np.quantile(latency_s, (0.5, 0.99)).tolist()
    return PipelineRun(
        cell, float(latency_s.mean()), p50_s, p99_s, 1.0 - totals.missed / len(arrivals),
        totals.gpu_s / cluster.now_s, cost, totals.moves, totals.refactored, totals.refused, totals.reclaimed,
        cluster.moved_gb, decision_ms,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _drawn(load: str, seed: int, duration_s: float, rate_rps: float) -> Arrivals:
    return draw_arrivals(load, seed, duration_s, rate_rps)


def serve_load(
    policy: PipelinePolicy, arrivals: Arrivals, hint: LoadHint, constants: PipelineConstants, seed: int
) -> tuple[Cluster, float]:
    """Serve all of a load; return the cluster at its end, and CPU milliseconds of the slowest per cent of decisions."""
    cluster = Cluster(arrivals, policy.start(hint), constants, seed)
    cluster.reclaims = not policy.keeps_idle
    spent = []
    while not cluster.is_done:
        if not isinstance(policy, StaticStages):  # to save time: it would not look
            begun_s = time.thread_time()
            move = policy.decide(cluster.view())
            spent.append(time.thread_time() - begun_s)
            cluster.apply(move)
        cluster.advance(cluster.now_s + constants.decision_s)
    return cluster, 1e3 * float(np.quantile(spent, 0.99)) if spent else 0.0


def judge(
    plan: PipelineComparison, executor: Executor | None = None, progress: Callable[[int, int], None] | None = None
) -> list[PipelineRun]:
    """Make all runs, in the order of the plan's cells."""
    cells, found = plan.cells(), []
    runs = map(run_cell, cells) if executor is None else executor.map(run_cell, cells, chunksize=8)
    for run in runs:
        found.append(run)
        if progress is not None:
            progress(len(found), len(cells))
    return found


@dataclass(slots=True)
class Runs:
    """All runs by load and policy, in the order of seeds."""

    by_policy: dict[tuple[str, str], list[PipelineRun]] = field(default_factory=dict)

    @classmethod
    def of(cls, runs: Sequence[PipelineRun]) -> Runs:
        """Sort runs."""
        found: dict[tuple[str, str], list[PipelineRun]] = {}
        for run in runs:
            found.setdefault((run.cell.load, run.cell.policy), []).append(run)
        return cls(found)

    def mean(self, load: str, policy: str, what: str) -> float:
        """Return the mean of a figure over seeds."""
        return float(np.mean([getattr(run, what) for run in self.by_policy[load, policy]]))

    def fixed(self, load: str) -> list[str]:
        """Return the fixed sets."""
        return [policy for seen, policy in self.by_policy if seen == load and policy.count(":") == 2]

    def at_equal_gpus(self, load: str, gpus: float) -> tuple[str, str, float]:
        """Return two fixed sets and the share of the second whose mix has the least mean latency at so many GPUs.

        A set that is there for a part of the time is more than a fixed set can do: it favours them. Below the smallest
        set and above the largest that is the fastest of them alone.
        """
        points = [(self.mean(load, each, "gpus"), self.mean(load, each, "mean_s"), each) for each in self.fixed(load)]
        below = [point for point in points if point[0] <= gpus + 1e-9] or [min(points)]
        best = min(below, key=lambda point: point[1])
        found, least = (best[2], best[2], 0.0), best[1]
        for low in below:
            for high in points:
                if high[0] > gpus >= low[0]:
                    share = (gpus - low[0]) / (high[0] - low[0])
                    mixed = (1 - share) * low[1] + share * high[1]
                    if mixed < least:
                        found, least = (low[2], high[2], share), mixed
        return found

    def mixed(self, load: str, mix: tuple[str, str, float], what: str) -> list[float]:
        """Return a figure of such a mix by seed."""
        pairs = zip(self.by_policy[load, mix[0]], self.by_policy[load, mix[1]], strict=True)
        return [(1 - mix[2]) * float(getattr(low, what)) + mix[2] * float(getattr(high, what)) for low, high in pairs]

    def ratio(self, load: str, policy: str, mix: tuple[str, str, float]) -> tuple[float, float, float]:
        """Return mean latency over that of a mix of fixed sets with the same requests, and its 95 % interval."""
        pairs = zip(self.by_policy[load, policy], self.mixed(load, mix, "mean_s"), strict=True)
        found = interval([math.log(mine.mean_s / theirs) for mine, theirs in pairs])
        return math.exp(found.mean), math.exp(found.mean - found.half), math.exp(found.mean + found.half)

    def cheapest(self, load: str) -> str:
        """Return the fixed set with the least cost."""
        return min(self.fixed(load), key=lambda policy: self.mean(load, policy, "cost"))


OF_FIXED_SETS: Final = ("mean_s", "p99_s", "attainment", "gpus", "cost")
FIGURES: Final = (
    "mean_s", "p50_s", "p99_s", "attainment", "gpus", "cost", "moves", "refactored", "refused", "reclaimed", "moved_gb",
    "decision_ms",
)  # fmt: skip


def judgement(plan: PipelineComparison, runs: Sequence[PipelineRun]) -> dict[str, Any]:
    """Return the table: figures with intervals by load and policy, and the best fixed set at equal GPU seconds."""
    sorted_runs = Runs.of(runs)
    return {
        "plan": asdict(plan),
        "loads": {
            load: {policy: _row(sorted_runs, load, policy) for policy in plan.policies} for load in plan.loads
        },
        "fixed_sets": {
            load: {
                policy: {what: sorted_runs.mean(load, policy, what) for what in OF_FIXED_SETS}
                for seen, policy in sorted_runs.by_policy if seen == load and policy.count(":") == 2
            }
            for load in plan.loads
        },
    }  # fmt: skip


def _row(runs: Runs, load: str, policy: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for what in FIGURES:
        found = interval([float(getattr(run, what)) for run in runs.by_policy[load, policy]])
        row[what] = {"mean": found.mean, "half_width": found.half if math.isfinite(found.half) else None}
    mix = runs.at_equal_gpus(load, row["gpus"]["mean"])
    ratio, low, high = runs.ratio(load, policy, mix)
    cheapest = runs.cheapest(load)
    row["fixed"] = {
        "sets": sorted({mix[0], mix[1]}), "share": mix[2], "mean_s": float(np.mean(runs.mixed(load, mix, "mean_s"))),
        "attainment": float(np.mean(runs.mixed(load, mix, "attainment"))), "latency_ratio": ratio,
        "ci": [low, high] if math.isfinite(high) else None, "cheapest": cheapest,
        "cheapest_cost": runs.mean(load, cheapest, "cost"),
    }  # fmt: skip
    return row
