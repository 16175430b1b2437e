"""The picture of `faser policy show`: lengths by load, and speed beside no speculation, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from ...models.evaluation.portrait import Stroke


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
