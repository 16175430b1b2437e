"""Tables and lines of README and docs that no benchmark's own report makes, each from a file of benchmarks/results.

Called by docs/figures.py, which knows where they stand.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, Final

import closed_loop_result as closed

from faser.controller.bench_ratio import OURS
from faser.controller.bench_result import name_of

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results"


def read(name: str) -> Any:
    """Return a results file."""
    return json.loads((RESULTS / name).read_text())


def closed_loop() -> str:
    """Return the README's ratios at each load; docs/results.md has all of it."""
    told = closed.read_results(closed.RESULTS)
    rivals = [name_of(arm) for arm in told.arms() if arm != OURS]
    lines = ["| concurrent requests | over no speculation | over the best rival | which |", "|---|---|---|---|"]
    for load in told.loads():
        best = closed.envelope_at(told, load)
        which = " / ".join(dict.fromkeys(map(name_of, best.rivals)))
        both = (closed.over_none(told, load), best.ratio)
        ratios = " | ".join(f"{each.value:.2f} ({each.low:.2f} to {each.high:.2f})" for each in both)
        lines.append(f"| {load} | {ratios} | {which} |")
    return "\n".join([*lines, "", f"Rivals: {', '.join(rivals)}."])


def confidence() -> str:
    """Return what the drafter's confidence is worth by draft position."""
    lines = [
        "| answers | position | tested | rejected | AUC (95 %) | calibration error, raw | calibrated |",
        "|---|---|---|---|---|---|---|",
    ]
    for temperature, rows in read("confidence.json")["by_temperature"].items():
        answers = "greedy" if float(temperature) == 0.0 else f"T = {temperature}"
        for row in rows:
            lines.append(
                f"| {answers} | {row['position']} | {row['tokens']} | {row['rejected']} "
                f"| {row['auc']:.3f} ({row['auc_low']:.3f} to {row['auc_high']:.3f}) "
                f"| {row['raw_error']:.3f} | {row['error']:.3f} |"
            )
    return "\n".join(lines)


def confidence_row() -> str:
    """Return the README's line on it: position 1, greedy."""
    row = read("confidence.json")["by_temperature"]["0"][0]
    return (
        "| the drafter's confidence on held-out prompts, greedy, position 1: AUC / calibration error "
        f"| {row['auc']:.3f} ({row['auc_low']:.3f} to {row['auc_high']:.3f}) / {row['error']:.3f} | 0.75 / 0.05 "
        "| `benchmarks/confidence_engine.py` |"
    )


def card() -> Any:
    """Return the card of the shipped drafter."""
    return json.loads((ROOT / "models" / "weights" / "drafter.card.json").read_text())


def exit_heads() -> str:
    """Return what the shipped exit heads tell, layer by layer, from their card."""
    found = json.loads((ROOT / "models" / "weights" / "exits.card.json").read_text())
    lines = [
        "| head behind layer | ROC-AUC | threshold | rows that leave | accepted tokens wrongly pruned "
        "| time per token | beside ending by confidence |",
        "|---|---|---|---|---|---|---|",
        f"| confidence alone | {found['auc_of_confidence_alone']:.3f} | | | "
        f"| {found['confidence_alone_before_verification']['time_share']:.3f} | 1 |",
    ]
    for row in found["by_layer"]:
        rule = row["rule"]
        lines.append(
            f"| {row['layer']} | {row['auc']:.3f} | {rule['threshold']:g} | {100 * rule['dropped']:.1f} % "
            f"| {100 * rule['wrong']:.1f} % | {rule['time_share']:.3f} | {row['beside_confidence']['time_share']:.3f} |"
        )
    return "\n".join(lines)


def acceptance() -> str:
    """Return how much of the shipped drafter's drafts is accepted, by kind of prompt."""
    lines = [
        "| prompts | greedy: accepted up to position 1 / 2 / 3 / 4 | tokens a step | T = 0.7: accepted "
        "| tokens a step |",
        "|---|---|---|---|---|",
    ]
    figures = card()["figures"]
    names = {"all": "**all held-out**"}
    rows = [(names.get(row["kind"], row["kind"]), row) for row in figures["by_kind"]]
    rows += [("32 hand-written questions", row) for row in figures["hand_written_prompts"]["rows"]]
    for name in dict.fromkeys(name for name, _ in rows):
        own = sorted((row for of, row in rows if of == name), key=lambda row: row["temperature"])
        cells = [
            f"{' / '.join(f'{share:.3f}' for share in row['acceptance_by_position'])} | {row['mean_length']:.2f}"
            for row in own
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def confidence_offline() -> str:
    """Return what the drafter's confidence is worth on whole answers, teacher-forced."""
    lines = [
        "| answers | position | tested | rejected | AUC | calibration error |",
        "|---|---|---|---|---|---|",
    ]
    for run in card()["figures"]["offline_held_out"]["rows"]:
        answers = "greedy" if run["temperature"] == 0.0 else f"T = {run['temperature']:g}"
        for position, row in enumerate(run["confidence_by_position"], start=1):
            lines.append(
                f"| {answers} | {position} | {row['tested']} | {row['rejected']} "
                f"| {row['auc']:.3f} | {row['calibration_error']:.3f} |"
            )
    return "\n".join(lines)


def confidence_saving() -> str:
    """Return what price draws and verifies for the tokens it has accepted, beside the least without confidence."""
    found = read("confidence_saving.json")
    lines = [
        "| requests | accepted a token emitted | drawn, price / without | | verified, price / without | |",
        "|---|---|---|---|---|---|",
    ]
    for requests, load in found["loads"].items():
        ours = load["summary"]["price"]
        cells = []
        for what in ("drawn", "verified"):
            own, least = ours[f"{what}_per_emitted"], ours[f"{what}_without_confidence"]
            cells.append(f"{own:.2f} / {least:.2f} | {100.0 * (own / least - 1.0):+.0f} %")
        lines.append(f"| {requests} | {ours['accepted_per_emitted']:.3f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def clients() -> str:
    """Return the figures of other clients beside ours."""
    import clients as benchmark  # it takes seconds to import
    import msgspec

    return str(benchmark.table(msgspec.json.decode(benchmark.RESULTS.read_bytes(), type=benchmark.Results)))


def quick_run() -> str:
    """Return the line on the quick run that is kept."""
    minutes, seconds = divmod(round(read("bench_quick.json")["wall_s"]), 60)
    return (
        f"One quick run on two shared cores, of {minutes} minutes and {seconds} seconds, is kept in "
        "`benchmarks/results/bench_quick.json`. Three pairs settle nothing: all of its"
    )


def adapter_row(caches: str, beginning: str) -> str:
    """Return one of the README's lines on the adapter; `caches` is what the benchmark calls its way of stepping."""
    runs = read("measured.json")["adapter"]
    cells, bounds = [], []
    for requests in (1, 8, 64, 256):
        rows = [row for run in runs for row in run if (row["requests"], row["caches"]) == (requests, caches)]
        cells.append(_middle([row["p50_us"] for row in rows]))
        bounds.append(f"{rows[0]['bound_us']:.0f}")
    return f"{beginning} | {' / '.join(cells)} us | {' / '.join(bounds)} us | `benchmarks/adapter.py` |"


def decide_row() -> str:
    """Return the README's line on the policy alone."""
    found = read("measured.json")["decide"][0]["requests"]
    cells = " / ".join(f"{found[requests]['policy_p50_us']:.0f}" for requests in ("64", "256"))
    return f"| policy alone, 64 / 256 requests, p50 | {cells} us | 100 / 250 us | `benchmarks/decide.py` |"


def round_trip_row(cores: str, pause_ms: float, beginning: str) -> str:
    """Return one of the README's lines on the way to the sidecar and back."""
    runs = read("measured.json")["round_trip"]
    rows = [row for run in runs for row in run if (row["cores"], row["pause_ms"]) == (cores, pause_ms)]
    spans = [_middle([row["p50_us"] for row in rows if row["requests"] == n]) for n in (64, 256)]
    bare, p99 = _middle([row["bare_us"] for row in rows]), max(row["p99_us"] for row in rows if row["requests"] == 64)
    return (
        f"{beginning} | {' / '.join(spans)} us; p99 at 64 at most {p99 / 1e3:.1f} ms; the bare socket {bare} us "
        "| 300 / 800 us; 2 ms | `benchmarks/round_trip.py` |"
    )


def share_row() -> str:
    """Return the README's line on the adapter in a real engine."""
    share = read("readme.json")["demo"]["result"]["adapter_share"]
    return f"| adapter's share of a step, in the demo | {share * 100:.2f} % | 1 % | `faser demo --json` |"


def telemetry_size() -> str:
    """Return the line on how much is recorded."""
    (size,) = (row["telemetry_bytes"] for row in read("scale.json")["by_requests"] if row["requests"] == 64)
    hour_mb = size * 100 * 3600 / 1e6
    return (
        f"Size: about {size / 1e3:.1f} kB per step of 64 requests, {hour_mb:.0f} MB per hour at 100 steps/s. "
        "Beyond `store.max_mb` (4 GiB unless set) or"
    )


def engines_to_a_core() -> str:
    """Return the line on how many engines a core serves."""
    runs = read("measured.json")["fleet"][0]["runs"]
    most = max(int(run["engines"]) for run in runs if run["keeps_up"])
    return (
        f"cores that sleep. One core answered {most} engines of 64 requests in time, 50 steps/s each; plan with a half "
        "of that (README, *Measured*)."
    )


def store_row() -> str:
    """Return the README's line on the telemetry store."""
    found = read("measured.json")["store"][0]
    return f"| telemetry store | {found['steps_per_s']:,.0f} steps/s of 64 requests | 100 | `benchmarks/store.py` |"


def fleet_row() -> str:
    """Return the README's line on the engines that one core serves."""
    runs = read("measured.json")["fleet"][0]["runs"]
    kept = [run for run in runs if run["keeps_up"]]
    most = max(kept, key=lambda run: int(run["engines"]), default=None)
    told = "none" if most is None else f"{most['engines']} ({most['core_share'] * 100:.0f} % of the core)"
    late = [f"{run['engines']}: {run['answered_in_time'] * 100:.1f} %" for run in runs if not run["keeps_up"]]
    return (
        "| engines on one sidecar core, 50 steps/s of 64 requests each, recorded, 99.9 % answered within 20 ms "
        f"| {'; '.join([told, *late])} | 32 | `benchmarks/fleet.py` |"
    )


def _middle(values: list[float]) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"
