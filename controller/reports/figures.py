"""The pictures of a report: load, draft lengths and acceptance over time, as SVG text.

Called by controller/reports/run_report.py. Uses matplotlib without its global state, so that threads and tests do not
meet.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as Canvas

from ...engine_adapter.arrays import Floats, Ints
from ..telemetry.tables import DraftedLengths, StepTable

_SIZE_INCHES: Final = (9.0, 2.8)
_BINS: Final = 60
_MIN_BIN_S: Final = 0.5
_POINTS: Final = 2000  # of a line; more only make the page heavier


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture with what it shows."""

    heading: str
    caption: str
    svg: str


@dataclass(frozen=True, slots=True)
class _Timeline:
    """Bins over the time of a file; `time_s` (n,) is each step's end, `of_step` (n,) its bin."""

    edges_s: Floats
    time_s: Floats
    of_step: Ints

    @property
    def count(self) -> int:
        return len(self.edges_s) - 1

    @property
    def middle_s(self) -> Floats:
        middle_s: Floats = (self.edges_s[1:] + self.edges_s[:-1]) / 2
        return middle_s

    def sums(self, values: Ints | Floats) -> Floats:
        """Return the sum of a step quantity in each bin."""
        result: Floats = np.bincount(self.of_step, weights=values, minlength=self.count).astype(np.float64)
        return result

    def ratio(self, above: Ints | Floats, below: Ints | Floats) -> Floats:
        """Return sum(above) / sum(below) in each bin; NaN where there is nothing below."""
        bottom = self.sums(below)
        result: Floats = np.divide(self.sums(above), bottom, out=np.full(self.count, np.nan), where=bottom > 0)
        return result


def draw_figures(steps: StepTable, lengths: DraftedLengths) -> list[Picture]:
    """Draw every picture of a file; none if it holds no step."""
    if not len(steps):
        return []
    timeline = _timeline(steps)
    return [_draw_load(steps, timeline), _draw_lengths(lengths, timeline), _draw_acceptance(steps, timeline)]


def _timeline(steps: StepTable) -> _Timeline:
    """Lay bins over the file; engines' clocks are independent, so each starts at 0."""
    time_s = steps.time_s.copy()
    for engine in np.unique(steps.engine):
        own = steps.engine == engine
        time_s[own] -= (steps.time_s[own] - steps.step_s[own]).min()
    span_s = max(float(time_s.max()), _MIN_BIN_S)
    count = int(min(_BINS, max(1, span_s / _MIN_BIN_S)))
    edges_s = np.linspace(0.0, span_s, count + 1)
    return _Timeline(edges_s, time_s, (np.searchsorted(edges_s, time_s, side="left") - 1).clip(0, count - 1))


def _svg(timeline: _Timeline, draw: Callable[[Axes], None]) -> str:
    def within(axes: Axes) -> None:
        draw(axes)
        axes.set_xlim(0.0, timeline.edges_s[-1])

    return svg(within, "time (s)")


def svg(draw: Callable[[Axes], None], x_label: str) -> str:
    """Return a picture as SVG text that can stand within HTML; the same bytes for the same content."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "faser", "font.size": 9}):
        canvas = Canvas(figsize=_SIZE_INCHES, layout="constrained")
        FigureCanvasSVG(canvas)
        axes = canvas.add_subplot()
        axes.set_xlabel(x_label)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        text = io.StringIO()
        canvas.savefig(text, format="svg", metadata={"Date": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :]  # without the XML prologue, which HTML does not take


def _draw_load(steps: StepTable, timeline: _Timeline) -> Picture:
    tokens_per_s = timeline.sums(steps.emitted) / np.diff(timeline.edges_s)
    shown = np.argsort(timeline.time_s, kind="stable")[:: 1 + len(steps) // _POINTS]
    time_s = timeline.time_s[shown]

    def draw(axes: Axes) -> None:
        axes.step(time_s, steps.running[shown], where="pre", label="running", color="#1f5fa8")
        axes.step(time_s, steps.waiting[shown], where="pre", label="waiting", color="#c06014", linestyle="--")
        axes.set_ylabel("requests")
        axes.set_ylim(bottom=0)
        other = axes.twinx()
        other.plot(timeline.middle_s, tokens_per_s, color="#7a8794", linewidth=0.9)
        other.set_ylabel("tokens/s (grey)")
        other.set_ylim(bottom=0)
        axes.legend(loc="upper left", frameon=False)

    return Picture(
        "Load", "Requests running and waiting in each step, and tokens emitted per second.", _svg(timeline, draw)
    )


def _draw_lengths(lengths: DraftedLengths, timeline: _Timeline) -> Picture:
    longest = int(lengths.drafted.max(initial=1))
    counts = np.zeros((longest + 1, timeline.count))
    np.add.at(counts, (lengths.drafted, timeline.of_step[lengths.step_index]), 1.0)
    total = counts.sum(axis=0)
    share = np.divide(counts, total, out=np.full_like(counts, np.nan), where=total > 0)
    share[share == 0] = np.nan
    has_rows = total > 0
    mean = (np.arange(longest + 1) @ counts)[has_rows] / total[has_rows]

    def draw(axes: Axes) -> None:
        mesh = axes.pcolormesh(
            timeline.edges_s, np.arange(longest + 2) - 0.5, share, norm=LogNorm(0.01, 1.0), cmap="YlGnBu"
        )
        axes.plot(timeline.middle_s[has_rows], mean, color="#c0392b", linewidth=1.2)
        axes.set_yticks(range(longest + 1))
        axes.set_ylabel("draft length (tokens)")
        axes.figure.colorbar(mesh, ax=axes, label="share of requests")

    caption = "Tokens drafted per request and step: share of the requests of a bin, and their mean (red)."
    return Picture("Draft lengths", caption, _svg(timeline, draw))


def _draw_acceptance(steps: StepTable, timeline: _Timeline) -> Picture:
    acceptance = timeline.ratio(steps.accepted, steps.verified)
    lease = timeline.ratio((steps.lease_epoch > 0).astype(np.int64), np.ones(len(steps), np.int64))
    has_drafts, has_steps = np.isfinite(acceptance), np.isfinite(lease)
    sources = _by_source(steps, timeline)

    def draw(axes: Axes) -> None:
        axes.plot(timeline.middle_s[has_drafts], acceptance[has_drafts], color="#1e7d4f", marker=".", markersize=4)
        axes.plot(timeline.middle_s[has_steps], lease[has_steps], color="#7a8794", linewidth=0.9, linestyle="--")
        for name, colour, share in sources:
            known = np.isfinite(share)
            axes.plot(timeline.middle_s[known], share[known], color=colour, linewidth=1.0, label=name)
        axes.set_ylim(0, 1.03)
        axes.set_ylabel("share")
        if sources:
            axes.legend(loc="lower left", frameon=False)

    beside = ", beside those of the drafter and of copied ones" if sources else ""
    caption = (
        f"Accepted share of the verified draft tokens (green){beside}, and share of the steps in which a decision of "
        "the sidecar was in force (dashed)."
    )
    return Picture("Acceptance", caption, _svg(timeline, draw))


def _by_source(steps: StepTable, timeline: _Timeline) -> list[tuple[str, str, Floats]]:
    """Return name, colour and accepted share of each source of drafts; nothing where all are the drafter's."""
    if not steps.verified_copies.any():
        return []
    accepted, verified = steps.accepted - steps.accepted_copies, steps.verified - steps.verified_copies
    return [
        ("drafter", "#1f5fa8", timeline.ratio(accepted, verified)),
        ("copies", "#c06014", timeline.ratio(steps.accepted_copies, steps.verified_copies)),
    ]
