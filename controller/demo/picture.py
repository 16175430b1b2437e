"""The picture that a demo ends with: time per token by arrival, and who was in time, beside no speculation.

Called by controller/demo/demo.py. Uses matplotlib without its global state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from ..engine.load_summary import RequestResult
from .comparison import SideBySide

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS: Final = {"no speculation": "#7a8794", "FASER": "black"}


def write_picture(comparison: SideBySide, path: Path) -> None:
    """Draw the comparison as SVG."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Sheet

    ours, plain = comparison.attainment()
    sheet = Sheet(figsize=(9.0 if ours else 6.0, 3.2), layout="constrained")
    canvas = FigureCanvasSVG(sheet)
    axes = sheet.subplots(1, 2 if ours else 1, squeeze=False)[0]
    _draw_times(axes[0], {"no speculation": comparison.plain, "FASER": comparison.steered})
    if ours:
        _draw_shares(axes[1], {"no speculation": plain, "FASER": ours})
    with rc_context({"svg.hashsalt": "demo"}):
        canvas.print_figure(path, metadata={"Date": None})


def _draw_times(axes: Axes, sides: Mapping[str, Sequence[RequestResult]]) -> None:
    for name, results in sides.items():
        arrived_s = [each.due_s for each in results if each.tpot_ms is not None]
        times_ms = [each.tpot_ms for each in results if each.tpot_ms is not None]
        axes.plot(arrived_s, times_ms, "o", color=_COLORS[name], label=name)
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("arrival, s")
    axes.set_ylabel("ms per token")
    axes.legend(fontsize=8)


def _draw_shares(axes: Axes, sides: Mapping[str, Mapping[str, float]]) -> None:
    for at, (name, shares) in enumerate(sides.items()):
        axes.bar(np.arange(len(shares)) + 0.4 * at - 0.2, list(shares.values()), 0.36, color=_COLORS[name], label=name)
        axes.set_xticks(range(len(shares)), list(shares))
    axes.set_ylim(0.0, 1.03)
    axes.set_ylabel("share of requests in time")
