"""What a replay found, in parts, once for the terminal and the HTML report.

Called by controller/cli/replay.py and controller/reports/replay_report.py; text only. Keeps the three kinds of
statement apart, and says of each what it cannot tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..replay.counterfactual import NAMES, Counterfactual
from ..replay.forward_pass_replay import CANNOT, POLICY_NOTE, Passes
from ..replay.offpolicy import OffPolicy
from ..replay.replay import Report, SourceCounts, mean_length


@dataclass(frozen=True, slots=True)
class Part:
    """One heading and what stands under it; the first cell of a row is its name."""

    heading: str
    texts: Sequence[str] = ()
    note: str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    points: Sequence[str] = ()
    drawn: Literal["", "lengths", "speed", "passes"] = ""  # by the HTML report


@dataclass(frozen=True, slots=True)
class Findings:
    """All that is told of one file."""

    title: str
    subtitle: str
    parts: Sequence[Part]


def replay_findings(report: Report, source: str, floor: float) -> Findings:
    """Return what the replay of a telemetry file found."""
    parts = [_decisions(report)]
    if report.policy:
        parts += [_side_by_side(report), _off_policy(report, floor), _counterfactual(report)]
    else:
        parts += [_recorded_lengths(report), Part("Other policies", ["None was asked: add --policy NAME."])]
    beside = f" beside {report.policy}" if report.policy else ""
    subtitle = f"{report.sessions} sessions, {report.records} records, {report.decisions} decisions{beside}"
    return Findings(f"Replay of {source}", subtitle, parts)


def passes_findings(passes: Passes, source: str) -> Findings:
    """Return what an input of forward-pass metrics holds."""
    asked = (passes.policy,) if passes.policy else ()
    parts = [
        Part("What this input cannot answer", ["It is another tool's telemetry, a degraded input:"], points=CANNOT),
        Part("What it holds", rows=_passes_rows(passes), drawn="passes"),
        Part(
            "Passes without prompts, by decoding requests",
            head=("decoding requests", "passes", "median ms", "p90 ms", "context", *asked),
            rows=_load_rows(passes),
        ),
    ]
    if passes.policy:
        head = ("draft length", passes.policy)
        rows = [*((str(length), str(count)) for length, count in passes.lengths.items()),
                ("mean", mean_length(passes.lengths))]  # fmt: skip
        parts.append(Part(f"What {passes.policy} would ask for", [POLICY_NOTE], head=head, rows=rows))
    subtitle = f"{passes.passes} forward passes of {passes.workers} workers and ranks"
    return Findings(f"Forward-pass metrics of {source}", subtitle, parts)


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
        rows=_decision_rows(report),
    )


def _decision_rows(report: Report) -> list[tuple[str, str]]:
    """Return what was compared and how it came out, and what the records say of drafts."""
    names = {"drafter": "the drafter's drafts", "copies": "copied drafts"}
    return [
        ("sessions", f"{report.sessions}, {report.partial_sessions} without their beginning"),
        ("records", f"{report.records}, decided on {report.decisions}"),
        ("the same bytes again", f"{report.identical} of {report.decisions - report.unrecorded - report.partial}"),
        ("not comparable", f"{report.unrecorded} without a digest, {report.partial} in partial sessions"),
        *((names[name], _accepted(counts)) for name, counts in report.sources.items()),
        *(("differs", text) for text in report.differing),
    ]


def _accepted(counts: SourceCounts) -> str:
    rate = f"{counts.accepted / counts.verified:.1%}" if counts.verified else "-"
    return f"{counts.accepted} of {counts.verified} verified tokens accepted, {rate}"


def _recorded_lengths(report: Report) -> Part:
    rows = [(str(length), str(count)) for length, count in report.lengths.items()]
    return Part(
        "Recorded draft lengths", head=("draft length", "request-decisions"),
        rows=[*rows, ("mean", mean_length(report.lengths))], drawn="lengths",
    )  # fmt: skip


def _side_by_side(report: Report) -> Part:
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
        drawn="lengths",
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
    rows += [(name, f"canary {ours}", f"{report.policy} {theirs}") for name, ours, theirs in _off_policy_rows(off)]
    estimated = f"Estimated from {off.effective_samples:.0f} effective samples; {report.policy} itself never ran."
    return Part(heading, [estimated], note, rows=rows)


def _off_policy_rows(off: OffPolicy) -> list[tuple[str, str, str]]:
    """Return the estimates, of the canary and of the other policy; none where they were refused."""
    return [
        (f"{name} per request and step", f"{ours.mean:.3f} ± {ours.half_width:.3f}",
         f"{theirs.mean:.3f} ± {theirs.half_width:.3f}")
        for name, ours, theirs in (
            ("tokens accepted", off.accepted_logged, off.accepted), ("draft rows", off.rows_logged, off.rows),
        )
        if ours is not None and theirs is not None
    ]  # fmt: skip


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
        return Part(heading, [f"{_counterfactual_line(found)}.", f"No counterfactual: {found.refusal}."], note)
    return Part(
        heading,
        [f"{_counterfactual_line(found)}."],
        note,
        head=("mean over requests", "recorded", "simulated", found.policy, "change", "error", "says"),
        rows=counterfactual_rows(found),
        drawn="speed",
    )


def _counterfactual_line(found: Counterfactual) -> str:
    """Return what was simulated."""
    left_out = f" ({found.left_out} more did not finish in the file and are left out)" if found.left_out else ""
    copied = f"; {found.copied_tokens} copied tokens are served one by one" if found.copied_tokens else ""
    return f"{found.requests} requests{left_out}, {found.runs} runs of the simulator, profile {found.profile}{copied}"


def counterfactual_rows(found: Counterfactual) -> list[tuple[str, ...]]:
    """Return one line per figure: recorded, simulated twice, change, error, and what that says."""
    return [
        (
            NAMES[speed.name],
            *(f"{value:.1f}" for value in (speed.recorded, speed.simulated, speed.alternative)),
            f"{speed.change:+.1%} ± {speed.spread:.1%}",
            f"{speed.error:.1%}",
            speed.verdict(),
        )
        for speed in found.speeds
    ]


def _passes_rows(passes: Passes) -> list[tuple[str, str]]:
    """Return what an input of forward-pass metrics holds."""
    span = "not told" if passes.span_s is None else f"{passes.span_s:.1f} s"
    kept = "sampled, so most passes are missing" if passes.is_sampled else "every pass that the producer kept"
    return [
        ("passes", f"{passes.passes}, {passes.idle} of them idle heartbeats, {passes.with_prompts} with prompts"),
        ("workers and ranks", str(passes.workers)),
        ("capture", kept),
        ("lost", f"{passes.lost} by the counters, {passes.disordered} out of order"),
        ("left out", f"{passes.other_versions} rows of other versions"),
        ("time", f"{passes.busy_s:.1f} s in passes, from first to last {span}"),
        ("most requests", f"{passes.peak_requests} in a pass, {passes.peak_queued} waiting"),
    ]


def _load_rows(passes: Passes) -> list[tuple[str, ...]]:
    """Return one line per octave of decoding requests, with the asked length where a policy was asked."""
    return [
        (
            str(load.first) if load.first == load.last else f"{load.first} to {load.last}",
            str(load.passes), f"{load.median_ms:.1f}", f"{load.p90_ms:.1f}", f"{load.mean_context:.0f}",
            *([f"{load.asked:.2f}" if load.asked is not None else "-"] if passes.policy else []),
        )
        for load in passes.loads
    ]  # fmt: skip
