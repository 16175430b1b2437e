"""100,000 hostile frames per run to each end: nothing crashes, hangs or allocates past the cap.

Half are bytes of real messages with damage, half are messages that are well formed but mean the impossible: NaN,
negative lengths, huge arrays, duplicate handles, counters that wrap. What a decoder lets through is fed to the part
that uses it: a session of the sidecar, or the engine's lease.
"""

from __future__ import annotations

import math
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq

from faser.controller.config import Config, LeaseConfig
from faser.controller.decision.session import Session
from faser.controller.link.ask import ask
from faser.controller.link.status_orders import decode_order
from faser.controller.snapshot import encode_snapshot
from faser.engine_adapter import protocol as wire
from faser.engine_adapter.link.engine_link import EngineLink
from faser.engine_adapter.steering.lease import Lease
from faser.env.estimate import step_frame

pytestmark = pytest.mark.alone

FRAMES = 200_000  # half of them to each end
TRACED = 4_000  # of them with every allocation traced, which takes ten times as long
THROUGH_SOCKETS = 4_000
USED = 1_000  # accepted messages that are used, not only decoded; the others of their kind differ in bytes only
MAX_ALLOCATED = 64 << 20  # bytes at once, for frames that are at most 1 MiB
SLOWEST_S = 2.0  # of processor time, one frame; the first ones may compile
BOOT = "boot-1"
NASTY: tuple[Any, ...] = (
    math.nan, math.inf, -math.inf, -1, 0, 1, -(1 << 63), (1 << 63) - 1, (1 << 64) - 1, 1 << 62, 65, 1e308, -1e308, None,
    True, "", "x" * 600, "\x00", b"", [], [[]], {}, [1] * 5000, [0.5] * 65, "act", "step", "advisory",
)  # fmt: skip
HUGE = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\x91" * 4096,
)


def messages(make_record: Callable[..., wire.StepRecord], hello: wire.Hello) -> tuple[list[Any], list[Any]]:
    rule = wire.StopRule([1.0, 0.5], [0.0], [0.25], [0.5])
    action = wire.ActionSet(
        BOOT, 9, 5, 34, 4.0, 0, [1, 2, 3], [3, 2, 1], 0.001, 0, 2, wire.Prune(15, 0.2), "active", rule
    )
    return (
        [make_record(BOOT, 1, 3), make_record(BOOT, 7, 2), hello, wire.Goodbye(BOOT)],
        [action, wire.Release(BOOT, 9), wire.HelloRequest(9)],
    )


class Mutator:
    """Makes hostile frames of honest messages; the seed is fixed, so that a failure can be repeated."""

    def __init__(self, originals: list[Any], seed: int) -> None:
        self.random = random.Random(seed)
        self.frames = [bytes(wire.encode(message)) for message in originals]
        self.trees = [msgspec.msgpack.decode(frame[2:]) for frame in self.frames]

    def frame(self) -> bytes:
        return self.damaged() if self.random.random() < 0.5 else self.impossible()

    def damaged(self) -> bytes:
        content = bytearray(self.random.choice(self.frames))
        kind = self.random.randrange(6)
        if kind == 0:
            del content[self.random.randrange(len(content)) :]
        elif kind == 1:
            content[1] = self.random.randrange(256)
        elif kind == 2:
            place = self.random.randrange(2, len(content))
            content[place:place] = self.random.choice(HUGE)
        elif kind == 3:
            content += self.random.randbytes(self.random.randrange(1, 40))
        else:
            for _ in range(self.random.randint(1, 6)):
                content[self.random.randrange(2, len(content))] = self.random.randrange(256)
        return bytes(content)

    def impossible(self) -> bytes:
        index = self.random.randrange(len(self.trees))
        tree = msgspec.msgpack.decode(self.frames[index][2:])
        for _ in range(self.random.randint(1, 3)):
            self._spoil(tree)
        try:
            return wire.HEADER + msgspec.msgpack.encode(tree)
        except (OverflowError, msgspec.MsgspecError):
            return self.damaged()

    def _spoil(self, tree: Any) -> None:
        """Put something impossible in a random place, or repeat a row as a duplicate id does."""
        node = tree
        while True:
            inner = [child for child in node if isinstance(child, list) and child]
            if not inner or self.random.random() < 0.4:
                break
            node = self.random.choice(inner)
        place = self.random.randrange(len(node))
        if self.random.random() < 0.2:
            node.extend(node[:200])
        else:
            nasty = self.random.choice(NASTY)
            node[place] = nasty[:] if isinstance(nasty, list) else nasty  # it may be spoiled in turn


@pytest.fixture
def originals(make_engine: Any, make_record: Any) -> tuple[list[Any], list[Any]]:
    engine = make_engine()
    hello = engine.hello()
    engine.close()  # another with its name is to connect, and would be driven out again and again
    return messages(make_record, hello)


def test_a_hundred_thousand_hostile_frames_each_hurt_neither_end(originals: tuple[list[Any], list[Any]]) -> None:
    from_engine, from_controller = (Mutator(made, seed) for seed, made in enumerate(originals))
    session = Session(originals[0][2], "price", LeaseConfig(), 7, 0.0)
    lease = Lease(BOOT, 6, 32, 1.0)
    outcomes: Counter[str] = Counter()
    slowest_s = 0.0
    ways = ((from_engine, step_frame.decode), (from_controller, wire.decode_from_controller))
    for number in range(FRAMES):
        if number == FRAMES - TRACED:
            tracemalloc.start(1)
        mutator, decode = ways[number % 2]
        frame = mutator.frame()
        started_s = time.thread_time()
        try:
            message = decode(frame)
        except wire.ProtocolError as error:
            outcomes[error.reason] += 1
            continue
        finally:
            slowest_s = max(slowest_s, time.thread_time() - started_s)
        outcomes["accepted"] += 1
        kind = type(message).__name__
        outcomes[kind] += 1
        if outcomes[kind] <= USED:
            _use(message, session, lease, number)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MAX_ALLOCATED
    assert slowest_s < SLOWEST_S
    assert outcomes.total() - sum(outcomes[kind] for kind in KINDS) == FRAMES
    assert min(outcomes[reason] for reason in ("malformed", "out_of_bounds", "wrong_version")) > 500
    assert min(outcomes[kind] for kind in ("StepRecord", "ActionSet", "Hello")) > 500
    assert session.failures == 0
    encode_snapshot_of(session)


KINDS = ("StepRecord", "Hello", "Goodbye", "ActionSet", "Release", "HelloRequest")


def _use(message: Any, session: Session, lease: Lease, number: int) -> None:
    if isinstance(message, wire.StepRecord):
        if session.admit(message, number * 0.01):
            decision = session.decide(message)
            session.learn()
            session.measure(message)
            if decision is not None:
                action = wire.decode_from_controller(wire.encode(decision.action_set))
                assert isinstance(action, wire.ActionSet)
                assert max([action.default_length, *action.lengths]) <= 6
        if session.newest is not None and session.newest.counter > 1 << 40:
            session.newest = None  # or all that follow were late
    elif isinstance(message, wire.Hello):
        Session(message, "price", LeaseConfig(), 7, 0.0)
    elif isinstance(message, wire.ActionSet):
        if lease.offer(message, 1, 0.0) is None:
            action = lease.in_force(1, 0.0)
            assert action is not None
            assert max([action.default_length, *action.lengths]) <= 6
            assert lease.in_force(34, 0.0) is None
    elif isinstance(message, wire.Release):
        lease.release(message)


def encode_snapshot_of(session: Session) -> None:
    status = session.status(1e9)
    assert msgspec.json.decode(msgspec.json.encode(status), type=type(status)).boot_id == BOOT


def test_a_daemon_takes_hostile_frames_from_a_socket_and_goes_on(
    start_daemon: Any, make_engine: Any, config: Config, originals: tuple[list[Any], list[Any]], eventually: Any
) -> None:
    daemon = start_daemon()
    hostile, honest = make_engine(), make_engine(boot_id="boot-2")
    hostile.hello()
    mutator = Mutator(originals[0], 3)
    for _ in range(THROUGH_SOCKETS):
        hostile.socket.send(mutator.frame())
        while hostile.socket.poll(0):
            hostile.socket.recv()
    honest.hello()
    honest.step()
    assert honest.action().boot_id == "boot-2"
    eventually(lambda: ask(config.link).link.received >= THROUGH_SOCKETS, "all are read")
    status = ask(config.link)
    assert sum(status.link.dropped.values()) > THROUGH_SOCKETS // 2
    assert all(engine.failures == 0 for engine in status.engines)
    assert status.store.error == ""
    daemon.stop()


def test_an_engine_takes_hostile_frames_from_a_socket_and_goes_on(
    sockets: Any, originals: tuple[list[Any], list[Any]], eventually: Any
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.SNDHWM, 0)
    router.bind(f"ipc://{sockets / 'router.sock'}")
    link = EngineLink(f"ipc://{sockets / 'router.sock'}", BOOT)
    link.send(wire.Goodbye(BOOT))
    router.recv_multipart()
    mutator, valid = Mutator(originals[1], 4), wire.Release("last", 1)
    taken = 0
    for _ in range(THROUGH_SOCKETS):
        router.send_multipart((BOOT.encode(), mutator.frame()))
        taken += len(link.receive())
    router.send_multipart((BOOT.encode(), wire.encode(valid)))
    eventually(lambda: valid in link.receive(), "a valid message arrives after them")
    assert link.refused.total() > THROUGH_SOCKETS // 2
    link.close()
    context.destroy(linger=0)


def test_a_status_socket_takes_hostile_frames_and_goes_on(
    start_daemon: Any, config: Config, sockets: Any, eventually: Any
) -> None:
    start_daemon()
    order = b'{"type":"switch","target":"*","mode":"off","by":"x"}'
    mix = random.Random(5)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    asker = context.socket(zmq.DEALER)
    asker.setsockopt(zmq.LINGER, 0)
    asker.connect(f"ipc://{sockets / 'status.sock'}")
    for _ in range(1000):
        frame = bytearray(order)
        frame[mix.randrange(len(frame))] = mix.randrange(256)
        if decode_order(bytes(frame)) is None:
            asker.send_multipart([bytes(frame)] * mix.choice((1, 1, 1, 2)))
    assert ask(config.link).modes == {}
    context.destroy(linger=0)
    assert encode_snapshot(ask(config.link))
