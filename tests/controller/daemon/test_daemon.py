"""The daemon's loop on real sockets and SQLite, against a fake engine that speaks the real protocol."""

import contextlib
import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from faser.controller.config import Config, LinkConfig, PolicyConfig, StoreConfig
from faser.controller.daemon.daemon import Daemon
from faser.controller.decision import session as session_module
from faser.controller.errors import StoreError
from faser.controller.link.ask import ask
from faser.controller.link.engine_router import MAX_INCOMING_BYTES
from faser.controller.replay.replay import replay
from faser.controller.telemetry.schema import open_for_reading
from faser.controller.telemetry.sessions import read_sessions
from faser.engine_adapter.link.engine_link import EngineLink
from faser.engine_adapter.protocol import HEADER, MAX_FRAME_BYTES, VERSION, HelloRequest, Release, encode
from faser.models.policies.policy import PolicyError

Start = Callable[..., Any]
Make = Callable[..., Any]


def test_an_engine_that_introduced_itself_gets_an_action_for_each_record(
    start_daemon: Start, make_engine: Make, config: Config
) -> None:
    start_daemon()
    engine = make_engine()
    engine.hello()
    sequences = []
    for _ in range(5):
        record = engine.step()
        action = engine.action()
        assert action.boot_id == engine.boot_id
        assert (action.default_length, action.valid_until_step) == (3, record.step + config.lease.steps)
        assert action.valid_until_s == pytest.approx(record.time_s + config.lease.ms / 1e3)
        sequences.append(action.sequence)
    assert sequences == sorted(set(sequences))


def test_a_backlog_is_observed_in_order_and_answered_once(start_daemon: Start, make_engine: Make) -> None:
    daemon = start_daemon()
    engine = make_engine()
    engine.hello()
    engine.step()
    engine.action()
    with hold(daemon):
        for _ in range(20):
            engine.step()
        time.sleep(0.05)  # all of them must be in the socket before the loop goes on
    assert engine.action().valid_until_step == engine.counter + 32
    assert engine.is_silent(0.2)
    status = ask(daemon.config.link).engines[0]
    assert (status.records, status.decisions, status.gaps) == (21, 2, 0)


@contextlib.contextmanager
def hold(daemon: Any) -> Iterator[None]:
    """Stop the loop between two rounds."""
    entered, leave = threading.Event(), threading.Event()
    original = daemon.daemon._look_after_engines

    def wait(now_s: float) -> None:
        entered.set()
        leave.wait()

    daemon.daemon._look_after_engines = wait
    assert entered.wait(5.0)
    yield
    daemon.daemon._look_after_engines = original
    leave.set()


def test_a_restarted_daemon_asks_a_known_engine_who_it_is_and_goes_on(start_daemon: Start, make_engine: Make) -> None:
    first = start_daemon()
    engine = make_engine()
    engine.hello()
    engine.step()
    epoch = engine.action().epoch
    first.stop()
    assert engine.receive() == Release(engine.boot_id, epoch)
    start_daemon()
    engine.step()
    question = engine.receive()
    assert isinstance(question, HelloRequest)
    assert question.epoch > epoch
    engine.hello()
    engine.step()
    assert engine.action().epoch == question.epoch


def test_a_sidecar_of_a_host_that_booted_later_takes_an_epoch_above_the_one_that_was_obeyed(
    start_daemon: Start, make_engine: Make, config: Config
) -> None:
    daemon, engine = start_daemon(), make_engine()
    obeyed = daemon.daemon.epoch + 10**15
    engine.hello(obeyed)
    for _ in range(5):
        engine.step()
        epoch = engine.action().epoch
    assert epoch > obeyed
    daemon.stop()
    assert engine.receive() == Release(engine.boot_id, epoch)
    (session,) = read_sessions(open_for_reading(config.store.path))
    assert session.epoch == epoch
    assert (replayed := replay(config.store.path)).is_exact()
    assert replayed.identical == 5


@pytest.mark.parametrize("sign", ["its lease", "its refusals"])
def test_an_engine_that_obeyed_another_sidecar_meanwhile_is_asked_and_steered_above_it(
    start_daemon: Start, make_engine: Make, make_record: Make, sign: str
) -> None:
    start_daemon()
    engine = make_engine()
    engine.hello()
    engine.step()
    obeyed = engine.action().epoch + 10**15
    record = make_record(engine.boot_id, 2)
    if sign == "its lease":
        record.lease_epoch = obeyed
    else:
        record.rejected = 1
    engine.send(record)
    while not isinstance(message := engine.receive(), HelloRequest):
        assert message.epoch < obeyed
    engine.hello(obeyed)
    engine.step(counter=3)
    while (epoch := engine.action().epoch) < obeyed:
        pass
    engine.hello(epoch)  # asked twice: what is known about it holds
    engine.step(counter=4)
    action = engine.action()
    assert (action.epoch, action.sequence) == (epoch, 2)


def test_an_unknown_engine_is_asked_once_per_second_not_per_record(
    start_daemon: Start, make_engine: Make, eventually: Any
) -> None:
    daemon = start_daemon()
    engine = make_engine()
    for _ in range(30):
        engine.step()
    assert isinstance(engine.receive(), HelloRequest)
    assert engine.is_silent(0.2)
    eventually(lambda: ask(daemon.config.link).link.dropped["unknown_engine"] == 30, "all are counted")


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "malformed"),
        (b"hello", "malformed"),
        (HEADER + b"\xc1", "malformed"),
        (HEADER + b"\x92\xa4step\x01", "out_of_bounds"),
        (bytes((HEADER[0], VERSION + 1)) + b"\x90", "wrong_version"),
        (HEADER + bytes(MAX_FRAME_BYTES), "oversized"),
        (bytes(encode(Release("boot-1", 1))), "out_of_bounds"),
    ],
)
def test_a_frame_that_is_no_message_is_counted_by_reason_and_the_loop_goes_on(
    start_daemon: Start, make_engine: Make, frame: bytes, reason: str, eventually: Any
) -> None:
    daemon = start_daemon()
    engine = make_engine()
    engine.hello()
    engine.socket.send(frame)
    engine.step()
    assert engine.action().sequence == 1
    assert ask(daemon.config.link).link.dropped == {reason: 1}


def test_a_frame_beyond_any_bound_costs_its_sender_the_connection_only(
    start_daemon: Start, make_engine: Make, eventually: Any
) -> None:
    daemon = start_daemon()
    engine, neighbour = make_engine(), make_engine(boot_id="boot-2")
    neighbour.hello()
    engine.socket.send(HEADER + bytes(MAX_INCOMING_BYTES))
    eventually(lambda: ask(daemon.config.link).link.disconnects, "a disconnect is counted")
    neighbour.step()
    assert neighbour.action().boot_id == "boot-2"
    engine.hello()
    eventually(lambda: len(ask(daemon.config.link).engines) == 2, "the engine is back")


def test_several_frames_in_one_message_and_foreign_boot_ids_are_dropped(
    start_daemon: Start, make_engine: Make, eventually: Any
) -> None:
    daemon = start_daemon()
    engine = make_engine(identity=b"somebody-else")
    engine.hello()
    engine.socket.send_multipart([b"one", b"two", b"three"])
    honest = make_engine(boot_id="boot-2")
    honest.hello()
    honest.step()
    honest.action()
    eventually(  # the other socket's frames may arrive after the honest engine's
        lambda: ask(daemon.config.link).link.dropped == {"wrong_identity": 1, "multipart": 1}, "both are counted"
    )


def test_gaps_and_late_records_are_counted_and_late_ones_get_no_answer(start_daemon: Start, make_engine: Make) -> None:
    daemon = start_daemon()
    engine = make_engine()
    engine.hello()
    for counter in (1, 2, 6, 4, 6):
        engine.step(counter=counter)
        if counter in (1, 2):
            engine.action()
    assert engine.action().valid_until_step == 6 + 32
    assert engine.is_silent(0.2)
    status = ask(daemon.config.link).engines[0]
    assert (status.gaps, status.lost_records, status.late_records, status.records) == (1, 3, 2, 3)


def test_two_engines_are_steered_apart(start_daemon: Start, make_engine: Make) -> None:
    daemon = start_daemon()
    engines = [make_engine(boot_id=f"boot-{number}") for number in range(2)]
    for engine in engines:
        engine.hello()
        engine.step(requests=3)
    assert [engine.action().boot_id for engine in engines] == ["boot-0", "boot-1"]
    assert [status.running for status in ask(daemon.config.link).engines] == [3, 3]


def test_a_policy_that_raises_leaves_the_engine_to_its_default_and_the_loop_alive(
    start_daemon: Start, make_engine: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*arguments: object) -> None:
        raise ZeroDivisionError

    daemon = start_daemon()
    engine = make_engine()
    engine.hello()
    with monkeypatch.context() as broken:
        broken.setattr(session_module, "decide", explode)
        engine.step()
        assert engine.is_silent(0.2)
    engine.step()
    assert engine.action().sequence == 1
    assert ask(daemon.config.link).engines[0].failures == 1
    assert "deciding failed" in caplog.text


def test_a_fixed_length_beyond_an_engines_buffers_is_refused_for_that_engine(
    start_daemon: Start, make_engine: Make, eventually: Any
) -> None:
    daemon = start_daemon(policy=PolicyConfig(spec="fixed:9"))
    engine = make_engine()
    engine.hello()
    engine.step()
    status = eventually(lambda: ask(daemon.config.link).engines, "the engine is shown")[0]
    assert "expected 0..6" in status.reason
    assert engine.is_silent(0.1)


def test_a_goodbye_and_a_vanished_process_are_noticed(
    start_daemon: Start, make_engine: Make, eventually: Any, config: Config
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    daemon = start_daemon()
    polite, killed = make_engine(), make_engine(boot_id="boot-2", pid=child.pid)
    for engine in (polite, killed):
        engine.hello()
        engine.step()
        engine.action()
    polite.goodbye()
    child.kill()
    wanted = {"boot-1": "stopped", "boot-2": "gone"}
    eventually(lambda: presences(config) == wanted, "both ends are shown")
    child.communicate()
    daemon.stop()
    rows = sqlite3.connect(config.store.path).execute("SELECT kind FROM events WHERE handle IS NULL").fetchall()
    assert {"hello", "goodbye", "gone"} <= {kind for (kind,) in rows}


def test_a_busy_engine_that_falls_silent_is_shown_and_recovers(
    start_daemon: Start, make_engine: Make, eventually: Any, config: Config
) -> None:
    start_daemon(link=dataclasses.replace(config.link, silent_after_s=0.2))
    engine = make_engine()
    engine.hello()
    engine.step()
    eventually(lambda: presences(config) == {"boot-1": "silent"}, "silence is shown")
    engine.step()
    eventually(lambda: presences(config) == {"boot-1": "busy"}, "recovery is shown")
    engine.step(requests=0)
    time.sleep(0.4)
    assert presences(config) == {"boot-1": "idle"}


def presences(config: Config) -> dict[str, str]:
    return {engine.boot_id: engine.presence for engine in ask(config.link).engines}


def test_engines_that_ended_are_forgotten_and_make_room(
    start_daemon: Start, make_engine: Make, eventually: Any, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    start_daemon(link=dataclasses.replace(config.link, max_engines=1))
    first, second = make_engine(), make_engine(boot_id="boot-2")
    first.hello()
    eventually(lambda: presences(config) == {"boot-1": "idle"}, "the first is met")
    second.hello()
    second.hello()
    eventually(lambda: ask(config.link).link.dropped.get("too_many_engines") == 2, "the second is refused, twice")
    assert caplog.text.count("is not served") == 1
    first.goodbye()
    eventually(lambda: presences(config) == {"boot-1": "stopped"}, "the first has gone")
    second.hello()
    eventually(lambda: presences(config) == {"boot-2": "idle"}, "the second takes its place")


def test_records_and_decisions_reach_the_file(start_daemon: Start, make_engine: Make, config: Config) -> None:
    daemon = start_daemon()
    engine = make_engine()
    engine.hello()
    for _ in range(10):
        engine.step()
        engine.action()
    daemon.stop()
    database = sqlite3.connect(config.store.path)
    steps = database.execute("SELECT counter, decision_sequence, decision_is_sent FROM steps ORDER BY id").fetchall()
    assert steps == [(number, number, 1) for number in range(1, 11)]
    assert database.execute("SELECT epoch FROM runs").fetchone() == (daemon.daemon.epoch,)


def test_a_store_that_cannot_be_written_ends_the_start_and_frees_the_endpoint(config: Config) -> None:
    broken = dataclasses.replace(config, store=StoreConfig(path=Path("/proc/nowhere/telemetry.sqlite")))
    with pytest.raises(StoreError, match="cannot be written"):
        Daemon(broken)
    daemon = Daemon(config)
    daemon.close()


def test_an_unknown_policy_ends_the_start(config: Config) -> None:
    with pytest.raises(PolicyError, match="unknown policy 'prize'"):
        Daemon(dataclasses.replace(config, policy=PolicyConfig(spec="prize")))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_gives_the_lease_back_flushes_the_file_and_ends_in_time(
    make_engine: Make, config: Config, number: signal.Signals, sidecar_process: subprocess.Popen[bytes]
) -> None:
    engine = make_engine()
    engine.hello()
    for _ in range(20):
        engine.step()
        epoch = engine.action().epoch
    sidecar_process.send_signal(number)
    assert engine.receive() == Release(engine.boot_id, epoch)
    assert sidecar_process.wait(5.0) == 0
    database = sqlite3.connect(config.store.path)
    assert database.execute("SELECT count(*) FROM steps").fetchone() == (20,)


def test_kill_9_leaves_a_sound_file_and_the_next_sidecar_takes_over_the_socket(
    start_daemon: Start,
    make_engine: Make,
    config: Config,
    eventually: Any,
    sidecar_process: subprocess.Popen[bytes],
) -> None:
    engine = make_engine()
    engine.hello()

    def has_written() -> bool:
        engine.step()
        engine.action()
        return ask(config.link).store.written > 50

    eventually(has_written, "the file grows")
    sidecar_process.kill()
    sidecar_process.wait()
    assert Path(config.link.endpoint.removeprefix("ipc://")).exists(), "the dead one left its socket behind"
    database = sqlite3.connect(config.store.path)
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    counters = [counter for (counter,) in database.execute("SELECT counter FROM steps ORDER BY id")]
    assert counters == list(range(1, len(counters) + 1))
    assert len(counters) >= 50
    database.close()
    start_daemon()
    engine.step()
    assert isinstance(engine.receive(), HelloRequest)


@pytest.fixture
def sidecar_process(config: Config) -> Iterator[subprocess.Popen[bytes]]:
    """A sidecar of its own process that answers; it ends with the test, whatever the test does."""
    environment = {
        **os.environ,
        "FASER_ENDPOINT": config.link.endpoint,
        "FASER_STORE": str(config.store.path),
        "FASER_STORE_FLUSH_S": str(config.store.flush_s),
        "FASER_POLICY": config.policy.spec,
        "FASER_GUARD_STALE_MS": str(config.guard.stale_ms),
        "FASER_GUARD_ENVELOPE_MARGIN": str(config.guard.envelope_margin),
        "FASER_MODE_STATE": str(config.mode.state),
    }
    command = [sys.executable, "-c", "from faser.controller.cli.main import main; main()", "sidecar"]
    with subprocess.Popen(command, env=environment, cwd="/") as process:
        try:
            _wait_for_status(config.link)
            yield process
        finally:
            process.kill()


def _wait_for_status(link: LinkConfig) -> None:
    end_s = time.monotonic() + 60.0
    while True:
        try:
            ask(link, 0.5)
        except Exception:
            assert time.monotonic() < end_s, "the sidecar did not start"
            time.sleep(0.02)
        else:
            return


def test_nothing_is_recorded_when_recording_is_off(start_daemon: Start, make_engine: Make, config: Config) -> None:
    daemon = start_daemon(store=dataclasses.replace(config.store, enabled=False))
    engine = make_engine()
    engine.hello()
    engine.step()
    engine.action()
    assert ask(config.link).store.path == ""
    daemon.stop()
    assert not config.store.path.exists()


def test_neither_end_of_the_link_uses_heartbeats(start_daemon: Start, config: Config) -> None:
    daemon, link = start_daemon(), EngineLink(config.link.endpoint, "boot-h")
    try:
        for socket in (daemon.daemon._router.socket, link._socket):
            assert socket.getsockopt(zmq.HEARTBEAT_IVL) <= 0
            assert socket.getsockopt(zmq.TCP_KEEPALIVE) == 1
    finally:
        link.close()
