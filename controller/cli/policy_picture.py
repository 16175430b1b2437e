"""The picture of `faser policy show`: lengths by load, and speed beside no speculation, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from ...models.evaluation.portrait import Stroke
from ...models.evaluation.slack_portrait import EDGES, SlackStroke


def draw(spec: str, world: str, strokes: Sequence[Stroke]) -> str:
    """Return the picture: a column per load, shares of lengths as shades above, speed below."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "faser", "font.size": 9}):
        canvas = Figure(figsize=(7.0, 4.6), layout="constrained")
        FigureCanvasSVG(canvas)
        above, below = canvas.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        shares = np.array([stroke.shares for stroke in strokes]).T
        mesh = above.pcolormesh(
            np.arange(len(strokes) + 1) - 0.5, np.arange(len(shares) + 1) - 0.5, shares, vmin=0, vmax=1, cmap="YlGnBu"
        )
        above.plot([stroke.mean_length for stroke in strokes], color="#c0392b", marker="o", markersize=3)
        above.set_ylabel("draft length (tokens)")
        above.set_title(f"{spec} in {world}", loc="left", fontsize=10)
        canvas.colorbar(mesh, ax=above, label="share of requests' steps")
        ratios = np.array([(stroke.ratio, *stroke.ratio_ci) for stroke in strokes]).T
        spread = np.abs(ratios[1:] - ratios[0])
        below.errorbar(range(len(strokes)), ratios[0], spread, color="#1f5fa8", marker="o", markersize=3, capsize=2)
        below.axhline(1.0, color="#7a8794", linewidth=0.8)
        below.set_ylabel("tokens/s,\noff = 1")
        below.set_xticks(range(len(strokes)), [str(stroke.requests) for stroke in strokes])
        below.set_xlabel("running requests")
        text = io.StringIO()
        canvas.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def draw_slack(spec: str, world: str, strokes: Sequence[SlackStroke]) -> str:
    """Return the picture: what a token is worth by slack, a line for each load; lengths by load and slack below."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "faser", "font.size": 9}):
        canvas = Figure(figsize=(7.0, 5.0), layout="constrained")
        FigureCanvasSVG(canvas)
        above, below = canvas.subplots(2, 1, sharex=True)
        at = np.arange(len(EDGES) + 1)
        for number, stroke in enumerate(strokes):
            values = [np.nan if value is None else value for value in stroke.values]
            shade = 0.75 * (1.0 - (number + 1) / len(strokes))
            above.plot(at, values, marker="o", markersize=3, color=str(shade), label=f"{stroke.requests} requests")
        above.set_yscale("log")
        above.set_ylabel("an urgent token is worth")
        above.set_title(f"{spec} in {world}, by slack", loc="left", fontsize=10)
        above.legend(fontsize=8)
        lengths = np.array([[np.nan if each is None else each for each in stroke.lengths] for stroke in strokes])
        mesh = below.pcolormesh(np.arange(len(at) + 1) - 0.5, np.arange(len(strokes) + 1) - 0.5, lengths, cmap="YlGnBu")
        canvas.colorbar(mesh, ax=below, label="draft length (tokens)")
        below.set_yticks(range(len(strokes)), [str(stroke.requests) for stroke in strokes])
        below.set_ylabel("running requests")
        below.set_xticks(np.arange(len(EDGES)) + 0.5, [f"{edge:+.0f}" for edge in EDGES])
        below.set_xlabel("tokens ahead (+) of the objective, or behind")
        text = io.StringIO()
        canvas.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
