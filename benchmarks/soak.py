"""A sidecar process over many steps: does its memory grow, does it leak descriptors, is every gap explained?

    python benchmarks/soak.py [--steps 200000] [--engines 32] [--requests 16] [--out FILE] [--json]

Engines with recorded steps send over real sockets, each one record behind the other: a record waits for the answer to
the one before, and all pause while too many wait to be written. After LIFE_STEPS steps an engine says goodbye and
another one takes its place, so that the sidecar also meets and forgets engines throughout. It decides with the policy
`price` and records within `store.max_mb`. Memory is compared between the last fifth and the second one: in the first,
tables and buffers still fill. Exits with 1 if it grew by 1 % or more, descriptors grew, records were lost, late or
dropped, or a decision failed. `--out` is written at every look, so that a run that is cut off leaves what it saw.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from recorded_engine import RecordedEngine, Recording, record_steps
from rich.progress import Progress
from sidecar_process import running_sidecar

from faser.controller.config import LinkConfig
from faser.controller.engine.machine import provenance
from faser.controller.errors import FaserError
from faser.controller.link.ask import ask
from faser.controller.snapshot import Snapshot
from faser.models.evaluation.worlds import held_out

LOOKS = 200  # at memory and descriptors, over the run
LIFE_STEPS = 2000
ANSWER_S = 10.0
BREATH_STEPS = 1000  # between two looks at what waits to be written
QUEUED_MOST, QUEUED_LEAST = 8000, 2000  # records; the sidecar drops what comes when 20,000 wait
SETTINGS = {
    "FASER_STORE_MAX_MB": "64",  # small, so that retention works throughout
    "FASER_GUARD_STALE_MS": "600000",  # the simulated clocks are not this machine's
}
GROWTH = 0.01
NOTHING = ("gaps", "lost_records", "late_records", "failures", "unanswered", "store_dropped")


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

    def spread(self) -> list[int]:
        """Return the least and the most descriptors after the first fifth."""
        settled = self.descriptors[len(self.descriptors) // 5 :]
        return [min(settled), max(settled)]


@dataclass
class Fleet:
    """The engines that play now, and what those that ended left behind."""

    context: zmq.Context[zmq.Socket[bytes]]
    address: str
    recordings: list[Recording]
    poller: zmq.Poller = field(default_factory=zmq.Poller)
    engines: dict[zmq.Socket[bytes], RecordedEngine] = field(default_factory=dict)
    clocks_s: dict[zmq.Socket[bytes], float] = field(default_factory=dict)
    boots: int = 0

    def boot(self) -> None:
        """Start another engine; its first step ends now."""
        recording = self.recordings[self.boots % len(self.recordings)]
        engine = RecordedEngine.connect(self.context, self.address, recording, f"engine-{self.boots}")
        self.boots += 1
        self.poller.register(engine.socket, zmq.POLLIN)
        self.engines[engine.socket] = engine
        self.clocks_s[engine.socket] = engine.send(1.0)

    def play(self) -> int:
        """Answer every engine that was answered with its next step; return how many steps were answered."""
        answered = 0
        for socket, _ in self.poller.poll(round(ANSWER_S * 1e3)):
            engine = self.engines[socket]
            steps = len(engine.hear())
            answered += steps
            if steps and engine.next == len(engine.records):
                self._end(engine)
            elif steps:
                self.clocks_s[socket] = engine.send(self.clocks_s[socket])
        return answered

    def _end(self, engine: RecordedEngine) -> None:
        self.poller.unregister(engine.socket)
        del self.engines[engine.socket], self.clocks_s[engine.socket]
        engine.part()
        self.boot()

    def close(self) -> None:
        """End every connection."""
        for socket in self.engines:
            socket.close()


@dataclass
class Faults:
    """What the sidecar's status told of engines, the highest figure of each boot: it forgets those that ended."""

    seen: dict[str, dict[str, int]] = field(default_factory=dict)

    def note(self, status: Snapshot) -> None:
        """Take a status in."""
        for engine in status.engines:
            figures = {name: getattr(engine, name) for name in ("gaps", "lost_records", "late_records", "failures")}
            self.seen[engine.boot_id] = figures

    def total(self, name: str) -> int:
        """Return the sum over all engines."""
        return sum(figures[name] for figures in self.seen.values())


def soak(steps: int, engines: int, requests: int, folder: Path, out: Path | None) -> dict[str, Any]:
    """Run; return the figures."""
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(disable=not sys.stderr.isatty()))
        task = progress.add_task("recording", total=None)
        recordings = [record_steps(world, requests, min(LIFE_STEPS, steps), 50.0) for world in held_out()]
        settings = SETTINGS | {"FASER_LINK_MAX_ENGINES": str(2 * engines)}
        pid, link = stack.enter_context(running_sidecar(folder, settings))
        context = stack.enter_context(zmq.Context())
        fleet = Fleet(context, link.endpoint, recordings)
        stack.callback(fleet.close)
        for _ in range(engines):
            fleet.boot()
        watch, faults, done, unanswered = Watch(pid), Faults(), 0, 0
        progress.update(task, description="soaking", total=steps)
        begun_s, look = time.monotonic(), max(steps // LOOKS, 1)
        about = provenance()
        next_look, next_breath, waited_s, found = look, BREATH_STEPS, 0.0, dict[str, Any]()
        while done < steps and not unanswered:
            answered = fleet.play()
            done += answered
            unanswered += not answered
            if done >= next_breath:
                next_breath += BREATH_STEPS
                waited_s += _wait_for_store(link)
            if done >= next_look:
                next_look += look
                watch.look()
                status = ask(link, timeout_s=10.0)
                faults.note(status)
                progress.update(task, completed=done)
                found = about | {
                    "steps": done, "engines": engines, "boots": fleet.boots, "requests": requests,
                    "steps_per_s": round(done / (time.monotonic() - begun_s), 1), "waited_s": round(waited_s, 1),
                    "resident_mb": [round(watch.resident_mb[0], 1), round(watch.resident_mb[-1], 1)],
                    "growth": round(watch.growth(), 5), "descriptors": watch.spread(),
                    **{name: faults.total(name) for name in ("gaps", "lost_records", "late_records", "failures")},
                    "unanswered": unanswered, "dropped_frames": status.link.dropped,
                    "store_dropped": status.store.dropped, "store_error": status.store.error,
                }  # fmt: skip
                if out is not None:
                    out.write_text(json.dumps(found, indent=1))
    return found | {"unanswered": unanswered}


def _wait_for_store(link: LinkConfig) -> float:
    """Pause until few records wait to be written where many do; return the seconds.

    These engines send their next step as soon as they are answered, more than the sidecar's core can also write.
    """
    begun_s = time.monotonic()
    if ask(link, timeout_s=10.0).store.queued > QUEUED_MOST:
        while ask(link, timeout_s=10.0).store.queued > QUEUED_LEAST:
            time.sleep(0.05)
    return time.monotonic() - begun_s


def is_sound(found: dict[str, Any], engines: int) -> bool:
    """Return whether nothing grew, leaked or got lost; connections of engines that come and go overlap for a moment."""
    low, high = found["descriptors"]
    is_quiet = not any(found[name] for name in NOTHING) and not found["store_error"]
    return bool(is_quiet and found["growth"] < GROWTH and high - low <= engines)


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--engines", type=int, default=32)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--out", type=Path, help="write the figures here at every look")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    if options.steps < 1 or not 1 <= options.engines <= 256 or not 1 <= options.requests <= 256:
        parser.error("expected at least one step, 1 to 256 engines and 1 to 256 requests")
    try:
        with tempfile.TemporaryDirectory(prefix="faser-soak-") as folder:
            found = soak(options.steps, options.engines, options.requests, Path(folder), options.out)
    except FaserError as error:
        print(f"soak: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(found) if options.json else "\n".join(f"{name:14} {value}" for name, value in found.items()))
    return 0 if is_sound(found, options.engines) else 1


if __name__ == "__main__":
    sys.exit(main())
