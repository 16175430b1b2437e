"""What each part of `price` is worth in simulation: `python benchmarks/ablation.py [--seeds N] [--json FILE]`.

Whole `price` beside `price` without one part (benchmarks/price_parts.py), on the same worlds, loads and seeds: same
requests, same luck. A part earns what whole `price` has over the one without it: tokens per second, goodput where the
load drifts. Splits and drafting ahead are looked at in the worlds that offer them. Seed after seed, each over
everything; the file (benchmarks/results/ablation.json) is written after each run, and another start goes on from it.
Simulated time, so the machine does not matter, but for the last table: what searching in every decision takes. A
minute a seed on an idle core.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from decide import BATCHES
from decide import measure as decision_us
from measured_cells import begun, write
from price_parts import PARTS, PolicyPart
from worth import half_width

from faser.controller.bench.markdown import markdown_table
from faser.controller.cli.evaluate import decided, one_thread
from faser.controller.engine.machine import provenance
from faser.controller.whole_file import require_place
from faser.models.evaluation.evaluate import CHANGING, DRIFT, SWING, Cell, simulate
from faser.models.evaluation.worlds import WorldSpec

RESULT: Final = Path(__file__).resolve().parent / "results" / "ablation.json"
LOADS: Final = (1, 4, 16, 64, DRIFT, SWING)
STEPS: Final = 400  # as a full batch without speculation makes them
FEWER: Final = {1: 200, DRIFT: 200}  # runs that are several times as long as that, see models/evaluation/evaluate.py
FIRST_SEED: Final = 501  # none that published tables were made with
WORTH: Final = 0.005  # what a part has to earn in some world
WHOLE: Final = "whole"
ALL: Final = "all"  # worlds or loads, their geometric mean
TIMES: Final = ("policy_p50_us", "policy_p99_us", "decide_p50_us")
COLUMNS: Final = (
    "without", "all", "drift", "swing", "least world", "best world", "worst cell", "best cell", "seeds",
    f"{WORTH:.1%} in a world",
)  # fmt: skip

Runs = Mapping[str, Sequence[float | None]]  # tokens per second and goodput, by key_of
Point = dict[str, Any]


def key_of(part: str, world: str, load: int, seed: int) -> str:
    """Return what a run is called in the file."""
    return f"{part}/{world}/{name_of(load)}/{seed}"


def name_of(load: int) -> str:
    """Return what a load is called."""
    return CHANGING.get(load, str(load))


def steps_of(load: int) -> int:
    """Return how long a run is."""
    return FEWER.get(load, STEPS)


def run(part: PolicyPart | None, world: WorldSpec, load: int, seed: int, steps: int = 0) -> tuple[float, float | None]:
    """Return tokens per second and goodput, of whole `price` or of one without a part; None: goodput isn't counted."""
    cell = Cell(part.policy if part else "price", world.name, load, seed, steps or steps_of(load))
    if part is None:
        found = simulate(cell, decided, (world,))
    else:
        with part.off():
            found = simulate(cell, decided, (world,))
    return found.tokens_per_s, None if math.isnan(found.goodput) else found.goodput


def ordered(seeds: range) -> Iterator[tuple[PolicyPart | None, WorldSpec, int, int]]:
    """Yield all runs, seed after seed, whole `price` before those that are compared with it."""
    worlds = {world.name: world for part in PARTS for world in part.worlds()}
    parts = {name: [part for part in PARTS if name in {world.name for world in part.worlds()}] for name in worlds}
    for seed in seeds:
        for name, world in worlds.items():
            for load in LOADS:
                yield None, world, load, seed
                yield from ((part, world, load, seed) for part in parts[name])


def earned(runs: Runs, part: str, world: str, load: int, seeds: range, *, is_goodput: bool) -> dict[int, float]:
    """Return by seed whole `price` over the one without a part, of those seeds for which both were run."""
    found = {}
    for seed in seeds:
        whole, less = (runs.get(key_of(name, world, load, seed)) for name in (WHOLE, part))
        if whole and less and (ours := whole[is_goodput]) and (theirs := less[is_goodput]):
            found[seed] = ours / theirs
    return found


def together(cells: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the geometric mean over cells, of those seeds that all of them have."""
    seeds = [seed for seed in cells[0] if all(seed in each for each in cells)]
    return {seed: math.exp(float(np.mean([math.log(each[seed]) for each in cells]))) for seed in seeds}


def points(runs: Runs, seeds: range) -> list[Point]:
    """Return what each part earns in each world at each load, and in all of them together."""
    return [
        {"part": part.name, "world": world, "load": load, "seeds": len(by_seed), **told(list(by_seed.values()))}
        for part in PARTS
        for (world, load), by_seed in _of_part(runs, part, seeds).items()
        if by_seed
    ]


def _of_part(runs: Runs, part: PolicyPart, seeds: range) -> dict[tuple[str, str], dict[int, float]]:
    """Return by world and load what a part earns by seed."""
    worlds, loads = [world.name for world in part.worlds()], [name_of(load) for load in LOADS]
    found = {
        (world, name_of(load)): earned(runs, part.name, world, load, seeds, is_goodput=load == DRIFT)
        for world in worlds
        for load in LOADS
    }
    found |= {(world, ALL): together([found[world, load] for load in loads]) for world in worlds}
    found |= {(ALL, load): together([found[world, load] for world in worlds]) for load in (*loads, ALL)}
    for world in worlds:
        found[world, "drift, tokens/s"] = earned(runs, part.name, world, DRIFT, seeds, is_goodput=False)
    return found


def told(ratios: Sequence[float]) -> dict[str, float | None]:
    """Return the mean of ratios and half of its 95 % interval over seeds, None for one seed."""
    return {"ratio": float(np.mean(ratios)), "half_width": half_width(ratios) if len(ratios) > 1 else None}


def verdict(worlds: Sequence[Point]) -> str:
    """Return whether a part earns WORTH in some world: yes and no are sure over the seeds, else it is open."""
    halves = [math.inf if point["half_width"] is None else point["half_width"] for point in worlds]
    gains = [point["ratio"] - 1.0 for point in worlds]
    if any(gain - half > WORTH for gain, half in zip(gains, halves, strict=True)):
        return "yes"
    return "no" if all(gain + half < WORTH for gain, half in zip(gains, halves, strict=True)) else "open"


def table(found: Sequence[Point]) -> str:
    """Return the Markdown table: a row for each part, what it earns in percent."""
    by_part = {part.name: [point for point in found if point["part"] == part.name] for part in PARTS}
    return markdown_table(COLUMNS, [row(name, own) for name, own in by_part.items() if own])


def row(name: str, own: Sequence[Point]) -> tuple[str, ...]:
    """Return a part's row."""
    at = {(point["world"], point["load"]): point for point in own}
    worlds = [point for (world, load), point in at.items() if world != ALL and load == ALL]
    cells = [point for (world, load), point in at.items() if ALL not in (world, load) and "," not in load]
    means = [percent(at.get((ALL, load))) for load in (ALL, "drift", "swing")]
    ends = [
        pick(which, key=lambda point: point["ratio"], default=None) for which in (worlds, cells) for pick in (min, max)
    ]
    places = [f"{percent(end)} {where(end)}" if end else "" for end in ends]
    seeds = str(min((point["seeds"] for point in worlds), default=0))
    return name, *means, *places, seeds, verdict(worlds)


def percent(point: Point | None) -> str:
    """Return what is earned at a point with half of its interval."""
    if point is None:
        return ""
    half = "" if point["half_width"] is None else f" ± {100.0 * point['half_width']:.2f}"
    return f"{100.0 * (point['ratio'] - 1.0):+.2f}{half}"


def where(point: Point) -> str:
    """Return a point's world, and its load where it has one."""
    return f"({point['world']})" if point["load"] == ALL else f"({point['world']}, {point['load']})"


def timed(steps: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return microseconds of decisions by requests, of whole `price` and of one that searches in every decision."""
    settling = next(part for part in PARTS if part.name == "settling")
    found: dict[str, dict[str, dict[str, float]]] = {}
    for batch in BATCHES:
        whole = decision_us(batch, "price", 7, steps, is_confident=True, has_copies=False)
        with settling.off():
            searching = decision_us(batch, "price", 7, steps, is_confident=True, has_copies=False)
        kinds = {WHOLE: whole, "without settling": searching}
        found[str(batch)] = {kind: {name: took[name] for name in TIMES} for kind, took in kinds.items()}
    return found


def fill(path: Path, kept: dict[str, Any], seeds: range) -> None:
    """Make the runs that are missing, and write each."""
    wanted = list(ordered(seeds))
    for number, (part, world, load, seed) in enumerate(wanted, 1):
        key = key_of(part.name if part else WHOLE, world.name, load, seed)
        if key in kept["runs"]:
            continue
        kept["runs"][key] = run(part, world, load, seed)
        write(path, kept)
        print(f"{number}/{len(wanted)} {key}", file=sys.stderr, flush=True)


def main() -> None:
    """Read the command line, make what is missing, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--timed-steps", type=int, default=1000, help="decisions that are timed; 0: none")
    options = parser.parse_args()
    require_place(options.json, "--json")
    one_thread()
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    steps = {name_of(load): steps_of(load) for load in LOADS}
    parts = [part.name for part in PARTS]  # a part that is gone is gone from whole `price`, too
    kept = begun(options.json, {"steps": steps, "first_seed": FIRST_SEED, "parts": parts}, {"runs": {}})
    fill(options.json, kept, seeds)
    if options.timed_steps:
        kept["decisions"] = timed(options.timed_steps)
    kept["points"] = points(kept["runs"], seeds)
    write(options.json, {**kept, **provenance()})
    print(table(kept["points"]))
    for batch, kinds in kept.get("decisions", {}).items():
        rows = [(kind, *(f"{us:.0f}" for us in took.values())) for kind, took in kinds.items()]
        print("\n" + markdown_table((f"{batch} requests", *TIMES), rows))


if __name__ == "__main__":
    main()
