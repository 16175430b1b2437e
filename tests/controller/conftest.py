"""Fixtures of the controller's tests: a fake engine on a real DEALER socket, a daemon on real sockets and SQLite."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from faser.controller.config import Config, GuardConfig, LinkConfig, ModeConfig, PolicyConfig, StoreConfig
from faser.controller.daemon.daemon import Daemon
from faser.engine_adapter.link.keys import EngineKeys
from faser.engine_adapter.protocol import (
    ActionSet,
    FromController,
    FromEngine,
    Goodbye,
    Hello,
    HelloRequest,
    RequestEvent,
    RequestRow,
    StepRecord,
    decode_from_controller,
    encode,
)

# Started in the background, as by `make test &`, this process ignores Ctrl-C, and what tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DEADLINE_S = 10.0
T = TypeVar("T")


def _eventually(probe: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Return the probe's first true value; fail when the deadline passes without one."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        if value := probe():
            return value
        time.sleep(0.005)
    pytest.fail(f"not within {deadline_s:g} s: {what}")


@pytest.fixture
def eventually() -> Callable[..., object]:
    """Return a function that polls a probe until it is true, and fails when the deadline passes."""
    return _eventually


class FakeEngine:
    """An engine's end of the wire: sends real frames, keeps what comes back."""

    def __init__(
        self,
        endpoint: str,
        boot_id: str = "boot-1",
        identity: bytes | None = None,
        pid: int = 0,
        keys: EngineKeys | None = None,
    ) -> None:
        self.boot_id = boot_id
        self.pid = pid or os.getpid()
        self.counter = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.setsockopt(zmq.ROUTING_ID, identity or boot_id.encode())
        if keys is not None:
            keys.apply(self.socket)
        self.socket.connect(endpoint)

    def send(self, message: FromEngine) -> None:
        self.socket.send(encode(message))

    def hello(
        self,
        epoch: int = 0,
        copy_max: int = 0,
        roster: Sequence[RequestEvent] = (),
        splits: Sequence[str] = ("unsplit",),
    ) -> Hello:
        hello = Hello(
            boot_id=self.boot_id, pid=self.pid, host=socket.gethostname(), adapter_version="0.1.0",
            vllm_version="0.32.0", model="target", device="cpu", runner="v1", is_async=False, method="eagle3",
            drafter="drafter", k_max=6, default_length=0, default_table=[], max_requests=256,
            max_batched_tokens=8192, kv_tokens=100_000, graph_sizes=[], splits=list(splits), exit_layers=[],
            tensor_parallel=1, pipeline_parallel=1, data_parallel=1, data_parallel_rank=0, lease_steps=32,
            lease_ms=1000, roster=list(roster), epoch=epoch, copy_max=copy_max,
        )  # fmt: skip
        self.send(hello)
        return hello

    def step(self, requests: int = 4, counter: int | None = None, lease: ActionSet | None = None) -> StepRecord:
        self.counter = self.counter + 1 if counter is None else counter
        record = make_record(self.boot_id, self.counter, requests, lease)
        self.send(record)
        return record

    def goodbye(self) -> None:
        self.send(Goodbye(self.boot_id))

    def receive(self, deadline_s: float = DEADLINE_S) -> FromController:
        assert self.socket.poll(int(deadline_s * 1e3)), f"nothing came within {deadline_s:g} s"
        return decode_from_controller(self.socket.recv())

    def action(self, deadline_s: float = DEADLINE_S) -> ActionSet:
        """Return the next action set, whatever comes before it."""
        while not isinstance(message := self.receive(deadline_s), ActionSet):
            assert isinstance(message, HelloRequest)
        return message

    def is_silent(self, for_s: float) -> bool:
        return not self.socket.poll(int(for_s * 1e3))

    def close(self) -> None:
        self._context.destroy(linger=0)


def make_record(boot_id: str, counter: int, requests: int = 4, lease: ActionSet | None = None) -> StepRecord:
    rows = [
        RequestRow(handle, 4, 3, 3, 3, 0, handle % 4, handle % 4 + 1, 100 + counter, False, (0.5, 0.25, 0.125))
        for handle in range(1, requests + 1)
    ]
    events = [RequestEvent("arrival", row.handle, counter * 0.01, 90, f"req-{row.handle}") for row in rows]
    return StepRecord(
        boot_id=boot_id, counter=counter, step=counter, time_s=counter * 0.01, step_s=0.01, schedule_s=1e-4,
        verify_s=8e-3, sample_s=1e-4, draft_s=1e-3, overlap_s=0.0, adapter_s=2e-5, running=requests, waiting=0,
        prefill_tokens=0, decode_tokens=requests, draft_tokens=3 * requests, kv_usage=0.25, split=None,
        frontier=None, lease_epoch=lease.epoch if lease else 0, lease_sequence=lease.sequence if lease else 0,
        dropped=0, rejected=0, events=events if counter == 1 else [], rows=rows,
    )  # fmt: skip


@pytest.fixture(name="make_record")
def record_maker() -> Callable[..., StepRecord]:
    """Return `make_record` for tests that need no socket."""
    return make_record


class RunningDaemon:
    """A daemon whose loop runs in a thread of the test."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.daemon = Daemon(config)
        self._thread = threading.Thread(target=self.daemon.run)
        self._thread.start()

    def stop(self) -> None:
        """End as SIGTERM would."""
        self.daemon.stop()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the loop did not end"
        self.daemon.close()


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Return a folder short enough for socket paths, 0700."""
    folder = Path(tempfile.mkdtemp(prefix="faser-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def config(sockets: Path, tmp_path: Path) -> Config:
    """Return a configuration with everything in temporary folders and a policy that needs no learning."""
    return Config(
        link=LinkConfig(endpoint=f"ipc://{sockets / 'engine.sock'}"),
        policy=PolicyConfig(spec="fixed:3"),
        mode=ModeConfig(state=tmp_path / "modes.json"),
        guard=GuardConfig(stale_ms=600_000, envelope_margin=1.0),  # a fake engine's clock and costs are nobody's
        store=StoreConfig(path=tmp_path / "telemetry.sqlite", flush_s=0.02),
    )


@pytest.fixture
def start_daemon(config: Config) -> Iterator[Callable[..., RunningDaemon]]:
    """Return a function that starts a daemon; `link`, `policy`, ... replace parts of the configuration."""
    with contextlib.ExitStack() as running:

        def start(**parts: object) -> RunningDaemon:
            daemon = RunningDaemon(dataclasses.replace(config, **parts))  # type: ignore[arg-type]
            running.callback(_stop_unless_stopped, daemon)
            return daemon

        yield start


def _stop_unless_stopped(daemon: RunningDaemon) -> None:
    if daemon._thread.is_alive():
        daemon.stop()


@pytest.fixture
def make_engine(config: Config) -> Iterator[Callable[..., FakeEngine]]:
    """Return a function that connects a fake engine."""
    engines: list[FakeEngine] = []

    def make(endpoint: str = config.link.endpoint, **options: object) -> FakeEngine:
        engines.append(FakeEngine(endpoint, **options))  # type: ignore[arg-type]
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
