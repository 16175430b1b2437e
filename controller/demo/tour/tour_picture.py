"""The picture of a tour: for each station some steps as a timeline, and beside it what the mechanism did step by step.

Called by controller/demo/tour/tour.py. Uses matplotlib without its global state. Of a step only its end and the length
of its phases are recorded: their order within it is the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ....engine_adapter.arrays import Bools, Floats
from .station_steps import StationSteps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN_STEPS: Final = 10
_ROW_INCHES: Final = 1.35
_TARGET, _DRAFTER, _HIDDEN, _SPLIT = "#4d5a66", "#b9c3cc", "#2a7ab0", "#e9dcc9"


class Curves(NamedTuple):
    """What a step could have done or did in all, and the part that the mechanism is seen by; (n,) each."""

    label: str
    whole: Floats
    part: Floats


def curves_of(mechanisms: Sequence[str], steps: StationSteps) -> Curves:
    """Return what to draw of a station; several mechanisms together are seen by what was accepted."""
    longest = steps["limits"] + steps["shortened"]
    hidden = Curves("drafting, ms:\nall, hidden", 1e3 * steps["draft_s"], 1e3 * steps["overlap_s"])
    known: Mapping[str, Curves] = {
        "lengths": Curves("tokens: longest for\nall, own lengths", longest, steps["limits"]),
        "stops": Curves("tokens: allowed,\ndrafted", steps["limits"], steps["drafted"]),
        "copies": Curves("tokens: copied,\naccepted", steps["verified_copies"], steps["accepted_copies"]),
        "pruning": Curves("draft rows: all,\nleft early", steps["verified"], steps["pruned"]),
        "ahead": hidden, "groups": hidden, "splits": hidden,
    }  # fmt: skip
    drafts = Curves("draft tokens:\nverified, accepted", steps["verified"], steps["accepted"])
    return known.get(mechanisms[0], drafts) if len(mechanisms) == 1 else drafts


def shown_from(is_prompt: Bools, count: int = SHOWN_STEPS) -> int:
    """Return the first of some steps in the middle, none of which reads a prompt if that can be."""
    last = max(len(is_prompt) - count, 0)
    free = [at for at in range(last + 1) if not is_prompt[at : at + count].any()]
    return min(free or range(last + 1), key=lambda at: abs(at - last // 2))


def write_tour_picture(stations: Mapping[str, tuple[Sequence[str], StationSteps]], path: Path) -> None:
    """Draw stations with steps, by name with their mechanisms, as SVG."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Sheet

    sheet = Sheet(figsize=(12.0, _ROW_INCHES * max(len(stations), 1) + 0.8), layout="constrained")
    canvas = FigureCanvasSVG(sheet)
    grid = sheet.subplots(max(len(stations), 1), 2, squeeze=False, sharex="col")
    for (left, right), (name, (mechanisms, steps)) in zip(grid, stations.items(), strict=False):
        left.set_ylabel(name, rotation=0, ha="right", va="center", fontweight="bold")
        if len(steps):
            _draw_timeline(left, steps)
            _draw_curves(right, steps, curves_of(mechanisms, steps))
    grid[0][0].set_title(
        "some steps: target (dark), drafter in turn (light), hidden behind the target (blue); two groups shaded",
        fontsize=8,
    )
    grid[0][1].set_title("all steps: grey the first, black the second of what stands beside them", fontsize=8)
    grid[-1][0].set_xlabel("ms")
    grid[-1][1].set_xlabel("step")
    with rc_context({"svg.hashsalt": "tour"}):
        canvas.print_figure(path, metadata={"Date": None})


def _draw_timeline(axes: Axes, steps: StationSteps) -> None:
    begin = shown_from(steps["prefill_tokens"] > 0)
    shown = slice(begin, begin + SHOWN_STEPS)
    ended, took = 1e3 * steps["time_s"][shown], 1e3 * steps["step_s"][shown]
    began = ended - took
    at = began - began[0]
    for left, width, split in zip(at, took, steps["split"][shown], strict=True):
        axes.axvline(left, color="#d0d0d0", linewidth=0.6)
        if split:
            axes.axvspan(left, left + width, color=_SPLIT)
    busy = 1e3 * (steps["verify_s"] + steps["sample_s"])[shown]
    waited = 1e3 * steps["schedule_s"][shown]
    hidden = 1e3 * steps["overlap_s"][shown]
    alone = np.maximum(1e3 * steps["draft_s"][shown] - hidden, 0.0)
    axes.barh(np.ones(len(at)), busy, left=at + waited, height=0.7, color=_TARGET)
    axes.barh(np.zeros(len(at)), hidden, left=at, height=0.7, color=_HIDDEN)
    axes.barh(np.zeros(len(at)), alone, left=at + waited + busy, height=0.7, color=_DRAFTER)
    axes.set_yticks([0, 1], ["drafter", "target"], fontsize=7)
    axes.margins(x=0.0)


def _draw_curves(axes: Axes, steps: StationSteps, curves: Curves) -> None:
    number = np.arange(len(steps))
    for split in np.flatnonzero(steps["split"] > 0):
        axes.axvspan(split - 0.5, split + 0.5, color=_SPLIT, linewidth=0)
    axes.bar(number, curves.whole, 0.9, color="#b9c3cc")
    axes.bar(number, curves.part, 0.9, color="black")
    decoding = curves.whole[steps["prefill_tokens"] == 0]  # a prompt's step is out of proportion
    if len(decoding) and decoding.max() > 0.0:
        axes.set_ylim(0.0, 1.1 * float(np.percentile(decoding, 99)))
    axes.margins(x=0.0)
    axes.set_ylabel(curves.label, fontsize=7)
    axes.tick_params(labelsize=7)
