"""What each mechanism gave, from the results that are kept: a table for docs/figures.py.

Nothing is measured here. Each line compares with and without one mechanism as its own benchmark did, on its machine;
lines do not multiply, for they are of different loads and machines.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import closed_loop_result
import numpy as np
import overlap_report
import pruning_report
import swing_report

from faser.controller.bench_ratio import OURS, paired_ratio, wider_interval
from faser.controller.bench_result import name_of
from faser.models.evaluate import DRIFT

RESULTS: Final = Path(__file__).resolve().parent / "results"
POLICIES: Final = ("adaspec", "smartspec", "learned", "goodput", "gplcb", "bandit", "ema")
SIMULATED: Final = "simulation, five worlds, 1 to 128 requests"
Row = tuple[str, str, str, str]  # mechanism, beside, measured where, ratio of tokens per second


def table() -> str:
    """Return the table."""
    rows = [*lengths(), *by_load(), *confidence(), *pruning(), *overlap(), *splits(), *frontiers(), *policies()]
    heading = ("mechanism", "over", "where", "tokens/s")
    return "\n".join(pruning_report.markdown(heading, rows))


def read(name: str) -> Any:
    """Return a results file."""
    return json.loads((RESULTS / name).read_text())


def lengths() -> Iterator[Row]:
    """Yield what choosing lengths brings, step by step, on the swinging load."""
    rates = swing_report.read().rates()
    fixed = max((arm for arm in rates if arm.startswith("k")), key=lambda arm: _level(rates[arm].tolist()))
    where = "engine, a swinging load"
    said = name_of(fixed)
    for name, arm, beside, told in (
        (f"the best fixed length in hindsight, {said}", fixed, "none", "no speculation"),
        ("a length for each size of the batch", swing_report.TABLE, fixed, said),
        ("a length for each request, stops by confidence, costs as measured", OURS, swing_report.TABLE, "that table"),
    ):
        yield name, told, where, str(paired_ratio(np.log(rates[arm]) - np.log(rates[beside]), wider_interval))


def by_load() -> Iterator[Row]:
    """Yield what lengths and stops bring at steady loads."""
    results = closed_loop_result.read_results(closed_loop_result.RESULTS)
    loads = sorted({turn.load for turn in results.turns})
    over_none = [f"{closed_loop_result.over_none(results, load).value:.2f}" for load in loads]
    over_best = [f"{closed_loop_result.envelope_at(results, load).ratio.value:.2f}" for load in loads]
    where = f"engine, {', '.join(map(str, loads))} requests"
    yield "lengths and stops together", "no speculation", where, ", ".join(over_none)
    yield "lengths and stops together", "the best rival of each", where, ", ".join(over_best)


def confidence() -> Iterator[Row]:
    """Yield what the drafter's confidence brings."""
    ratios = [1.0 / ratio for ratio in steady_over_price("price:history")]
    yield "the drafter's confidence", "lengths by history alone", SIMULATED, _range(ratios)


def steady_over_price(name: str) -> list[float]:
    """Return a policy's tokens per second over those of `price`, in each world at each steady load."""
    worlds = read("policies.json")["policies"][name]["worlds"]
    return [cell["over_price"] for world in worlds.values() for load, cell in world.items() if load.isdigit()]


def pruning() -> Iterator[Row]:
    """Yield what ending drafts by confidence brings a fixed length, and what pruning brings beside that."""
    cells = read("pruning_gate.json")["cells"]
    for name, arm, beside, told in (
        ("drafts that end by confidence", "confidence", "full", "drafts in full"),
        ("pruned verification under its gate", "gate", "confidence", "drafts that end by confidence"),
    ):
        both = [cell["tokens_per_s"] for cell in cells if {arm, beside} <= set(cell["tokens_per_s"])]
        ratios = [_level(rates[arm]) / _level(rates[beside]) for rates in both]
        if ratios:
            where = f"engine, {len(ratios)} of {len(pruning_report.GRID)} batches and lengths"
            yield name, told, where, _range(ratios)


def overlap() -> Iterator[Row]:
    """Yield what the two ways to overlap bring the embedded pair."""
    found = json.loads(overlap_report.GATE_RESULT.read_text())["loads"]
    forced = (("drafting ahead, forced on", "ahead"), ("two groups, forced on", "groups"))
    for name, arm in (*forced, ("both, each under its gate", "gated")):
        loads = {load["requests"]: load["tokens_per_s"] for load in found if arm in load["tokens_per_s"]}
        ratios = [_level(rates[arm]) / _level(rates["in turn"]) for rates in loads.values()]
        yield name, "drafting in turn", f"engine, split cores, {', '.join(map(str, loads))} requests", _range(ratios)


def splits() -> Iterator[Row]:
    """Yield what choosing a split brings in the simulated engines that offer some."""
    yield from _simulated("splits.json", "a split of the device, chosen", "unsplit")


def frontiers() -> Iterator[Row]:
    """Yield what choosing to draft ahead brings in the simulated engines that can."""
    yield from _simulated("frontiers.json", "drafting ahead, chosen", "drafting in turn")


def _simulated(file: str, mechanism: str, over: str) -> Iterator[Row]:
    points = read(file)["points"]
    for world in dict.fromkeys(point["world"] for point in points):
        own = {point["load"]: point["policies"]["price"] for point in points if point["world"] == world}
        ratios = [found["ratio"] for load, found in own.items() if load != DRIFT]
        drift = f"{own[DRIFT]['ratio']:.3f} ± {own[DRIFT]['half_width']:.3f}"
        yield mechanism, over, f"simulation, {world}, 1 to 128 requests", _range(ratios)
        yield "the same under a drifting load: goodput", over, f"simulation, {world}", drift


def policies() -> Iterator[Row]:
    """Yield what other policies bring in place of `price`."""
    for name in POLICIES:
        yield f"the policy `{name}`", "`price`", SIMULATED, _range(steady_over_price(name))


def _level(rates: list[float]) -> float:
    return statistics.geometric_mean(rates)


def _range(ratios: list[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.3f} (least {min(ratios):.3f}, most {max(ratios):.3f})"
