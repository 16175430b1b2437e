"""What steering costs by requests per engine and by engines, up to 1,000: CPU, memory, messages, telemetry.

    OMP_NUM_THREADS=1 python benchmarks/scale.py             # about 4 minutes; benchmarks/results/scale.json
    python benchmarks/scale.py --docs docs                   # the tables of docs/scale.md again, from that file

Simulated engines run in closed loop with the policy `price`; their step records then go, as bytes, through the
sidecar's own session (decode, observe, decide, encode, learn, measure) in this process, and through its store. Sockets
and the loop around them are not in it: benchmarks/fleet.py has them. CPU times are the thread's, the store's the
process's.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from recorded_engine import Recording, record_steps
from rich.progress import Progress

from faser.controller.bench_machine import Machine, commit, machine_facts, versions
from faser.controller.config import LeaseConfig
from faser.controller.session import Session
from faser.controller.store import EngineEntry, RunEntry, StepEntry, Store
from faser.engine_adapter.protocol import StepRecord, decode_from_engine, encode
from faser.models.worlds import held_out

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results" / "scale.json"
REQUESTS: Final = (1, 4, 16, 64, 128)
ENGINES: Final = (1, 10, 100, 1000)
BATCH: Final = 64  # requests of each engine where engines are counted
STEPS_PER_S: Final = 50.0
PER_NODE: Final = 8  # engines: a node of eight GPUs, one engine each
DAY_S: Final = 86_400.0
BEGIN, END = "<!-- scale: begin -->", "<!-- scale: end -->"


class ByRequests(msgspec.Struct, frozen=True):
    """One engine with so many running requests; means per step."""

    requests: int
    decide_us: float  # CPU of the sidecar's thread
    decide_us_p99: float
    store_us: float  # CPU of writing it
    record_bytes: float
    action_bytes: float
    telemetry_bytes: float


class ByEngines(msgspec.Struct, frozen=True):
    """So many engines in one process, their records in turns."""

    engines: int
    decide_us: float
    memory_kib: float  # of each engine's session


class Results(msgspec.Struct):
    """The file."""

    machine: Machine
    versions: dict[str, str]
    commit: str
    world: str
    steps: int
    note: str = ""
    by_requests: list[ByRequests] = []
    by_engines: list[ByEngines] = []


class Desk:
    """One engine's session, fed with bytes as the daemon feeds it."""

    def __init__(self, recording: Recording) -> None:
        self.session = Session(recording.hello, "price", LeaseConfig(), 1, 0.0)

    def take(self, frame: bytes) -> tuple[StepEntry, int]:
        """Return what would be stored, and the size of the answer."""
        record = decode_from_engine(frame)
        assert isinstance(record, StepRecord)
        session = self.session
        session.admit(record, record.time_s)
        decision = session.decide(record)
        assert decision is not None, session.governor.reason
        answer = encode(decision.action_set)
        session.learn()
        session.measure(record)
        return StepEntry(record, 0, decision.action_set, decision.reason, 0.0, True, "price"), len(answer)


def framed(recording: Recording) -> list[bytes]:
    """Return the records as bytes, on a clock that goes with their scaled steps."""
    ends_s = np.cumsum([record.step_s for record in recording.records]).tolist()
    pairs = zip(recording.records, ends_s, strict=True)
    return [encode(msgspec.structs.replace(record, time_s=end_s)) for record, end_s in pairs]


def by_requests(recording: Recording, requests: int, folder: Path) -> ByRequests:
    """Return the cost of one engine's steps; the first half warms up."""
    desk, frames = Desk(recording), framed(recording)
    half, times_us, sizes, entries = len(frames) // 2, [], [], []
    for frame in frames:
        begun_ns = time.thread_time_ns()
        entry, size = desk.take(frame)
        times_us.append((time.thread_time_ns() - begun_ns) / 1e3)
        sizes.append(size)
        entries.append(entry)
    store_us, telemetry = _stored(recording, entries, folder / f"{requests}.sqlite")
    return ByRequests(
        requests, round(float(np.mean(times_us[half:])), 1), round(float(np.quantile(times_us[half:], 0.99)), 1),
        round(store_us, 1), round(float(np.mean([len(frame) for frame in frames])), 1),
        round(float(np.mean(sizes)), 1), round(telemetry, 1),
    )  # fmt: skip


def _stored(recording: Recording, entries: Sequence[StepEntry], path: Path) -> tuple[float, float]:
    """Return CPU microseconds and bytes per step of the telemetry file; an empty file's are left out."""
    store = Store(path, RunEntry(1, time.time_ns(), "scale", "{}"))
    store.put(EngineEntry(recording.hello, time.time_ns()))
    begun_s = time.process_time()
    for entry in entries:
        store.put(entry)
    store.close(60.0)
    used_s, size = time.process_time() - begun_s, path.stat().st_size
    empty = Store(path.with_suffix(".empty"), RunEntry(1, time.time_ns(), "scale", "{}"))
    empty.close(60.0)
    return 1e6 * used_s / len(entries), (size - path.with_suffix(".empty").stat().st_size) / len(entries)


def by_engines(recording: Recording, engines: int, least: int) -> ByEngines:
    """Return the cost of each record where so many engines take turns, `least` records of each before it counts."""
    frames = framed(recording)
    rounds = max(math.ceil(200 / engines), 4)
    gc.collect()
    before = _resident_kib()
    desks = [Desk(recording) for _ in range(engines)]
    used_ns = 0
    for at, frame in enumerate(frames[: least + rounds]):
        begun_ns = time.thread_time_ns()
        for desk in desks:
            desk.take(frame)
        used_ns += time.thread_time_ns() - begun_ns if at >= least else 0
    memory = (_resident_kib() - before) / engines
    return ByEngines(engines, round(used_ns / 1e3 / engines / rounds, 1), round(memory, 1))


def _resident_kib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def tables(results: Results) -> str:
    """Return the tables of docs/scale.md."""
    lines = [
        "| running requests | CPU of a step, us | p99 | writing it, us | record, bytes | action set, bytes "
        "| telemetry, bytes | telemetry, GB/day |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for each in results.by_requests:
        day = each.telemetry_bytes * STEPS_PER_S * DAY_S / 1e9
        lines.append(
            f"| {each.requests} | {each.decide_us:.0f} | {each.decide_us_p99:.0f} | {each.store_us:.0f} "
            f"| {each.record_bytes:.0f} | {each.action_bytes:.0f} | {each.telemetry_bytes:.0f} | {day:.1f} |"
        )
    lines += [
        "",
        f"| engines with {BATCH} requests, one process | CPU of a step, us | memory of each, KiB |",
        "|--:|--:|--:|",
    ]
    for each in results.by_engines:  # one engine's memory is below what the kernel counts in
        memory = f"{each.memory_kib:.0f}" if each.engines > 1 else ""
        lines.append(f"| {each.engines} | {each.decide_us:.0f} | {memory} |")
    return "\n".join([*lines, "", *_extrapolated(results)])


def _extrapolated(results: Results) -> list[str]:
    """Return what follows for engines on nodes of eight: multiplied, not measured."""
    one = next(each for each in results.by_requests if each.requests == BATCH)
    cores = (one.decide_us + one.store_us) * STEPS_PER_S / 1e6
    wire = (one.record_bytes + one.action_bytes) * STEPS_PER_S
    lines = [
        f"| engines, {PER_NODE} on a node | nodes, each with a sidecar | cores of a node's sidecar | cores in all "
        "| messages within a node, MB/s | telemetry in all, GB/day |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for engines in (1, PER_NODE, 64, 256, 1000):
        nodes, on_node = math.ceil(engines / PER_NODE), min(engines, PER_NODE)
        lines.append(
            f"| {engines} | {nodes} | {on_node * cores:.2f} | {engines * cores:.1f} | {on_node * wire / 1e6:.2f} "
            f"| {engines * one.telemetry_bytes * STEPS_PER_S * DAY_S / 1e9:.0f} |"
        )
    return lines


def write_docs(results: Results, page: Path) -> None:
    """Replace the tables between their markers."""
    text = page.read_text()
    head, rest = text.split(BEGIN)
    page.write_text(f"{head}{BEGIN}\n{told(results)}\n{END}{rest.split(END)[1]}")


def told(results: Results) -> str:
    """Return what stands between the markers: where it was measured, and the tables."""
    where = f"{results.machine.cpu}, {results.machine.cores} cores, one thread; commit {results.commit}; "
    where += f"world {results.world}, {results.steps} steps."
    return "\n".join([where + (f" {results.note}" if results.note else ""), "", tables(results)])


def measure(options: argparse.Namespace) -> Results:
    """Run everything."""
    world = next(each for each in held_out() if each.name == options.world)
    results = Results(machine_facts(), versions(), commit(), world.name, options.steps, options.note)
    with tempfile.TemporaryDirectory() as name, Progress(disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("scale", total=len(options.requests) + len(options.engines))
        for requests in options.requests:
            recording = record_steps(world, requests, options.steps, STEPS_PER_S)
            results.by_requests.append(by_requests(recording, requests, Path(name)))
            progress.advance(task)
        recording = record_steps(world, BATCH, options.steps, STEPS_PER_S)
        for engines in options.engines:
            results.by_engines.append(by_engines(recording, engines, options.steps // 4))
            progress.advance(task)
    return results


def main() -> int:
    """Parse, measure or write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=list(REQUESTS))
    parser.add_argument("--engines", type=int, nargs="+", default=list(ENGINES))
    parser.add_argument("--steps", type=int, default=400, help="of each engine")
    parser.add_argument("--world", default="gpu-8b-eagle", choices=[each.name for each in held_out()])
    parser.add_argument("--note", default="", help="a remark kept in the results and shown with them")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, help="measure nothing, rewrite scale.md in this folder")
    options = parser.parse_args()
    if options.docs is not None:
        write_docs(msgspec.json.decode(options.out.read_bytes(), type=Results), options.docs / "scale.md")
        return 0
    if min(*options.requests, *options.engines) < 1 or options.steps < 8:
        parser.error("expected numbers of at least 1, and 8 steps")
    results = measure(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    if BATCH in options.requests:
        print(tables(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
