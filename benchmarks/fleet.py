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
import gc
import heapq
import json
import math
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from recorded_engine import RecordedEngine, Recording, record_steps
from rich.progress import Progress
from sidecar_process import running_sidecar

from faser.controller.engine.machine import Processor
from faser.controller.engine.processes import cpu_s
from faser.controller.errors import FaserError
from faser.controller.link.ask import ask
from faser.models.evaluation.worlds import held_out

KEEPS_UP = 0.999
WARM_S = 3.0  # not counted: tables fill, code is read in


@dataclass
class Tally:
    """What came of the records that count."""

    sent: int = 0
    answer_s: list[float] = field(default_factory=list)
    core_share: float = 0.0
    stolen_share: float = 0.0  # of a core, by other guests of the host


def serve(engines: int, rate: float, recorded: list[Recording], seconds: float) -> dict[str, Any]:
    """Run so many engines against a new sidecar; return the figures."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faser-fleet-")))
        cores = sorted(os.sched_getaffinity(0))
        settings = {"FASER_LINK_MAX_ENGINES": str(engines)}
        pid, link = stack.enter_context(running_sidecar(folder, settings, cores[-1:]))
        if len(cores) > 1:
            os.sched_setaffinity(0, cores[:-1])
            stack.callback(os.sched_setaffinity, 0, cores)
        context = stack.enter_context(zmq.Context())
        lines = []
        for number in range(engines):
            recording = recorded[number % len(recorded)]
            lines.append(RecordedEngine.connect(context, link.endpoint, recording, f"engine-{number}"))
            stack.callback(lines[-1].socket.close)
        gc.collect()
        gc.disable()  # a collection here would count as a late answer there
        stack.callback(gc.enable)
        tally = _drive(lines, rate, seconds, pid)
        status = ask(link, timeout_s=10.0)
    return _figures(engines, rate, tally, status)


def _drive(lines: list[RecordedEngine], rate: float, seconds: float, pid: int) -> Tally:
    """Send every record at its time, and count those behind the warm-up."""
    poller, by_socket, tally, used_s = zmq.Poller(), {line.socket: line for line in lines}, Tally(), 0.0
    for line in lines:
        poller.register(line.socket, zmq.POLLIN)
    begun_s = time.monotonic() + 1.0  # once all are connected
    counted_s, end_s = begun_s + WARM_S, begun_s + WARM_S + seconds
    due = [(begun_s + number / len(lines) / rate, number) for number in range(len(lines))]
    heapq.heapify(due)
    while True:
        now_s = time.monotonic()
        if not used_s and now_s >= counted_s:
            used_s, since_s, stolen_s = cpu_s(pid), now_s, Processor.now().steal_s
        while due[0][0] <= now_s < end_s:
            at_s, number = heapq.heappop(due)
            heapq.heappush(due, (lines[number].send(at_s), number))
            tally.sent += counted_s <= at_s
        if now_s >= end_s + 1.0:  # time for the last answers
            tally.core_share = (cpu_s(pid) - used_s) / (now_s - since_s)
            tally.stolen_share = (Processor.now().steal_s - stolen_s) / (now_s - since_s)
            return tally
        wait_ms = math.ceil(max(min(due[0][0] - time.monotonic(), 0.05), 0.0) * 1e3)  # libzmq's clock; 0 would spin
        for socket, _ in poller.poll(wait_ms):
            answered = [(time.monotonic() - took_s, took_s) for _, took_s in by_socket[socket].hear()]
            tally.answer_s += [took_s for sent_s, took_s in answered if sent_s >= counted_s]


def _figures(engines: int, rate: float, tally: Tally, status: Any) -> dict[str, Any]:
    answer_ms = np.array(tally.answer_s) * 1e3
    in_time = min(int((answer_ms < 1e3 / rate).sum()) / tally.sent, 1.0)
    lost = sum(engine.lost_records + engine.late_records for engine in status.engines)
    failures = sum(engine.failures + engine.sends_dropped for engine in status.engines)
    p50, p99 = (round(float(np.quantile(answer_ms, share)), 3) if len(answer_ms) else None for share in (0.5, 0.99))
    return {
        "engines": engines, "steps_per_s": rate, "records": tally.sent, "answered_in_time": round(in_time, 5),
        "answer_ms": {"p50": p50, "p99": p99}, "core_share": round(tally.core_share, 3),
        "stolen_share": round(tally.stolen_share, 3),
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
