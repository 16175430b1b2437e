"""Bad weather on the link: frames lost, doubled, late, out of order, a direction cut, either end killed or stopped.

A real engine link and lease on one side, a real sidecar process on the other, a proxy with a seed between them.
`make chaos` runs the same for longer and with more seeds. Run as a script this file is an engine that can be killed.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from faser.controller.config import LinkConfig
from faser.controller.errors import NotRunningError
from faser.controller.link.ask import ask, order
from faser.controller.link.status_orders import Switch
from faser.controller.snapshot import EngineStatus
from faser.engine_adapter.link.engine_link import EngineLink
from faser.engine_adapter.protocol import Hello, decode_from_engine, encode
from faser.engine_adapter.steering.lease import Lease
from faser.engine_adapter.steering.sampled_tokens import SampledTokens
from faser.engine_adapter.steering.steering import BatchOutcome, Default, Steering

pytestmark = pytest.mark.alone

BOOT, K_MAX, STEP_S = "boot-chaos", 6, 0.005
LEASE_STEPS, LEASE_S = 32, 0.5
GRANTED_S = 1.0  # an order that waited unread is good for as long as the sidecar said
SECONDS = float(os.environ.get("FASER_CHAOS_SECONDS", "4"))
SEEDS = range(int(os.environ.get("FASER_CHAOS_SEEDS", "2")))
SLOWEST_S = 0.5  # of a call on the engine's thread, on a machine that does other things too


@dataclass
class Weather:
    """What happens to a frame: chances of loss and of a second copy, and the longest delay, which re-orders too."""

    loss: float = 0.0
    double: float = 0.0
    delay_s: float = 0.0


class Proxy:
    """Stands between one engine and the sidecar; `cut` holds the directions nothing passes in."""

    def __init__(self, front: str, back: str, seed: int) -> None:
        self.weather, self.cut = Weather(), set[str]()
        self.passed, self.lost = Counter[str](), Counter[str]()
        self._random = random.Random(seed)
        self._late: list[tuple[float, int, str, bytes]] = []
        self._number = itertools.count()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._engine = self._context.socket(zmq.ROUTER)
        self._engine.bind(front)
        self._sidecar = self._context.socket(zmq.DEALER)
        self._sidecar.setsockopt(zmq.ROUTING_ID, BOOT.encode())
        self._sidecar.setsockopt(zmq.RECONNECT_IVL, 20)
        self._sidecar.connect(back)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        for socket in self._engine, self._sidecar:
            socket.close(linger=0)
        self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._engine, zmq.POLLIN)
        poller.register(self._sidecar, zmq.POLLIN)
        while not self._is_over.is_set():
            ready = dict(poller.poll(2))
            if self._engine in ready:
                self._take("up", self._engine.recv_multipart()[1])
            if self._sidecar in ready:
                self._take("down", self._sidecar.recv())
            while self._late and self._late[0][0] <= time.monotonic():
                self._pass(*heapq.heappop(self._late)[2:])

    def _take(self, way: str, frame: bytes) -> None:
        weather, chance = self.weather, self._random.random
        if way in self.cut or chance() < weather.loss:
            self.lost[way] += 1
            return
        for _ in range(2 if chance() < weather.double else 1):
            late_s = time.monotonic() + weather.delay_s * chance()
            heapq.heappush(self._late, (late_s, next(self._number), way, frame))

    def _pass(self, way: str, frame: bytes) -> None:
        if way in self.cut:
            self.lost[way] += 1
            return
        self.passed[way] += 1
        with contextlib.suppress(zmq.ZMQError):
            if way == "up":
                self._sidecar.send(frame, zmq.NOBLOCK)
            else:
                self._engine.send_multipart((BOOT.encode(), frame), zmq.NOBLOCK)


@dataclass
class Request:
    """As much of vLLM's request as the adapter reads; it never ends."""

    num_computed_tokens: int = 100
    num_output_tokens: int = 1
    num_prompt_tokens: int = 100
    max_tokens: int = 1 << 30
    priority: int = 0
    is_prefill_chunk: bool = False
    num_output_placeholders: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass
class Engine:
    """Steps with the real link and lease; looks at every order it is given."""

    steering: Steering
    requests: dict[str, Request] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    epochs: list[int] = field(default_factory=list)
    slowest_s: float = 0.0

    def begin(self) -> None:
        self.steering.introduce()
        for index in range(4):
            self.requests[f"r{index}"] = Request()
            self.steering.arrive(f"r{index}", self.requests[f"r{index}"])

    def step(self) -> int:
        """Run one step; return the epoch of the lease in force, 0 for the engine's default."""
        scheduled = {name: 1 + len(self.drafts.get(name, ())) for name in self.requests}
        looked_s, ended_s, begun_s = self.steering._looked_s, self.steering._last_end_s, time.monotonic()
        order = self.steering.order(scheduled, begun_s)
        ordered_s = time.monotonic() - begun_s
        stepped_s = 0.0 if looked_s is None else max(ended_s - looked_s, 0.0)  # a step may outlast what holds behind it
        self._look_at(order.lengths, order.lease_epoch, begun_s - stepped_s)
        time.sleep(STEP_S)
        sampled = [[7] * rows for rows in scheduled.values()]
        for (name, request), tokens in zip(self.requests.items(), sampled, strict=True):
            request.num_output_tokens += len(tokens)
            request.num_computed_tokens += scheduled[name]
        rows = {name: row for row, name in enumerate(scheduled)}
        begun_s = time.monotonic()
        delivered = {name: len(tokens) for name, tokens in zip(scheduled, sampled, strict=True)}
        tokens = SampledTokens.of(sampled, is_pruned=False)
        self.steering.record(order, BatchOutcome(scheduled, self.drafts, rows, tokens, delivered, 4, 0, 0.1, None))
        self.slowest_s = max(self.slowest_s, ordered_s, time.monotonic() - begun_s)
        self.drafts = {name: [7] * length for name, length in order.lengths.items()}
        return order.lease_epoch

    def _look_at(self, lengths: dict[str, int], epoch: int, since_s: float) -> None:
        action = self.steering.lease._action
        assert all(0 <= length <= K_MAX for length in lengths.values())
        if epoch == 0:
            assert set(lengths.values()) == {1}  # the engine's default
            return
        assert action is not None
        assert action.boot_id == self.steering.hello.boot_id
        assert self.steering.step <= action.valid_until_step
        assert since_s <= action.valid_until_s + SLOWEST_S
        assert epoch >= max(self.epochs, default=0), "an older sidecar came back into force"
        self.epochs.append(epoch)

    def run(self, seconds: float) -> list[int]:
        """Step for so long; return the epochs in force."""
        end_s = time.monotonic() + seconds
        epochs = []
        while time.monotonic() < end_s:
            epochs.append(self.step())
        return epochs

    def run_until_steered(self, seconds: float = 15.0) -> None:
        end_s = time.monotonic() + seconds
        while self.step() == 0:
            assert time.monotonic() < end_s, "control did not come back"


class SidecarProcess:
    """`faser sidecar` as a process that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        base = {name: value for name, value in os.environ.items() if not name.startswith("FASER_")}
        self._environment = base | {
            "FASER_ENDPOINT": f"ipc://{folder / 'back.sock'}", "FASER_POLICY": "fixed:3",
            "FASER_GUARD_ENVELOPE_MARGIN": "1", "FASER_STORE": str(folder / "t.sqlite"),
            "FASER_MODE_STATE": str(folder / "modes.json"), "XDG_CONFIG_HOME": str(folder),
        }  # fmt: skip
        self.link = LinkConfig(endpoint=f"ipc://{folder / 'back.sock'}")
        self.start()

    def start(self, booted_ns: int | None = None) -> None:
        """Begin a life; on a host that booted so long ago, if that is given."""
        clock = "" if booted_ns is None else f"import time; time.clock_gettime_ns = lambda clock: {booted_ns}; "
        command = [sys.executable, "-P", "-c", f"{clock}from faser.controller.cli.main import main; main()", "sidecar"]
        self.process = subprocess.Popen(command, env=self._environment, cwd="/", stderr=subprocess.DEVNULL)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def answers(self) -> bool:
        try:
            return ask(self.link, timeout_s=5.0).pid == self.process.pid
        except NotRunningError:
            return False

    def engine(self, boot_id: str = BOOT) -> EngineStatus | None:
        engines = ask(self.link, timeout_s=5.0).engines
        return next((engine for engine in engines if engine.boot_id == boot_id), None)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class EngineProcess:
    """This file as a program: an engine that goes from state to state when told, and says which one it is in."""

    def __init__(self, endpoint: str, hello: Hello) -> None:
        self.boot_id, self.state = hello.boot_id, ""
        command = [sys.executable, __file__, endpoint, encode(hello).hex()]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def bring_to(self, state: str) -> None:
        """Let it go on until it is in this state."""
        assert self.process.stdin is not None
        while self.state != state:
            if self.state in ("connected", "introduced"):  # it waits there
                self.process.stdin.write("go on\n")
                self.process.stdin.flush()
            self.state = self.said()
            assert self.state, "the engine ended"

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def calm_down(engine: Engine) -> None:
    """Step until control is without a gap, as soon as the machine lets it."""
    end_s = time.monotonic() + 10.0
    while not all(engine.run(0.5)):
        assert time.monotonic() < end_s, "control has gaps in calm weather"


@dataclass
class Scene:
    """Everything that takes part."""

    engine: Engine
    proxy: Proxy
    sidecar: SidecarProcess


@pytest.fixture
def scene(sockets: Path, make_engine: Any, eventually: Any, request: pytest.FixtureRequest) -> Iterator[Scene]:
    hello: Hello = make_engine(boot_id=BOOT).hello()
    front = f"ipc://{sockets / 'front.sock'}"
    with contextlib.ExitStack() as stack:
        sidecar = SidecarProcess(sockets)
        stack.callback(sidecar.close)
        proxy = Proxy(front, sidecar.link.endpoint, getattr(request, "param", 0))
        stack.callback(proxy.close)
        link = EngineLink(front, BOOT)
        stack.callback(link.close)
        engine = Engine(Steering(hello, link, Lease(BOOT, K_MAX, LEASE_STEPS, LEASE_S), Default(1)))
        eventually(sidecar.answers, "the sidecar answers", 60.0)
        engine.begin()
        engine.run_until_steered()
        yield Scene(engine, proxy, sidecar)
        assert engine.slowest_s < SLOWEST_S, "the engine waited for the link"


@pytest.mark.parametrize("scene", SEEDS, indirect=True)
def test_in_a_storm_orders_stay_valid_and_control_comes_back(scene: Scene) -> None:
    scene.proxy.weather = Weather(loss=0.2, double=0.2, delay_s=0.05)
    stormy = scene.engine.run(SECONDS)
    assert scene.proxy.lost["up"] > 20
    assert scene.proxy.lost["down"] > 5
    assert sum(epoch > 0 for epoch in stormy) > len(stormy) // 2  # a fifth lost costs no control
    scene.proxy.weather = Weather()
    calm_down(scene.engine)
    seen = scene.sidecar.engine()
    assert seen is not None
    assert seen.lost_records > 0  # every hole is counted; late ones are lost and late, doubled ones late
    assert seen.late_records > 0
    assert seen.failures == 0


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_link_that_is_open_one_way_only_gives_the_default_within_the_lease(scene: Scene, way: str) -> None:
    scene.proxy.cut.add(way)
    scene.engine.run(LEASE_S + 0.3)
    assert set(scene.engine.run(0.5)) == {0}
    scene.proxy.cut.clear()
    scene.engine.run_until_steered()


def test_control_without_the_lease_a_cut_link_would_steer_forever(scene: Scene) -> None:
    scene.engine.steering.lease.max_s = scene.engine.steering.lease.max_steps = 1 << 40
    scene.engine.steering.lease.in_force = lambda step, now_s: scene.engine.steering.lease._action  # type: ignore[method-assign]
    scene.proxy.cut.add("up")
    with pytest.raises(AssertionError):
        scene.engine.run(LEASE_S + 2.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_sidecar_that_ends_in_a_storm_is_followed_by_the_next(scene: Scene, number: int) -> None:
    scene.proxy.weather = Weather(loss=0.1, double=0.1, delay_s=0.02)
    before = max(scene.engine.epochs)
    scene.sidecar.signal(number)
    scene.engine.run(LEASE_S + 0.3)
    assert set(scene.engine.run(0.3)) == {0}
    scene.sidecar.close()
    scene.sidecar.start()
    scene.engine.run_until_steered()
    assert scene.engine.epochs[-1] > before


def test_a_sidecar_that_is_stopped_and_goes_on_does_not_bring_old_orders_into_force(scene: Scene) -> None:
    for _ in range(max(1, round(SECONDS / 4))):
        scene.sidecar.signal(signal.SIGSTOP)
        scene.engine.run(LEASE_S + 0.3)
        assert set(scene.engine.run(0.2)) == {0}
        scene.sidecar.signal(signal.SIGCONT)
        scene.engine.run_until_steered()


def test_a_sidecar_of_a_host_that_booted_later_than_the_last_ones_is_obeyed(scene: Scene, eventually: Any) -> None:
    for booted_ns in (10**9, 5):  # over TCP an engine does not know whose host it is
        before = scene.engine.epochs[-1]
        scene.sidecar.close()
        scene.engine.run(LEASE_S + 0.2)
        assert scene.engine.step() == 0
        scene.sidecar.start(booted_ns)
        eventually(scene.sidecar.answers, "the next life answers", 60.0)
        scene.engine.run_until_steered()
        assert scene.engine.epochs[-1] > before > booted_ns


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_sidecar_that_ends_or_stops_in_any_state_leaves_the_default_and_control_comes_back(
    sockets: Path, make_engine: Any, eventually: Any, number: signal.Signals
) -> None:
    hello = make_engine().hello()
    with contextlib.ExitStack() as stack:
        sidecar = SidecarProcess(sockets)
        stack.callback(sidecar.close)
        engines = {state: _engine_of(sidecar, hello, f"boot-{state}", stack) for state in SIDECAR_STATES}
        eventually(sidecar.answers, "the sidecar answers", 60.0)
        _bring_sidecar_to_its_states(sidecar, engines, eventually)
        sidecar.signal(number)
        if number == signal.SIGTERM:
            sidecar.signal(signal.SIGCONT)
            assert sidecar.process.wait(20.0) == 0
        _run_all(engines, LEASE_S + 0.2)
        assert _run_all(engines, 0.2) == {state: {0} for state in engines}
        if number == signal.SIGSTOP:
            sidecar.signal(signal.SIGCONT)
        else:
            sidecar.start()
        eventually(sidecar.answers, "the sidecar answers again", 60.0)
        off = engines.pop("released")
        for engine in engines.values():
            engine.run_until_steered()
        assert set(off.run(0.2)) == {0}, "what was switched off stays off"
        eventually(lambda: off.step() == 0 and sidecar.engine("boot-released"), "it is known again")
        order(sidecar.link, Switch("boot-released", "active"), 10.0)
        off.run_until_steered()


SIDECAR_STATES = ("released", "met", "asked", "unmet")  # in each, towards one of the engines


def _engine_of(sidecar: SidecarProcess, hello: Hello, boot_id: str, stack: contextlib.ExitStack) -> Engine:
    link = EngineLink(sidecar.link.endpoint, boot_id)
    stack.callback(link.close)
    lease = Lease(boot_id, K_MAX, LEASE_STEPS, LEASE_S)
    return Engine(Steering(msgspec.structs.replace(hello, boot_id=boot_id), link, lease, Default(1)))


def _bring_sidecar_to_its_states(sidecar: SidecarProcess, engines: dict[str, Engine], eventually: Any) -> None:
    """Leave it stopped: a lease given back, a hello without a record, a record and a hello on their way."""
    engines["released"].begin()
    engines["released"].run_until_steered()
    order(sidecar.link, Switch("boot-released", "off"), 10.0)
    eventually(lambda: engines["released"].step() == 0, "the lease is given back")
    engines["met"].begin()
    eventually(lambda: sidecar.engine("boot-met"), "the engine is met")
    engines["asked"].begin()
    engines["asked"].run_until_steered()
    sidecar.signal(signal.SIGSTOP)
    engines["asked"].step()
    engines["unmet"].begin()


def _run_all(engines: dict[str, Engine], seconds: float) -> dict[str, set[int]]:
    """Step in turn for so long; return the epochs in force."""
    end_s = time.monotonic() + seconds
    seen: dict[str, set[int]] = {state: set() for state in engines}
    while time.monotonic() < end_s:
        for state, engine in engines.items():
            seen[state].add(engine.step())
    return seen


STATES = ("connected", "introduced", "steered")
PAUSE = signal.SIGUSR1  # an engine that gets it stops itself between two steps
ENDS = {signal.SIGKILL: "gone", signal.SIGTERM: "stopped"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_an_engine_that_ends_or_stops_in_any_state_troubles_nobody(
    scene: Scene, make_engine: Any, eventually: Any, number: signal.Signals
) -> None:
    hello, endpoint = make_engine().hello(), scene.sidecar.link.endpoint
    for state in STATES:
        with contextlib.ExitStack() as stack:
            engine = EngineProcess(endpoint, msgspec.structs.replace(hello, boot_id=f"boot-{state}"))
            stack.callback(engine.close)
            engine.bring_to(state)
            calm_down(scene.engine)
            engine.signal(number)
            assert all(scene.engine.run(GRANTED_S + 0.3)), "a neighbour lost its steering"
            if number == signal.SIGSTOP:
                engine.signal(signal.SIGCONT)
                if state == "steered":
                    # In the middle of a step that was a long one, behind which orders from before may hold for a step.
                    eventually(lambda name=engine.boot_id: _is_steered_anew(scene, name), "fresh orders")
                    engine.signal(PAUSE)
                    assert all(scene.engine.run(GRANTED_S + 0.3)), "a neighbour lost its steering"
                    engine.signal(signal.SIGCONT)  # its lease is over: it knows before it runs another step
                    engine.bring_to("default")
            else:
                engine.process.wait(10.0)
                if state != "connected":
                    eventually(lambda name=engine.boot_id: _presence(scene, name) == ENDS[number], "its end is seen")
                engine = EngineProcess(
                    scene.sidecar.link.endpoint, msgspec.structs.replace(hello, boot_id=f"2-{state}")
                )
                stack.callback(engine.close)
            engine.bring_to("steered")
            engine.signal(signal.SIGTERM)
            assert engine.process.wait(10.0) == 0  # every order it was given was in force and its own
    seen = scene.sidecar.engine()
    assert seen is not None
    assert (seen.gaps, seen.failures) == (0, 0)


def _is_steered_anew(scene: Scene, boot_id: str) -> bool:
    engine = scene.sidecar.engine(boot_id)
    assert engine is not None
    return engine.lease_age_s is not None and engine.lease_age_s < LEASE_S


def _presence(scene: Scene, boot_id: str) -> str:
    engine = scene.sidecar.engine(boot_id)
    return engine.presence if engine is not None else ""


def main() -> None:
    """Be an engine: say each state, and go on when a line comes in; end in an orderly way on SIGTERM."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(0)

    def pause(number: int, frame: object) -> None:
        nonlocal is_to_pause
        is_to_pause = True

    is_to_pause = False
    signal.signal(signal.SIGTERM, stop)
    signal.signal(PAUSE, pause)
    hello = decode_from_engine(bytes.fromhex(sys.argv[2]))
    assert isinstance(hello, Hello)
    hello = msgspec.structs.replace(hello, pid=os.getpid())
    link = EngineLink(sys.argv[1], hello.boot_id)
    engine = Engine(Steering(hello, link, Lease(hello.boot_id, K_MAX, LEASE_STEPS, LEASE_S), Default(1)))
    try:
        print("connected", flush=True)
        sys.stdin.readline()
        engine.begin()
        print("introduced", flush=True)
        sys.stdin.readline()
        was_steered = False
        while True:
            if is_to_pause:
                is_to_pause = False
                os.kill(os.getpid(), signal.SIGSTOP)
            if (is_steered := engine.step() > 0) != was_steered:
                print("steered" if is_steered else "default", flush=True)
            was_steered = is_steered
    finally:
        engine.steering.close()


if __name__ == "__main__":
    main()
