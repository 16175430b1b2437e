"""What people see of a benchmark: its tables and the picture.

Called by controller/bench/bench.py. Made from the results alone. Uses matplotlib without its global state.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.markdown import Markdown

from .markdown import markdown_table, page
from .ratio import OURS, Ratio, chained, paired_ratio, wider_interval
from .result import Results, Spans, name_of


def tables(results: Results) -> Markdown:
    """Return the tables of a run's page, and the latencies of every arm."""
    names = ("load", "prompts", "arm", "first token", "per token", "whole answer")
    rows = [
        (str(each.load), each.kinds, name_of(each.arm), *map(_spans, (each.ttft_ms, each.tpot_ms, each.e2e_ms)))
        for each in results.latencies
    ]
    latencies = f"\n\nLatency p50 / p90 / p99 in ms:\n\n{markdown_table(names, rows)}" if rows else ""
    return Markdown(page(results) + latencies)


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
