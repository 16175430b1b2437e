"""Engines whose steps were recorded beforehand, over real sockets: a load that costs its own side next to nothing."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

import msgspec
import zmq

from faser.controller.decision.decide import LeaseTerms, decide
from faser.engine_adapter.protocol import (
    ActionSet,
    Goodbye,
    Hello,
    HelloRequest,
    RequestEvent,
    StepRecord,
    decode_from_controller,
    encode,
)
from faser.env.estimate.engine_state import EngineState, learn
from faser.env.simulator.simulated_engine import SimulatedEngine
from faser.env.simulator.simulated_record import hello
from faser.models.evaluation.worlds import WorldSpec
from faser.models.registry import make_policy

_TIMES = ("step_s", "verify_s", "draft_s", "overlap_s")


@dataclass(frozen=True)
class Recording:
    """What an engine says of itself and of its steps."""

    hello: Hello
    records: list[StepRecord]


def record_steps(world: WorldSpec, requests: int, steps: int, rate: float) -> Recording:
    """Let an engine run in closed loop with the policy `price`; its times are scaled to `rate` steps per second.

    The recording begins when the batch is full. An arrival is told with the request's first step, as if a client had
    sent it when another one's request ended: the simulated engine's queue is none of what is measured.
    """
    engine = SimulatedEngine(world.closed(requests), 1)
    state, policy, actions = EngineState(engine.capabilities), make_policy("price", engine.capabilities), None
    records: list[StepRecord] = []
    while len(records) < steps:
        record = engine.step(actions)
        actions = decide(state, record, policy, LeaseTerms(), 1, record.counter).action_set
        learn(state)
        if records or record.running >= requests:
            records.append(record)
    records = without_queue(records)
    pace = steps / rate / sum(record.step_s for record in records)
    scaled = [
        msgspec.structs.replace(
            record,
            rows=msgspec.Raw(msgspec.msgpack.encode(record.rows)),  # type: ignore[arg-type]  # sent as they are
            **{name: getattr(record, name) * pace for name in _TIMES},
        )
        for record in records
    ]
    return Recording(hello(engine.simulator), scaled)


def without_queue(records: list[StepRecord]) -> list[StepRecord]:
    """Return the records with each arrival moved to its request's first row; who never runs does not arrive."""
    held: dict[int, RequestEvent] = {}
    told: set[int] = set()
    moved = []
    for record in records:
        held |= {event.handle: event for event in record.events if event.kind == "arrival"}
        rows = [row.handle for row in record.rows]
        arrivals = [held.pop(handle) for handle in rows if handle in held]
        told.update(rows)
        others = [event for event in record.events if event.kind != "arrival" and event.handle in told]
        moved.append(msgspec.structs.replace(record, events=[*arrivals, *others], waiting=0))
    return moved


@dataclass
class RecordedEngine:
    """One connection that plays a recording: counters, times and leases are filled in while records are sent."""

    socket: zmq.Socket[bytes]
    hello: Hello
    records: list[StepRecord]
    next: int = 0
    lease: tuple[int, int] = (0, 0)
    sent_s: dict[int, float] = field(default_factory=dict)  # by step, of records that wait for their answer

    @classmethod
    def connect(
        cls, context: zmq.Context[zmq.Socket[bytes]], address: str, recording: Recording, boot_id: str
    ) -> RecordedEngine:
        """Introduce an engine of this name."""
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTING_ID, boot_id.encode())
        socket.connect(address)
        introduction = msgspec.structs.replace(recording.hello, boot_id=boot_id, pid=os.getpid())
        socket.send(encode(introduction))
        return cls(socket, introduction, recording.records)

    def send(self, end_s: float) -> float:
        """Send the record of the step that ended then; return when the next one ends."""
        template = self.records[self.next]
        self.next += 1
        epoch, sequence = self.lease
        record = msgspec.structs.replace(
            template, boot_id=self.hello.boot_id, counter=self.next, step=self.next, time_s=end_s,
            lease_epoch=epoch, lease_sequence=sequence,
        )  # fmt: skip
        self.sent_s[self.next] = time.monotonic()
        self.socket.send(encode(record))
        return end_s + self.records[self.next % len(self.records)].step_s

    def hear(self) -> list[tuple[int, float]]:
        """Take in what the sidecar said; return the steps it answered, and how many seconds each answer took."""
        answered = []
        while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            message = decode_from_controller(self.socket.recv(zmq.NOBLOCK))
            if isinstance(message, HelloRequest):
                self.socket.send(encode(self.hello))
            elif isinstance(message, ActionSet):
                self.lease = (message.epoch, message.sequence)
                step = message.valid_until_step - self.hello.lease_steps  # an answer says how long it holds
                if (sent_s := self.sent_s.pop(step, None)) is not None:
                    answered.append((step, time.monotonic() - sent_s))
        return answered

    def part(self) -> None:
        """Say goodbye, as an engine does that ends."""
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.send(encode(Goodbye(self.hello.boot_id)))
        self.socket.close()
