"""A sidecar process over many steps: does its memory grow, does it leak descriptors, is every gap explained?

    python benchmarks/soak.py [--steps 20000] [--requests 16] [--json]

A simulated engine sends the records of its steps over a real socket, one behind the other: each waits for the answer to
the one before. The sidecar decides with the policy `price` and records within `store.max_mb`. Memory is compared
between the last fifth and the second one: in the first, tables and buffers still fill. Exits with 1 if it grew by 1 %
or more, descriptors changed, records were lost or dropped, or a decision failed. Takes about 20 minutes per million.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
from rich.progress import Progress

from faser.controller.config import LinkConfig
from faser.controller.errors import FaserError
from faser.controller.status import ask
from faser.engine_adapter.protocol import ActionSet, HelloRequest, decode_from_controller, encode
from faser.env.simulated_record import hello
from faser.models.simulated import SimulatedEngine
from faser.models.worlds import held_out

LOOKS = 200  # at memory and descriptors, over the run
ANSWER_MS = 10_000
STORE_MB = 64  # small, so that retention works throughout
GROWTH = 0.01


@dataclass
class Watch:
    """What a process holds, over time."""

    pid: int
    resident_mb: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def look(self) -> None:
        """Take a reading."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (resident,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
        self.resident_mb.append(int(resident) / 1024)
        self.descriptors.append(len(os.listdir(f"/proc/{self.pid}/fd")))

    def growth(self) -> float:
        """Return by how much the last fifth lies above the second one."""
        fifth = max(len(self.resident_mb) // 5, 1)
        settled, last = self.resident_mb[fifth : 2 * fifth] or self.resident_mb, self.resident_mb[-fifth:]
        return statistics.median(last) / statistics.median(settled) - 1.0


def start_sidecar(folder: Path) -> tuple[subprocess.Popen[bytes], LinkConfig]:
    """Start one with files of its own."""
    endpoint = f"ipc://{folder / 'engine.sock'}"
    base = {name: value for name, value in os.environ.items() if not name.startswith("FASER_")}
    environment = base | {
        "FASER_ENDPOINT": endpoint, "FASER_STORE": str(folder / "t.sqlite"), "FASER_STORE_MAX_MB": str(STORE_MB),
        "FASER_MODE_STATE": str(folder / "modes.json"), "XDG_CONFIG_HOME": str(folder),
        "FASER_GUARD_STALE_MS": "600000",  # the simulated clock is not this machine's
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-P", "-c", "from faser.controller.cli import main; main()", "sidecar"]
    process = subprocess.Popen(command, env=environment, cwd="/", stderr=subprocess.DEVNULL)
    return process, LinkConfig(endpoint=endpoint)


def soak(steps: int, requests: int, folder: Path) -> dict[str, Any]:
    """Run; return the figures."""
    (world,) = (world for world in held_out() if world.name == "cpu-weak-drafter")
    engine = SimulatedEngine(world.closed(requests), 1)
    introduction = hello(engine.simulator)
    with ExitStack() as stack:
        sidecar, link = start_sidecar(folder)
        stack.callback(sidecar.wait)
        stack.callback(sidecar.terminate)
        context = stack.enter_context(zmq.Context())
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTING_ID, introduction.boot_id.encode())
        socket.connect(link.endpoint)
        stack.callback(socket.close)
        introduction = msgspec.structs.replace(introduction, pid=os.getpid())
        socket.send(encode(introduction))
        watch, actions, silent = Watch(sidecar.pid), None, 0
        progress = stack.enter_context(Progress(disable=not sys.stderr.isatty()))
        task = progress.add_task("soaking", total=steps)
        begun_s = time.monotonic()
        for number in range(1, steps + 1):
            socket.send(encode(engine.step(actions)))
            actions = _answer(socket, introduction)
            silent += actions is None
            if number % max(steps // LOOKS, 1) == 0:
                watch.look()
                progress.update(task, completed=number)
        took_s = time.monotonic() - begun_s
        status = ask(link, timeout_s=10.0)
    (seen,) = status.engines
    return {
        "steps": steps, "requests": requests, "steps_per_s": round(steps / took_s, 1),
        "resident_mb": [round(watch.resident_mb[0], 1), round(watch.resident_mb[-1], 1)],
        "growth": round(watch.growth(), 5), "descriptors": [min(watch.descriptors), max(watch.descriptors)],
        "gaps": seen.gaps, "lost_records": seen.lost_records, "late_records": seen.late_records,
        "failures": seen.failures, "unanswered": silent, "store_dropped": status.store.dropped,
        "store_error": status.store.error,
    }  # fmt: skip


def _answer(socket: zmq.Socket[bytes], introduction: Any) -> ActionSet | None:
    """Return the answer to a record; None where the sidecar sends none."""
    while socket.poll(ANSWER_MS):
        message = decode_from_controller(socket.recv())
        if isinstance(message, ActionSet):
            return message
        if isinstance(message, HelloRequest):
            socket.send(encode(introduction))
    return None


def is_sound(found: dict[str, Any]) -> bool:
    """Return whether nothing grew, leaked or got lost."""
    low, high = found["descriptors"]
    nothing = ("gaps", "lost_records", "late_records", "failures", "unanswered", "store_dropped")
    return found["growth"] < GROWTH and low == high and not any(found[name] for name in nothing)


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    if options.steps < 1 or not 1 <= options.requests <= 256:
        parser.error("expected at least one step and 1 to 256 requests")
    try:
        with tempfile.TemporaryDirectory(prefix="faser-soak-") as folder:
            found = soak(options.steps, options.requests, Path(folder))
    except FaserError as error:
        print(f"soak: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(found) if options.json else "\n".join(f"{name:14} {value}" for name, value in found.items()))
    return 0 if is_sound(found) else 1


if __name__ == "__main__":
    sys.exit(main())
