"""The HTML report of a replay: the recorded decisions beside another policy's, in one file without outside links.

Called by controller/cli/replay.py. Adds pictures to what controller/reports/replay_rows.py tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes

from ... import __version__
from ..replay.counterfactual import Counterfactual
from ..replay.forward_pass_replay import Passes
from ..replay.replay import Report, Trail
from .figures import Picture, svg
from .page import write_page
from .replay_rows import Findings, counterfactual_rows

BINS: Final = 240  # of a line over decisions; more only make the page heavier
RECORDED, OTHER, LOAD = "#1f5fa8", "#c06014", "#7a8794"


def write_replay_report(findings: Findings, report: Report, trail: Trail, source: str, path: Path) -> None:
    """Write the report of a telemetry file's replay; raise StoreError if it cannot be written."""
    lengths = [_histogram(report), _over_decisions(report, trail)] if trail.running else []
    found = report.counterfactual
    speed = [_speed_figure(found)] if found is not None and not found.refusal else []
    _write(findings, {"lengths": lengths, "speed": speed}, source, path)


def write_passes_report(findings: Findings, passes: Passes, source: str, path: Path) -> None:
    """Write the report of an input of forward-pass metrics."""
    _write(findings, {"passes": [_passes_figure(passes)] if passes.running else []}, source, path)


def _write(findings: Findings, figures: Mapping[str, Sequence[Picture]], source: str, path: Path) -> None:
    write_page(
        path, "replay.html", title=findings.title, subtitle=findings.subtitle, parts=findings.parts, figures=figures,
        source=source, version=__version__,
    )  # fmt: skip


def _histogram(report: Report) -> Picture:
    lengths = np.arange(max([0, *report.lengths, *report.alternative_lengths]) + 1)
    series = [("recorded", report.lengths, RECORDED)]
    if report.policy:
        series.append((report.policy, report.alternative_lengths, OTHER))

    def draw(axes: Axes) -> None:
        width = 0.8 / len(series)
        for place, (name, counts, colour) in enumerate(series):
            total = max(sum(counts.values()), 1)
            shares = [100 * counts.get(int(length), 0) / total for length in lengths]
            axes.bar(lengths + (place - (len(series) - 1) / 2) * width, shares, width, label=name, color=colour)
        axes.set_xticks(lengths)
        axes.set_ylabel("% of request-decisions")
        axes.legend(frameon=False)

    return Picture(
        "Lengths", "Draft lengths asked for, share of request-decisions.", svg(draw, "draft length (tokens)")
    )


def _over_decisions(report: Report, trail: Trail) -> Picture:
    x, running = _binned(trail.running)
    lines = [("recorded", _binned(trail.recorded)[1], RECORDED)]
    if trail.alternative:
        lines.append((report.policy, _binned(trail.alternative)[1], OTHER))

    def draw(axes: Axes) -> None:
        for name, values, colour in lines:
            axes.plot(x, values, label=name, color=colour, linewidth=1.2)
        axes.set_ylabel("mean draft length (tokens)")
        axes.set_ylim(bottom=0)
        other = axes.twinx()
        other.fill_between(x, running, color=LOAD, alpha=0.25, linewidth=0)
        other.set_ylabel("running requests (grey)")
        other.set_ylim(bottom=0)
        axes.legend(frameon=False, loc="upper right")

    return Picture(
        "Over the file", "Mean draft length over the decisions of the file, and the requests that ran.",
        svg(draw, "decision, in the file's order"),
    )  # fmt: skip


def _binned(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the middles and means of at most BINS bins."""
    edges = np.unique(np.linspace(0, len(values), min(BINS, len(values)) + 1).astype(np.int64))
    sums = np.add.reduceat(np.asarray(values, np.float64), edges[:-1])
    return ((edges[1:] + edges[:-1]) / 2).tolist(), (sums / np.diff(edges)).tolist()


def _speed_figure(found: Counterfactual) -> Picture:
    names = [row[0] for row in counterfactual_rows(found)]
    changes = np.array([100 * speed.change for speed in found.speeds])
    doubts = np.array([100 * (speed.error + speed.spread) for speed in found.speeds])

    def draw(axes: Axes) -> None:
        places = np.arange(len(names))[::-1]
        axes.barh(places, 2 * doubts, left=-doubts, color=LOAD, alpha=0.3, label="error of the simulator and spread")
        axes.plot(changes, places, "o", color=OTHER, label=f"change under {found.policy}")
        axes.axvline(0.0, color="#1c2430", linewidth=0.8)
        axes.set_yticks(places, names)
        axes.legend(frameon=False)

    caption = "Change under the policy; a point within its grey bar says nothing."
    return Picture("Speed", caption, svg(draw, "change over the recorded lengths, both simulated (%)"))


def _passes_figure(passes: Passes) -> Picture:
    x, running = _binned(passes.running)
    _, queued = _binned(passes.queued)
    _, wall_ms = _binned(passes.wall_ms)

    def draw(axes: Axes) -> None:
        axes.plot(x, running, color=RECORDED, label="in the pass")
        axes.plot(x, queued, color=OTHER, linestyle="--", label="waiting")
        axes.set_ylabel("requests")
        axes.set_ylim(bottom=0)
        other = axes.twinx()
        other.plot(x, wall_ms, color=LOAD, linewidth=0.9)
        other.set_ylabel("time of a pass, ms (grey)")
        other.set_ylim(bottom=0)
        axes.legend(frameon=False, loc="upper left")

    return Picture("Load", "Requests in each pass and waiting, and its time.", svg(draw, "pass, in the file's order"))
