"""The HTML report of a run: tables and pictures in one file without outside links.

Called by the demo and by anyone with a telemetry file; what clients saw is added where a load run is at hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...engine_adapter.protocol import Hello
from ..engine.load_summary import LoadSummary
from ..quantiles import Quantiles
from ..snapshot import AttainmentStatus, told_layers
from ..telemetry.tables import CutSteps, SourceSummary, TelemetrySummary
from ..telemetry.telemetry_file import WholeTelemetry
from .figures import draw_figures
from .page import write_page

_NOTHING: Final = "-"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table, ready to read."""

    name: str
    value: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A table with its heading."""

    heading: str
    rows: Sequence[Row]


def write_report(
    telemetry: WholeTelemetry, report: Path, load: LoadSummary | None = None, title: str = "FASER report"
) -> None:
    """Write the report of a telemetry file; raise StoreError if it cannot be written."""
    sections = [Section("Engine and drafter", engine_rows(telemetry.summary))]
    if telemetry.attainment:
        sections.append(Section("Objectives", objective_rows(telemetry.attainment)))
    if telemetry.cuts:
        sections.append(Section("Pipeline stages", stage_rows(telemetry.cuts)))
    if load:
        sections.insert(0, Section("What clients saw", client_rows(load)))
    write_page(
        report, "report.html", title=title,
        subtitle="; ".join(map(describe_engine, telemetry.engines)) or "no engine introduced itself",
        sections=sections, figures=draw_figures(telemetry.steps, telemetry.lengths), telemetry=telemetry.path.name,
        has_load=load is not None,
    )  # fmt: skip


def describe_engine(engine: Hello) -> str:
    """Say in one line what an engine is."""
    return (
        f"{Path(engine.model).name} on vLLM {engine.vllm_version} ({engine.device}), "
        f"drafting by {engine.method} up to {engine.k_max} tokens"
    )


def client_rows(load: LoadSummary) -> list[Row]:
    """Return the lines on requests and latency."""
    cancelled = f", {load.cancelled} cancelled" if load.cancelled else ""
    failures = "; ".join(f"{count}x {reason}" for reason, count in load.failures.items())
    return [
        Row("requests", f"{load.finished} finished, {load.failed} failed{cancelled}", failures),
        Row("tokens/s", _number(load.tokens_per_s, 1), f"{load.output_tokens} tokens in {load.wall_s:.1f} s"),
        Row("TTFT p50 / p99", _quantiles(load.ttft_ms, "ms"), "from scheduled arrival to first token"),
        Row("TPOT p50 / p99", _quantiles(load.tpot_ms, "ms"), "per token after the first"),
        Row("E2E p50 / p99", _quantiles(load.e2e_ms, "ms"), "from scheduled arrival to last token"),
        Row("most in flight", str(load.peak_in_flight), f"load generator: {100 * load.cpu_share:.1f} % of a core"),
    ]


def engine_rows(summary: TelemetrySummary) -> list[Row]:
    """Return the lines on steps, drafts and overhead."""
    histogram = ", ".join(f"{length}: {count}" for length, count in summary.draft_length_histogram.items())
    share = _number(100 * summary.lease_share_after_first_second, 1)
    return [
        Row("steps", str(summary.steps), f"up to {summary.peak_running} requests, {_quantiles(summary.step_ms, 'ms')}"),
        Row("steps under a lease", str(summary.steps_under_lease), f"{share} % after the first second"),
        Row("decisions", str(summary.decisions), f"{_quantiles(summary.decision_us, 'µs')} each"),
        Row(
            "acceptance",
            _percent(summary.acceptance_rate),
            f"{summary.accepted_tokens} of {summary.verified_tokens} draft tokens",
        ),
        *_source_rows(summary),
        Row("mean draft length", _number(summary.mean_draft_length, 2), f"request-steps by length: {histogram}"),
        Row("tokens per request-step", _number(summary.mean_emitted, 2)),
        Row("steps with mixed lengths", str(summary.steps_with_mixed_lengths), "requests with different lengths"),
        Row(
            "adapter p50 / p99",
            _quantiles(summary.adapter_us_per_step, "µs"),
            f"{_percent(summary.adapter_share)} of the engine's time",
        ),
        Row("records lost", str(summary.gaps), f"{summary.dropped_records} dropped by the engine"),
    ]


def objective_rows(attainment: Mapping[str, AttainmentStatus]) -> list[Row]:
    """Return a line on each class of requests with objectives."""
    return [
        Row(
            name,
            _percent(counts.in_time / counts.finished if counts.finished else math.nan),
            f"{counts.in_time} of {counts.finished} finished requests in time: first token, and mean per further token",
        )
        for name, counts in attainment.items()
    ]


def stage_rows(cuts: Sequence[CutSteps]) -> list[Row]:
    """Return a line on each way in which a pipeline was cut."""
    return [
        Row(
            told_layers(cut.layers),
            f"{_number(cut.tokens / cut.seconds if cut.seconds else math.nan, 1)} tokens/s",
            f"{cut.tokens} tokens in {cut.steps} steps, {cut.moving} of them while layers moved; "
            f"{cut.moves} moves complete by the last",
        )
        for cut in cuts
    ]


def _source_rows(summary: TelemetrySummary) -> list[Row]:
    """Return the lines on each source of drafts, of copies only where there are some."""
    sources = {"of the drafter": summary.drafter}
    if summary.copies.verified_tokens:
        sources["of copies"] = summary.copies
    return [Row(f"... {name}", _percent(source.acceptance_rate), _became(source)) for name, source in sources.items()]


def _became(source: SourceSummary) -> str:
    accepted = f"{source.accepted_tokens} of {source.verified_tokens} tokens"
    return f"{accepted}; {_number(source.waste, 2)} wasted per token emitted"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else _NOTHING


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if math.isfinite(share) else _NOTHING


def _quantiles(values: Quantiles, unit: str) -> str:
    if not math.isfinite(values.p50):
        return _NOTHING
    digits = 1 if values.p50 < 100 else 0
    return f"{values.p50:.{digits}f} / {values.p99:.{digits}f} {unit}"
