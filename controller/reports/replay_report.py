"""The HTML report of a replay: the recorded decisions beside another policy's, in one file without outside links.

Called by controller/cli/replay.py. Keeps the three kinds of statement apart, and says of each what it cannot tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes

from ... import __version__
from ..replay.counterfactual import Counterfactual
from ..replay.forward_pass_replay import CANNOT, POLICY_NOTE, Passes
from ..replay.offpolicy import OffPolicy
from ..replay.replay import Report, Trail, mean_length
from .figures import Picture, svg
from .page import write_page
from .replay_rows import (
    counterfactual_line,
    counterfactual_rows,
    decision_rows,
    load_rows,
    off_policy_rows,
    passes_rows,
)

BINS: Final = 240  # of a line over decisions; more only make the page heavier
RECORDED, OTHER, LOAD = "#1f5fa8", "#c06014", "#7a8794"


@dataclass(frozen=True, slots=True)
class Part:
    """One heading and what stands under it; the first cell of a row is its name."""

    heading: str
    texts: Sequence[str] = ()
    note: str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    points: Sequence[str] = ()
    figures: Sequence[Picture] = ()


def write_replay_report(report: Report, trail: Trail, source: str, path: Path, floor: float) -> None:
    """Write the report of a telemetry file's replay; raise StoreError if it cannot be written."""
    parts = [_decisions(report)]
    if report.policy:
        parts += [_side_by_side(report, trail), _off_policy(report, floor), _counterfactual(report)]
    else:
        parts.append(_recorded_lengths(report, trail))
        parts.append(Part("Other policies", ["None was asked: add --policy NAME."]))
    beside = f" beside {report.policy}" if report.policy else ""
    subtitle = f"{report.sessions} sessions, {report.records} records, {report.decisions} decisions{beside}"
    _write(path, f"Replay of {source}", subtitle, parts, source)


def write_passes_report(passes: Passes, source: str, path: Path) -> None:
    """Write the report of an input of forward-pass metrics."""
    parts = [
        Part("What this input cannot answer", ["It is another tool's telemetry, a degraded input:"], points=CANNOT),
        Part("What it holds", rows=passes_rows(passes), figures=[_passes_figure(passes)] if passes.running else []),
        Part(
            "Passes without prompts, by decoding requests",
            head=("decoding requests", "passes", "median ms", "p90 ms", "context", *_asked_head(passes)),
            rows=load_rows(passes),
        ),
    ]
    if passes.policy:
        head = ("draft length", passes.policy)
        rows = [*((str(length), str(count)) for length, count in passes.lengths.items()),
                ("mean", mean_length(passes.lengths))]  # fmt: skip
        parts.append(Part(f"What {passes.policy} would ask for", [POLICY_NOTE], head=head, rows=rows))
    subtitle = f"{passes.passes} forward passes of {passes.workers} workers and ranks"
    _write(path, f"Forward-pass metrics of {source}", subtitle, parts, source)


def _asked_head(passes: Passes) -> tuple[str, ...]:
    return (passes.policy,) if passes.policy else ()


def _write(path: Path, title: str, subtitle: str, parts: list[Part], source: str) -> None:
    write_page(path, "replay.html", title=title, subtitle=subtitle, parts=parts, source=source, version=__version__)


def _decisions(report: Report) -> Part:
    compared = report.decisions - report.unrecorded - report.partial
    if not compared:
        verdict = "No decision could be compared."
    elif report.identical == compared:
        verdict = f"All {compared} decisions that can be compared came out as the same bytes (100 %)."
    else:
        share = int(1000 * report.identical / compared) / 10  # rounded down: 100 % means all
        verdict = (
            f"{report.identical} of {compared} decisions came out as the same bytes ({share:.1f} %). The file was "
            "changed, or written by a version whose policy decides otherwise."
        )
    return Part(
        "1. Decision replay: exact",
        [verdict],
        "Every recorded decision was made again from the same records, in the same order, and its bytes were compared. "
        "That says nothing about speed.",
        rows=decision_rows(report),
    )


def _recorded_lengths(report: Report, trail: Trail) -> Part:
    rows = [(str(length), str(count)) for length, count in report.lengths.items()]
    return Part(
        "Recorded draft lengths", head=("draft length", "request-decisions"),
        rows=[*rows, ("mean", mean_length(report.lengths))], figures=_length_figures(report, trail),
    )  # fmt: skip


def _side_by_side(report: Report, trail: Trail) -> Part:
    ours, theirs = sum(report.lengths.values()), sum(report.alternative_lengths.values())
    rows = [
        (str(length), *_count(report.lengths.get(length, 0), ours),
         *_count(report.alternative_lengths.get(length, 0), theirs))
        for length in sorted(report.lengths.keys() | report.alternative_lengths.keys())
    ]  # fmt: skip
    rows.append(("mean", mean_length(report.lengths), "", mean_length(report.alternative_lengths), ""))
    agreement = "" if report.agreement is None else f"The same length in {report.agreement:.1%} of request-decisions."
    return Part(
        f"Side by side: recorded and {report.policy}",
        [agreement] if agreement else [],
        f"What {report.policy} would have asked for on the states that the recorded decisions led to. It saw the same "
        "records, not those that its own lengths would have caused: exact, and again nothing about speed.",
        head=("draft length", "recorded", "share", report.policy, "share"),
        rows=rows,
        figures=_length_figures(report, trail),
    )


def _count(count: int, total: int) -> tuple[str, str]:
    return str(count), f"{100 * count / total:.1f} %" if total else "-"


def _off_policy(report: Report, floor: float) -> Part:
    heading = "2. Off-policy estimate: from a canary's chance draws"
    note = (
        "Tokens accepted and draft rows per request and step, reweighted by the logged probability of each drawn "
        "length; 95 % intervals over requests. Never tokens/s: requests share the batch."
    )
    off = report.off_policy
    if off is None or not off.samples:
        return Part(heading, ["No estimate: the file has no canary decisions, so nothing was drawn by chance."], note)
    rows = [
        ("samples", str(off.samples), f"of {off.requests} requests in which {report.policy} agrees at least once"),
        ("effective samples", f"{off.effective_samples:.0f}", f"floor {floor:.0f}"),
        ("coverage", f"{off.coverage:.1%}", "samples in which it wants the length that was drawn"),
    ]
    if off.refusal:
        return Part(heading, [f"No estimate: {off.refusal}."], note, rows=rows)
    return Part(heading, [_estimates(off, report.policy)], note, rows=[*rows, *_estimate_rows(off, report.policy)])


def _estimates(off: OffPolicy, policy: str) -> str:
    return f"Estimated from {off.effective_samples:.0f} effective samples; {policy} itself never ran."


def _estimate_rows(off: OffPolicy, policy: str) -> list[tuple[str, str, str]]:
    return [(name, f"canary {ours}", f"{policy} {theirs}") for name, ours, theirs in off_policy_rows(off)]


def _counterfactual(report: Report) -> Part:
    heading = "3. Counterfactual: in the calibrated simulator"
    note = (
        "The recorded requests served again by a model of the engine: once under the recorded lengths, whose distance "
        "from the recording is the error, and once under the policy. A profile that was calibrated to this very "
        "file has a smaller error than it would have on another one."
    )
    found = report.counterfactual
    if found is None:
        return Part(heading, ["Not asked for: add --counterfactual."], note)
    if found.refusal:
        return Part(heading, [f"{counterfactual_line(found)}.", f"No counterfactual: {found.refusal}."], note)
    return Part(
        heading,
        [f"{counterfactual_line(found)}."],
        note,
        head=("mean over requests", "recorded", "simulated", found.policy, "change", "error", "says"),
        rows=counterfactual_rows(found),
        figures=[_speed_figure(found)],
    )


def _length_figures(report: Report, trail: Trail) -> list[Picture]:
    if not trail.running:
        return []
    figures = [_histogram(report), _over_decisions(report, trail)]
    return [figure for figure in figures if figure]


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
