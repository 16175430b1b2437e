"""What a demo ends with: one JSON object and one table. Figures of steps come from the telemetry file alone.

Called by controller/demo/demo.py. Field names stand in docs/guide/quickstart.md and are what scripts read: add, never
rename.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from rich.table import Table

from ...engine_adapter.protocol import Hello
from ..engine.load_summary import LoadSummary
from ..quantiles import Quantiles
from ..reports.run_report import client_rows, engine_rows
from ..telemetry.tables import TelemetrySummary
from ..telemetry.telemetry_file import TelemetryFile


class Percentiles(msgspec.Struct, frozen=True):
    """Median and tail; null where nothing was measured."""

    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Quantiles | None) -> Percentiles:
        """Return the rounded percentiles."""
        return cls(_rounded(values.p50), _rounded(values.p99)) if values else cls(None, None)


class EngineFacts(msgspec.Struct, frozen=True):
    """The engine as it introduced itself to the sidecar; empty if it never did."""

    name: str = "vllm"
    version: str = ""
    device: str = ""
    model: str = ""
    method: str = ""
    drafter: str = ""
    k_max: int = 0


class RequestCounts(msgspec.Struct, frozen=True):
    """Requests by how they ended; `cancelled` ones were in flight at Ctrl-C."""

    finished: int
    failed: int
    cancelled: int
    failures: dict[str, int]


class DemoResult(msgspec.Struct, frozen=True):
    """The last line of `faser demo --json`. Times as named; lengths in tokens per request and step."""

    engine: EngineFacts
    requests: RequestCounts
    tokens_per_s: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    e2e_ms: Percentiles
    steps: int
    decisions: int
    steps_under_lease: int
    lease_share_after_first_second: float | None
    dropped_records: int
    gaps: int
    acceptance_rate: float | None
    mean_draft_length: float | None
    mean_emitted: float | None
    draft_length_histogram: dict[str, int]
    steps_with_mixed_lengths: int
    steps_with_mixed_drafts: int
    adapter_us_per_step: Percentiles
    adapter_share: float | None
    step_ms: Percentiles
    decision_us: Percentiles
    peak_running: int
    telemetry_path: str | None
    report_path: str | None
    policy: str
    seed: int
    duration_s: float
    wall_s: float
    output_tokens: int
    trace: str
    peak_rps: float
    load_generator_cpu_share: float | None
    cores: int
    is_interrupted: bool


def collect(
    *,
    telemetry: Path,
    report: Path,
    load: LoadSummary | None,
    policy: str,
    seed: int,
    duration_s: float,
    trace: str,
    peak_rps: float,
    is_interrupted: bool,
) -> tuple[DemoResult, TelemetrySummary | None]:
    """Put a run's figures together; what was never measured is null or 0."""
    has_telemetry = telemetry.is_file()
    engine, steps = _told(telemetry) if has_telemetry else (EngineFacts(), None)
    result = DemoResult(
        engine=engine,
        requests=RequestCounts(load.finished, load.failed, load.cancelled, dict(load.failures))
        if load
        else RequestCounts(0, 0, 0, {}),
        tokens_per_s=round(load.tokens_per_s, 2) if load else 0.0,
        ttft_ms=Percentiles.of(load.ttft_ms if load else None),
        tpot_ms=Percentiles.of(load.tpot_ms if load else None),
        e2e_ms=Percentiles.of(load.e2e_ms if load else None),
        steps=steps.steps if steps else 0,
        decisions=steps.decisions if steps else 0,
        steps_under_lease=steps.steps_under_lease if steps else 0,
        lease_share_after_first_second=_rounded(steps.lease_share_after_first_second) if steps else None,
        dropped_records=steps.dropped_records if steps else 0,
        gaps=steps.gaps if steps else 0,
        acceptance_rate=_rounded(steps.acceptance_rate) if steps else None,
        mean_draft_length=_rounded(steps.mean_draft_length) if steps else None,
        mean_emitted=_rounded(steps.mean_emitted) if steps else None,
        draft_length_histogram={str(k): n for k, n in steps.draft_length_histogram.items()} if steps else {},
        steps_with_mixed_lengths=steps.steps_with_mixed_lengths if steps else 0,
        steps_with_mixed_drafts=steps.steps_with_mixed_drafts if steps else 0,
        adapter_us_per_step=Percentiles.of(steps.adapter_us_per_step if steps else None),
        adapter_share=_rounded(steps.adapter_share, 6) if steps else None,
        step_ms=Percentiles.of(steps.step_ms if steps else None),
        decision_us=Percentiles.of(steps.decision_us if steps else None),
        peak_running=steps.peak_running if steps else 0,
        telemetry_path=str(telemetry.absolute()) if has_telemetry else None,
        report_path=str(report.absolute()) if has_telemetry else None,
        policy=policy,
        seed=seed,
        duration_s=duration_s,
        wall_s=round(load.wall_s, 3) if load else 0.0,
        output_tokens=load.output_tokens if load else 0,
        trace=trace,
        peak_rps=peak_rps,
        load_generator_cpu_share=_rounded(load.cpu_share) if load else None,
        cores=len(os.sched_getaffinity(0)),
        is_interrupted=is_interrupted,
    )
    return result, steps


def final_table(result: DemoResult, load: LoadSummary | None, steps: TelemetrySummary | None) -> Table:
    """Return the table a demo ends with."""
    engine = result.engine
    title = f"{Path(engine.model).name or 'no engine'} on vLLM {engine.version or '-'} ({engine.device or '-'})"
    table = Table(title=f"{title}, policy {result.policy}", title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for row in [*(client_rows(load) if load else []), *(engine_rows(steps) if steps else [])]:
        table.add_row(row.name, row.value, row.remark)
    return table


def _told(telemetry: Path) -> tuple[EngineFacts, TelemetrySummary]:
    with TelemetryFile(telemetry) as file:
        return _engine_facts(file.engines()), file.summary()


def _engine_facts(engines: list[Hello]) -> EngineFacts:
    if not engines:
        return EngineFacts()
    hello = engines[-1]
    return EngineFacts("vllm", hello.vllm_version, hello.device, hello.model, hello.method, hello.drafter, hello.k_max)


def _rounded(value: float, digits: int = 4) -> float | None:
    """Return the value for JSON, which knows no NaN."""
    return round(value, digits) if value == value else None
