"""Writes measured figures into README and docs from benchmarks/results alone.

    python docs/figures.py             # rewrite every tied figure; --check fails where one is not its file's
    python docs/figures.py --untied    # lines with figures that no file stands behind

A tie is a block between `<!-- figures: NAME -->` and `<!-- end of figures -->`, or a line that begins in a certain way.
Blocks between `<!-- NAME: begin -->` and `<!-- NAME: end -->` are written by the reports of their own benchmarks, and
tested with those. What is left may only be figures that were set, not measured; they are listed in SET. The diary,
docs/decisions.md, keeps the figures of its day.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # whose reports make tables
RESULTS = ROOT / "benchmarks" / "results"
END = "<!-- end of figures -->"
DIARY = "docs/decisions.md"
BEGIN, CLOSE = re.compile(r"<!-- (figures: .*|.*: begin) -->"), re.compile(r"<!-- (end of figures|.*: end) -->")
FIGURE = re.compile(
    r"\d(?: ?%| (?:us|ms|s|GiB|MiB|KiB)\b|(?: tokens| steps)/s)|\d\.\d+ ± |\(\d\.\d+ to \d\.\d+\)|\d\.\d{3}\b"
)


def read(name: str) -> Any:
    """Return a results file."""
    return json.loads((RESULTS / name).read_text())


def closed_loop() -> str:
    """Return the README's ratios at each load; docs/results.md has all of it."""
    import closed_loop_report as report  # it takes a second to import

    told = report.read_results(report.RESULTS)
    lines = [
        "| concurrent requests | over no speculation | over the best of no speculation and k = 1 to 4 |",
        "|---|---|---|",
    ]
    for load in sorted({turn.load for turn in told.turns}):
        ratios = (report.over_none(told, load), report.envelope_at(told, load).ratio)
        lines.append(f"| {load} | " + " | ".join(f"{r.value:.2f} ({r.low:.2f} to {r.high:.2f})" for r in ratios) + " |")
    return "\n".join(lines)


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


def reported(script: str, table: str) -> str:
    """Return a table of a report in benchmarks/."""
    return str(getattr(import_module(script), table)())


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


BLOCKS: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "demo"): partial(reported, "readme", "demo"),
    ("README.md", "tests"): partial(reported, "readme", "tests"),
    ("README.md", "closed loop"): closed_loop,
    ("docs/simulator.md", "speed"): partial(reported, "measured", "speed"),
    ("docs/bench.md", "trace"): partial(reported, "bench_trace", "table"),
    ("docs/results.md", "ablation"): partial(reported, "ablation_report", "table"),
    ("docs/results.md", "bench full"): partial(reported, "bench_full", "table"),
    ("docs/results.md", "bench costs"): partial(reported, "bench_full", "costs"),
    ("docs/results.md", "swing"): partial(reported, "swing_report", "table"),
    ("docs/bench.md", "slices"): partial(reported, "slices", "table"),
    ("docs/policies.md", "policies"): partial(reported, "simulation_report", "policies_overall"),
    ("docs/policies.md", "policies in words"): partial(reported, "simulation_report", "policies_said"),
    ("docs/policies.md", "policies by world"): partial(reported, "simulation_report", "policies_by_world"),
    ("docs/policies.md", "policies bounds"): partial(reported, "simulation_report", "policies_bounds"),
    ("docs/policies.md", "splits"): partial(reported, "simulation_report", "splits"),
    ("docs/policies.md", "objectives"): partial(reported, "simulation_report", "objectives"),
    ("docs/drafter.md", "acceptance"): acceptance,
    ("docs/drafter.md", "confidence"): confidence,
    ("docs/drafter.md", "confidence offline"): confidence_offline,
    ("docs/drafter.md", "confidence saving"): confidence_saving,
    ("docs/bench.md", "clients"): clients,
    ("docs/pruning.md", "heads"): exit_heads,
    ("docs/overlap.md", "bounds"): partial(reported, "overlap_bounds", "documented"),
    ("docs/overlap.md", "evictions"): partial(reported, "overlap_report", "evictions"),
    ("docs/overlap.md", "drafting ahead"): partial(reported, "overlap_report", "drafting_ahead"),
    ("docs/overlap.md", "ping-pong"): partial(reported, "overlap_report", "ping_pong"),
    ("docs/overlap.md", "the pair's rates"): partial(reported, "overlap_report", "pair_rates"),
    ("docs/overlap.md", "the pair's ratios"): partial(reported, "overlap_report", "pair_ratios"),
    ("docs/overlap.md", "the gates"): partial(reported, "overlap_report", "gates"),
    ("docs/reliability.md", "soak"): partial(reported, "soak", "table"),
    **{
        ("docs/simulator.md", f"simulator {name}"): partial(reported, "fidelity_report", name.replace(" ", "_"))
        for name in ("calibration", "acceptance", "published", "closed loop", "ahead", "pruned")
    },
}
ADAPTER = {
    "back to back": (
        "| adapter on the engine thread, a core of its own, 1 / 8 / 64 / 256 requests, p50, median of the runs, "
        "back to back"
    ),
    "after a pause": "| the same after a pause of 1 ms, in which the core sleeps",
    "flushed": "| the same with flushed caches",
}
ROUND_TRIP = {
    ("own", 0.0): (
        "| decision round trip, 64 / 256 requests, p50, median of the runs, back to back, each process on its own core"
    ),
    ("own", 5.0): "| the same with a step every 5 ms",
    ("any", 0.0): "| back to back again, wherever the system puts the processes",
    ("any", 5.0): "| wherever it puts them, with a step every 5 ms",
}
LINES: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/bench.md", "One quick run on two shared cores,"): quick_run,
    ("README.md", "| the drafter's confidence on held-out prompts"): confidence_row,
    ("README.md", "| adapter's share of a step, in the demo"): share_row,
    ("docs/telemetry.md", "Size: about"): telemetry_size,
    ("README.md", "While the load swings from one request"): partial(reported, "swing_report", "sentence"),
    ("README.md", "| drafting ahead with an oracle"): partial(reported, "overlap_report", "drafting_ahead_row"),
}
# Bounds, settings and definitions: the beginnings of lines whose figures nobody measured.
SET: dict[str, tuple[str, ...]] = {
    "README.md": ("| default back after the sidecar is killed", "Where it falls short:"),
    "docs/bench.md": (
        "It needs the extra `train`", "- **95 % interval**", "- **Bar**", "- **disturbed**", "Ratios are those of",
        "round by round with its 95 % interval",
    ),
    "docs/drafter.md": ("- **Optimiser**", "tokenizer (its greedy answers must agree"),
    "docs/operations.md": ("| kill -9, a hang, a cut network", "prints what the other policy would have earned"),
    "docs/overlap.md": (
        "  [catching up](settings.md)", "  death up to 60 s", "  states travel in shared memory",
        "The drafter's tokens come from a recorded run",
    ),
    "docs/policies.md": (
        "- `goodput`: geometric mean", "Against the best rival of each point", "- **The bar of 30 % is out of reach",
        "Compared is what the best plan promises", "    faser sidecar --policy price:pace",
    ),
    "docs/pruning.md": (
        "accepted so far, and for each layer", "whichever of *in full*", "each to the same prompts, held to the same",
    ),
    "docs/reliability.md": (
        "| sidecar killed, stopped", "| hostile frames", "| a frame above the engine's limit",
        "`make chaos` runs storms",
    ),
    "docs/results.md": ("95 % intervals where there are two rounds",),
    "docs/scale.md": ("are measured. The third is **extrapolated**", "A pod of its own for every engine"),
    "docs/simulator.md": ("what was asked for) are one cell", "The bars are a median of 5 %"),
}  # fmt: skip
# Of benchmarks/measured.py: tied once its file is there.
MEASURED: dict[tuple[str, str], Callable[[], str]] = {
    **{("README.md", line): partial(adapter_row, caches, line) for caches, line in ADAPTER.items()},
    ("README.md", "| policy alone, 64 / 256 requests"): decide_row,
    ("README.md", "| telemetry store"): store_row,
    ("README.md", "| engines on one sidecar core"): fleet_row,
    ("docs/operations.md", "cores that sleep. One core answered"): engines_to_a_core,
    **{("README.md", line): partial(round_trip_row, *way, line) for way, line in ROUND_TRIP.items()},
}


def written(page: str, text: str) -> str:
    """Return a page with its figures as the files have them."""
    for (where, name), make in BLOCKS.items():
        if where == page:
            begin = f"<!-- figures: {name} -->\n"
            head, _, rest = text.partition(begin)
            _, end, tail = rest.partition(END)
            if not end:
                raise SystemExit(f"{page}: no block {begin.strip()} ... {END}; put the two lines back")
            text = f"{head}{begin}\n{make()}\n\n{END}{tail}"
    lines = LINES | (MEASURED if (RESULTS / "measured.json").exists() else {})
    for (where, beginning), make in lines.items():
        if where == page:
            found = [line for line in text.splitlines() if line.startswith(beginning)]
            if len(found) != 1:
                raise SystemExit(f"{page}: {len(found)} lines begin with {beginning!r}; expected one")
            text = text.replace(found[0], make())
    return text


def pages() -> list[str]:
    """Return the pages with ties."""
    return sorted({page for page, _ in (*BLOCKS, *LINES, *MEASURED)})


def untied(pages: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield lines that have figures, are not written from a file, and were not set but measured.

    :param pages: text by path; None: README and docs as they are
    """
    ties = LINES | (MEASURED if (RESULTS / "measured.json").exists() else {})
    paths = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for page, text in (pages or {str(path.relative_to(ROOT)): path.read_text() for path in paths}).items():
        own = [beginning for where, beginning in ties if where == page] + list(SET.get(page, ()))
        is_tied = page == DIARY
        for number, line in enumerate(text.splitlines(), start=1):
            if page != DIARY:
                is_tied = bool(BEGIN.match(line)) or (is_tied and not CLOSE.match(line))
            if not is_tied and not line.startswith(tuple(own)) and FIGURE.search(line):
                yield f"{page}:{number}: {line[:150]}"


def main() -> int:
    """Write, check or list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a figure is not its file's")
    parser.add_argument("--untied", action="store_true", help="list lines with figures that no file stands behind")
    options = parser.parse_args()
    if options.untied:
        sys.stdout.writelines(f"{line}\n" for line in untied())
        return 0
    stale = []
    for page in pages():
        path = ROOT / page
        text = path.read_text()
        if (new := written(page, text)) != text:
            stale.append(page)
            if not options.check:
                path.write_text(new)
    if stale and options.check:
        sys.stderr.write(f"figures that are not their files': {', '.join(stale)}; run: python docs/figures.py\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
