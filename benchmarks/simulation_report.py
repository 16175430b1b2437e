"""Tables of what `faser evaluate` and splits.py, frontiers.py, objectives.py found in simulated worlds, for docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from faser.controller.bench_ratio import LEAST_RATIO

RESULTS: Final = Path(__file__).resolve().parent / "results"
SHOWN: Final = ("price", "learned")  # policies whose worlds are told one by one
KNOWN: Final = {  # by what they know, most first
    "oracle:request": "which tokens will be accepted",
    "informed:drafts": "every token's chance before any is drafted, true costs",
    "informed:rounds": "a token's chance once it is drafted, true costs",
    "informed:lengths": "what a request is like, true costs",
    "price": "what it has learnt, with confidence",
    "price:history": "what it has learnt, without",
}
# Shown where the load changes.
SHOWN_CHANGING: Final = ("oracle:request", "informed:rounds", "price", "learned", "table")


def read(name: str) -> Any:
    """Return a results file."""
    return json.loads((RESULTS / name).read_text())


def policies_overall() -> str:
    """Return every policy's goodput, envelope ratio, closed gap and ratio to price."""
    lines = [
        "| policy | goodput | envelope ratio, mean | lowest | gap closed | over price, 95 % |",
        "|---|---|---|---|---|---|",
    ]
    found = read("policies.json")["policies"]
    for name in sorted(found, key=lambda name: -found[name]["goodput"]):
        each = found[name]
        low, high = each["over_price_ci"]
        lines.append(
            f"| {name} | {each['goodput']:.0f} | {each['envelope_ratio_mean']:.3f} | {each['envelope_ratio_min']:.3f} "
            f"| {each['gap_closed']:+.2f} | {each['over_price']:.3f} ({low:.3f}..{high:.3f}) |"
        )
    return "\n".join(lines)


def policies_by_world() -> str:
    """Return the ratios to the best rival of each world and load, and who that was."""
    found = read("policies.json")["policies"]
    loads = list(next(iter(found[SHOWN[0]]["worlds"].values())))
    lines = [f"| world | policy | {' | '.join(loads)} |", "|---" * (2 + len(loads)) + "|"]
    for world in found[SHOWN[0]]["worlds"]:
        for name in SHOWN:
            cells = [found[name]["worlds"][world][load] for load in loads]
            told = [f"{c['envelope_ratio']:.3f} ± {(c['envelope_ci'][1] - c['envelope_ci'][0]) / 2:.3f}" for c in cells]
            lines.append(f"| {world} | {name} | " + " | ".join(told) + " |")
        rivals = [found[SHOWN[0]]["worlds"][world][load]["best_rival"] for load in loads]
        lines.append("| | best rival | " + " | ".join(rivals) + " |")
    return "\n".join(lines)


def policies_said() -> str:
    """Return in words how `price` and `learned` stand."""
    found = read("policies.json")["policies"]
    price, learned = found["price"], found["learned"]
    points = [(world, load, cell) for world, loads in price["worlds"].items() for load, cell in loads.items()]
    world, load, least = min(points, key=lambda point: point[2]["envelope_ratio"])
    half = (least["envelope_ci"][1] - least["envelope_ci"][0]) / 2
    below = [point for point in points if point[2]["envelope_ratio"] < LEAST_RATIO]
    ways = {"swing": "swings", "drift": "drifts"}
    changing = {way: [c["over_best_fixed"] for _, at, c in points if at == load] for load, way in ways.items()}
    told = ", ".join(
        f"{np.mean(seen):.3f} times on average where the load {way} ({min(seen):.2f} to {max(seen):.2f})"
        for way, seen in changing.items()
        if seen
    )
    low, high = learned["over_price_ci"]
    perfect = found["informed:rounds"]["gap_closed"]
    where = f"{load} requests" if load.isdigit() else load
    lines = [
        f"- `price` is at {price['envelope_ratio_mean']:.3f} of the envelope on average, and below {LEAST_RATIO:g} at "
        f"{len(below)} of {len(points)} points; the lowest is {least['envelope_ratio']:.3f} ± {half:.3f} "
        f"({world}, {where}).",
        f"- Of the best fixed length of each world, chosen in hindsight, it is {told}.",
        f"- `price` closes {price['gap_closed']:.0%} of the gap from the best fixed length to hindsight; a perfect "
        f"confidence and true costs, with nothing to learn, close {perfect:.0%}.",
        f"- `learned` emits {learned['over_price']:.4f} ({low:.4f} to {high:.4f}) times as much as `price`; its mean "
        f"is {learned['envelope_ratio_mean']:.3f} of the envelope, its lowest {learned['envelope_ratio_min']:.3f}.",
    ]
    return "\n".join(lines)


def policies_bounds() -> str:
    """Return how much of the gap to hindsight each stage of knowledge closes, by world."""
    result = read("policies.json")
    found, sharpness = result["policies"], result["confidence_auc"]
    worlds = list(found["price"]["worlds"])
    heads = [f"{world} ({sharpness[world]:.2f})" if world in sharpness else f"{world} (none)" for world in worlds]
    lines = [
        f"| knows | {' | '.join(heads)} | mean of those with confidence | all |",
        "|---" * (len(worlds) + 3) + "|",
    ]
    for name, told in KNOWN.items():
        shares = found[name]["gap_closed_by_world"]
        cells = [shares[world] for world in worlds]
        mean = sum(shares[world] for world in sharpness) / len(sharpness)
        told = f"{told} (`{name}`)"
        lines.append(f"| {told} | " + " | ".join(f"{x:+.2f}" for x in (*cells, mean, found[name]["gap_closed"])) + " |")
    return "\n".join(lines)


def policies_changing() -> str:
    """Return what bounds, ours and the best table gain over the best fixed length on changing loads, by world."""
    found = read("policies.json")["policies"]
    worlds = list(found["price"]["worlds"])
    lines = [f"| load | policy | {' | '.join(worlds)} | mean |", "|---" * (len(worlds) + 3) + "|"]
    for load in [load for load in ("swing", "drift") if load in found["price"]["worlds"][worlds[0]]]:
        for name in SHOWN_CHANGING:
            cells = [found[name]["worlds"][world][load] for world in worlds]
            means = [cell["over_best_fixed"] for cell in cells]
            halves = [(cell["over_best_fixed_ci"][1] - cell["over_best_fixed_ci"][0]) / 2 for cell in cells]
            told = [f"{mean:.3f} ± {half:.3f}" for mean, half in zip(means, halves, strict=True)]
            lines.append(f"| {load} | `{name}` | {' | '.join(told)} | {np.mean(means):.3f} |")
    return "\n".join(lines)


def splits() -> str:
    """Return what choosing a split is worth, by world and load."""
    return _by_kind("splits.json", ("over unsplit alone", "steps under a split"), "unsplit")


def frontiers() -> str:
    """Return what choosing to draft ahead is worth, by world and load."""
    return _by_kind("frontiers.json", ("over in turn alone", "steps asked for, ahead"), "in turn")


def _by_kind(file: str, told: tuple[str, str], usual: str) -> str:
    points = read(file)["points"]
    names = list(points[0]["policies"])
    heads = [f"{name}: {what}" for name in names for what in told]
    lines = [f"| world | running requests | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for point in points:
        cells = [cell for name in names for cell in _kind_cells(point["policies"][name], usual)]
        lines.append(f"| {point['world']} | {point['load'] or 'drift'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _kind_cells(found: Any, usual: str) -> tuple[str, str]:
    shares = [(name, share) for name, share in found["share_of_steps"].items() if name != usual]
    told = ", ".join(f"{name}: {share:.1%}" for name, share in shares if share >= 0.001) or "none"
    return f"{found['ratio']:.3f} ± {found['half_width']:.3f}", told


def objectives() -> str:
    """Return what objectives for the pace of answers are worth, by world and load."""
    points = read("objectives.json")["points"]
    lines = ["| world | running requests | goodput over price | tokens/s over price |", "|---|---|---|---|"]
    for point in points:
        known = point["goodput"] is not None
        goodput = f"{point['goodput']:.3f} ± {point['half_width']:.3f}" if known else "nothing in time under either"
        lines.append(f"| {point['world']} | {point['load'] or 'drift'} | {goodput} | {point['tokens_per_s']:.3f} |")
    return "\n".join(lines)
