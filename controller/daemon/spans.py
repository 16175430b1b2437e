"""Decisions as OpenTelemetry spans, sent over OTLP/HTTP by a thread; the standard OTEL_* variables say where to.

Opened by controller/daemon/daemon.py when `trace.enabled` is set. The loop's part is an append to a bounded
deque: nothing of the SDK runs in it. What a slow or dead collector leaves no room for is dropped and counted. No
request is named.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import deque
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_TRACES_SAMPLER
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from ... import __version__
from ..config import TraceConfig
from .span_notes import TraceNote

logger = logging.getLogger(__name__)

SPAN: Final = "faser.decide"
BATCH: Final = 512  # spans in one message
FLUSH_S: Final = 0.5
CLOSE_S: Final = 2.0
GIVE_UP_S: Final = 1.0  # once the exporter was told to stop trying

Attribute = str | int | float | bool


def attributes_of(note: TraceNote) -> dict[str, Attribute]:
    """Return what a span says of a decision; durations of stages in ms."""
    record, action = note.record, note.action_set
    told: dict[str, Attribute] = {
        "faser.engine": note.engine, "faser.boot_id": action.boot_id, "faser.mode": action.mode,
        "faser.policy": note.policy, "faser.reason": note.reason, "faser.step": record.step,
        "faser.sequence": action.sequence, "faser.running": record.running, "faser.waiting": record.waiting,
        "faser.requests": note.requests, "faser.lengths_sum": note.lengths_sum, "faser.price": action.price or 0.0,
        "faser.backlog": note.backlog, "faser.is_sent": note.is_sent, "faser.lag_ms": note.lag_s * 1e3,
        "faser.engine_step_ms": record.step_s * 1e3,
    }  # fmt: skip
    told |= {f"faser.stage.{stage}_ms": took_ns / 1e6 for stage, took_ns in note.watch.stages_ns}
    return {name: value for name, value in told.items() if not isinstance(value, float) or math.isfinite(value)}


class _Finished(SpanProcessor):
    """Collects the spans that the sampler took; only this file's thread touches it."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class SpanWriter:
    """Takes decisions in and exports them.

    :param exporter: where spans go; OTLP/HTTP as OTEL_EXPORTER_OTLP_* say unless given
    """

    def __init__(self, config: TraceConfig, exporter: SpanExporter | None = None, flush_s: float = FLUSH_S) -> None:
        self.dropped = self.exported = 0
        self.is_failing = False
        self._most, self._flush_s = config.queue_spans, flush_s
        self._queue: deque[TraceNote] = deque()
        self._finished = _Finished()
        # The SDK chooses the sampler by itself where OTEL_TRACES_SAMPLER names one.
        sampler = None if os.environ.get(OTEL_TRACES_SAMPLER) else TraceIdRatioBased(config.ratio)
        self._provider = TracerProvider(sampler=sampler, resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(self._finished)
        self._tracer = self._provider.get_tracer("faser", __version__)
        # Each attempt to reach a dead collector is a line of the exporter's: here it is said once.
        logging.getLogger(OTLPSpanExporter.__module__).setLevel(logging.CRITICAL)
        self._exporter = exporter or OTLPSpanExporter()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._write_until_closed, name="faser-traces", daemon=True)
        self._thread.start()

    def put(self, note: TraceNote) -> None:
        """Hand a decision over; never waits."""
        if len(self._queue) >= self._most:
            self.dropped += 1
        else:
            self._queue.append(note)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what waits, at most for `timeout_s`, then make the exporter give up."""
        self._is_stopping.set()
        self._thread.join(timeout_s)
        self._exporter.shutdown()
        self._thread.join(GIVE_UP_S)
        self.dropped += len(self._queue)
        self._provider.shutdown()
        logger.info("traces: %d spans exported, %d dropped", self.exported, self.dropped)

    def _write_until_closed(self) -> None:
        while True:
            is_last = self._is_stopping.wait(self._flush_s)
            while self._queue:
                self._write([self._queue.popleft() for _ in range(min(len(self._queue), BATCH))])
                if self.is_failing and self._is_stopping.is_set():
                    return
            if is_last:
                return

    def _write(self, notes: list[TraceNote]) -> None:
        for note in notes:
            started_ns = note.watch.started_ns
            # An empty context: each decision is a trace of its own.
            span = self._tracer.start_span(SPAN, context=Context(), start_time=started_ns)
            if span.is_recording():
                span.set_attributes(attributes_of(note))
            span.end(started_ns + sum(took_ns for _, took_ns in note.watch.stages_ns))
        spans, self._finished.spans = self._finished.spans, []
        if not spans:
            return
        try:
            has_failed = self._exporter.export(spans) is not SpanExportResult.SUCCESS
        except Exception:  # whatever an exporter raises, the next batch is tried again
            logger.debug("exporting failed", exc_info=True)
            has_failed = True
        if has_failed:
            self.dropped += len(spans)
        else:
            self.exported += len(spans)
        self._tell(has_failed)

    def _tell(self, has_failed: bool) -> None:
        if has_failed and not self.is_failing:
            logger.warning("traces do not arrive, deciding goes on; look at OTEL_EXPORTER_OTLP_ENDPOINT")
        elif self.is_failing and not has_failed:
            logger.info("traces arrive again; %d were dropped", self.dropped)
        self.is_failing = has_failed


def _resource() -> Resource:
    """Return who sends: what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say comes first."""
    name = OTELResourceDetector().detect().attributes.get(SERVICE_NAME, "faser")
    return Resource.create({SERVICE_NAME: name, SERVICE_VERSION: __version__})
