"""How many engines one sidecar on one core serves: simulated engines at 50 steps/s with 64 requests each, recorded.

    python benchmarks/engines.py                 # 32 engines for 10 s
    python benchmarks/engines.py --until-it-breaks

The sidecar is pinned to one core, the load to another. It keeps up if it decides on every record (a record that waits
beside a newer one is only observed), loses none and the store keeps pace. The bound: 32 engines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from faser.controller.config import LinkConfig
from faser.controller.errors import NotRunningError
from faser.controller.link.ask import ask
from faser.engine_adapter import protocol as wire

STEPS_PER_S = 50
REQUESTS = 64
KEEPS_UP = 0.99  # share of records decided on
START_S = 20.0


def hello(boot_id: str) -> wire.Hello:
    """Return an engine like the demo's."""
    return wire.Hello(
        boot_id, os.getpid(), socket.gethostname(), "0", "0.32.0", "target", "cpu", "v1", False, "eagle3", "drafter", 6,
        0, [], 256, 8192, 10**5, [], ["unsplit"], [], 1, 1, 1, 0, 32, 1000, [],
    )  # fmt: skip


def record(boot_id: str, counter: int, time_s: float) -> wire.StepRecord:
    """Return a step in which requests verified two to four tokens."""
    rows = [
        wire.RequestRow(handle, 3 + handle % 3, 3, 3, 2 + handle % 3, 0, handle % 3, handle % 3 + 1, 100, False,
                        (0.9, 0.7, 0.5, 0.3)[: 2 + handle % 3])
        for handle in range(1, REQUESTS + 1)
    ]  # fmt: skip
    events = [wire.RequestEvent("arrival", row.handle, time_s, 90, f"{boot_id}-{row.handle}") for row in rows]
    return wire.StepRecord(
        boot_id, counter, counter, time_s, 0.018, 1e-4, 0.014, 1e-4, 3e-3, 0.0, 5e-5, REQUESTS, 0, 0, REQUESTS,
        sum(row.verified for row in rows), 0.3, None, None, 0, 0, 0, 0, events if counter == 1 else [], rows,
    )  # fmt: skip


@contextlib.contextmanager
def sidecar(folder: str, cores: set[int]) -> Iterator[tuple[LinkConfig, int]]:
    """Give a running sidecar, on these cores, and its process id."""
    link = LinkConfig(endpoint=f"ipc://{folder}/engine.sock")
    command = [str(Path(sys.executable).with_name("faser")), "sidecar", "--endpoint", link.endpoint,
               "--store", f"{folder}/telemetry.sqlite"]  # fmt: skip
    environment = {**os.environ, "FASER_MODE_STATE": f"{folder}/modes.json", "FASER_LINK_MAX_ENGINES": "4096"}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=folder, env=environment)
    try:
        os.sched_setaffinity(process.pid, cores)  # before it starts its threads
        end_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(NotRunningError):
                ask(link, 0.5)
                break
            if time.monotonic() > end_s:
                raise SystemExit("the sidecar did not start")
            time.sleep(0.1)
        yield link, process.pid
    finally:
        process.terminate()
        process.wait(20)


def load(link: LinkConfig, engines: int, seconds: float) -> tuple[int, float]:
    """Send every engine's records on time, one engine after the other; return the records sent and the worst delay."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = []
    for number in range(engines):
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.ROUTING_ID, f"engine-{number}".encode())
        dealer.connect(link.endpoint)
        dealer.send(wire.encode(hello(f"engine-{number}")))
        sockets.append(dealer)
    shapes = [record(f"engine-{number}", 2, 0.0) for number in range(engines)]
    start_s, worst_s, sent = time.monotonic() + 0.5, 0.0, 0
    for step in range(int(seconds * STEPS_PER_S)):
        for number, dealer in enumerate(sockets):
            due_s = start_s + (step + number / engines) / STEPS_PER_S
            now_s = time.monotonic()
            whole = shapes[number] if step else record(f"engine-{number}", 1, now_s)
            whole = msgspec.structs.replace(whole, counter=step + 1, step=step + 1, time_s=max(due_s, now_s))
            frame = wire.encode(whole)
            if (wait_s := due_s - time.monotonic()) > 0:
                time.sleep(wait_s)
            worst_s = max(worst_s, time.monotonic() - due_s)
            dealer.send(frame)
            sent += 1
            with contextlib.suppress(zmq.Again):
                dealer.recv(zmq.NOBLOCK)
    context.destroy(linger=1000)
    return sent, worst_s


def measure(engines: int, seconds: float, cores: list[int]) -> dict[str, float]:
    """Run the load against a fresh sidecar and return what it did."""
    with tempfile.TemporaryDirectory() as folder, sidecar(folder, {cores[0]}) as (link, pid):
        os.sched_setaffinity(0, {cores[-1]})
        before_s = _cpu_s(pid)
        sent, worst_s = load(link, engines, seconds)
        time.sleep(1.0)
        seen = ask(link, 10.0)
        records = sum(engine.records for engine in seen.engines)
        return {
            "engines": engines,
            "sent": sent,
            "load_late_s": round(worst_s, 4),
            "received": records,
            "decided_share": round(sum(engine.decisions for engine in seen.engines) / max(records, 1), 4),
            "lost": sum(engine.lost_records for engine in seen.engines),
            "store_dropped": seen.store.dropped,
            "cpu_s_per_s": round((_cpu_s(pid) - before_s) / seconds, 3),
            "decision_us_p50": round(max((engine.decision_us_p50 for engine in seen.engines), default=0.0), 1),
        }


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def keeps_up(row: dict[str, float]) -> bool:
    """Return whether nothing was lost and nearly every record decided on."""
    is_whole = row["received"] == row["sent"] and not row["lost"] and not row["store_dropped"]
    return is_whole and row["decided_share"] >= KEEPS_UP


def main() -> None:
    """Print one line per number of engines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--until-it-breaks", action="store_true")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    engines = options.engines
    while True:
        row = measure(engines, options.seconds, cores)
        print(json.dumps({**row, "keeps_up": keeps_up(row)}), flush=True)
        if not options.until_it_breaks or not keeps_up(row):
            return
        engines += max(engines // 4, 1)


if __name__ == "__main__":
    main()
