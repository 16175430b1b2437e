"""What benchmarks in simulated worlds share: every world at every load over some seeds, with a bar, into a file.

Called by splits.py, frontiers.py and objectives.py.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rich.progress import Progress
from scipy import stats
from tables import table

from faser.controller.cli.evaluate import decided
from faser.controller.engine.machine import provenance
from faser.engine_adapter.protocol import ActionSet, StepRecord
from faser.env.estimate.engine_state import EngineState
from faser.env.simulator.simulated_engine import SimulatedEngine
from faser.models.evaluation.evaluate import DRIFT, FULL, Cell, Meter, scenario_of
from faser.models.evaluation.worlds import WorldSpec
from faser.models.registry import make_policy

Compare = Callable[[WorldSpec, int, range], dict[str, Any]]  # a world at a load, over seeds
KindOf = Callable[[StepRecord], int]  # which kind of step it was

POLICIES: Final = ("price", "learned")
STEPS: Final = 2400  # without speculation, of a full batch
DRIFT_STEPS: Final = 4800


def half_width(values: Sequence[float]) -> float:
    """Return half of Student's 95 % interval of the mean."""
    reach = float(stats.t.ppf(0.975, len(values) - 1))
    return reach * statistics.stdev(values) / math.sqrt(len(values))


def run(
    world: WorldSpec, load: int, seed: int, kinds: int, kind_of: KindOf, chosen: str = "price", steps: int = 0
) -> tuple[float, list[float]]:
    """Return tokens per second, goodput where the load drifts, and the share of the counted steps of each kind.

    :param load: running requests, or DRIFT
    """
    engine = SimulatedEngine(scenario_of(world, load), seed)
    policy, state = make_policy(chosen, engine.capabilities), EngineState(engine.capabilities)
    pace_s = float(engine.simulator.origins.pace_s[0])
    horizon_s = pace_s * (steps or (DRIFT_STEPS if load == DRIFT else STEPS))
    meter = Meter(engine.simulator, horizon_s, int(FULL * load))
    counts = [0] * kinds
    actions: ActionSet | None = None
    while True:
        record = engine.step(actions)
        if meter.is_over():
            break
        if meter.start is not None:
            counts[kind_of(record)] += 1
        actions = decided(state, record, policy, record.counter)
    score = meter.run(Cell(chosen, world.name, load, seed, steps)).score
    return score, [count / max(sum(counts), 1) for count in counts]


def compared(
    world: WorldSpec, without: WorldSpec, load: int, seeds: range, kinds: Sequence[str], kind_of: KindOf
) -> dict[str, Any]:
    """Return each policy's scores with something over those without it, at one load, and the shares of the steps."""
    found = {name: _beside(world, without, load, seeds, kinds, kind_of, name) for name in POLICIES}
    return {"world": world.name, "load": load, "policies": found}


def _beside(
    world: WorldSpec, without: WorldSpec, load: int, seeds: range, kinds: Sequence[str], kind_of: KindOf, chosen: str
) -> dict[str, Any]:
    """Return the ratio of the scores with and without, with its 95 % half-width, and the shares of the steps."""
    ratios, shares = [], []
    for seed in seeds:
        rate, under = run(world, load, seed, len(kinds), kind_of, chosen)
        ratios.append(rate / run(without, load, seed, len(kinds), kind_of, chosen)[0])
        shares.append(under)
    mean_shares = map(statistics.mean, zip(*shares, strict=True))
    return {
        "ratio": statistics.mean(ratios), "half_width": half_width(ratios),
        "share_of_steps": dict(zip(kinds, mean_shares, strict=True)),
    }  # fmt: skip


def measure(
    about: str, result: Path, worlds: Sequence[WorldSpec], loads: Sequence[int], seed: int, compare: Compare
) -> None:
    """Read the command line, compare at every point, write the file, print its table.

    :param seed: the first one
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=result)
    options = parser.parse_args()
    points, found = [(world, load) for world in worlds for load in loads], []
    with Progress() as bar:
        task = bar.add_task("comparing", total=len(points))
        for world, load in points:
            found.append(compare(world, load, range(seed, seed + options.seeds)))
            bar.advance(task)
    kept = {**provenance(), "seeds": options.seeds, "points": found}
    options.json.write_text(json.dumps(kept, indent=1) + "\n")
    print(table(kept))
