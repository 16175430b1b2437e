"""How many engines one sidecar serves on one core before it falls behind.

    python benchmarks/fleet.py [--engines 32 48 64 96] [--steps-per-s 50] [--requests 64] [--seconds 20] [--json]

Each simulated engine, of the held-out worlds in turn, is a connection of its own on a real socket and goes on stepping
whether the answer to the last step came or not. Their records are recorded beforehand, in closed loop with the decision
core, so that the load on this side is sockets and clocks only; their times are scaled to the wanted rate, counters and
leases filled in on sending. The sidecar, a process of its own that records into its store, is pinned to one core, this
script to another. It keeps up if at least 99.9 % of the records are answered within 1 / steps-per-s seconds, none is
lost, and the store drops none.
Exits with 1 if the first number of engines is too much.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from rich.progress import Progress
from sidecar_process import cpu_s, start_sidecar

from faser.controller.decide import LeaseTerms, decide
from faser.controller.errors import FaserError
from faser.controller.status import ask
from faser.engine_adapter.protocol import (
    ActionSet,
    Hello,
    HelloRequest,
    StepRecord,
    decode_from_controller,
    encode,
)
from faser.env.simulated_record import hello
from faser.env.state import EngineState, learn
from faser.models.policy import make_policy
from faser.models.simulated import SimulatedEngine
from faser.models.worlds import WorldSpec, held_out

KEEPS_UP = 0.999
WARM_S = 3.0  # not counted: tables fill, code is read in


def record_steps(world: WorldSpec, requests: int, steps: int, rate: float) -> tuple[Hello, list[StepRecord]]:
    """Return what an engine says in so many steps under the policy `price`, once its batch is full, at this pace."""
    engine = SimulatedEngine(world.closed(requests), 1)
    state, policy, actions = EngineState(engine.capabilities), make_policy("price", engine.capabilities), None
    records: list[StepRecord] = []
    while len(records) < steps:
        record = engine.step(actions)
        actions = decide(state, record, policy, LeaseTerms(), 1, record.counter).action_set
        learn(state)
        if records or record.running >= requests:
            records.append(record)
    pace = steps / rate / sum(record.step_s for record in records)
    times = ("step_s", "verify_s", "draft_s", "overlap_s")
    scaled = [
        msgspec.structs.replace(record, **{name: getattr(record, name) * pace for name in times}) for record in records
    ]
    return hello(engine.simulator), scaled


@dataclass
class Line:
    """One engine's connection and what came of it."""

    socket: zmq.Socket[bytes]
    hello: Hello
    records: list[StepRecord]
    offset_s: float
    next: int = 0
    lease: tuple[int, int] = (0, 0)
    sent_s: dict[int, float] = field(default_factory=dict)  # by record number: engine step
    answer_s: list[float] = field(default_factory=list)
    sent: int = 0

    def send(self, end_s: float, is_counted: bool) -> float:
        """Send the record of the step that ended then; return when the next one ends."""
        template = self.records[self.next]
        self.next += 1
        epoch, sequence = self.lease
        record = msgspec.structs.replace(
            template, boot_id=self.hello.boot_id, counter=self.next, step=self.next, time_s=end_s,
            lease_epoch=epoch, lease_sequence=sequence,
        )  # fmt: skip
        if is_counted:
            self.sent += 1
            self.sent_s[self.next] = time.monotonic()
        self.socket.send(encode(record))
        return end_s + self.records[self.next].step_s

    def hear(self, steps_ahead: int) -> None:
        """Take in what the sidecar said; an answer names its step by how long it holds."""
        while self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            message = decode_from_controller(self.socket.recv(zmq.NOBLOCK))
            if isinstance(message, HelloRequest):
                self.socket.send(encode(self.hello))
            elif isinstance(message, ActionSet):
                self.lease = (message.epoch, message.sequence)
                begun_s = self.sent_s.pop(message.valid_until_step - steps_ahead, None)
                if begun_s is not None:
                    self.answer_s.append(time.monotonic() - begun_s)


def serve(engines: int, rate: float, recorded: list[tuple[Hello, list[StepRecord]]], seconds: float) -> dict[str, Any]:
    """Run so many engines against a new sidecar; return the figures."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faser-fleet-")))
        sidecar, link = start_sidecar(folder, {"FASER_LINK_MAX_ENGINES": str(engines)})
        stack.callback(sidecar.wait)
        stack.callback(sidecar.terminate)
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 1:
            os.sched_setaffinity(sidecar.pid, cores[-1:])
            os.sched_setaffinity(0, cores[:-1])
            stack.callback(os.sched_setaffinity, 0, cores)
        context = stack.enter_context(zmq.Context())
        poller, lines = zmq.Poller(), []
        for number in range(engines):
            introduction, records = recorded[number % len(recorded)]
            introduction = msgspec.structs.replace(introduction, boot_id=f"engine-{number}", pid=os.getpid())
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.ROUTING_ID, introduction.boot_id.encode())
            socket.connect(link.endpoint)
            stack.callback(socket.close)
            socket.send(encode(introduction))
            poller.register(socket, zmq.POLLIN)
            lines.append(Line(socket, introduction, records, number / engines / rate))
        used = _drive(lines, poller, seconds, sidecar.pid)
        status = ask(link, timeout_s=10.0)
    return _figures(lines, rate, used, status)


def _drive(lines: list[Line], poller: zmq.Poller, seconds: float, pid: int) -> float:
    """Send every record at its time; return the share of a core that the sidecar used."""
    by_socket = {line.socket: line for line in lines}
    begun_s = time.monotonic() + 1.0  # once all are connected
    due = [(begun_s + line.offset_s, number) for number, line in enumerate(lines)]
    heapq.heapify(due)
    counted_s, end_s = begun_s + WARM_S, begun_s + WARM_S + seconds
    used_s = 0.0
    while True:
        now_s = time.monotonic()
        if not used_s and now_s >= counted_s:
            used_s, since_s = cpu_s(pid), now_s
        while due[0][0] <= now_s < end_s:
            at_s, number = heapq.heappop(due)
            heapq.heappush(due, (lines[number].send(at_s, counted_s <= at_s), number))
        if now_s >= end_s + 1.0:  # time for the last answers
            return (cpu_s(pid) - used_s) / (now_s - since_s)
        for socket, _ in poller.poll(max(min(due[0][0] - time.monotonic(), 0.05), 0.0) * 1e3):
            by_socket[socket].hear(32)


def _figures(lines: list[Line], rate: float, used: float, status: Any) -> dict[str, Any]:
    answer_ms = np.array([each for line in lines for each in line.answer_s]) * 1e3
    sent = sum(line.sent for line in lines)
    in_time = int((answer_ms < 1e3 / rate).sum()) / sent
    lost = sum(engine.lost_records + engine.late_records for engine in status.engines)
    failures = sum(engine.failures + engine.sends_dropped for engine in status.engines)
    p50, p99 = (float(np.quantile(answer_ms, share)) if len(answer_ms) else None for share in (0.5, 0.99))
    return {
        "engines": len(lines), "steps_per_s": rate, "records": sent, "answered_in_time": round(in_time, 5),
        "answer_ms": {"p50": p50 and round(p50, 3), "p99": p99 and round(p99, 3)}, "core_share": round(used, 3),
        "lost_records": lost, "failures": failures, "dropped_frames": status.link.dropped,
        "store_written": status.store.written, "store_dropped": status.store.dropped, "store_error": status.store.error,
        "keeps_up": in_time >= KEEPS_UP and not (lost or failures or status.store.dropped or status.store.error),
    }  # fmt: skip


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[32])
    parser.add_argument("--steps-per-s", type=float, default=50.0)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    if min(options.engines) < 1 or options.steps_per_s <= 0 or not 1 <= options.requests <= 256:
        parser.error("expected at least one engine, a positive rate and 1 to 256 requests")
    steps = int(options.steps_per_s * (options.seconds + WARM_S + 2.0)) + 100
    found = []
    try:
        with Progress(disable=not sys.stderr.isatty()) as progress:
            worlds, recorded = held_out(), []
            task = progress.add_task("recording", total=len(worlds) + len(options.engines))
            for world in worlds:
                recorded.append(record_steps(world, options.requests, steps, options.steps_per_s))
                progress.advance(task)
            for engines in options.engines:
                progress.update(task, description=f"{engines} engines", advance=1)
                found.append(serve(engines, options.steps_per_s, recorded, options.seconds))
                if not options.json:
                    print("  ".join(f"{name} {value}" for name, value in found[-1].items()))
    except FaserError as error:
        print(f"fleet: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps({"requests": options.requests, "seconds": options.seconds, "runs": found}))
    return 0 if found[0]["keeps_up"] else 1


if __name__ == "__main__":
    sys.exit(main())
