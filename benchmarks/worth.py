"""What a choice is worth in simulation: `python benchmarks/worth.py CHOICE [--json FILE]`.

splits, frontiers: `price` in the worlds that offer splits or can draft ahead
(models/evaluation/worlds.py), against itself where the same engine offers none or cannot. Whether to draft ahead
the gate of a real engine measures; the simulated engine goes ahead of all requests at full length. objectives:
`price:pace=...`, with the objectives by which the simulator counts a token as in time, against `price:even` on the
held-out worlds, which serve two classes of requests: goodput, and tokens per second beside it. adaptive: `price` in
the body of vLLM's adaptive verification against vLLM's own brain there, in the GPU worlds with a confident drafter and
with the steps of captured graphs. Every draft is made in full, and of it what pays is verified; vLLM's own always
drafts all positions, `price` chooses the rounds as well. Same requests, same luck.
Simulated time, so the machine does not matter. Some minutes each.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from rich.progress import Progress
from tables import table

from faser.controller.bench.ratio import student_interval
from faser.controller.cli.evaluate import decided
from faser.controller.engine.machine import provenance
from faser.engine_adapter.protocol import StepRecord
from faser.env.profile.engine_profile import Split
from faser.env.simulator.simulator import Simulator
from faser.models.evaluation.evaluate import DRIFT, DRIFT_RUNS, SMALL_LOAD, Cell, scenario_of, simulate
from faser.models.evaluation.worlds import K_MAX, LOADS, WorldSpec, going_ahead, held_out, side_by_side

Compare = Callable[[WorldSpec, int, range], dict[str, Any]]  # a world at a load, over seeds

RESULTS: Final = Path(__file__).resolve().parent / "results"
POLICIES: Final = ("price",)
STEPS: Final = 2400  # without speculation, of a full batch
DRIFT_STEPS: Final = 4800
AHEAD_KINDS: Final = ("in turn", "asked for", "ahead")
# vLLM's own capture sizes: 1, 2, 4, then every 8, from 256 on every 16.
GRAPH_SIZES: Final = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
PACED_STEPS: Final = 400  # as `faser evaluate` makes


def half_width(values: Sequence[float]) -> float:
    """Return half of Student's 95 % interval of the mean."""
    low, high = student_interval(np.asarray(values))
    return (high - low) / 2.0


@dataclass(frozen=True, slots=True)
class Choice:
    """What a policy may choose, by the steps that come of it."""

    kinds: Callable[[WorldSpec], Sequence[str]]
    kind_of: Callable[[StepRecord], int]  # which of the kinds a step was
    without: Callable[[WorldSpec], WorldSpec]  # the same engine where there is nothing to choose

    def run(
        self, world: WorldSpec, load: int, seed: int, steps: int = 0, chosen: str = "price"
    ) -> tuple[float, list[float]]:
        """Return tokens per second, goodput where the load drifts, and the share of the counted steps of each kind.

        :param load: running requests, or DRIFT
        """
        times = DRIFT_RUNS if load == DRIFT else max(SMALL_LOAD // load, 1)
        steps = (steps or (DRIFT_STEPS if load == DRIFT else STEPS)) // times
        counts: Counter[int] = Counter()
        cell = Cell(chosen, world.name, load, seed, steps)
        found = simulate(cell, decided, (world,), lambda record: counts.update([self.kind_of(record)]))
        return found.score, [counts[kind] / max(counts.total(), 1) for kind in range(len(self.kinds(world)))]

    def compared(self, world: WorldSpec, load: int, seeds: range) -> dict[str, Any]:
        """Return each policy's scores with the choice over those without it, and the shares of the steps."""
        return {
            "world": world.name,
            "load": load,
            "policies": {at: self._beside(world, load, seeds, at) for at in POLICIES},
        }

    def _beside(self, world: WorldSpec, load: int, seeds: range, chosen: str) -> dict[str, Any]:
        """Return the ratio of the scores with and without, with its 95 % half-width, and the shares of the steps."""
        ratios, shares = [], []
        for seed in seeds:
            rate, under = self.run(world, load, seed, chosen=chosen)
            ratios.append(rate / self.run(self.without(world), load, seed, chosen=chosen)[0])
            shares.append(under)
        mean_shares = map(statistics.mean, zip(*shares, strict=True))
        return {
            "ratio": statistics.mean(ratios), "half_width": half_width(ratios),
            "share_of_steps": dict(zip(self.kinds(world), mean_shares, strict=True)),
        }  # fmt: skip


def changed(world: WorldSpec, **changes: Any) -> WorldSpec:
    """Return the same world with another engine."""
    profile = msgspec.structs.replace(world.profile, **changes)
    return WorldSpec(world.name, world.note, profile, world.has_confidence)


SPLITS: Final = Choice(
    lambda world: [split.name for split in world.profile.splits],
    lambda record: record.split or 0,
    lambda world: changed(world, splits=(Split("unsplit"),)),
)
FRONTIERS: Final = Choice(  # nothing asked for; asked for, but nothing drafted ahead; drafted ahead
    lambda world: AHEAD_KINDS,
    lambda record: (2 if record.overlap_s else 1) if record.frontier else 0,
    lambda world: changed(world, ahead=None),
)


def paced(world: WorldSpec, load: int) -> str:
    """Return the policy that knows the objectives of a world's classes."""
    scenario = scenario_of(world, load)
    objectives = Simulator(scenario, 1, seed=0).world.objectives[0]
    limits = [f"{each.priority}:{1e3 * objectives[row, 1]:.4f}" for row, each in enumerate(scenario.classes)]
    return f"price:pace={','.join(limits)}"


def with_objectives(world: WorldSpec, load: int, seeds: range) -> dict[str, Any]:
    """Return ratios at one load: goodput with its 95 % half-width over seeds, and tokens per second.

    The first two are None where `price` has nothing in time: there no ratio means anything.
    """
    goodput, rates = [], []
    for seed in seeds:
        within, plain = (
            simulate(Cell(policy, world.name, load, seed, PACED_STEPS), decided)
            for policy in (paced(world, load), "price:even")
        )
        goodput.append(within.goodput / plain.goodput if plain.goodput else math.nan)
        rates.append(within.tokens_per_s / plain.tokens_per_s)
    is_known = not any(map(math.isnan, goodput))
    return {
        "world": world.name, "load": load, "limits": paced(world, load),
        "goodput": statistics.mean(goodput) if is_known else None,
        "half_width": half_width(goodput) if is_known else None,
        "tokens_per_s": statistics.mean(rates),
    }  # fmt: skip


def adaptive_worlds() -> list[WorldSpec]:
    """Return the GPU worlds that adaptive verification is for, with that and with captured graphs."""
    confident = [world for world in held_out() if world.name.startswith("gpu") and world.has_confidence]
    return [changed(world, is_adaptive=True, graph_sizes=GRAPH_SIZES) for world in confident]


def limited(world: WorldSpec, longest: int) -> WorldSpec:
    """Return the same engine whose operator configured shorter drafts."""
    model = world.profile.acceptance
    cut = {name: getattr(model, name)[:longest] for name in ("intercepts", "slopes", "quantiles")}
    return changed(world, k_max=longest, acceptance=msgspec.structs.replace(model, **cut))


def against_vllms_own(world: WorldSpec, load: int, seeds: range) -> dict[str, Any]:
    """Return FASER's tokens per second over vLLM's own at the same longest draft, and at the best one in hindsight."""

    def rates(chosen: str, engine: WorldSpec) -> list[float]:
        cells = (Cell(chosen, world.name, load, seed, PACED_STEPS) for seed in seeds)
        return [simulate(cell, decided, (engine,)).score for cell in cells]

    ours = rates("price", world)
    theirs = {longest: rates("goodput", limited(world, longest)) for longest in range(1, K_MAX + 1)}
    best = max(theirs, key=lambda longest: statistics.mean(theirs[longest]))
    return {
        "world": world.name, "load": load, "over vLLM's own": over(ours, theirs[K_MAX]),
        "over its best length": over(ours, theirs[best]), "best length": best,
    }  # fmt: skip


def over(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return the mean ratio with its 95 % half-width."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return {"ratio": statistics.mean(ratios), "half_width": half_width(ratios)}


# Worlds, loads, the first seed, what compares
CHOICES: Final[dict[str, tuple[Callable[[], Sequence[WorldSpec]], Sequence[int], int, Compare]]] = {
    "splits": (side_by_side, (*LOADS, DRIFT), 301, SPLITS.compared),
    "frontiers": (going_ahead, (*LOADS, DRIFT), 301, FRONTIERS.compared),
    "adaptive": (adaptive_worlds, LOADS, 401, against_vllms_own),
    "objectives": (held_out, (8, 32, 128, DRIFT), 401, with_objectives),
}


def main() -> None:
    """Read the command line, compare at every point, write the file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("choice", choices=CHOICES)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/CHOICE.json")
    options = parser.parse_args()
    worlds, loads, seed, compare = CHOICES[options.choice]
    points, found = [(world, load) for world in worlds() for load in loads], []
    with Progress() as bar:
        for world, load in bar.track(points, description="comparing"):
            found.append(compare(world, load, range(seed, seed + options.seeds)))
    kept = {**provenance(), "seeds": options.seeds, "points": found}
    path = options.json or RESULTS / f"{options.choice}.json"
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(table(kept))


if __name__ == "__main__":
    main()
