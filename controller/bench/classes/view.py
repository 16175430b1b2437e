"""The picture of a benchmark with classes: who is in time by class, and goodput against load.

Called by controller/bench/classes/bench.py. Made from the results alone. Uses matplotlib without its global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..ratio import OURS
from ..result import name_of
from .result import KEPT, ClassResults, Figure, PointFigures, figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GREY: Final = "#7a8794"


def write_class_picture(results: ClassResults, path: Path) -> None:
    """Draw every closed load point by arm, and all replays' goodput against their rates; SVG or PNG by suffix."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Sheet

    found = figures(results)
    closed = [point for point in found if point.peak_rps is None]
    replays = [point for point in found if point.peak_rps is not None]
    panels = 2 * len(closed) + bool(replays)
    sheet = Sheet(figsize=(5.2 * panels, 4.0), layout="constrained")
    canvas = FigureCanvasSVG(sheet) if path.suffix == ".svg" else FigureCanvasAgg(sheet)
    axes = sheet.subplots(1, panels, squeeze=False)[0]
    for at, point in enumerate(closed):
        _draw_shares(axes[2 * at], point, [each.name for each in results.classes])
        _draw_goodput(axes[2 * at + 1], point)
    if replays:
        _draw_load(axes[-1], replays)
    with rc_context({"svg.hashsalt": "bench"}):
        if path.suffix == ".svg":
            canvas.print_figure(path, metadata={"Date": None})
        else:
            canvas.print_figure(path, dpi=150)


def _draw_shares(axes: Axes, point: PointFigures, classes: Sequence[str]) -> None:
    place = np.arange(len(point.arms), dtype=np.float64)
    for at, name in enumerate(classes):
        shift = 0.3 * (at + 0.5) / len(classes) - 0.15
        _draw(axes, place + shift, [arm.attainment[name] for arm in point.arms], fmt="o", label=name)
    axes.axhline(KEPT, color=_GREY, linewidth=0.8)
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel("share of requests in time")
    axes.legend(fontsize=8)
    _name_arms(axes, point)


def _draw_goodput(axes: Axes, point: PointFigures) -> None:
    place = np.arange(len(point.arms), dtype=np.float64)
    _draw(axes, place, [arm.goodput for arm in point.arms], fmt="o", color="black", label="goodput")
    _draw(axes, place + 0.15, [arm.tokens_per_s for arm in point.arms], fmt="s", color=_GREY, label="all tokens")
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("tokens/s")
    axes.legend(fontsize=8)
    _name_arms(axes, point)


def _draw_load(axes: Axes, points: Sequence[PointFigures]) -> None:
    """Draw a line for each arm, over the rates of all replays; replays of several traces lie on one axis."""
    arms = dict.fromkeys(arm.arm for point in points for arm in point.arms)
    for name in arms:
        own = [(point.peak_rps, arm.goodput) for point in points for arm in point.arms if arm.arm == name]
        style: dict[str, Any] = (
            {"color": "black", "linewidth": 2.2, "zorder": 5} if name == OURS else {"linewidth": 1.1}
        )
        rates = np.array([rate for rate, _ in own], np.float64)
        _draw(axes, rates, [figure for _, figure in own], fmt="o-", label=name_of(name), **style)
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("peak rate, requests/s")
    axes.set_ylabel("tokens/s of answers in time")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)


def _draw(axes: Axes, place: Any, shown: Sequence[Figure], **style: Any) -> None:
    """Draw figures with their intervals; what is not known is left out."""
    values = np.array([np.nan if each.value is None else each.value for each in shown])
    low = np.array([value if each.low is None else each.low for value, each in zip(values, shown, strict=True)])
    high = np.array([value if each.high is None else each.high for value, each in zip(values, shown, strict=True)])
    reach = np.nan_to_num(np.array([values - low, high - values])).clip(0.0)
    axes.errorbar(place, values, reach, capsize=2, markersize=4, **style)


def _name_arms(axes: Axes, point: PointFigures) -> None:
    axes.set_xticks(range(len(point.arms)), [name_of(arm.arm) for arm in point.arms], rotation=60, ha="right")
    axes.set_title(point.load, fontsize=9)
    axes.grid(alpha=0.3)
