"""What objectives for the pace of answers are worth in simulation: `python benchmarks/objectives.py [--json FILE]`.

`price:pace=...`, with the objectives by which the simulator counts a token as in time, against `price` on the held-out
worlds, which serve two classes of requests: goodput, and tokens per second beside it. Same requests, same luck, on
steady and drifting loads. Simulated time, so the machine does not matter. Some minutes; then `python docs/figures.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any, Final

from rich.progress import Progress
from scipy import stats

from faser.controller.bench_machine import commit, versions
from faser.controller.evaluate import decided
from faser.env.simulator import Simulator
from faser.models.evaluate import DRIFT, Cell, simulate
from faser.models.worlds import WorldSpec, held_out

RESULT: Final = Path(__file__).resolve().parent / "results" / "objectives.json"
LOADS: Final = (8, 32, 128, DRIFT)
STEPS: Final = 400  # as `faser evaluate` makes


def paced(world: WorldSpec, load: int) -> str:
    """Return the policy that knows the objectives of a world's classes."""
    scenario = world.drifting() if load == DRIFT else world.closed(load)
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
    reach = float(stats.t.ppf(0.975, len(goodput) - 1)) / len(goodput) ** 0.5
    return {
        "world": world.name, "load": load, "limits": paced(world, load),
        "goodput": statistics.mean(goodput) if is_known else None,
        "half_width": reach * statistics.stdev(goodput) if is_known else None,
        "tokens_per_s": statistics.mean(rates),
    }  # fmt: skip


def main() -> None:
    """Compare, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    points = [(world, load) for world in held_out() for load in LOADS]
    found = []
    with Progress() as bar:
        task = bar.add_task("comparing", total=len(points))
        for world, load in points:
            found.append(compared(world, load, range(401, 401 + options.seeds)))
            bar.advance(task)
    result = {"versions": versions(), "commit": commit(), "seeds": options.seeds, "points": found}
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
