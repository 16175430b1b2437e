"""Decision round trip: record out -> action in force. `python benchmarks/round_trip.py [--json]`.

A real sidecar process (`faser sidecar`, policy price, recording to SQLite) and a real engine-side link. Each step sends
a record of 64 or 256 requests and waits until the answering action set is in the engine's inbox, as `Steering` would
find it; once back to back and once every 5 ms, in turns of 70 steps, since a shared machine has slower seconds: the
median of the turns' medians stands beside their quartiles. Bounds (idle cores): 64 requests p50 <= 300 us and
p99 <= 2 ms, 256 requests p50 <= 800 us. First each process has a core of its own (`cores` is `own`), as
docs/guide/operations.md advises; then the system's scheduler puts them where it likes (`any`), so that most wake-ups go
to another core that sleeps. `bare_us` is the trip of 64 requests' bytes at the same pace between two processes that do
nothing else, placed alike: what the machine's sockets and wake-ups cost. On a busy machine compare the CPU time per
decision, which is printed beside.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from made_engine import Inbox, hello, record, summed_up
from sidecar_process import running_sidecar

from faser.controller.engine.processes import cpu_s
from faser.engine_adapter import protocol as wire
from faser.engine_adapter.link.engine_link import EngineLink

PAUSES_S = (0.0, 0.005)  # between two steps; the second is about the shortest step of a real engine
BOUNDS_US = {64: (300.0, 2000.0), 256: (800.0, float("inf"))}
FIRST_S = 120.0  # the sidecar may compile
BLOCK_STEPS, FIRST_STEPS = 80, 10
Cores = set[int]


def step(boot_id: str, counter: int, requests: int, generator: np.random.Generator) -> wire.StepRecord:
    """Return a plausible step of `requests` decoding requests."""
    lengths = generator.integers(0, 5, requests)
    accepted = np.minimum(generator.geometric(0.5, requests) - 1, lengths)
    return record(boot_id, counter, time.monotonic(), lengths.tolist(), accepted.tolist())


class Engine:
    """An engine that does not exist: it sends records and waits for their answers."""

    def __init__(self, endpoint: str, requests: int) -> None:
        self._boot_id, self._requests = f"bench{requests}", requests
        self._link = EngineLink(endpoint, self._boot_id)
        self._inbox = self._link._inbox = Inbox()
        self._link.send(hello(self._boot_id))
        self._generator, self._counter = np.random.default_rng(0), 0

    def serve(self, steps: int, pause_s: float) -> list[float]:
        """Return round trips, microseconds; the first ones of a block are left out."""
        return [self._trip_us(pause_s) for _ in range(steps)][FIRST_STEPS:]

    def _trip_us(self, pause_s: float) -> float:
        self._counter += 1
        message = step(self._boot_id, self._counter, self._requests, self._generator)
        time.sleep(pause_s)
        started_s = time.perf_counter()
        self._link.send(message)
        until_answered(
            self._link, self._inbox, started_s + (2.0 if self._counter > 1 else FIRST_S), self._counter
        )  # fmt: skip
        return (self._inbox.arrived_s - started_s) * 1e6

    def close(self) -> None:
        """Give the socket back."""
        self._link.close()


def measure(endpoint: str, blocks: int, sidecar_pid: int) -> list[dict[str, Any]]:
    """Return medians of the blocks' medians with their quartiles, the p99 of all, and CPU time per decision."""
    engines = {requests: Engine(endpoint, requests) for requests in BOUNDS_US}
    for engine in engines.values():
        engine.serve(BLOCK_STEPS, 0.0)  # the sidecar compiles, and learns
    ways = [(requests, pause_s) for requests in BOUNDS_US for pause_s in PAUSES_S]
    trips_us: dict[tuple[int, float], list[list[float]]] = {way: [] for way in ways}
    spent_s = dict.fromkeys(ways, 0.0)
    for number in range(blocks):
        for requests, pause_s in ways[:: -1 if number % 2 else 1]:
            before_s = cpu_s(sidecar_pid)
            trips_us[requests, pause_s].append(engines[requests].serve(BLOCK_STEPS, pause_s))
            spent_s[requests, pause_s] += cpu_s(sidecar_pid) - before_s
    for engine in engines.values():
        engine.close()
    rows = []
    for (requests, pause_s), found_us in trips_us.items():
        rows.append(
            {
                "requests": requests, "pause_ms": pause_s * 1e3, **summed_up(found_us),
                "sidecar_cpu_us": spent_s[requests, pause_s] / (blocks * BLOCK_STEPS) * 1e6,
            }
        )  # fmt: skip
    return rows


def until_answered(link: EngineLink, inbox: Inbox, until_s: float, counter: int) -> None:
    """Wait for an action set, as in a forward pass: without the interpreter lock."""
    while not any(isinstance(answer, wire.ActionSet) for answer in link.receive()):
        if not inbox.arrived.wait(until_s - time.perf_counter()):
            raise SystemExit(f"no answer to record {counter} in time")
        inbox.arrived.clear()


def echo(endpoint: str) -> None:
    """Send everything back."""
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(endpoint)
    while True:
        socket.send_multipart(socket.recv_multipart())


def bare_us(endpoint: str, pause_s: float, peers: Cores, times: int = 300) -> float:
    """Return the median trip to a process on these cores that echoes, with this pause between two."""
    peer = multiprocessing.get_context("spawn").Process(target=echo, args=(endpoint,), daemon=True)
    peer.start()
    os.sched_setaffinity(peer.pid or 0, peers)
    socket = zmq.Context().socket(zmq.DEALER)  # whose thread is placed as this one is
    socket.connect(endpoint)
    frame = wire.encode(step("bare", 2, 64, np.random.default_rng(0)))
    trips_us = []
    for _ in range(times):
        time.sleep(pause_s)
        started_s = time.perf_counter()
        socket.send(frame)
        socket.recv()
        trips_us.append((time.perf_counter() - started_s) * 1e6)
    peer.terminate()
    socket.close(linger=0)
    return statistics.median(trips_us[times // 5 :])


def placed(name: str, engine: Cores, peers: Cores, blocks: int) -> list[dict[str, Any]]:
    """Measure with the engine's process on some cores and the sidecar on others."""
    os.sched_setaffinity(0, engine)
    with tempfile.TemporaryDirectory() as folder:
        with running_sidecar(Path(folder), {}, peers) as (pid, link):
            rows = measure(link.endpoint, blocks, pid)
        bare = {pause_s * 1e3: bare_us(f"ipc://{folder}/bare{pause_s}.sock", pause_s, peers) for pause_s in PAUSES_S}
    return [{"cores": name, **row, "bare_us": bare[row["pause_ms"]]} for row in rows]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    rows = placed("own", {cores[0]}, {cores[-1]}, options.blocks) + placed("any", {*cores}, {*cores}, options.blocks)
    for row in [] if options.json else rows:
        p50, p99 = BOUNDS_US[int(row["requests"])]
        low, high = row["p50_quartiles_us"]
        print(
            f"{row['cores']} cores, {row['requests']:4.0f} requests, pause {row['pause_ms']:.0f} ms: "
            f"p50 {row['p50_us']:6.0f} us ({low:.0f} to {high:.0f}; bound {p50:.0f}), "
            f"p99 {row['p99_us']:6.0f} us (bound {p99:.0f}), "
            f"sidecar CPU {row['sidecar_cpu_us']:.0f} us a decision, bare socket {row['bare_us']:.0f} us"
        )
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
