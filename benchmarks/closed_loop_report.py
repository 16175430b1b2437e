"""Table and picture of closed_loop.py's results.

    python benchmarks/closed_loop_report.py [--json benchmarks/results/closed_loop.json] [--docs docs]

Rewrites the table in docs/results.md between its markers, and docs/closed_loop.svg, from the JSON file alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from closed_loop_result import (
    RESULTS,
    Results,
    Settings,
    envelope_at,
    mean_length,
    over_none,
    read_results,
    scatter_at,
)

from faser.controller.bench_ratio import LEAST_LOW, LEAST_RATIO, OURS, WANTED_HALF_WIDTH, Floats, paired_ratio
from faser.controller.bench_result import name_of
from faser.controller.bench_table import described

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- closed loop: begin -->", "<!-- closed loop: end -->"
HEADING = "# Results\n"


def table_rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return the table's heading and its rows, one per load."""
    arms, has_ratio = results.arms(), OURS in results.arms()
    heading = ["requests", *(name_of(arm) for arm in arms)]
    if has_ratio:
        pairs = "starts" if len(results.starts()) > 1 else "pairs"
        heading += ["FASER's length", "over none", "over the best rival", "rival", pairs, "bar"]
    return heading, [_row(results, load, arms, has_ratio) for load in results.loads()]


def _row(results: Results, load: int, arms: Sequence[str], has_ratio: bool) -> list[str]:
    rates = results.rates(load)
    row = [str(load), *(_spread(rates[arm]) for arm in arms)]
    if not has_ratio:
        return row
    best = envelope_at(results, load)
    rivals = " / ".join(dict.fromkeys(name_of(arm) for arm in best.rivals))
    verdict = "met" if best.ratio.meets_envelope() else "missed" if best.ratio.is_sharp() else "open"
    over = str(over_none(results, load)) if "none" in arms else ""
    pairs = f"{best.ratio.pairs}{' *' if best.is_disturbed else ''}"
    return [*row, f"{mean_length(results, load):.2f}", over, str(best.ratio), rivals, pairs, verdict]


def _spread(rates: Floats) -> str:
    rates = rates[~np.isnan(rates)]
    if not len(rates):
        return ""
    return f"{np.median(rates):.0f} ({rates.min():.0f} to {rates.max():.0f})"


def markdown(results: Results) -> str:
    """Return the section for docs/results.md."""
    heading, rows = table_rows(results)
    lines = [f"| {' | '.join(cells)} |" for cells in (heading, ["--:"] * len(heading), *rows)]
    return "\n".join([BEGIN, "## Closed loop", "", *_conditions(results), "", *lines, "", *_legend(results), END, ""])


def _conditions(results: Results) -> list[str]:
    machine, settings = results.machine, results.settings
    low_s, high_s = np.percentile([turn.seconds / turn.slices for turn in results.turns], [5, 95])
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    return [
        f"{settings.target} on {machine.name}, {machine.cores} cores, {settings.threads} of them for the engine's",
        f"threads; {versions};",
        f"commit {', '.join(results.commits)}; drafter sha256 {settings.drafter_sha256[:12]}.",
        f"Each of N clients sends its next held-out prompt when its {settings.max_tokens}-token answer is done;",
        "the first answers are staggered. Greedy, the five kinds of prompts in turn, the same stream for every arm;",
        f"all are held to the same {settings.answers} answers, recorded before, lest the easier text win.",
        "Every arm is a vLLM engine in a process of its own, FASER's with its sidecar beside it; they take turns in",
        f"slices of {low_s:.1f} to {high_s:.1f} s, each serving as many tokens as the others; those that wait use no",
        "time, and FASER's lease outlives their wait." + _pinned(settings),
        f"Policy: {settings.policy}, longest draft {settings.k_max}." + _table(results),
        "",
        "![tokens/s relative to no speculation](closed_loop.svg)",
    ]


def _pinned(settings: Settings) -> str:
    core = "" if settings.core is None else f" Every engine's thread stays on core {settings.core}."
    return core + (" Their memory is in huge pages." if settings.has_huge_pages else "")


def _table(results: Results) -> str:
    return f" The best table: {described(results.table)}." if "table" in results.arms() else ""


def _legend(results: Results) -> list[str]:
    disturbed = sum(turn.is_disturbed for turn in results.turns)
    return [
        "Tokens/s: median (lowest to highest) over rounds. *FASER's length*: draft tokens verified per request and",
        "step. Ratios: of rounds in which all arms read as many prompt tokens (a regression's slope takes out the time",
        "of prompts beyond the round's average; over a load all arms read the same). " + _intervals(results),
        f"*Bar*: ratio at least {LEAST_RATIO}, lower end at least {LEAST_LOW}, half-width at most "
        f"{WANTED_HALF_WIDTH:.0%}; *open*: the interval is still wider.",
        f"{len(results.turns)} rounds of an arm, {disturbed} of them disturbed by other work or stolen time and left",
        "out; * marks loads that use such rounds.",
        "Reproduce: `python benchmarks/closed_loop.py --docs docs`.",
        "",
    ]


def _intervals(results: Results) -> str:
    count = len(results.starts())
    pair, place = ("rounds", "round") if count < 2 else ("starts", "start")
    told = "Geometric mean over paired rounds with its 95 % interval."
    if count > 1:
        told = (
            f"All engines were started anew {count} times.{_scatter(results)}\n"
            f"Geometric means over a start's rounds, and over starts with their 95 % interval.{_slices_had(results)}"
        )
    return (
        f"{told}\nThe best rival is chosen on every other {place} and compared on the {pair} between, and the other\n"
        f"way round, among arms that were in half of the {pair} at least: after the first {pair} arms that fall\n"
        "behind are left out." + _cold_steps(results) + _steps_by_prompts(results)
    )


def _slices_had(results: Results) -> str:
    """Return how many steps slices had without speculation, where not all starts had the same."""
    found: dict[int, list[int]] = {}
    for number in results.starts():
        turns = [turn for turn in results.turns if (turn.start, turn.arm) == (number, "none")]
        if turns:
            steps = round(sum(turn.steps for turn in turns) / sum(turn.slices for turn in turns))
            found.setdefault(steps, []).append(number + 1)
    if len(found) < 2:
        return ""
    told = ", ".join(f"{steps} (starts {', '.join(map(str, starts))})" for steps, starts in found.items())
    return f"\nWithout speculation a slice had so many steps: {told}."


def _scatter(results: Results) -> str:
    """Return how far starts lie apart, and how far by what happens within them: is an engine as good as another?"""
    found = [found for load in results.loads() if (found := scatter_at(results, load)) is not None]
    if not found:
        return ""
    seen, expected = np.sqrt(np.mean(np.square(found), axis=0))
    return (
        f" Starts' ratios of FASER to no\nspeculation scatter by {seen:.1%} (root mean square over loads); by the "
        f"scatter of rounds within a start, were they independent, {expected:.1%} is to be expected."
    )


def _cold_steps(results: Results) -> str:
    """Return how much longer the first step of a slice is than the others, of steps without prompts."""
    told = []
    for load in results.loads():
        rival = envelope_at(results, load).rivals[0]
        ours, theirs = (_cold_s(results, load, arm) for arm in (OURS, rival))
        if ours is not None and theirs is not None:
            told.append(f"{ours * 1e3:+.1f} and {theirs * 1e3:+.1f} ms at {load} requests ({name_of(rival)})")
    if not told:
        return ""
    return (
        "\nOf steps without prompts the first of a slice is so much longer than the others, of FASER and of the best "
        f"rival: {', '.join(told)}."
    )


def _cold_s(results: Results, load: int, arm: str) -> float | None:
    """Return by how many seconds an arm's first plain step of a slice is longer than its others; None: not told."""
    turns = [turn for turn in results.turns if (turn.load, turn.arm) == (load, arm) and turn.plain_firsts]
    firsts = sum(turn.plain_firsts for turn in turns)
    others = sum(turn.steps - turn.prompt_steps for turn in turns) - firsts
    if not firsts or not others:
        return None
    firsts_s = sum(turn.plain_firsts_s for turn in turns)
    others_s = sum(turn.seconds - turn.prompt_steps_s for turn in turns) - firsts_s
    return firsts_s / firsts - others_s / others


def _steps_by_prompts(results: Results) -> str:
    """Return how much longer FASER's steps are, with and without prompts."""
    told = []
    for load, ours, theirs in _alike(results):
        if all(0 < each.prompt_steps < each.steps for each in (ours, theirs)):
            plain, prompts = ours.plain_step_s / theirs.plain_step_s, ours.prompt_step_s / theirs.prompt_step_s
            told.append(f"{plain - 1.0:+.1%} and {prompts - 1.0:+.1%} at {load} requests")
    if not told:
        return ""
    return (
        "\nWhere FASER and no speculation both emit a token a step, a step of FASER's takes so much longer without "
        f"prompts and with them: {', '.join(told)}."
    )


def _alike(results: Results) -> Iterator[tuple[int, Slices, Slices]]:
    """Yield the loads at which FASER and no speculation emit a token a step, and the slices of both.

    Elsewhere prompts fall upon other places of a slice, and would be most of any difference.
    """
    for load in results.loads():
        ours, theirs = (_slices(results, load, arm) for arm in (OURS, "none"))
        if ours and theirs and abs(ours.steps - theirs.steps) < 0.02 * theirs.steps:
            yield load, ours, theirs


class Slices(NamedTuple):
    """An arm's slices at a load, on average."""

    steps: float
    seconds: float
    prompt_steps: float
    prompt_steps_s: float

    @property
    def prompt_step_s(self) -> float:
        """A step that ends the reading of a prompt."""
        return self.prompt_steps_s / self.prompt_steps

    @property
    def plain_step_s(self) -> float:
        """Any other step."""
        return (self.seconds - self.prompt_steps_s) / (self.steps - self.prompt_steps)


def _slices(results: Results, load: int, arm: str) -> Slices | None:
    """Return them; None where the arm had none."""
    turns = [turn for turn in results.turns if (turn.load, turn.arm) == (load, arm)]
    if not turns:
        return None
    count = sum(turn.slices for turn in turns)
    names = ("steps", "seconds", "prompt_steps", "prompt_steps_s")
    totals = (sum(getattr(turn, name) for turn in turns) for name in names)
    return Slices(*(total / count for total in totals))


def write_markdown(results: Results, path: Path) -> None:
    """Put the section between its markers in the file, or at its end."""
    text = path.read_text() if path.exists() else HEADING
    if BEGIN in text and END in text:
        before, after = text.split(BEGIN)[0], text.split(END)[1].removeprefix("\n")
    else:
        before, after = text.rstrip("\n") + "\n\n", ""
    path.write_text(before + markdown(results) + after)


def write_picture(results: Results, path: Path) -> None:
    """Draw each arm's tokens/s over the load, relative to no speculation (else to the first arm)."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    loads, arms = results.loads(), results.arms()
    base = "none" if "none" in arms else arms[0]
    figure = Figure(figsize=(7.0, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for arm in arms:
        ratios = [paired_ratio(np.log(rates[arm]) - np.log(rates[base])) for rates in map(results.rates, loads)]
        values = np.array([ratio.value for ratio in ratios])
        reach = np.array([[r.value - r.low for r in ratios], [r.high - r.value for r in ratios]])
        style = {"color": "black", "linewidth": 2.2, "zorder": 5} if arm == OURS else {"linewidth": 1.2}
        axes.errorbar(
            loads, values, np.nan_to_num(reach), marker="o", markersize=3.5, capsize=2, label=name_of(arm), **style
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) for load in loads])
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel(f"tokens/s over {name_of(base)}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    with rc_context({"svg.hashsalt": "closed_loop"}):
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})


def write_documents(results: Results, docs: Path) -> None:
    """Write table and picture."""
    docs.mkdir(parents=True, exist_ok=True)
    write_markdown(results, docs / "results.md")
    write_picture(results, docs / "closed_loop.svg")


def main() -> None:
    """Write the documents anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    if not options.json.exists():
        print(f"closed_loop_report: no results at {options.json}; run benchmarks/closed_loop.py first")
        return
    write_documents(read_results(options.json), options.docs)
    print(f"closed_loop_report: wrote {options.docs / 'results.md'} and closed_loop.svg")


if __name__ == "__main__":
    main()
