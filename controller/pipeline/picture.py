"""The picture of `faser evaluate --pipeline`: latency over GPUs, a panel for each load, as SVG text."""

from __future__ import annotations

import io
import math
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from ...env.pipeline.constants import STAGES

SHADES = ("#b7c3cf", "#8ea3b8", "#5f7f9f", "#31577f")  # fixed sets, by stages
MARKS = {
    "flexpipe": ("s", "#c0392b"),
    "weigh": ("o", "#1e8449"),
    "weigh:1.5": ("D", "#52be80"),
    "learned": ("P", "#8e44ad"),
    "hindsight": ("*", "#111111"),
}
OTHERS = ("v", "#d68910")


def draw(result: dict[str, Any]) -> str:
    """Return the picture: fixed sets as lines, one for each number of stages, policies as marks."""
    loads = list(result["loads"])
    columns = min(3, len(loads))
    rows = math.ceil(len(loads) / columns)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "faser", "font.size": 8}):
        canvas = Figure(figsize=(3.1 * columns, 2.4 * rows + 0.4), layout="constrained")
        FigureCanvasSVG(canvas)
        panels = canvas.subplots(rows, columns, squeeze=False)
        for axes in panels.flat[len(loads) :]:
            axes.set_visible(False)
        for axes, load in zip(panels.flat, loads, strict=False):
            _panel(axes, load, result)
        handles, labels = panels.flat[0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=7)
        text = io.StringIO()
        canvas.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _panel(axes: Axes, load: str, result: dict[str, Any]) -> None:
    fixed = result["fixed_sets"][load]
    for stages, shade in zip(STAGES, SHADES, strict=True):
        sets = sorted((row["gpus"], row["mean_s"]) for name, row in fixed.items() if name.split(":")[1] == str(stages))
        axes.plot(*zip(*sets, strict=True), color=shade, marker=".", linewidth=1, label=f"{stages} stages, fixed")
    for policy, row in result["loads"][load].items():
        if policy.startswith("static:"):
            continue
        mark, colour = MARKS.get(policy, OTHERS)
        label = "reactive:4 to 32" if policy == "reactive:4" else "_" if policy.startswith("reactive:") else policy
        axes.plot(row["gpus"]["mean"], row["mean_s"]["mean"], mark, color=colour, markersize=6, label=label)
    axes.set_title(load, loc="left", fontsize=9)
    axes.set_xlabel("GPUs held, mean")
    axes.set_ylabel("mean latency (s)")
    axes.set_yscale("log")
