"""Who keeps objectives: every policy in every world around the knee, with several seeds, and where they stand.

Called by controller/cli/evaluate.py (`faser evaluate --objectives`), which injects the decision core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...env.simulator.simulated_engine import SimulatedEngine
from ..registry import make_policy
from .attainment import Attained, serve
from .evaluate import Decide
from .foresight import Foresight
from .objective_worlds import CLASSES, ObjectiveWorld
from .standing import Interval, interval

RULES: Final = ("adaserve", "behind:2", "urgent:1", "urgent:2", "urgent:3")
UNAWARE: Final = ("off", "fixed:1", "fixed:2", "fixed:3", "price:even", "goodput")
FORESIGHT: Final = "foresight:"  # no policy: a bound, by what a token is worth to who is behind
EVEN_FORESIGHT: Final = f"{FORESIGHT}1"  # that knows what will be accepted, and no objectives
BOUNDS: Final = (EVEN_FORESIGHT, *(f"{FORESIGHT}{worth}" for worth in (2, 6, 25, 100)))
A_THIRD: Final = 1.0 / 3.0  # of the best unaware policy's violations: what is asked of a policy
DUAL_PRICES: Final = (0.0, *np.geomspace(0.01, 1e4, 120).tolist())  # of violations, of one more in the mean's logarithm
FEW_REQUESTS, FEW_TIMES = 32, 3  # of smaller batches more steps are made: few of their requests end
LEAST_LATE: Final = 0.005  # of the requests: a share of violations below it is taken for so many


@dataclass(frozen=True, slots=True)
class ObjectivePlan:
    """What is compared with what."""

    policies: tuple[str, ...]
    worlds: tuple[ObjectiveWorld, ...]
    seeds: tuple[int, ...]
    steps: int
    rules: tuple[str, ...] = RULES

    @property
    def everybody(self) -> tuple[str, ...]:
        """Return all that is run in each world, each once."""
        return tuple(dict.fromkeys((*self.policies, *self.rules, *UNAWARE, *BOUNDS)))


@dataclass(frozen=True, slots=True)
class ObjectiveCell:
    """One run to make."""

    policy: str
    world: ObjectiveWorld
    seed: int
    steps: int


Runs = dict[tuple[str, str], list[Attained]]  # by policy and world, in the order of the seeds
Progress = Callable[[int, int], None]


def simulate_cell(cell: ObjectiveCell, decide: Decide) -> Attained:
    """Make one run."""
    world = cell.world
    if cell.policy.startswith(FORESIGHT):
        worth = float(cell.policy.removeprefix(FORESIGHT))
        return Foresight(world.scenario(), cell.seed, worth).serve(cell.steps)
    engine = SimulatedEngine(world.scenario(), cell.seed, has_confidence=world.world.has_confidence)
    return serve(engine, make_policy(cell.policy, engine.capabilities), decide, cell.steps)


def compare(
    plan: ObjectivePlan, decide: Decide, pool: Executor | None = None, progress: Progress | None = None
) -> Runs:
    """Run the plan; the same plan gives the same figures."""
    cells = [
        ObjectiveCell(policy, world, seed, plan.steps * (FEW_TIMES if world.requests < FEW_REQUESTS else 1))
        for world in plan.worlds
        for policy in plan.everybody
        for seed in plan.seeds
    ]
    jobs = cells, [decide] * len(cells)
    found: Runs = {}
    results = map(simulate_cell, *jobs) if pool is None else pool.map(simulate_cell, *jobs)
    for done, (cell, attained) in enumerate(zip(cells, results, strict=True), 1):
        found.setdefault((cell.policy, cell.world.name), []).append(attained)
        if progress is not None:
            progress(done, len(cells))
    return found


def summary(plan: ObjectivePlan, runs: Runs) -> dict[str, Any]:
    """Return everything as JSON: each run's shares, and each policy beside the best unaware rival and the best rule."""
    return {
        "worlds": [world.name for world in plan.worlds],
        "seeds": len(plan.seeds),
        "steps": plan.steps,
        "runs": {world.name: _world_rows(plan, runs, world) for world in plan.worlds},
        "standing": {policy: _standing(plan, runs, policy) for policy in plan.policies},
        # How much goodput goes with how many violations: of whoever is best in each world, chosen in hindsight.
        "frontier": {
            "clairvoyant": frontier(plan, runs, BOUNDS),
            "even_clairvoyant": frontier(plan, runs, (EVEN_FORESIGHT,)),  # one point
            "known": frontier(plan, runs, (*plan.policies, *plan.rules, *UNAWARE)),
        },
    }


def frontier(plan: ObjectivePlan, runs: Runs, names: Sequence[str]) -> list[tuple[float, float]]:
    """Return rising (violations, goodput) over the best unaware rivals', one of `names` being chosen for each world.

    The choices are those that are best at some price of violations, so the points lie on the frontier's hull.
    """
    least = sum(_least_late(runs, world) for world in plan.worlds)
    options = [[_point(runs, name, world) for name in names] for world in plan.worlds]
    found = set()
    for price in DUAL_PRICES:
        chosen = [max(each, key=lambda point: point[1] - price * point[0] / least) for each in options]
        late, gains = zip(*chosen, strict=True)
        found.add((round(sum(late) / least, 4), round(math.exp(float(np.mean(gains))), 4)))
    return sorted(found)


def _point(runs: Runs, name: str, world: ObjectiveWorld) -> tuple[float, float]:
    """Return a policy's share of requests that are late, and the log of its goodput over the best unaware rival's."""
    row = _row(runs[name, world.name])
    best = max(_row(runs[rival, world.name])["goodput"] for rival in UNAWARE)
    return max(row["late_share"], LEAST_LATE), math.log(max(row["goodput"], 1e-9) / max(best, 1e-9))


def _least_late(runs: Runs, world: ObjectiveWorld) -> float:
    """Return the share of requests that are late under the world's best unaware rival."""
    return max(float(min(_row(runs[rival, world.name])["late_share"] for rival in UNAWARE)), LEAST_LATE)


def _world_rows(plan: ObjectivePlan, runs: Runs, world: ObjectiveWorld) -> dict[str, Any]:
    return {policy: _row(runs[policy, world.name]) for policy in plan.everybody}


def _row(runs: Sequence[Attained]) -> dict[str, Any]:
    in_time = {name: _mean([run.in_time(at) for run in runs]) for at, name in enumerate(CLASSES)}
    return {
        "goodput": _mean([run.goodput for run in runs]),
        "tokens_per_s": _mean([run.tokens / max(run.seconds, 1e-9) for run in runs]),
        "late_share": _mean([run.late_share for run in runs]),
        "in_time": in_time,
    }


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 4)


def _standing(plan: ObjectivePlan, runs: Runs, policy: str) -> dict[str, Any]:
    """Return a policy's violations and goodput over those of the best rivals, over all worlds, by seed."""
    unaware = [_over(plan, runs, policy, world, UNAWARE) for world in plan.worlds]
    rules = [_over(plan, runs, policy, world, plan.rules) for world in plan.worlds]
    price = [_over(plan, runs, policy, world, ("price",)) for world in plan.worlds] if "price" in plan.policies else []
    halves = [ratio for ratio, world in zip(unaware, plan.worlds, strict=True) if world.urgent_share >= 0.5]
    return {
        "violations_over_unaware": _late_ratio(plan, runs, policy),
        "goodput_over_unaware": _told(unaware),
        "goodput_over_unaware_half_urgent": _told(halves) if halves else None,
        "goodput_over_best_rule": _told(rules),
        "goodput_over_price": _told(price) if price and policy != "price" else None,
    }


def _over(plan: ObjectivePlan, runs: Runs, policy: str, world: ObjectiveWorld, rivals: Sequence[str]) -> list[float]:
    """Return the log of goodput over the rival's that is best at the other seeds, (seeds,)."""
    own = [run.goodput for run in runs[policy, world.name]]
    found = []
    for at in range(len(plan.seeds)):
        others = [place for place in range(len(plan.seeds)) if place != at] or [at]
        best = max(rivals, key=lambda rival: np.mean([runs[rival, world.name][o].goodput for o in others]))
        found.append(math.log(max(own[at], 1e-9) / max(runs[best, world.name][at].goodput, 1e-9)))
    return found


def _told(logs: Sequence[Sequence[float]]) -> dict[str, float | None]:
    """Return the geometric mean over the worlds, with its interval over the seeds."""
    by_seed = np.mean(np.array(logs), axis=0).tolist()
    found: Interval = interval(by_seed)
    low, high = (math.exp(found.mean + sign * found.half) for sign in (-1.0, 1.0))
    return {
        "ratio": round(math.exp(found.mean), 4),
        "low": round(low, 4) if math.isfinite(high) else None,
        "high": round(high, 4) if math.isfinite(high) else None,
    }


def _late_ratio(plan: ObjectivePlan, runs: Runs, policy: str) -> float:
    """Return the violations over all worlds as a share of those of each world's best unaware rival."""
    own = sum(max(_row(runs[policy, world.name])["late_share"], LEAST_LATE) for world in plan.worlds)
    return float(round(own / sum(_least_late(runs, world) for world in plan.worlds), 4))
