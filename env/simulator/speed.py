"""How fast the simulator steps: `python -m faser.env.simulator.speed --json`.

64 requests per engine, every mechanism on, KV blocks short enough that requests are preempted, observations computed,
a new random action for every engine and step. Each core steps a batch of its own; one batch on all cores, which waits
for the slowest at every step, stands beside. Ends with {"steps_per_s": ..., "steps_per_s_one_core": ...,
"steps_per_s_one_batch": ..., "requests": 64, ...}.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..layout.action_vector import ACTION
from ..profile.engine_profile import synthetic_profile
from .scenario import Scenario, with_mechanisms
from .simulator import Simulator

REQUESTS = 64
WARM_STEPS = 600  # until batches are full and blocks short


def scenario() -> Scenario:
    """Return what is benchmarked: overloaded engines."""
    profile = with_mechanisms(synthetic_profile(max_requests=REQUESTS, kv_blocks=5500, k_max=6))
    return Scenario(profiles=(profile,), slots=REQUESTS, load=(1.5, 1.5), staleness=1)


class TimedEngines:
    """A batch of engines on some threads, past its start."""

    def __init__(self, engines: int, threads: int, seed: int) -> None:
        self.simulator = Simulator(scenario(), engines, seed=seed, threads=threads)
        self.simulator.reset()
        self.simulator.warm()
        self._random = np.random.default_rng(seed)
        self.run(until=lambda count: count == WARM_STEPS)

    def run(self, until: Callable[[int], bool]) -> int:
        """Step until so many steps are enough; return the engine steps."""
        count, engines = 0, self.simulator.engines
        while not until(count):
            self.simulator.step(self._random.random((engines, len(ACTION)), np.float32) * 2.0 - 1.0)
            count += 1
        return count * engines


def measure(cores: int, engines: int, seconds: float, turns: int, *, is_one_batch: bool = False) -> dict[str, float]:
    """Return the median steps per second over a number of turns, and how full and short of blocks engines were."""
    batches = (
        [TimedEngines(engines, cores, 0)] if is_one_batch else [TimedEngines(engines, 1, seed) for seed in range(cores)]
    )
    states = [batch.simulator.state.engines for batch in batches]
    before = sum(int(state["preemptions"].sum()) for state in states)
    rates, steps = [], 0
    with ThreadPoolExecutor(len(batches)) as pool:
        for _ in range(turns):
            started_s = time.perf_counter()
            end_s = started_s + seconds / turns
            taken = sum(pool.map(lambda batch, end_s=end_s: batch.run(lambda _: time.perf_counter() >= end_s), batches))
            rates.append(taken / (time.perf_counter() - started_s))
            steps += taken
    for batch in batches:
        batch.simulator.close()
    preempted = sum(int(state["preemptions"].sum()) for state in states) - before
    return {
        "steps_per_s": float(np.median(rates)),
        "running": float(np.mean([state["running"] for state in states])),
        "preemptions_per_1000_steps": float(1000.0 * preempted / max(steps, 1)),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m faser.env.simulator.speed", description="How fast the simulator steps."
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--seconds", type=float, default=10.0, help="per measurement")
    parser.add_argument("--engines", type=int, default=64, help="in a batch; more fit no core's own cache")
    parser.add_argument("--cores", type=int, default=2, help="of the first figure")
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or options.engines < 1 or options.cores < 1:
        parser.error("expected seconds above 0, at least one engine and one core")
    many = measure(options.cores, options.engines, options.seconds, turns=5)
    one = measure(1, options.engines, options.seconds, turns=5)
    together = measure(options.cores, options.engines, options.seconds, turns=5, is_one_batch=True)
    report = (
        f"{many['steps_per_s']:,.0f} engine steps/s on {options.cores} cores, a batch of {options.engines} on each; "
        f"{one['steps_per_s']:,.0f} on one; {together['steps_per_s']:,.0f} with one batch on {options.cores}; "
        f"{many['running']:.1f} running requests, {many['preemptions_per_1000_steps']:.1f} preemptions per 1000 steps"
    )
    result = {
        "steps_per_s": round(many["steps_per_s"]), "steps_per_s_one_core": round(one["steps_per_s"]),
        "steps_per_s_one_batch": round(together["steps_per_s"]), "requests": REQUESTS, "engines": options.engines,
        "cores": options.cores, "running": round(many["running"], 2),
        "preemptions_per_1000_steps": round(many["preemptions_per_1000_steps"], 2),
    }  # fmt: skip
    sys.stdout.write(report + "\n" + (json.dumps(result) + "\n" if options.json else ""))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
