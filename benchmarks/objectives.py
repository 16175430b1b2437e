"""What objectives for the pace of answers are worth in simulation: `python benchmarks/objectives.py [--json FILE]`.

`price:pace=...`, with the objectives by which the simulator counts a token as in time, against `price` on the held-out
worlds, which serve two classes of requests: goodput, and tokens per second beside it. Same requests, same luck, on
steady and drifting loads. Simulated time, so the machine does not matter. Some minutes.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any, Final

from simulated_points import half_width, measure

from faser.controller.cli.evaluate import decided
from faser.env.simulator.simulator import Simulator
from faser.models.evaluation.evaluate import DRIFT, Cell, scenario_of, simulate
from faser.models.evaluation.worlds import WorldSpec, held_out

RESULT: Final = Path(__file__).resolve().parent / "results" / "objectives.json"
LOADS: Final = (8, 32, 128, DRIFT)
STEPS: Final = 400  # as `faser evaluate` makes


def paced(world: WorldSpec, load: int) -> str:
    """Return the policy that knows the objectives of a world's classes."""
    scenario = scenario_of(world, load)
    objectives = Simulator(scenario, 1, seed=0).world.objectives[0]
    limits = [f"{each.priority}:{1e3 * objectives[row, 1]:.4f}" for row, each in enumerate(scenario.classes)]
    return f"price:pace={','.join(limits)}"


def compared(world: WorldSpec, load: int, seeds: range) -> dict[str, Any]:
    """Return ratios at one load: goodput with its 95 % half-width over seeds, and tokens per second.

    The first two are None where `price` has nothing in time: there no ratio means anything.
    """
    goodput, rates = [], []
    for seed in seeds:
        within, plain = (
            simulate(Cell(policy, world.name, load, seed, STEPS), decided) for policy in (paced(world, load), "price")
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


if __name__ == "__main__":
    measure(__doc__ or "", RESULT, held_out(), LOADS, 401, compared)
