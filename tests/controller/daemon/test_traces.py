"""Decisions as OpenTelemetry spans: what they say, that OTLP/HTTP gets them, that no collector holds deciding up."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from faser.controller.config import Config, TraceConfig
from faser.controller.daemon import spans
from faser.controller.daemon.daemon import Daemon
from faser.controller.daemon.reload import prepare
from faser.controller.daemon.span_notes import StageClock, TraceNote
from faser.controller.daemon.spans import SpanWriter
from faser.controller.errors import ConfigError, UsageError
from faser.engine_adapter.protocol import ActionSet

STAGES = ("observe", "decide", "send", "learn", "record")


@pytest.fixture(autouse=True)
def _no_settings_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def note(make_record: Any) -> TraceNote:
    watch = StageClock()
    watch.lap("decide")
    action = ActionSet(
        boot_id="boot-1", epoch=1, sequence=1, valid_until_step=9, valid_until_s=9.0, default_length=0, handles=[],
        lengths=[], price=0.5, split=None, frontier=None, prune=None, mode="active",
    )  # fmt: skip
    return TraceNote("model@host", make_record("boot-1", 1), action, "price", "why", 12, 4, 0, 0.0, True, watch)


@pytest.fixture
def writer() -> Iterator[Callable[..., SpanWriter]]:
    """Return a function that makes a writer; it is closed in the end."""
    made: list[SpanWriter] = []

    def make(exporter: SpanExporter, **settings: Any) -> SpanWriter:
        made.append(SpanWriter(TraceConfig(True, **settings), exporter, flush_s=0.01))
        return made[-1]

    yield make
    for each in made:
        each.close(0.1)


class Stubborn(SpanExporter):
    """Raises, fails or waits, as it is told."""

    def __init__(self) -> None:
        self.answer: SpanExportResult | Exception = SpanExportResult.SUCCESS
        self.may_go_on, self.is_asked = threading.Event(), threading.Event()
        self.may_go_on.set()
        self.exports = 0

    def export(self, batch: Any) -> SpanExportResult:
        self.is_asked.set()
        self.may_go_on.wait()
        self.exports += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def shutdown(self) -> None:
        self.may_go_on.set()


def test_a_decision_is_a_span_that_names_no_request(
    start_daemon: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = InMemorySpanExporter()
    monkeypatch.setattr(spans, "OTLPSpanExporter", lambda: kept)
    daemon = start_daemon(trace=TraceConfig(enabled=True))
    engine = make_engine()
    engine.hello()
    for _ in range(3):
        engine.step()
        engine.action()
    daemon.stop()
    finished = kept.get_finished_spans()
    assert [span.name for span in finished] == ["faser.decide"] * 3
    assert len({span.context.trace_id for span in finished}) == 3
    for number, span in enumerate(finished, 1):
        told = dict(span.attributes)
        expected = {
            "faser.boot_id": "boot-1", "faser.mode": "active", "faser.policy": "fixed:3",
            "faser.reason": "policy fixed:3",
            "faser.step": number, "faser.sequence": number, "faser.running": 4, "faser.waiting": 0, "faser.requests": 4,
            "faser.lengths_sum": 12, "faser.is_sent": True, "faser.backlog": 0,
        }  # fmt: skip
        assert told | expected == told
        assert told["faser.engine"].startswith("target@")
        stages_ms = [told.pop(f"faser.stage.{stage}_ms") for stage in STAGES]
        assert min(stages_ms) > 0
        assert (span.end_time - span.start_time) / 1e6 == pytest.approx(sum(stages_ms), abs=0.001)
        assert not [value for value in told.values() if "req-" in str(value)]
        assert not [name for name in told if "handle" in name or "request_id" in name]
        assert span.resource.attributes["service.name"] == "faser"


def test_traces_are_off_unless_asked_for_and_cost_no_import_then(tmp_path: Path) -> None:
    assert TraceConfig().enabled is False
    code = (
        "import sys; from faser.controller.cli import main as cli\n"
        "from faser.controller.daemon import ledger, sidecar\n"
        "from faser.controller.config import Config\n"
        "assert ledger.open_traces(Config().trace) is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "[]"


def test_without_the_packages_one_line_says_what_to_install(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "faser.controller.daemon.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(UsageError) as raised:
        Daemon(changed(config, trace=TraceConfig(enabled=True)))
    assert str(raised.value) == (
        "trace.enabled is set, but opentelemetry.exporter.otlp.proto.http.trace_exporter is not installed; "
        "expected the extra otel; pip install 'faser-vllm[otel]'"
    )


def changed(config: Config, **parts: Any) -> Config:
    return dataclasses.replace(config, **parts)


def test_a_running_sidecar_refuses_to_change_it(config: Config) -> None:
    for trace in (TraceConfig(True), TraceConfig(ratio=0.5), TraceConfig(queue_spans=7)):
        with pytest.raises(ConfigError, match="restart the sidecar"):
            prepare(config, changed(config, trace=trace), {})


@pytest.mark.parametrize(("ratio", "least", "most"), [(0.0, 0, 0), (0.5, 100, 300), (1.0, 400, 400)])
def test_a_share_of_the_decisions_is_traced(writer: Any, note: TraceNote, ratio: float, least: int, most: int) -> None:
    kept = InMemorySpanExporter()
    traces = writer(kept, ratio=ratio)
    for _ in range(400):
        traces.put(note)
    traces.close()
    assert least <= len(kept.get_finished_spans()) <= most
    assert traces.dropped == 0


def test_the_standard_variables_come_first(writer: Any, note: TraceNote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "faser-east")
    kept, none = InMemorySpanExporter(), InMemorySpanExporter()
    traces = writer(kept)
    traces.put(note)
    traces.close()
    (span,) = kept.get_finished_spans()
    assert span.resource.attributes["service.name"] == "faser-east"
    assert span.resource.attributes["deployment.environment"] == "lab"
    for variable, value in (("OTEL_TRACES_SAMPLER", "always_off"), ("OTEL_SDK_DISABLED", "true")):
        with monkeypatch.context() as only:
            only.setenv(variable, value)
            traces = writer(none)
            traces.put(note)
            traces.close()
        assert none.get_finished_spans() == ()


def test_what_a_stuck_collector_leaves_no_room_for_is_dropped_and_counted(writer: Any, note: TraceNote) -> None:
    exporter = Stubborn()
    exporter.may_go_on.clear()
    traces = writer(exporter, queue_spans=8)
    traces.put(note)
    assert exporter.is_asked.wait(10)  # the writer hangs in it from here on
    for _ in range(100):
        traces.put(note)  # returns, or this test hangs
    assert traces.dropped == 92
    exporter.may_go_on.set()
    traces.close()
    assert (traces.exported, traces.dropped) == (9, 92)


@pytest.mark.parametrize("answer", [SpanExportResult.FAILURE, RuntimeError("planted")])
def test_a_collector_that_fails_is_told_once_and_may_come_back(
    writer: Any, note: TraceNote, caplog: pytest.LogCaptureFixture, eventually: Any, answer: Any
) -> None:
    caplog.set_level(logging.INFO, "faser.controller.daemon.spans")
    exporter = Stubborn()
    exporter.answer = answer
    traces = writer(exporter)
    for number in range(1, 4):
        traces.put(note)
        eventually(lambda: exporter.exports == number, "another attempt")  # noqa: B023 - called at once
    exporter.answer = SpanExportResult.SUCCESS
    traces.put(note)
    eventually(lambda: traces.exported == 1, "the collector is back")
    traces.close()
    said = [entry.getMessage() for entry in caplog.records]
    assert [text.split(",")[0] for text in said[:1]] == ["traces do not arrive"]
    assert said[1:] == ["traces arrive again; 3 were dropped", "traces: 1 spans exported, 3 dropped"]


# --- over real sockets ---


class Collector:
    """An OTLP/HTTP endpoint: keeps what it was sent; `is_stuck` accepts and never answers."""

    def __init__(self, is_stuck: bool = False) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.may_answer = threading.Event()
        if not is_stuck:
            self.may_answer.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.requests.append(
                    (self.path, {name.lower(): value for name, value in self.headers.items()}, body)
                )
                collector.may_answer.wait()
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def spans(self) -> list[dict[str, Any]]:
        found = []
        for _, _, body in list(self.requests):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    found += [{entry.key: entry.value for entry in span.attributes} for span in scope.spans]
        return found

    def close(self) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Callable[..., Collector]]:
    made: list[Collector] = []

    def make(**options: Any) -> Collector:
        made.append(Collector(**options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_sidecar_sends_its_decisions_over_otlp_http(
    collector: Any, make_engine: Any, config: Config, tmp_path: Path, eventually: Any
) -> None:
    endpoint = collector()
    base = {name: value for name, value in os.environ.items() if not name.startswith(("FASER_", "OTEL_"))}
    environment = base | {
        "FASER_ENDPOINT": config.link.endpoint, "FASER_MODE_STATE": str(tmp_path / "modes.json"),
        "FASER_POLICY": "fixed:3", "FASER_GUARD_STALE_MS": "600000", "XDG_CONFIG_HOME": str(tmp_path),
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint.url, "OTEL_EXPORTER_OTLP_HEADERS": "x-scope=lab",
    }  # fmt: skip
    code = "from faser.controller.cli.main import main; main()"
    command = [sys.executable, "-P", "-c", code, "sidecar", "--trace", "--no-record"]
    sidecar = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        engine = make_engine()
        engine.hello()
        engine.step()
        engine.action(60.0)
        for _ in range(4):
            engine.step()
            engine.action()
        eventually(lambda: len(endpoint.spans()) == 5, "five spans at the collector")
    finally:
        sidecar.send_signal(signal.SIGTERM)
        said = sidecar.communicate(timeout=30)[1]
    assert sidecar.returncode == 0
    assert "traces: 5 spans exported, 0 dropped" in said
    path, headers, _ = endpoint.requests[0]
    assert (path, headers["content-type"], headers["x-scope"]) == ("/v1/traces", "application/x-protobuf", "lab")
    assert [span["faser.step"].int_value for span in endpoint.spans()] == [1, 2, 3, 4, 5]
    assert {span["faser.lengths_sum"].int_value for span in endpoint.spans()} == {12}
    assert not [body for _, _, body in endpoint.requests if b"req-" in body]


@pytest.mark.parametrize("is_stuck", [False, True], ids=["refused", "silent"])
def test_deciding_goes_on_without_a_collector(
    collector: Any, start_daemon: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch, is_stuck: bool
) -> None:
    endpoint = collector(is_stuck=is_stuck)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.url if is_stuck else "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    monkeypatch.setattr(spans, "FLUSH_S", 0.01)
    daemon = start_daemon(trace=TraceConfig(enabled=True, queue_spans=16))
    engine = make_engine()
    engine.hello()
    for number in range(1, 201):
        engine.step()
        assert engine.action().sequence == number
    traces = daemon.daemon._ledger.traces
    assert len(traces._queue) <= 16
    begun_s = time.monotonic()
    daemon.stop()
    assert time.monotonic() - begun_s < 9.0  # two seconds for what waits, one to give up, and some for this machine
    assert traces.exported == 0
    assert traces.dropped >= 100
    assert is_stuck or not traces._thread.is_alive()  # it does not wait for its next attempt
