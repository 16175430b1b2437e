"""The HTTP side over real sockets: who may ask, what is answered, and that it survives a sidecar that hangs."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import faser
from faser.controller.config import Config, HttpConfig
from faser.controller.daemon import web
from faser.controller.daemon.logs import JsonFormatter
from faser.controller.daemon.metrics import METRICS, exposition
from faser.controller.daemon.systemd import Notifier
from faser.controller.daemon.web import MAX_CONNECTIONS, Listener, WebServer
from faser.controller.errors import ConfigError, EndpointError
from faser.controller.link.ask import ask

Start = Callable[..., Any]
TEMPLATES = Path(faser.__file__).parent / "controller" / "daemon" / "page"
TOKEN = "a-token-of-enough-characters"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


@contextmanager
def served(config: Config, token_file: Path | None = None) -> Iterator[WebServer]:
    server = WebServer(HttpConfig("127.0.0.1:0", str(token_file or "")), config.link)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def server(start_daemon: Start, make_engine: Any, config: Config) -> Iterator[WebServer]:
    start_daemon()
    engine = make_engine()
    engine.hello()
    engine.step()
    engine.action()
    with served(config) as made:
        yield made


def fetch(
    server: WebServer, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode(), dict(reply.getheaders())
    finally:
        connection.close()


def test_status_health_and_readiness_are_json(server: WebServer) -> None:
    assert fetch(server, "/healthz")[:2] == (200, '{"status":"ok"}')
    assert json.loads(fetch(server, "/readyz?engines=1&recording=1")[1])["ready"] is True
    code, body, _ = fetch(server, "/readyz?engines=2")
    assert (code, json.loads(body)["missing"]) == (503, ["engines"])
    assert fetch(server, "/readyz?engines=many")[0] == 400
    status = json.loads(fetch(server, "/status")[1])
    assert status["engines"][0]["last_step"]["lengths"] == [3, 3, 3, 3]


def test_metrics_are_what_the_table_says_and_carry_no_request_id(server: WebServer, config: Config) -> None:
    code, body, headers = fetch(server, "/metrics")
    assert (code, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families = {family.name: family for family in text_string_to_metric_families(body)}
    assert set(families) == {figure.name.removesuffix("_total") for figure in METRICS}
    assert all(family.documentation for family in families.values())
    samples = {(s.name, *sorted(s.labels.values())): s.value for f in families.values() for s in f.samples}
    assert samples["faser_engine_records_total", "boot-1"] == 1
    assert samples["faser_engine_mode", "active", "boot-1"] == 1
    assert samples["faser_engine_mode", "boot-1", "off"] == 0
    assert samples["faser_engine_draft_length_requests", "3", "boot-1"] == 4
    assert "req-" not in body
    assert exposition(ask(config.link)).count(b"# HELP") == len(METRICS)


def test_metric_names_follow_the_conventions() -> None:
    for figure in METRICS:
        assert re.fullmatch(r"faser_[a-z0-9_]+", figure.name)
        assert not re.search(r"_(ms|us|percent)$", figure.name)


def test_the_page_loads_its_parts_from_here_and_runs_no_other_code(server: WebServer) -> None:
    code, page, headers = fetch(server, "/")
    assert code == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert re.findall(r"https?://", page) == []
    sources = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert sources == ["/icon.svg", "/page.css", "/page.js"]
    for source in sources:
        assert fetch(server, source)[0] == 200
    assert re.findall(r"<script(?![^>]*src=)|\son\w+=|style=", page) == []
    script = (TEMPLATES / "page.js").read_text()
    assert re.findall(r"innerHTML|insertAdjacentHTML|document\.write|eval\(|https?://", script) == []


def test_every_element_and_field_that_the_script_reads_exists(server: WebServer) -> None:
    script, page = (TEMPLATES / "page.js").read_text(), (TEMPLATES / "page.html").read_text()
    named = set(re.findall(r'(?:byId|surface|curves|rows|legend)\("([a-z-]+)"', script))
    assert named <= set(re.findall(r'id="([a-z-]+)"', page))
    engine = json.loads(fetch(server, "/status")[1])["engines"][0]
    assert set(re.findall(r"\bengine\.(\w+)", script)) <= set(engine)
    assert set(re.findall(r"\bsteering\.(\w+)", script)) <= set(engine["steering"])
    assert set(re.findall(r"\blast_step\.(\w+)", script)) <= set(engine["last_step"])
    assert set(re.findall(r'"(\w+_ms)"', script)) <= set(engine["last_step"])


def test_events_stream_snapshots(server: WebServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", "/events")
    reply = connection.getresponse()
    assert reply.getheader("Content-Type") == "text/event-stream"
    for _ in range(3):
        assert json.loads(reply.readline().removeprefix(b"data: "))["engines"][0]["boot_id"] == "boot-1"
        assert reply.readline() == b"\n"
    connection.close()


@pytest.mark.parametrize(
    ("host", "code"),
    [("127.0.0.1:9478", 200), ("localhost", 200), ("[::1]:1", 200), ("evil.example:9478", 403), ("", 403)],
)
def test_a_name_that_was_pointed_at_loopback_is_refused(server: WebServer, host: str, code: int) -> None:
    assert fetch(server, "/status", Host=host)[0] == code


def test_without_a_token_nothing_can_be_switched(server: WebServer, config: Config) -> None:
    code, body, _ = fetch(server, "/mode", "POST", b'{"mode":"off"}')
    assert (code, "http.token_file" in body) == (403, True)
    assert ask(config.link).modes == {}


def test_with_a_token_only_its_bearers_see_and_switch(
    start_daemon: Start, make_engine: Any, config: Config, token_file: Path
) -> None:
    start_daemon()
    make_engine().hello()
    with served(config, token_file) as server:
        for path in ("/status", "/metrics", "/events"):
            assert fetch(server, path)[0] == 401
            assert fetch(server, path, Authorization="Bearer wrong")[0] == 401
        assert [fetch(server, path)[0] for path in ("/healthz", "/readyz", "/")] == [200, 200, 200]
        authorised = {"Authorization": f"Bearer {TOKEN}"}
        assert fetch(server, "/status", **authorised)[0] == 200
        assert fetch(server, "/mode", "POST", b'{"mode":"off"}')[0] == 401
        for body in (b"", b"{}", b'{"mode":"loud"}', b"[1]", b"\xff"):
            assert fetch(server, "/mode", "POST", body, **authorised)[0] == 400
        assert fetch(server, "/mode", "POST", b'{"mode":"off","engine":"boot-9"}', **authorised)[0] == 409
        assert fetch(server, "/mode", "POST", b"x" * 10_000, **authorised)[0] == 413
        code, body, _ = fetch(server, "/mode", "POST", b'{"mode":"advisory","engine":"*"}', **authorised)
        assert (code, json.loads(body)["modes"]) == (200, {"*": "advisory"})
    assert ask(config.link).modes == {"*": "advisory"}


def test_what_is_no_request_is_refused_in_one_line_and_the_log_stays_clean(
    start_daemon: Start, config: Config, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start_daemon()
    with served(config, token_file) as server:
        for garbage in (b"\xff" * 99, b"GET /status\tHTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"):
            with socket.create_connection(("127.0.0.1", server.port)) as raw:
                raw.sendall(garbage + b"\r\n\r\n")
                assert b" 400 " in raw.recv(99)
        assert fetch(server, "/status", Authorization="Bearer \xff\xfe")[0] == 401
        authorised = {"Authorization": f"Bearer {TOKEN}"}
        squeezed = authorised | {"Content-Encoding": "gzip"}
        assert fetch(server, "/mode", "POST", b"no gzip at all", **squeezed)[0] == 400
        for nameless in ("", "x" * 701):
            body = json.dumps({"mode": "off", "engine": nameless}).encode()
            code, body_, _ = fetch(server, "/mode", "POST", body, **authorised)
            assert (code, "expected one of up to 700" in body_) == (409, True)
        assert [fetch(server, path, **authorised)[0] for path in ("/nowhere", "/mode")] == [404, 405]
    assert caplog.records == []


def test_a_bug_in_an_answer_is_logged_once_and_answered(
    server: WebServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(web, "exposition", lambda snapshot: 1 / 0)
    for _ in range(3):
        code, body, _ = fetch(server, "/metrics")
        assert (code, "log has its traceback" in body) == (500, True)
    (line,) = [record for record in caplog.records if record.exc_info]
    assert "HTTP request failed" in line.message


def test_a_crowd_that_says_nothing_neither_keeps_others_out_nor_takes_every_descriptor(server: WebServer) -> None:
    with ExitStack() as crowd:
        for _ in range(4 * MAX_CONNECTIONS):
            crowd.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
        assert fetch(server, "/healthz")[0] == 200
        held = [name for name in _descriptors() if name.startswith("socket:")]
        ours = 4 * MAX_CONNECTIONS  # the crowd's own ends are in this process, too
        assert len(held) - ours < 2 * MAX_CONNECTIONS + 20
    assert fetch(server, "/healthz")[0] == 200


def _descriptors() -> list[str]:
    """What this process's descriptors name; other threads may close one between the listing and the look."""
    names: list[str] = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            names.append(os.readlink(path))
    return names


def test_a_sidecar_that_is_gone_is_503(start_daemon: Start, config: Config) -> None:
    daemon = start_daemon()
    with served(config) as server:
        assert fetch(server, "/healthz")[0] == 200
        daemon.stop()
        server._newest = None
        for path in ("/healthz", "/readyz", "/metrics", "/status"):
            assert fetch(server, path)[0] == 503


@pytest.mark.parametrize(
    ("listen", "error"),
    [("0.0.0.0:0", EndpointError), ("example.org:80", EndpointError), ("127.0.0.1", ConfigError), ("", ConfigError),
     ("127.0.0.1:99999", ConfigError)],
)  # fmt: skip
def test_an_address_others_reach_needs_a_token(listen: str, error: type[Exception], token_file: Path) -> None:
    with pytest.raises(error):
        Listener.of(HttpConfig(listen))
    if error is EndpointError:
        assert Listener.of(HttpConfig(listen, str(token_file))).token == TOKEN


@pytest.mark.parametrize(("content", "mode"), [("short", 0o600), (TOKEN, 0o644), ("two words and more text", 0o600)])
def test_a_token_that_is_short_or_open_to_others_is_refused(tmp_path: Path, content: str, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="mode 0600"):
        Listener.of(HttpConfig("127.0.0.1:0", str(path)))


def test_a_port_in_use_is_a_clear_error(config: Config) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(EndpointError, match="a free address"):
            WebServer(HttpConfig(f"127.0.0.1:{holder.getsockname()[1]}"), config.link)


def test_systemd_hears_ready_alive_and_stopping(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "2000000"})
        notifier.ready()
        for now_s in (10.0, 10.5, 11.0, 11.9):
            notifier.beat(now_s)
        notifier.stopping()
        systemd.setblocking(False)
        assert [systemd.recv(99) for _ in range(4)] == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1", b"STOPPING=1"]
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "x"}).ready()
    Notifier({}).beat(1.0)


def test_json_logs_are_one_object_per_line() -> None:
    record = logging.LogRecord("faser.x", logging.WARNING, __file__, 1, "two\nlines of %s", ("text",), None)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line) | {"time_s": 0} == {
        "time_s": 0, "level": "warning", "logger": "faser.x", "message": "two\nlines of text",
    }  # fmt: skip
