"""What a demo ends with: one JSON object and one table. Figures of steps come from the telemetry file alone.

Called by controller/demo/demo.py. Field names stand in docs/guide/quickstart.md and are what scripts read: add, never
rename.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.table import Table

from ...engine_adapter.protocol import Hello
from ..engine.load_summary import LoadSummary
from ..quantiles import Quantiles
from ..reports.run_report import client_rows, engine_rows
from ..telemetry.tables import TelemetrySummary
from ..telemetry.telemetry_file import WholeTelemetry
from .comparison import SideBySide, Speedup


class Percentiles(msgspec.Struct, frozen=True):
    """Median and tail; null where nothing was measured."""

    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Quantiles) -> Percentiles:
        """Return the rounded percentiles."""
        return cls(_rounded(values.p50), _rounded(values.p99))


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


NOTHING_MEASURED: Final = Percentiles(None, None)


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """The last line of `faser demo --json`; defaults are what was never measured.

    Times as named; lengths in tokens per request and step. Attainment is by class: of the whole load, and of the
    requests that were served without speculation too, on both sides.
    """

    engine: EngineFacts = EngineFacts()
    requests: RequestCounts = RequestCounts(0, 0, 0, {})
    tokens_per_s: float = 0.0
    ttft_ms: Percentiles = NOTHING_MEASURED
    tpot_ms: Percentiles = NOTHING_MEASURED
    e2e_ms: Percentiles = NOTHING_MEASURED
    steps: int = 0
    decisions: int = 0
    steps_under_lease: int = 0
    lease_share_after_first_second: float | None = None
    dropped_records: int = 0
    gaps: int = 0
    acceptance_rate: float | None = None
    mean_draft_length: float | None = None
    mean_emitted: float | None = None
    draft_length_histogram: dict[str, int] = {}
    steps_with_mixed_lengths: int = 0
    steps_with_mixed_drafts: int = 0
    adapter_us_per_step: Percentiles = NOTHING_MEASURED
    adapter_share: float | None = None
    step_ms: Percentiles = NOTHING_MEASURED
    decision_us: Percentiles = NOTHING_MEASURED
    peak_running: int = 0
    telemetry_path: str | None = None
    report_path: str | None = None
    policy: str
    seed: int
    duration_s: float
    wall_s: float = 0.0
    output_tokens: int = 0
    trace: str
    peak_rps: float
    load_generator_cpu_share: float | None = None
    attainment: dict[str, float] = {}
    speedup: Speedup | None = None
    compared_attainment: dict[str, float] = {}
    plain_attainment: dict[str, float] = {}
    picture_path: str | None = None
    cores: int
    is_interrupted: bool


def figures_of_load(load: LoadSummary) -> dict[str, Any]:
    """Return what clients saw, as fields of DemoResult."""
    return {
        "requests": RequestCounts(load.finished, load.failed, load.cancelled, dict(load.failures)),
        "tokens_per_s": round(load.tokens_per_s, 2), "ttft_ms": Percentiles.of(load.ttft_ms),
        "tpot_ms": Percentiles.of(load.tpot_ms), "e2e_ms": Percentiles.of(load.e2e_ms), "wall_s": round(load.wall_s, 3),
        "output_tokens": load.output_tokens, "load_generator_cpu_share": _rounded(load.cpu_share),
        "attainment": _rounded_shares(load.attainment),
    }  # fmt: skip


def figures_of_comparison(comparison: SideBySide, picture: Path) -> dict[str, Any]:
    """Return what came of the run without speculation, as fields of DemoResult."""
    ours, plain = map(_rounded_shares, comparison.attainment())
    return {
        "speedup": comparison.speedup(), "compared_attainment": ours, "plain_attainment": plain,
        "picture_path": str(picture.absolute()),
    }  # fmt: skip


def figures_of_telemetry(telemetry: WholeTelemetry, report: Path) -> dict[str, Any]:
    """Return what the engine reported, as fields of DemoResult."""
    steps = telemetry.summary
    counts = (
        "steps", "decisions", "steps_under_lease", "dropped_records", "gaps", "steps_with_mixed_lengths",
        "steps_with_mixed_drafts", "peak_running",
    )  # fmt: skip
    shares = ("lease_share_after_first_second", "acceptance_rate", "mean_draft_length", "mean_emitted")
    spreads = ("adapter_us_per_step", "step_ms", "decision_us")
    return {
        "engine": _engine_facts(telemetry.engines),
        **{name: getattr(steps, name) for name in counts},
        **{name: _rounded(getattr(steps, name)) for name in shares},
        **{name: Percentiles.of(getattr(steps, name)) for name in spreads},
        "draft_length_histogram": {str(k): n for k, n in steps.draft_length_histogram.items()},
        "adapter_share": _rounded(steps.adapter_share, 6), "telemetry_path": str(telemetry.path.absolute()),
        "report_path": str(report.absolute()),
    }  # fmt: skip


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


def _engine_facts(engines: list[Hello]) -> EngineFacts:
    if not engines:
        return EngineFacts()
    hello = engines[-1]
    return EngineFacts("vllm", hello.vllm_version, hello.device, hello.model, hello.method, hello.drafter, hello.k_max)


def _rounded_shares(shares: Mapping[str, float]) -> dict[str, float]:
    return {name: round(share, 4) for name, share in shares.items()}


def _rounded(value: float, digits: int = 4) -> float | None:
    """Return the value for JSON, which knows no NaN."""
    return round(value, digits) if value == value else None
