"""Decision round trip: record out -> action in force. `python benchmarks/round_trip.py [--json]`.

A real sidecar process (`faser sidecar`, policy price, recording to SQLite) and a real engine-side link. Each step sends
a record of 64 or 256 requests and waits until the answering action set is in the engine's inbox, as `Steering` would
find it; once back to back and once every 5 ms. Bounds (idle cores): 64 requests p50 <= 300 us and p99 <= 2 ms, 256
requests p50 <= 800 us. First each process has a core of its own (`cores` is `own`), as docs/operations.md advises; then
the system's scheduler puts them where it likes (`any`), so that most wake-ups go to another core that sleeps. `bare_us`
is the same trip of the same bytes at the same pace between two processes that do nothing else, placed alike: what the
machine's sockets and wake-ups cost. On a busy machine compare the CPU time per decision, which is printed beside.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np
import zmq
from engines import sidecar

from faser.engine_adapter import protocol as wire
from faser.engine_adapter.link import INBOX_LIMIT, EngineLink

PAUSES_S = (0.0, 0.005)  # between two steps; the second is about the shortest step of a real engine
BOUNDS_US = {64: (300.0, 2000.0), 256: (800.0, float("inf"))}
FIRST_S = 120.0  # the sidecar may compile
Cores = set[int]


class Inbox(deque[wire.FromController]):
    """An inbox that can be waited for, and notes when its newest message arrived, perf_counter seconds."""

    arrived_s = 0.0

    def __init__(self) -> None:
        super().__init__(maxlen=INBOX_LIMIT)
        self.arrived = threading.Event()

    def append(self, message: wire.FromController) -> None:
        """Take a message in, on the link's thread."""
        self.arrived_s = time.perf_counter()
        super().append(message)
        self.arrived.set()


def hello(boot_id: str) -> wire.Hello:
    """Introduce an engine that does not exist."""
    return wire.Hello(
        boot_id=boot_id, pid=os.getpid(), host="", adapter_version="", vllm_version="0.32.0", model="none",
        device="cpu", runner="v1", is_async=False, method="eagle3", drafter="", k_max=6, default_length=0,
        default_table=[], max_requests=256, max_batched_tokens=4096, kv_tokens=1 << 20, graph_sizes=[],
        splits=["unsplit"], exit_layers=[], tensor_parallel=1, pipeline_parallel=1, data_parallel=1,
        data_parallel_rank=0, lease_steps=32, lease_ms=1000, roster=[],
    )  # fmt: skip


def record(boot_id: str, counter: int, requests: int, generator: np.random.Generator) -> wire.StepRecord:
    """Return a plausible step of `requests` decoding requests."""
    lengths = generator.integers(0, 5, requests)
    accepted = np.minimum(generator.geometric(0.5, requests) - 1, lengths)
    rows = [
        wire.RequestRow(i + 1, 1 + int(k), int(k), int(k), int(k), 0, int(a), int(a) + 1, 100 + counter, False)
        for i, (k, a) in enumerate(zip(lengths, accepted, strict=True))
    ]
    drafts = int(lengths.sum())
    seconds = 0.015 + 0.0007 * (requests + drafts)
    events = [wire.RequestEvent("arrival", i + 1, time.monotonic(), 90, f"r{i}") for i in range(requests)]
    return wire.StepRecord(
        boot_id, counter, counter, time.monotonic(), seconds, 1e-4, 0.8 * seconds, 1e-3, 0.1 * seconds, 0.0, 5e-5,
        requests, 0, 0, requests, drafts, 0.3, None, None, 0, 0, 0, 0, events if counter == 1 else [], rows,
    )  # fmt: skip


def measure(endpoint: str, requests: int, steps: int, sidecar_pid: int, pause_s: float) -> dict[str, float]:
    """Return round-trip percentiles in microseconds and the sidecar's CPU time per decision."""
    boot_id = f"bench{requests}-{pause_s}"
    link = EngineLink(endpoint, boot_id)
    inbox = link._inbox = Inbox()
    link.send(hello(boot_id))
    generator = np.random.default_rng(0)
    trips_us: list[float] = []
    spent_s = 0.0
    for counter in range(1, steps + 1):
        message = record(boot_id, counter, requests, generator)
        if counter == steps // 5:
            spent_s = cpu_s(sidecar_pid)
        time.sleep(pause_s)
        started_s = time.perf_counter()
        link.send(message)
        until_answered(link, inbox, started_s + (2.0 if counter > 1 else FIRST_S), counter)
        trips_us.append((inbox.arrived_s - started_s) * 1e6)
    per_decision_us = (cpu_s(sidecar_pid) - spent_s) / (steps - steps // 5) * 1e6
    link.close()
    settled = trips_us[steps // 5 :]
    return {
        "requests": requests,
        "pause_ms": pause_s * 1e3,
        "p50_us": statistics.median(settled),
        "p99_us": float(np.percentile(settled, 99)),
        "sidecar_cpu_us": per_decision_us,
    }


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
    frame = wire.encode(record("bare", 2, 64, np.random.default_rng(0)))
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


def cpu_s(pid: int) -> float:
    """Return the CPU time a process has used, all threads, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def placed(name: str, engine: Cores, peers: Cores, steps: int) -> list[dict[str, float | str]]:
    """Measure with the engine's process on some cores and the sidecar on others."""
    os.sched_setaffinity(0, engine)
    rows: list[dict[str, float | str]] = []
    with tempfile.TemporaryDirectory() as folder:
        with sidecar(folder, peers) as (link, pid):
            for pause_s in PAUSES_S:
                rows += [measure(link.endpoint, requests, steps, pid, pause_s) for requests in BOUNDS_US]
        bare = {pause_s * 1e3: bare_us(f"ipc://{folder}/bare{pause_s}.sock", pause_s, peers) for pause_s in PAUSES_S}
    return [{"cores": name, **row, "bare_us": bare[float(row["pause_ms"])]} for row in rows]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    rows = placed("own", {cores[0]}, {cores[-1]}, options.steps) + placed("any", {*cores}, {*cores}, options.steps)
    for row in [] if options.json else rows:
        p50, p99 = BOUNDS_US[int(row["requests"])]
        print(
            f"{row['cores']} cores, {row['requests']:4.0f} requests, pause {row['pause_ms']:.0f} ms: "
            f"p50 {row['p50_us']:6.0f} us (bound {p50:.0f}), p99 {row['p99_us']:6.0f} us (bound {p99:.0f}), "
            f"sidecar CPU {row['sidecar_cpu_us']:.0f} us a decision, bare socket {row['bare_us']:.0f} us"
        )
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
