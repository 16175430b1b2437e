"""What people see of a benchmark: the envelope table, latencies and costs, and the picture.

Called by controller/bench/bench.py. Made from the results alone. Uses matplotlib without its global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Group
from rich.table import Table

from .best_table import described
from .ratio import OURS, Ratio, chained, paired_ratio, wider_interval
from .result import MAIN, Point, Results, Spans, cost_of, name_of, points


def envelope_table(results: Results) -> Group:
    """Return the tables: the envelope first, then latencies and costs by arm."""
    arms = [arm for arm in results.arms() if arm != OURS]
    table = Table(title="FASER against the best rival, tokens/s (traces: goodput)")
    for heading in (
        "load",
        "prompts",
        *map(name_of, arms),
        "FASER",
        "ratio",
        "95 % interval",
        "best rival",
        "starts" if any(point.starts > 1 for point in points(results)) else "pairs",
        "",
    ):
        table.add_column(heading, justify="right")
    for point in points(results):
        table.add_row(*_row(point, arms))
    lines = [f"best table: {described(results.table)}"] if results.table else []
    lines += [f"left out: {name_of(arm)}: {reason}" for arm, reason in results.failed.items()]
    if any(turn.disturbed for turn in results.turns):
        lines.append("* uses rounds that other load disturbed: too few were quiet")
    return Group(table, _cost_table(results), *lines)


def _row(point: Point, arms: Sequence[str]) -> list[str]:
    low, high = point.ci
    span = f"{low:.3f} to {high:.3f}" if low is not None and high is not None else ""
    ratio = "" if point.envelope_ratio is None else f"{point.envelope_ratio:.3f}"
    mark = " *" if point.uses_disturbed else ""
    rates = [f"{point.rivals[arm]:.1f}" if arm in point.rivals else "" for arm in arms]
    best = " / ".join(map(name_of, point.best_rival))
    faser = "" if point.faser is None else f"{point.faser:.1f}"
    return [str(point.load), point.kinds, *rates, faser, ratio, span, best, f"{point.pairs}{mark}", point.verdict]


def _cost_table(results: Results) -> Table:
    table = Table(title="latency p50 / p90 / p99 in ms, drafts and CPU time")
    headings = ("load", "prompts", "arm", "first token", "per token", "whole answer", "length", "accepted", "waste")
    for heading in (*headings, "CPU ms/token", "spread"):
        table.add_column(heading, justify="right")
    lives = {(each.load, each.kinds, each.arm): each for each in results.latencies}
    for load, kinds in results.load_points():
        for arm in results.arms(MAIN):
            if not (turns := [turn for turn in results.turns_at(load, kinds) if turn.arm == arm]):
                continue
            cost, life = cost_of(turns), lives.get((load, kinds, arm))
            spans = [_spans(each) for each in (life.ttft_ms, life.tpot_ms, life.e2e_ms)] if life else [""] * 3
            costs = (cost.draft_length, cost.acceptance_rate, cost.draft_waste)
            rates = [turn.rate for turn in turns]
            table.add_row(
                str(load), kinds, name_of(arm), *spans, *("" if each is None else f"{each:.2f}" for each in costs),
                "" if cost.cpu_ms_per_token is None else f"{cost.cpu_ms_per_token:.1f}",
                f"{min(rates):.0f} to {max(rates):.0f}",
            )  # fmt: skip
    return table


def _spans(spans: Spans) -> str:
    return " / ".join("" if value is None else f"{value:.0f}" for value in (spans.p50, spans.p90, spans.p99))


def write_picture(results: Results, path: Path) -> None:
    """Draw each arm as a ratio to no speculation (else to the first arm) at every load point; SVG or PNG by suffix."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    keys, arms = results.load_points(), results.arms()
    base = "none" if "none" in arms else arms[0]
    figure = Figure(figsize=(max(5.0, 2.0 + 0.9 * len(keys)), 3.6), layout="constrained")
    canvas = FigureCanvasSVG(figure) if path.suffix == ".svg" else FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    place = np.arange(len(keys), dtype=np.float64)
    for at, arm in enumerate(arms):
        ratios = [_over(results, load, kinds, arm, base) for load, kinds in keys]
        values = np.array([ratio.value for ratio in ratios])
        reach = np.array([[r.value - r.low for r in ratios], [r.high - r.value for r in ratios]])
        style = {"color": "black", "zorder": 5, "markersize": 6} if arm == OURS else {"markersize": 4}
        shift = 0.5 * (at + 0.5) / len(arms) - 0.25
        axes.errorbar(
            place + shift, values, np.nan_to_num(reach), fmt="o", capsize=2, linewidth=1.2, label=name_of(arm), **style
        )
    axes.axhline(1.0, color="#7a8794", linewidth=0.8)
    axes.set_xticks(place, [f"{load}" if kinds == "all" else f"{load}\n{kinds}" for load, kinds in keys])
    axes.set_xlabel("concurrent requests, or trace")
    axes.set_ylabel(f"tokens/s over {name_of(base)}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    with rc_context({"svg.hashsalt": "bench"}):
        if path.suffix == ".svg":
            canvas.print_figure(path, metadata={"Date": None})
        else:
            canvas.print_figure(path, dpi=150)


def _over(results: Results, load: int | str, kinds: str, arm: str, base: str) -> Ratio:
    rates = results.compared(load, kinds)
    if arm not in rates or base not in rates:
        return paired_ratio(np.array([]))
    logs = {name: np.log(rate) for name, rate in rates.items()}
    direct = paired_ratio(logs[arm] - logs[base], wider_interval)
    if direct.pairs or OURS not in logs:
        return direct
    # Not all servers fit into memory at once: groups that never met have met FASER.
    over = paired_ratio(logs[arm] - logs[OURS], wider_interval)
    return chained(over, paired_ratio(logs[OURS] - logs[base], wider_interval))
