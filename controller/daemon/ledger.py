"""What the sidecar writes down: telemetry, the file of decisions, traces, and what rarely happens to an engine.

Owned by the daemon. Each of the three may be off; none of them makes the loop wait.
"""

from __future__ import annotations

import logging
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ... import __version__
from ..config import Config, TraceConfig
from ..decision.audit import AuditFile, audit_event
from ..errors import UsageError
from ..snapshot import AuditStatus, StoreStatus
from ..telemetry.packing import pack_rows
from ..telemetry.retention import Retention
from ..telemetry.store import Entry, NoticeEntry, RunEntry, StepEntry, Store
from .rising_clock import RisingClock

if TYPE_CHECKING:
    from .spans import SpanWriter

logger = logging.getLogger(__name__)


class Ledger:
    """The three writers of one daemon, and the clock by which they date what they write."""

    def __init__(self, config: Config, epoch: int) -> None:
        self.clock = RisingClock()
        self.traces = open_traces(config.trace)
        self._store = self._open_store(config, epoch)
        audit = config.audit
        self.audit = AuditFile(Path(audit.path), audit.max_mb << 20, audit.files) if audit.path else None

    def _open_store(self, config: Config, epoch: int) -> Store | None:
        store = config.store
        if not store.enabled:
            return None
        run = RunEntry(epoch, self.clock.now_ns(), __version__, _effective(config))
        return Store(store.path, run, store.queue_records, store.flush_s, Retention.of(store))

    def follow(self, config: Config, changed: str) -> None:
        """Take on a configuration that was read again, and note it."""
        if self._store is not None:
            self._store.retain(Retention.of(config.store))
        audit_event("reload", is_taken=True, detail=changed)
        self.record(NoticeEntry("", "reload", _effective(config), self.clock.now_ns()))

    def stand_aside(self, until_s: float) -> None:
        """Let the store's thread leave the processor to answers."""
        if self._store is not None:
            self._store.stand_aside(until_s)

    def record(self, entry: Entry) -> None:
        """Queue what is not a step."""
        if self._store is not None:
            self._store.put(entry)

    def record_step(self, entry: StepEntry) -> None:
        """Pack the rows here and let go of them: kept until they are written, they would fill the processor's cache."""
        if self._store is not None:
            entry.rows = pack_rows(entry.record.rows, entry.record.verified_copies)
            entry.record = msgspec.structs.replace(entry.record, rows=[])
            self._store.put(entry)

    def notice(self, boot_id: str, kind: str, detail: str) -> None:
        """Say what became of an engine: in the log, the store and the audit's events."""
        level = logging.WARNING if kind in ("silent", "gone") else logging.INFO
        logger.log(level, "engine %s: %s (%s)", boot_id, kind, detail)
        self.record(NoticeEntry(boot_id, kind, detail, self.clock.now_ns()))
        audit_event("engine", boot_id, kind=kind, detail=detail)

    def store_status(self) -> StoreStatus:
        """Return how the store is."""
        return StoreStatus("", 0, 0, 0, "") if self._store is None else StoreStatus(*astuple(self._store.health()))

    def audit_status(self) -> AuditStatus:
        """Return how the file of decisions is."""
        return AuditStatus() if self.audit is None else self.audit.status()

    def close(self) -> None:
        """Write what waits."""
        for writer in (self.audit, self._store, self.traces):
            if writer is not None:
                writer.close()


def _effective(config: Config) -> str:
    return msgspec.json.encode(config, enc_hook=str).decode()


def open_traces(config: TraceConfig) -> SpanWriter | None:
    """Return where traces go, None if they are off; raise UsageError where OpenTelemetry is not installed."""
    if not config.enabled:
        return None
    try:
        from .spans import SpanWriter
    except ImportError as error:
        raise UsageError(
            f"trace.enabled is set, but {error.name} is not installed",
            "the extra otel",
            "pip install 'faser-vllm[otel]'",
        ) from None
    return SpanWriter(config)
