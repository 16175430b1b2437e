"""The sidecar's figures in Prometheus's format: METRICS is the one list of names, with meaning and labels.

Called by the HTTP side with a status snapshot. The deployment's dashboard and alerts are tested against METRICS;
no label ever holds a request id. Engines that are over leave with their session, so that series do not pile up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...engine_adapter.protocol import Mode
from ..snapshot import EngineStatus, Presence, Snapshot, Stance

Labels = tuple[str, ...]
Sample = tuple[Labels, float]
MODES: Final[tuple[Mode, ...]] = ("active", "advisory", "canary", "off")
STANCES: Final[tuple[Stance, ...]] = ("steer", "hold", "fallback")
PRESENCES: Final[tuple[Presence, ...]] = ("busy", "idle", "silent", "stopped", "gone")
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Series:
    """One metric: counters end in _total; `of` gives its samples from the whole snapshot."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: Labels
    of: Callable[[Snapshot], Iterator[Sample]]


def _whole(read: Callable[[Snapshot], float]) -> Callable[[Snapshot], Iterator[Sample]]:
    def samples(snapshot: Snapshot) -> Iterator[Sample]:
        yield (), read(snapshot)

    return samples


def _each(read: Callable[[EngineStatus], float | None]) -> Callable[[Snapshot], Iterator[Sample]]:
    def samples(snapshot: Snapshot) -> Iterator[Sample]:
        for engine in snapshot.engines:
            if (value := read(engine)) is not None:
                yield (engine.boot_id,), value

    return samples


def _one_of(values: tuple[str, ...], read: Callable[[EngineStatus], str]) -> Callable[[Snapshot], Iterator[Sample]]:
    """Give one series per possible value, 1 for the one that holds: a change shows as a change."""

    def samples(snapshot: Snapshot) -> Iterator[Sample]:
        for engine in snapshot.engines:
            for value in values:
                yield (engine.boot_id, value), float(read(engine) == value)

    return samples


def _info(snapshot: Snapshot) -> Iterator[Sample]:
    for engine in snapshot.engines:
        yield (
            (engine.boot_id, engine.steering.name, engine.model, engine.method, engine.device, engine.vllm_version),
            1.0,
        )


def _positions(snapshot: Snapshot) -> Iterator[Sample]:
    for engine in snapshot.engines:
        for position, share in enumerate(engine.acceptance_by_position, 1):
            if share is not None:
                yield (engine.boot_id, str(position)), share


def _lengths(snapshot: Snapshot) -> Iterator[Sample]:
    for engine in snapshot.engines:
        for length, requests in enumerate(engine.length_histogram):
            yield (engine.boot_id, str(length)), requests


def _not_steered(snapshot: Snapshot) -> Iterator[Sample]:
    for engine in snapshot.engines:
        for reason, count in sorted(engine.steering.counts.items()):
            yield (engine.boot_id, reason), count


def _dropped(snapshot: Snapshot) -> Iterator[Sample]:
    for reason, count in sorted(snapshot.link.dropped.items()):
        yield (reason,), count


ENGINE: Final = ("engine",)
METRICS: Final = (
    Series("faser_uptime_seconds", "gauge", "Since the sidecar started.", (), _whole(lambda s: s.uptime_s)),
    Series("faser_engines", "gauge", "Engines that are known.", (), _whole(lambda s: len(s.engines))),
    Series("faser_link_received_total", "counter", "Frames read.", (), _whole(lambda s: s.link.received)),
    Series("faser_link_sent_total", "counter", "Frames handed to the socket.", (), _whole(lambda s: s.link.sent)),
    Series("faser_link_dropped_total", "counter", "Frames dropped, by reason.", ("reason",), _dropped),
    Series("faser_link_disconnects_total", "counter", "Connections that ended.", (),
           _whole(lambda s: s.link.disconnects)),
    Series("faser_store_written_total", "counter", "Entries in the telemetry file.", (),
           _whole(lambda s: s.store.written)),
    Series("faser_store_dropped_total", "counter", "Entries dropped.", (), _whole(lambda s: s.store.dropped)),
    Series("faser_store_queued", "gauge", "Entries that wait for the disk.", (), _whole(lambda s: s.store.queued)),
    Series("faser_store_failed", "gauge", "1: recording has stopped.", (),
           _whole(lambda s: float(bool(s.store.error)))),
    Series("faser_store_file_bytes", "gauge", "Size of the telemetry file.", (), _whole(lambda s: s.store.file_bytes)),
    Series("faser_store_log_bytes", "gauge", "Size of the write-ahead log beside it.", (),
           _whole(lambda s: s.store.log_bytes)),
    Series("faser_store_pinned_seconds", "gauge", "Since a reader keeps the log from being cut; 0: none does.", (),
           _whole(lambda s: s.store.pinned_s)),
    Series("faser_audit_written_total", "counter", "Decisions in the audit file.", (),
           _whole(lambda s: s.audit.written)),
    Series("faser_audit_dropped_total", "counter", "Decisions that are in no audit file.", (),
           _whole(lambda s: s.audit.dropped)),
    Series("faser_audit_failures_total", "counter", "Writes of the audit file that failed.", (),
           _whole(lambda s: s.audit.failures)),
    Series("faser_audit_failed", "gauge", "1: the last write of the audit file failed.", (),
           _whole(lambda s: float(bool(s.audit.error)))),
    Series("faser_modes_unsaved", "gauge", "1: switched modes will not survive a restart.", (),
           _whole(lambda s: float(bool(s.mode_error)))),
    Series("faser_engine_info", "gauge", "1, with what the engine is.",
           ("engine", "name", "model", "method", "device", "vllm_version"), _info),
    Series("faser_engine_mode", "gauge", "1 for the mode that holds.", ("engine", "mode"),
           _one_of(MODES, lambda e: e.steering.mode)),
    Series("faser_engine_stance", "gauge", "1 for the guard's stance.", ("engine", "stance"),
           _one_of(STANCES, lambda e: e.steering.stance)),
    Series("faser_engine_presence", "gauge", "1 for the engine's presence.", ("engine", "presence"),
           _one_of(PRESENCES, lambda e: e.presence)),
    Series("faser_engine_not_steered_total", "counter", "Records not decided on, by stance and reason.",
           ("engine", "reason"), _not_steered),
    Series("faser_engine_envelope_ratio", "gauge", "Tokens/s over those of no speculation.", ENGINE,
           _each(lambda e: e.steering.envelope_ratio)),
    Series("faser_engine_lag_seconds", "gauge", "Of the newest record behind the quickest.", ENGINE,
           _each(lambda e: e.steering.lag_s)),
    Series("faser_engine_running_requests", "gauge", "Requests in the batch.", ENGINE, _each(lambda e: e.running)),
    Series("faser_engine_waiting_requests", "gauge", "Requests that wait.", ENGINE, _each(lambda e: e.waiting)),
    Series("faser_engine_kv_usage_ratio", "gauge", "Used share of the KV cache.", ENGINE, _each(lambda e: e.kv_usage)),
    Series("faser_engine_tokens_per_second", "gauge", "Emitted, over 5 s.", ENGINE, _each(lambda e: e.tokens_per_s)),
    Series("faser_engine_steps_per_second", "gauge", "Over 5 s.", ENGINE, _each(lambda e: e.steps_per_s)),
    Series("faser_engine_step_seconds", "gauge", "Mean over 5 s.", ENGINE, _each(lambda e: e.step_ms / 1e3)),
    Series("faser_engine_adapter_seconds", "gauge", "CPU time of the plugin in a step.", ENGINE,
           _each(lambda e: e.adapter_us / 1e6)),
    Series("faser_engine_acceptance_ratio", "gauge", "Accepted / verified draft tokens, over 5 s.", ENGINE,
           _each(lambda e: e.acceptance_rate)),
    Series("faser_engine_position_acceptance_ratio", "gauge", "The same by draft position.", ("engine", "position"),
           _positions),
    Series("faser_engine_draft_length_mean", "gauge", "Drafted tokens per request and step, over 5 s.", ENGINE,
           _each(lambda e: e.mean_draft_length)),
    Series("faser_engine_draft_length_requests", "gauge", "Request-steps by drafted tokens, over 5 s.",
           ("engine", "length"), _lengths),
    Series("faser_engine_lease_ratio", "gauge", "Share of steps under our lease, over 5 s.", ENGINE,
           _each(lambda e: e.lease_share)),
    Series("faser_engine_lease_age_seconds", "gauge", "Of the lease in force; absent: the default holds.", ENGINE,
           _each(lambda e: e.lease_age_s)),
    Series("faser_engine_last_record_age_seconds", "gauge", "Since a record came; absent: none yet.", ENGINE,
           _each(lambda e: e.last_record_age_s)),
    Series("faser_engine_records_total", "counter", "Records taken in.", ENGINE, _each(lambda e: e.records)),
    Series("faser_engine_lost_records_total", "counter", "Records missing.", ENGINE, _each(lambda e: e.lost_records)),
    Series("faser_engine_late_records_total", "counter", "Out of order or twice.", ENGINE,
           _each(lambda e: e.late_records)),
    Series("faser_engine_dropped_total", "counter", "Records the engine could not send.", ENGINE,
           _each(lambda e: e.engine_dropped)),
    Series("faser_engine_rejected_total", "counter", "Our messages the engine refused.", ENGINE,
           _each(lambda e: e.engine_rejected)),
    Series("faser_engine_decisions_total", "counter", "Decisions made.", ENGINE, _each(lambda e: e.decisions)),
    Series("faser_engine_unsent_total", "counter", "Decisions the socket did not take.", ENGINE,
           _each(lambda e: e.sends_dropped)),
    Series("faser_engine_failures_total", "counter", "Records on which deciding failed.", ENGINE,
           _each(lambda e: e.failures)),
    Series("faser_engine_clamped_total", "counter", "Decisions in which the policy asked for what cannot be had.",
           ENGINE, _each(lambda e: e.clamped)),
    Series("faser_engine_sat_out", "gauge", "Requests without drafts: too long for the drafter's context.",
           ENGINE, _each(lambda e: e.sat_out)),
    Series("faser_engine_miscounted_total", "counter", "Draft tokens counted otherwise than by vLLM's own counters.",
           ENGINE, _each(lambda e: e.miscounted)),
    Series("faser_engine_handed_over_total", "counter", "Observations a learned policy left to price.", ENGINE,
           _each(lambda e: e.handed_over)),
    Series("faser_engine_unverified_tokens_total", "counter", "Draft tokens drawn and dropped unverified.", ENGINE,
           _each(lambda e: e.unverified_tokens)),
    Series("faser_engine_prune_steps_total", "counter", "Steps in which exit heads looked at the drafts.", ENGINE,
           _each(lambda e: e.pruning.steps)),
    Series("faser_engine_pruned_rows_total", "counter", "Draft rows that left the target's forward pass.", ENGINE,
           _each(lambda e: e.pruning.pruned_rows)),
    Series("faser_engine_saved_rows_total", "counter", "The same, each as the share of the layers it was spared.",
           ENGINE, _each(lambda e: e.pruning.saved_rows)),
    Series("faser_engine_wrongly_pruned_total", "counter", "Drafts cut at a token that was then accepted.", ENGINE,
           _each(lambda e: e.pruning.wrongly_pruned)),
    Series("faser_engine_prune_seconds_total", "counter", "Spent on deciding which rows leave, and cutting.", ENGINE,
           _each(lambda e: e.pruning.spent_s)),
    Series("faser_decision_p50_seconds", "gauge", "Median time to decide.", ENGINE,
           _each(lambda e: e.decision_us_p50 / 1e6)),
    Series("faser_decision_p99_seconds", "gauge", "Its 99th percentile.", ENGINE,
           _each(lambda e: e.decision_us_p99 / 1e6)),
)  # fmt: skip


class _Families(Collector):
    """One snapshot as Prometheus's families."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        for figure in METRICS:
            kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
            family = kind(figure.name, figure.help, labels=figure.labels)
            for labels, value in figure.of(self._snapshot):
                family.add_metric(labels, value)
            yield family


def exposition(snapshot: Snapshot) -> bytes:
    """Return every metric in the text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(snapshot))
    return generate_latest(registry)
