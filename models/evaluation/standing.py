"""Where policies stand: ratios to the best rival, to the best fixed length and to hindsight, with intervals over seeds.

Called by controller/cli/evaluate.py on the table that models/evaluation/evaluate.py makes. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .evaluate import CHANGING, ORACLES, Table
from .worlds import WorldSpec, confidence_auc

LEAST_GAP = 0.005  # log; below it there is nothing to close


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and half the width of its 95 % interval over seeds."""

    mean: float
    half: float


@dataclass(frozen=True, slots=True)
class EvaluatedPoint:
    """One policy in one world at one load, beside its rivals."""

    scores: tuple[float, ...]  # by seed
    score: Interval
    envelope: Interval  # ratio to the best rival, which is chosen on the other seeds
    best_rival: str  # over all seeds
    over_best_fixed: Interval
    over_price: Interval
    gain: float  # log of the ratio to the best fixed length
    gap: float  # ... of per-request hindsight


def interval(values: Sequence[float]) -> Interval:
    """Return mean and half width by Student's t; infinite for a single value."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, math.inf)
    from statistics import stdev

    return Interval(mean, student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values)))


def student_t(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t."""
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    return table[freedom - 1] if freedom <= len(table) else 1.96 + 2.5 / freedom


def point(table: Table, policy: str, world: WorldSpec, load: int) -> EvaluatedPoint:
    """Return how a policy stands at one point."""
    scores, own = table.scores, table.scores[policy, world.name, load]
    rivals = [rival for rival in table.rivals(world) if rival != policy]
    fixed = ["off", *(f"fixed:{k}" for k in range(1, world.profile.k_max + 1))]

    def chosen(names: Sequence[str], seed: int) -> float:
        """Return the score at one seed of what is best at the others (at all, if there is one seed only)."""
        others = [place for place in range(len(own)) if place != seed] or [seed]
        best = max(names, key=lambda name: float(np.mean([scores[name, world.name, load][o] for o in others])))
        return scores[best, world.name, load][seed]

    envelope = [value / max(chosen(rivals, seed), 1e-9) for seed, value in enumerate(own)]
    floor = {name: float(np.mean(scores[name, world.name, load])) for name in {*rivals, *fixed}}
    best_fixed = max(fixed, key=lambda name: floor[name])
    ceiling = float(np.mean(scores[ORACLES[0], world.name, load]))
    base = max(floor[best_fixed], 1e-9)
    fixed_scores = scores[best_fixed, world.name, load]
    price = scores.get(("price", world.name, load), own)
    return EvaluatedPoint(
        own,
        interval(own),
        interval(envelope),
        max(rivals, key=lambda name: floor[name]),
        interval([value / max(other, 1e-9) for value, other in zip(own, fixed_scores, strict=True)]),
        interval([value / max(other, 1e-9) for value, other in zip(own, price, strict=True)]),
        math.log(max(float(np.mean(own)), 1e-9) / base),
        math.log(max(ceiling, 1e-9) / base),
    )


def summary(table: Table) -> dict[str, object]:
    """Return what `faser evaluate --json` prints."""
    plan = table.plan
    names = sorted({name for name, _, _ in table.scores})
    policies: dict[str, object] = {}
    for name in names:
        points = {
            (world.name, load): point(table, name, world, load)
            for world in plan.worlds
            for load in plan.loads
            if (name, world.name, load) in table.scores
        }
        # One figure per seed: the geometric mean over worlds and loads, so that fast engines do not drown slow ones.
        by_seed = _over(table, name, list(points), base=None)
        against_price = _over(table, name, list(points)) if "price" in names else []
        over = interval(by_seed)
        ratios = [each.envelope.mean for each in points.values()]
        price = interval(against_price) if against_price else None
        policies[name] = {
            "goodput": over.mean,
            "ci": _bounds(over),
            "envelope_ratio_min": min(ratios),
            "envelope_ratio_mean": float(np.mean(ratios)),
            "gap_closed": gap_closed(list(points.values())),
            "gap_closed_by_world": {
                world.name: gap_closed([each for (at, _), each in points.items() if at == world.name])
                for world in plan.worlds
            },
            "over_price": price.mean if price else None,
            "over_price_ci": _bounds(price) if price else None,
            "worlds": {world.name: _world_rows(points, world.name) for world in plan.worlds},
        }
    return {
        "policies": policies,
        "worlds": len(plan.worlds),
        "seeds": len(plan.seeds),
        "seed_numbers": list(plan.seeds),  # in the order of the points' scores
        "steps": plan.steps,  # of a full batch without speculation: how long a run is
        "tables": table.tables,
        "confidence_auc": {world.name: confidence_auc(world) for world in plan.worlds if world.has_confidence},
    }


def _over(table: Table, name: str, points: list[tuple[str, int]], base: str | None = "price") -> list[float]:
    """Return the geometric mean over the points of a policy's scores, or of their ratio to another's, for each seed."""
    logs = np.log(np.maximum([table.scores[name, world, load] for world, load in points], 1e-9))
    if base is not None:
        logs = logs - np.log(np.maximum([table.scores[base, world, load] for world, load in points], 1e-9))
    means: list[float] = np.exp(logs.mean(axis=0)).tolist()
    return means


def gap_closed(points: Sequence[EvaluatedPoint]) -> float | None:
    """Return how far the points lie from the best fixed length (0) to per-request hindsight (1), all gaps together.

    Gains and gaps are summed before they are divided: a ratio of its own means little where the gap is small.
    """
    gap = sum(each.gap for each in points)
    return sum(each.gain for each in points) / gap if gap > LEAST_GAP * len(points) else None


def _bounds(value: Interval) -> list[float | None]:
    if math.isinf(value.half):
        return [None, None]
    return [value.mean - value.half, value.mean + value.half]


def _world_rows(points: dict[tuple[str, int], EvaluatedPoint], world: str) -> dict[str, object]:
    return {
        CHANGING.get(load, str(load)): {
            "score": each.score.mean,
            "ci": _bounds(each.score),
            "envelope_ratio": each.envelope.mean,
            "envelope_ci": _bounds(each.envelope),
            "best_rival": each.best_rival,
            "scores": list(each.scores),
            "over_best_fixed": each.over_best_fixed.mean,
            "over_best_fixed_ci": _bounds(each.over_best_fixed),
            "over_price": each.over_price.mean,
            "gap_closed": gap_closed([each]),
        }
        for (name, load), each in points.items()
        if name == world
    }
