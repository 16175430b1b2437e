"""How fast the simulator steps: `python -m faser.env.bench --json`.

64 requests per engine, every mechanism on, KV blocks short enough that requests are preempted, observations computed,
a new random action for every engine and step. Ends with {"steps_per_s": ..., "steps_per_s_one_core": ...,
"requests": 64, ...}.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np

from .action_vector import ACTION
from .engine_model import synthetic_profile
from .scenario import Scenario, with_mechanisms
from .simulator import Simulator

REQUESTS = 64
WARM_STEPS = 600  # until batches are full and blocks short


def scenario() -> Scenario:
    """Return what is benchmarked: overloaded engines."""
    profile = with_mechanisms(synthetic_profile(max_requests=REQUESTS, kv_blocks=5500, k_max=6))
    return Scenario(profiles=(profile,), slots=REQUESTS, load=(1.5, 1.5), staleness=1)


def measure(threads: int, engines: int, seconds: float, turns: int) -> dict[str, float]:
    """Return the median steps per second over a number of turns, and how full and short of blocks engines were."""
    simulator = Simulator(scenario(), engines, threads=threads)
    simulator.reset()
    simulator.warm()
    random = np.random.default_rng(0)

    def act() -> None:
        simulator.step(random.random((engines, len(ACTION)), np.float32) * 2.0 - 1.0)

    for _ in range(WARM_STEPS):
        act()
    before = simulator.state.engines["preemptions"].sum()
    rates, steps = [], 0
    for _ in range(turns):
        started_s, count = time.perf_counter(), 0
        while time.perf_counter() - started_s < seconds / turns:
            act()
            count += 1
        rates.append(count * engines / (time.perf_counter() - started_s))
        steps += count * engines
    simulator.close()
    preempted = simulator.state.engines["preemptions"].sum() - before
    return {
        "steps_per_s": float(np.median(rates)),
        "running": float(simulator.state.engines["running"].mean()),
        "preemptions_per_1000_steps": float(1000.0 * preempted / max(steps, 1)),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m faser.env.bench", description="How fast the simulator steps.")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--seconds", type=float, default=10.0, help="per measurement")
    parser.add_argument("--engines", type=int, default=256, help="in the batch")
    parser.add_argument("--threads", type=int, default=2, help="of the first figure")
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or options.engines < 1 or options.threads < 1:
        parser.error("expected seconds above 0, at least one engine and one thread")
    many = measure(options.threads, options.engines, options.seconds, turns=5)
    one = measure(1, options.engines, options.seconds, turns=5)
    report = (
        f"{many['steps_per_s']:,.0f} engine steps/s on {options.threads} cores, {one['steps_per_s']:,.0f} on one; "
        f"{many['running']:.1f} running requests, {many['preemptions_per_1000_steps']:.1f} preemptions per 1000 steps"
    )
    result = {
        "steps_per_s": round(many["steps_per_s"]), "steps_per_s_one_core": round(one["steps_per_s"]),
        "requests": REQUESTS, "engines": options.engines, "running": round(many["running"], 2),
        "preemptions_per_1000_steps": round(many["preemptions_per_1000_steps"], 2),
    }  # fmt: skip
    sys.stdout.write(report + "\n" + (json.dumps(result) + "\n" if options.json else ""))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
