"""The lines of a replay's tables, once for the terminal and the HTML report.

Called by controller/cli/replay.py and controller/reports/replay_report.py; text only.
"""

from __future__ import annotations

from ..replay.counterfactual import NAMES, Counterfactual
from ..replay.forward_pass_replay import Passes
from ..replay.offpolicy import OffPolicy
from ..replay.replay import Report


def decision_rows(report: Report) -> list[tuple[str, str]]:
    """Return what was compared and how it came out."""
    return [
        ("sessions", f"{report.sessions}, {report.partial_sessions} without their beginning"),
        ("records", f"{report.records}, decided on {report.decisions}"),
        ("the same bytes again", f"{report.identical} of {report.decisions - report.unrecorded - report.partial}"),
        ("not comparable", f"{report.unrecorded} without a digest, {report.partial} in partial sessions"),
        *(("differs", text) for text in report.differing),
    ]


def off_policy_rows(off: OffPolicy) -> list[tuple[str, str, str]]:
    """Return the estimates, of the canary and of the other policy; none where they were refused."""
    return [
        (f"{name} per request and step", f"{ours.mean:.3f} ± {ours.half_width:.3f}",
         f"{theirs.mean:.3f} ± {theirs.half_width:.3f}")
        for name, ours, theirs in (
            ("tokens accepted", off.accepted_logged, off.accepted), ("draft rows", off.rows_logged, off.rows),
        )
        if ours is not None and theirs is not None
    ]  # fmt: skip


def counterfactual_line(found: Counterfactual) -> str:
    """Return what was simulated."""
    left_out = f" ({found.left_out} more did not finish in the file and are left out)" if found.left_out else ""
    return f"{found.requests} requests{left_out}, {found.runs} runs of the simulator, profile {found.profile}"


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


def passes_rows(passes: Passes) -> list[tuple[str, str]]:
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


def load_rows(passes: Passes) -> list[tuple[str, ...]]:
    """Return one line per octave of decoding requests, with the asked length where a policy was asked."""
    return [
        (
            str(load.first) if load.first == load.last else f"{load.first} to {load.last}",
            str(load.passes), f"{load.median_ms:.1f}", f"{load.p90_ms:.1f}", f"{load.mean_context:.0f}",
            *([f"{load.asked:.2f}" if load.asked is not None else "-"] if passes.policy else []),
        )
        for load in passes.loads
    ]  # fmt: skip
