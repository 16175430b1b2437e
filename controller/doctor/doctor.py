"""`faser doctor`: names what is wrong with an installation and how to mend it; changes nothing.

Called by the CLI. Each check beside this file returns findings; one that fails to run is itself a
finding, never a traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..config import Config
from .checks import CHECKS, Finding, Patient
from .graph_check import check_graphs, check_rounds
from .installation import Installation
from .sidecar_checks import SIDECAR_CHECKS

_STYLES = {"ok": "green", "note": "blue", "warn": "yellow", "fail": "red"}


def run_doctor(is_json: bool = False, config: Config | None = None) -> int:
    """Print the findings; return 1 if any is a failure, else 0."""
    findings = examine(Patient(Installation.found(), config or _effective_config()))
    if is_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode() + "\n")
    else:
        _show(findings, Console())
    return int(any(finding.level == "fail" for finding in findings))


def examine(patient: Patient) -> list[Finding]:
    """Return the findings of every check, in order."""
    return [
        finding for check in (*CHECKS, *SIDECAR_CHECKS, check_graphs, check_rounds) for finding in _run(check, patient)
    ]


def _run(check: Callable[[Patient], Iterator[Finding]], patient: Patient) -> Iterator[Finding]:
    try:
        yield from check(patient)
    except Exception as error:  # the doctor must reach its last check whatever it finds
        yield Finding(check.__name__.removeprefix("check_"), "fail", f"could not be checked: {error}", "report this")


def _effective_config() -> Config:
    from ..config_layers import load

    return load(None, os.environ).config


def _show(findings: list[Finding], console: Console) -> None:
    table = Table("", "check", box=None, pad_edge=False)
    for column in ("seen", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        style = _STYLES[finding.level]
        table.add_row(f"[{style}]{finding.level}[/]", finding.name, escape(finding.seen), escape(finding.remedy))
    console.print(table, highlight=False)
    failures = sum(finding.level == "fail" for finding in findings)
    warnings = sum(finding.level == "warn" for finding in findings)
    console.print(f"{failures} failures, {warnings} warnings", highlight=False)
