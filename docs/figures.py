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
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # whose reports make tables

import page_lines  # noqa: E402 - the folder must be on the path first

RESULTS = ROOT / "benchmarks" / "results"
END = "<!-- end of figures -->"
DIARY = "docs/decisions.md"
BEGIN, CLOSE = re.compile(r"<!-- (figures: .*|.*: begin) -->"), re.compile(r"<!-- (end of figures|.*: end) -->")
FIGURE = re.compile(
    r"\d(?: ?%| (?:us|ms|s|GiB|MiB|KiB)\b|(?: tokens| steps)/s)|\d\.\d+ ± |\(\d\.\d+ to \d\.\d+\)|\d\.\d{3}\b"
)


def reported(script: str, table: str) -> str:
    """Return a table of a report in benchmarks/."""
    return str(getattr(import_module(script), table)())


BLOCKS: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "demo"): partial(reported, "readme", "demo"),
    ("README.md", "tests"): partial(reported, "readme", "tests"),
    ("README.md", "closed loop"): page_lines.closed_loop,
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
    ("docs/policies.md", "policies changing"): partial(reported, "simulation_report", "policies_changing"),
    ("docs/policies.md", "policies bounds"): partial(reported, "simulation_report", "policies_bounds"),
    ("docs/policies.md", "splits"): partial(reported, "simulation_report", "splits"),
    ("docs/policies.md", "frontiers"): partial(reported, "simulation_report", "frontiers"),
    ("docs/policies.md", "objectives"): partial(reported, "simulation_report", "objectives"),
    ("docs/drafter.md", "acceptance"): page_lines.acceptance,
    ("docs/drafter.md", "confidence"): page_lines.confidence,
    ("docs/drafter.md", "confidence offline"): page_lines.confidence_offline,
    ("docs/drafter.md", "confidence saving"): page_lines.confidence_saving,
    ("docs/bench.md", "clients"): page_lines.clients,
    ("docs/pruning.md", "heads"): page_lines.exit_heads,
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
    ("docs/bench.md", "One quick run on two shared cores,"): page_lines.quick_run,
    ("README.md", "| the drafter's confidence on held-out prompts"): page_lines.confidence_row,
    ("README.md", "| adapter's share of a step, in the demo"): page_lines.share_row,
    ("docs/telemetry.md", "Size: about"): page_lines.telemetry_size,
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
    **{("README.md", line): partial(page_lines.adapter_row, caches, line) for caches, line in ADAPTER.items()},
    ("README.md", "| policy alone, 64 / 256 requests"): page_lines.decide_row,
    ("README.md", "| telemetry store"): page_lines.store_row,
    ("README.md", "| engines on one sidecar core"): page_lines.fleet_row,
    ("docs/operations.md", "cores that sleep. One core answered"): page_lines.engines_to_a_core,
    **{("README.md", line): partial(page_lines.round_trip_row, *way, line) for way, line in ROUND_TRIP.items()},
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
