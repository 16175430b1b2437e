"""The sidecar's figures in Prometheus's format: METRICS is the one list of names, with meaning and labels.

Called by the HTTP side with a status snapshot. The deployment's dashboard and alerts are tested against METRICS;
no label ever holds a request id. Engines that are over leave with their session, so that series do not pile up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...engine_adapter.protocol import Mode
from ..snapshot import AttainmentStatus, EngineStatus, Presence, Snapshot, SourceStatus, Stance

Labels = tuple[str, ...]
Sample = tuple[Labels, float]
MODES: Final[tuple[Mode, ...]] = ("active", "advisory", "canary", "off")
STANCES: Final[tuple[Stance, ...]] = ("steer", "hold", "fallback")
PRESENCES: Final[tuple[Presence, ...]] = ("busy", "idle", "silent", "stopped", "gone")
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Series:
    """One metric: a counter if its name ends in _total; `of` gives its samples from the whole snapshot."""

    name: str
    help: str
    labels: Labels
    of: Callable[[Snapshot], Iterator[Sample]]


def _whole(name: str, help: str, read: Callable[[Snapshot], float]) -> Series:
    return Series(name, help, (), lambda snapshot: iter([((), read(snapshot))]))


def _each(name: str, help: str, read: Callable[[EngineStatus], float | None]) -> Series:
    def samples(snapshot: Snapshot) -> Iterator[Sample]:
        for engine in snapshot.engines:
            if (value := read(engine)) is not None:
                yield (engine.boot_id,), value

    return Series(name, help, ("engine",), samples)


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


def _by_source(read: Callable[[SourceStatus], float | None]) -> Callable[[Snapshot], Iterator[Sample]]:
    def samples(snapshot: Snapshot) -> Iterator[Sample]:
        for engine in snapshot.engines:
            for name, source in engine.sources.items():
                if (value := read(source)) is not None:
                    yield (engine.boot_id, name), value

    return samples


def _by_class(read: Callable[[AttainmentStatus], float]) -> Callable[[Snapshot], Iterator[Sample]]:
    def samples(snapshot: Snapshot) -> Iterator[Sample]:
        for engine in snapshot.engines:
            for name, attained in engine.attainment.items():
                yield (engine.boot_id, name), read(attained)

    return samples


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


METRICS: Final = (
    _whole("faser_uptime_seconds", "Since the sidecar started.", lambda s: s.uptime_s),
    _whole("faser_engines", "Engines that are known.", lambda s: len(s.engines)),
    _whole("faser_link_received_total", "Frames read.", lambda s: s.link.received),
    _whole("faser_link_sent_total", "Frames handed to the socket.", lambda s: s.link.sent),
    Series("faser_link_dropped_total", "Frames dropped, by reason.", ("reason",), _dropped),
    _whole("faser_link_disconnects_total", "Connections that ended.", lambda s: s.link.disconnects),
    _whole("faser_store_written_total", "Entries in the telemetry file.", lambda s: s.store.written),
    _whole("faser_store_dropped_total", "Entries dropped.", lambda s: s.store.dropped),
    _whole("faser_store_queued", "Entries that wait for the disk.", lambda s: s.store.queued),
    _whole("faser_store_failed", "1: recording has stopped.", lambda s: float(bool(s.store.error))),
    _whole("faser_store_file_bytes", "Size of the telemetry file.", lambda s: s.store.file_bytes),
    _whole("faser_store_log_bytes", "Size of the write-ahead log beside it.", lambda s: s.store.log_bytes),
    _whole("faser_store_pinned_seconds", "Since a reader keeps the log from being cut; 0: none does.",
           lambda s: s.store.pinned_s),
    _whole("faser_audit_written_total", "Decisions in the audit file.", lambda s: s.audit.written),
    _whole("faser_audit_dropped_total", "Decisions that are in no audit file.", lambda s: s.audit.dropped),
    _whole("faser_audit_failures_total", "Writes of the audit file that failed.", lambda s: s.audit.failures),
    _whole("faser_audit_failed", "1: the last write of the audit file failed.", lambda s: float(bool(s.audit.error))),
    _whole("faser_modes_unsaved", "1: switched modes will not survive a restart.", lambda s: float(bool(s.mode_error))),
    Series("faser_engine_info", "1, with what the engine is.",
           ("engine", "name", "model", "method", "device", "vllm_version"), _info),
    Series("faser_engine_mode", "1 for the mode that holds.", ("engine", "mode"),
           _one_of(MODES, lambda e: e.steering.mode)),
    Series("faser_engine_stance", "1 for the guard's stance.", ("engine", "stance"),
           _one_of(STANCES, lambda e: e.steering.stance)),
    Series("faser_engine_presence", "1 for the engine's presence.", ("engine", "presence"),
           _one_of(PRESENCES, lambda e: e.presence)),
    Series("faser_engine_not_steered_total", "Records not decided on, by stance and reason.", ("engine", "reason"),
           _not_steered),
    _each("faser_engine_envelope_ratio", "Tokens/s over those of no speculation.", lambda e: e.steering.envelope_ratio),
    _each("faser_engine_lag_seconds", "Of the newest record behind the quickest.", lambda e: e.steering.lag_s),
    _each("faser_engine_running_requests", "Requests in the batch.", lambda e: e.running),
    _each("faser_engine_waiting_requests", "Requests that wait.", lambda e: e.waiting),
    _each("faser_engine_kv_usage_ratio", "Used share of the KV cache.", lambda e: e.kv_usage),
    _each("faser_engine_tokens_per_second", "Emitted, over 5 s.", lambda e: e.tokens_per_s),
    _each("faser_engine_steps_per_second", "Over 5 s.", lambda e: e.steps_per_s),
    _each("faser_engine_step_seconds", "Mean over 5 s.", lambda e: e.step_ms / 1e3),
    _each("faser_engine_adapter_seconds", "CPU time of the plugin in a step.", lambda e: e.adapter_us / 1e6),
    _each("faser_engine_acceptance_ratio", "Accepted / verified draft tokens, over 5 s.", lambda e: e.acceptance_rate),
    Series("faser_engine_position_acceptance_ratio", "The same by draft position.", ("engine", "position"), _positions),
    Series("faser_engine_source_acceptance_ratio", "The same by source: drafter, copies.", ("engine", "source"),
           _by_source(lambda s: s.acceptance_rate)),
    Series("faser_engine_source_waste_ratio", "Its tokens rejected, or drawn in vain, per emitted one, over 5 s.",
           ("engine", "source"), _by_source(lambda s: s.waste)),
    Series("faser_engine_source_requests_ratio", "Share of the decoding requests that verified its drafts, over 5 s.",
           ("engine", "source"), _by_source(lambda s: s.share)),
    Series("faser_engine_source_verified_tokens_total", "Its tokens that were verified.", ("engine", "source"),
           _by_source(lambda s: s.verified_total)),
    Series("faser_engine_source_accepted_tokens_total", "Its tokens that were accepted.", ("engine", "source"),
           _by_source(lambda s: s.accepted_total)),
    Series("faser_engine_objective_finished_total", "Requests with objectives that finished, by class.",
           ("engine", "class"), _by_class(lambda a: a.finished)),
    Series("faser_engine_objective_in_time_total", "Those that kept all of their objectives.", ("engine", "class"),
           _by_class(lambda a: a.in_time)),
    _each("faser_engine_draft_length_mean", "Drafted tokens per request and step, over 5 s.",
          lambda e: e.mean_draft_length),
    Series("faser_engine_draft_length_requests", "Request-steps by drafted tokens, over 5 s.", ("engine", "length"),
           _lengths),
    _each("faser_engine_lease_ratio", "Share of steps under our lease, over 5 s.", lambda e: e.lease_share),
    _each("faser_engine_lease_age_seconds", "Of the lease in force; absent: the default holds.",
          lambda e: e.lease_age_s),
    _each("faser_engine_last_record_age_seconds", "Since a record came; absent: none yet.",
          lambda e: e.last_record_age_s),
    _each("faser_engine_records_total", "Records taken in.", lambda e: e.records),
    _each("faser_engine_lost_records_total", "Records missing.", lambda e: e.lost_records),
    _each("faser_engine_late_records_total", "Out of order or twice.", lambda e: e.late_records),
    _each("faser_engine_dropped_total", "Records the engine could not send.", lambda e: e.engine_dropped),
    _each("faser_engine_rejected_total", "Our messages the engine refused.", lambda e: e.engine_rejected),
    _each("faser_engine_decisions_total", "Decisions made.", lambda e: e.decisions),
    _each("faser_engine_unsent_total", "Decisions the socket did not take.", lambda e: e.sends_dropped),
    _each("faser_engine_failures_total", "Records on which deciding failed.", lambda e: e.failures),
    _each("faser_engine_clamped_total", "Decisions in which the policy asked for what cannot be had.",
          lambda e: e.clamped),
    _each(
        "faser_engine_stages", "Ranks of a pipeline that run layers, where stages can move.",
        lambda e: None if e.stages is None else sum(map(bool, e.stages.layers)),
    ),
    _each(
        "faser_engine_stage_moves_total", "Moves of its stages.",
        lambda e: None if e.stages is None else e.stages.moves,
    ),
    _each("faser_engine_sat_out", "Requests without drafts: too long for the drafter's context.", lambda e: e.sat_out),
    _each("faser_engine_rested", "Requests left out of the last step for those behind their objectives.",
          lambda e: e.rested),
    _each("faser_engine_miscounted_total", "Draft tokens counted otherwise than by vLLM's own counters.",
          lambda e: e.miscounted),
    _each("faser_engine_handed_over_total", "Observations a learned policy left to price.", lambda e: e.handed_over),
    _each("faser_engine_unverified_tokens_total", "Draft tokens drawn and dropped unverified.",
          lambda e: e.unverified_tokens),
    _each("faser_engine_prune_steps_total", "Steps in which exit heads looked at the drafts.",
          lambda e: e.pruning.steps),
    _each("faser_engine_pruned_rows_total", "Draft rows that left the target's forward pass.",
          lambda e: e.pruning.pruned_rows),
    _each("faser_engine_saved_rows_total", "The same, each as the share of the layers it was spared.",
          lambda e: e.pruning.saved_rows),
    _each("faser_engine_wrongly_pruned_total", "Drafts cut at a token that was then accepted.",
          lambda e: e.pruning.wrongly_pruned),
    _each("faser_engine_prune_seconds_total", "Spent on deciding which rows leave, and cutting.",
          lambda e: e.pruning.spent_s),
    _each("faser_decision_p50_seconds", "Median time to decide.", lambda e: e.decision_us_p50 / 1e6),
    _each("faser_decision_p99_seconds", "Its 99th percentile.", lambda e: e.decision_us_p99 / 1e6),
)  # fmt: skip


class _Families(Collector):
    """One snapshot as Prometheus's families."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        for figure in METRICS:
            kind = CounterMetricFamily if figure.name.endswith("_total") else GaugeMetricFamily
            family = kind(figure.name, figure.help, labels=figure.labels)
            for labels, value in figure.of(self._snapshot):
                family.add_metric(labels, value)
            yield family


def exposition(snapshot: Snapshot) -> bytes:
    """Return every metric in the text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(snapshot))
    return generate_latest(registry)
