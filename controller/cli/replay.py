"""`faser replay`: prints what a replay found, as text, JSON or an HTML report.

Called by the CLI. Tells its input by the first bytes: FASER's telemetry, or another tool's forward-pass metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..errors import UsageError
from ..replay.counterfactual import estimate_speed
from ..replay.forward_pass_metrics import is_forward_pass_metrics, read_forward_passes
from ..replay.forward_pass_replay import CANNOT, replay_passes
from ..replay.offpolicy import FLOOR
from ..replay.replay import Trail, replay
from ..reports.replay_rows import Findings, passes_findings, replay_findings


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
    findings = replay_findings(report, options.file.name, options.floor)
    if options.report is not None:
        from ..reports.replay_report import write_replay_report

        write_replay_report(findings, report, trail, options.file.name, options.report)
    _show(findings, report, options, console)
    return 0 if report.is_exact() else 1


def _run_passes(options: ReplayOptions, console: Console) -> None:
    if options.is_counterfactual:
        raise UsageError(
            f"--counterfactual on {options.file}: forward-pass metrics tell neither arrivals nor the length of answers",
            "FASER's own telemetry",
            "record with faser sidecar",
        )
    passes = replay_passes(read_forward_passes(options.file), options.policy)
    findings = passes_findings(passes, options.file.name)
    if options.report is not None:
        from ..reports.replay_report import write_passes_report

        write_passes_report(findings, passes, options.file.name, options.report)
    _show(findings, {**msgspec.to_builtins(passes), "cannot": CANNOT}, options, console)


def _show(findings: Findings, content: object, options: ReplayOptions, console: Console) -> None:
    """Print the content as JSON, or all parts as text."""
    if options.json:
        console.out(msgspec.json.encode(content).decode(), highlight=False)
        return
    console.print(Text(f"{findings.title}: {findings.subtitle}"))
    for part in findings.parts:
        console.print(Text(f"\n{part.heading}", style="bold"))
        for text in (*part.texts, *([part.note] if part.note else []), *(f"  - {point}" for point in part.points)):
            console.print(Text(text))
        if part.rows:
            table = Table(*map(escape, part.head), show_header=bool(part.head))
            for row in part.rows:
                table.add_row(*map(Text, row))
            console.print(table)
    if options.report is not None:
        console.print(f"report: {options.report}")
