"""The tables of a whole run of `faser bench` in docs/results.md, made from its file alone.

The run: `faser bench --out benchmarks/results/bench_full.json`, or in parts with `--resume`. Which servers met in which
rounds depends on memory; a row compares FASER with each arm in the rounds that both were in.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from bench_trace import ratio
from pruning_report import markdown

from faser.controller.bench_plan import is_rival
from faser.controller.bench_ratio import OURS
from faser.controller.bench_result import Point, Results, cost_of, name_of, points, read_results
from faser.controller.bench_table import described

RESULT: Final = Path(__file__).resolve().parent / "results" / "bench_full.json"


def table() -> str:
    """Return FASER over every rival at every load, and over the best of them."""
    results = read_results(RESULT)
    arms = [arm for arm in results.arms() if is_rival(arm)]
    names = ("requests", *map(name_of, arms), "over the best", "which", "pairs", "bar")
    rows = []
    for point in (point for point in points(results) if isinstance(point.load, int)):
        rates = results.rates(point.load, point.kinds, is_clean=not point.uses_disturbed)
        cells = [ratio(rates[OURS], rates[arm]) if arm in rates else "" for arm in arms]
        rows.append((str(point.load), *cells, *_best(point)))
    return "\n".join([*_said(results), "", *markdown(names, rows)])


def _best(point: Point) -> tuple[str, str, str, str]:
    low, high = point.ci
    known = point.envelope_ratio is not None and low is not None
    found = f"{point.envelope_ratio:.3f} ({low:.3f} to {high:.3f})" if known else ""
    return found, " / ".join(map(name_of, point.best_rival)), f"{point.pairs}", point.verdict


def _said(results: Results) -> list[str]:
    turns = [turn for turn in results.turns if turn.phase == "main"]
    disturbed = sum(bool(turn.disturbed) for turn in turns)
    lines = [
        f"{results.machine.name}, {results.machine.cores} cores, {results.settings.threads} of them for an engine's "
        f"threads; commit {results.commit}; {len(turns)} turns, {disturbed} of them disturbed by other work; "
        f"{results.wall_s / 60:.0f} minutes. The best table: {described(results.table)}."
    ]
    lines += [f"Left out: {name_of(arm)}: {reason}." for arm, reason in results.failed.items()]
    return lines


def costs() -> str:
    """Return, for each load and arm, drafts, waste and CPU time."""
    results = read_results(RESULT)
    names = ("requests", "arm", "tokens/s, median", "draft tokens verified", "accepted", "waste", "CPU ms/token")
    rows = []
    for point in (point for point in points(results) if isinstance(point.load, int)):
        for arm in results.arms():
            own = [turn for turn in results.turns_at(point.load, point.kinds) if turn.arm == arm]
            if not own:
                continue
            cost = cost_of(own)
            rate = point.faser if arm == OURS else point.rivals.get(arm)
            figures = (cost.draft_length, cost.acceptance_rate, cost.draft_waste)
            rows.append(
                (
                    str(point.load), name_of(arm), "" if rate is None else f"{rate:.1f}",
                    *("" if value is None else f"{value:.2f}" for value in figures),
                    "" if cost.cpu_ms_per_token is None else f"{cost.cpu_ms_per_token:.1f}",
                )
            )  # fmt: skip
    return "\n".join(markdown(names, rows))


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n\n{costs()}\n")
