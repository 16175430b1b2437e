"""FASER in the body of vLLM's adaptive verification against vLLM's own brain there: `python benchmarks/adaptive.py`.

The GPU worlds with a confident drafter (models/evaluation/worlds.py), costs of published fits with the steps of
captured graphs: every draft is made in full, and of it what pays is verified. vLLM's own always drafts all positions
and knows what it verifies costs; FASER's policy `price` chooses the rounds as well. Same requests, same luck.
Simulated time, so the machine does not matter.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import simulated_points
from simulated_points import half_width, measure

from faser.models.evaluation.worlds import K_MAX, LOADS, WorldSpec, held_out

ROOT: Final = Path(__file__).resolve().parent.parent
RESULT: Final = ROOT / "benchmarks" / "results" / "adaptive.json"
RIVAL: Final = "goodput"
# vLLM's own sizes: 1, 2, 4, then every 8 up to 256, then every 16 up to 512.
GRAPH_SIZES: Final = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


def adaptive(world: WorldSpec) -> WorldSpec:
    """Return the same engine with adaptive verification and captured graphs."""
    profile = msgspec.structs.replace(world.profile, is_adaptive=True, graph_sizes=GRAPH_SIZES)
    return WorldSpec(world.name, world.note, profile, world.has_confidence)


def run(world: WorldSpec, load: int, seed: int, chosen: str) -> float:
    """Return tokens per second of a policy in that body."""
    return simulated_points.run(adaptive(world), load, seed, 1, lambda record: 0, chosen)[0]


def limited(world: WorldSpec, longest: int) -> WorldSpec:
    """Return the same engine whose operator configured shorter drafts."""
    model = world.profile.acceptance
    cut = {name: getattr(model, name)[:longest] for name in ("intercepts", "slopes", "quantiles")}
    acceptance = msgspec.structs.replace(model, **cut)
    profile = msgspec.structs.replace(world.profile, k_max=longest, acceptance=acceptance)
    return WorldSpec(world.name, world.note, profile, world.has_confidence)


def compared(world: WorldSpec, load: int, seeds: range) -> dict[str, Any]:
    """Return FASER's tokens per second over vLLM's own at the same longest draft, and at the best one in hindsight."""
    ours = [run(world, load, seed, "price") for seed in seeds]
    rivals = {k: [run(limited(world, k), load, seed, RIVAL) for seed in seeds] for k in range(1, K_MAX + 1)}
    best = max(rivals, key=lambda k: statistics.mean(rivals[k]))
    beside = {"as configured": rivals[K_MAX], "best in hindsight": rivals[best]}
    found = {name: over(ours, rates) for name, rates in beside.items()}
    return {"world": world.name, "load": load, "best_longest": best, "over": found}


def over(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return the mean ratio with its 95 % half-width."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return {"ratio": statistics.mean(ratios), "half_width": half_width(ratios)}


if __name__ == "__main__":
    worlds = [world for world in held_out() if world.name.startswith("gpu") and world.has_confidence]
    measure(__doc__ or "", RESULT, worlds, LOADS, 401, compared)
