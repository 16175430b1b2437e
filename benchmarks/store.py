"""Can the telemetry file keep up? Writes the steps of a busy fleet through the real store and prints the margin.

    python benchmarks/store.py [--seconds 20] [--engines 1] [--requests 64] [--rate 0]

Rate 0 hands steps over as fast as the store takes them and reports the ceiling; a positive rate (steps/s and engine)
paces them as an engine would and reports what was dropped and the CPU time. The demand is 100 steps/s of 64 requests.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
from made_engine import hello, record

from faser.controller.telemetry.store import EngineEntry, RunEntry, StepEntry, Store
from faser.engine_adapter.protocol import ActionSet, StepRecord

DEMAND_STEPS_PER_S = 100.0


def step(boot_id: str, counter: int, requests: int, dice: random.Random) -> StepRecord:
    """Return one step with random lengths, acceptances and single-precision confidences."""
    lengths = [dice.randint(0, 5) for _ in range(requests)]
    accepted = [dice.randint(0, length) for length in lengths]
    confidences = [tuple(float(np.float32(dice.random())) for _ in range(length)) for length in lengths]
    handles = range(counter // 50 + 1, counter // 50 + 1 + requests)
    return record(boot_id, counter, counter * 0.01, lengths, accepted, confidences, handles)


def action(step: StepRecord) -> ActionSet:
    """Return a decision that names every request."""
    handles = [row.handle for row in step.rows]
    lengths = [row.drafted for row in step.rows]
    return ActionSet(step.boot_id, 1, step.counter, step.step + 32, step.time_s + 1, 0, handles, lengths, 1e-5)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    dice = random.Random(0)
    boots = [f"boot-{engine}" for engine in range(options.engines)]
    pool = [step(boots[0], counter, options.requests, dice) for counter in range(1, 301)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "telemetry.sqlite"
        store = Store(path, RunEntry(1, time.time_ns(), "benchmark", "{}"))
        for boot_id in boots:
            store.put(EngineEntry(hello(boot_id), time.time_ns()))
        started, cpu, offered, peak = time.perf_counter(), time.process_time(), 0, 0
        while (elapsed := time.perf_counter() - started) < options.seconds:
            waiting = store.health().queued
            peak = max(peak, waiting)
            due = int(elapsed * options.rate) * options.engines if options.rate else offered + max(0, 2000 - waiting)
            while offered < due:
                boot_id, made = boots[offered % options.engines], pool[offered % len(pool)]
                made = msgspec.structs.replace(made, boot_id=boot_id, counter=offered)
                store.put(StepEntry(made, time.time_ns(), action(made), "benchmark", 5e-5, True))
                offered += 1
            time.sleep(0.002)
        store.close(60.0)
        health, wall, used = store.health(), time.perf_counter() - started, time.process_time() - cpu
        size = path.stat().st_size
    rate, per_step = health.written / wall, used / offered * 1e6
    if options.json:
        found = {"steps_per_s": rate, "dropped": health.dropped, "requests": options.requests, "cpu_us": per_step}
        print(json.dumps(found | {"bytes_per_step": size / health.written}))
        return
    margin = rate / DEMAND_STEPS_PER_S
    print(f"{health.written} entries in {wall:.1f} s: {rate:.0f}/s, {margin:.0f}x the demand of 100 steps/s")
    print(f"dropped {health.dropped}, longest queue {peak}, {size / health.written:.0f} bytes/step")
    print(f"{per_step:.0f} us CPU/step, the making of the records included")


if __name__ == "__main__":
    main()
