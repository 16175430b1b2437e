"""`faser replay`: prints what a replay found, as text, JSON or an HTML report.

Called by the CLI. Tells its input by the first bytes: FASER's telemetry, or another tool's forward-pass metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from ..errors import UsageError
from ..replay.counterfactual import Counterfactual, estimate_speed
from ..replay.forward_pass_metrics import is_forward_pass_metrics, read_forward_passes
from ..replay.forward_pass_replay import CANNOT, POLICY_NOTE, Passes, replay_passes
from ..replay.offpolicy import FLOOR
from ..replay.replay import Report, Trail, mean_length, replay
from ..reports.replay_rows import (
    counterfactual_line,
    counterfactual_rows,
    decision_rows,
    load_rows,
    off_policy_rows,
    passes_rows,
)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What `faser replay` was asked for."""

    file: Path
    policy: str | None = None
    is_counterfactual: bool = False
    profile: Path | None = None  # None: the shipped profile of the embedded pair
    report: Path | None = None
    floor: float = FLOOR
    json: bool = False

    def __post_init__(self) -> None:
        if self.is_counterfactual and not self.policy:
            raise UsageError("--counterfactual without a policy", "what to compare with", "add --policy NAME")
        if self.profile is not None and not self.is_counterfactual:
            raise UsageError("--profile without --counterfactual", "both or neither", "add --counterfactual")
        if self.report is not None and self.report.exists() and self.file.exists() and self.report.samefile(self.file):
            raise UsageError(f"--report {self.report} is the input itself", "another file")


def run_replay(options: ReplayOptions) -> int:
    """Print the report; return 1 if a decision came out differently."""
    console = Console(soft_wrap=True, highlight=False)
    if is_forward_pass_metrics(options.file):
        _run_passes(options, console)
        return 0
    trail = Trail()
    report = replay(options.file, options.policy, options.floor, trail)
    if options.is_counterfactual and options.policy:
        report.counterfactual = estimate_speed(options.file, options.policy, options.profile)
    if options.report is not None:
        from ..reports.replay_report import write_replay_report

        write_replay_report(report, trail, options.file.name, options.report, options.floor)
    if options.json:
        console.out(msgspec.json.encode(report).decode(), highlight=False)
    else:
        _show(report, options.file, console)
        _say_where(options, console)
    return 0 if report.is_exact() else 1


def _run_passes(options: ReplayOptions, console: Console) -> None:
    if options.is_counterfactual:
        raise UsageError(
            f"--counterfactual on {options.file}: forward-pass metrics tell neither arrivals nor the length of answers",
            "FASER's own telemetry",
            "record with faser sidecar",
        )
    passes = replay_passes(read_forward_passes(options.file), options.policy)
    if options.report is not None:
        from ..reports.replay_report import write_passes_report

        write_passes_report(passes, options.file.name, options.report)
    if options.json:
        console.out(msgspec.json.encode({**msgspec.to_builtins(passes), "cannot": CANNOT}).decode(), highlight=False)
    else:
        _show_passes(passes, options.file, console)
        _say_where(options, console)


def _say_where(options: ReplayOptions, console: Console) -> None:
    if options.report is not None:
        console.print(f"report: {options.report}")


def _show(report: Report, path: Path, console: Console) -> None:
    table = Table(title=f"decision replay of {path.name}", title_justify="left", show_header=False)
    for name, value in decision_rows(report):
        table.add_row(name, value)
    console.print(table)
    if report.policy:
        _show_alternative(report, console)
    if report.counterfactual is not None:
        _show_counterfactual(report.counterfactual, console)


def _show_alternative(report: Report, console: Console) -> None:
    table = Table("draft length", "recorded", report.policy, title="request-decisions; says nothing about speed")
    for length in sorted(report.lengths.keys() | report.alternative_lengths.keys()):
        table.add_row(str(length), str(report.lengths.get(length, 0)), str(report.alternative_lengths.get(length, 0)))
    table.add_row("mean", mean_length(report.lengths), mean_length(report.alternative_lengths))
    console.print(table)
    if report.agreement is not None:
        console.print(f"the same length in {report.agreement:.1%} of request-decisions")
    off = report.off_policy
    if off is None or not off.samples:
        console.print("no off-policy estimate: the file has no canary decisions")
        return
    console.print(
        f"off-policy: {off.samples} samples, {off.effective_samples:.0f} effective, coverage {off.coverage:.1%}"
    )
    if off.refusal:
        console.print(f"no estimate: {off.refusal}")
        return
    for name, ours, theirs in off_policy_rows(off):
        console.print(f"{name}: canary {ours}, {report.policy} {theirs} (95 %)")


def _show_counterfactual(found: Counterfactual, console: Console) -> None:
    console.print(f"counterfactual: {counterfactual_line(found)}")
    if found.refusal:
        console.print(f"no counterfactual: {found.refusal}")
        return
    table = Table()
    for name in ("what", "recorded", "simulated", found.policy, "change", "error", "says"):
        table.add_column(name, justify="left" if name in ("what", "says") else "right")
    for row in counterfactual_rows(found):
        table.add_row(*row)
    console.print(table)


def _show_passes(passes: Passes, path: Path, console: Console) -> None:
    table = Table(title=f"forward-pass metrics of {path.name}: degraded input", title_justify="left", show_header=False)
    for name, value in passes_rows(passes):
        table.add_row(name, value)
    console.print(table)
    names = (
        "decoding requests",
        "passes",
        "median ms",
        "p90 ms",
        "context",
        *([passes.policy] if passes.policy else []),
    )
    table = Table(*names, title="passes without prompts")
    for row in load_rows(passes):
        table.add_row(*row)
    console.print(table)
    if passes.policy:
        console.print(POLICY_NOTE)
    console.print("This input cannot answer:")
    for text in CANNOT:
        console.print(f"  - {text}")
