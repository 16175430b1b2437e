"""What choosing a split is worth in simulation: `python benchmarks/splits.py [--json FILE]`.

The policies `price` and `learned` in the worlds that offer splits (models/worlds.py), each against itself where the
same engine offers none: same requests, same luck. Simulated time, so the machine does not matter. Ten minutes; then
`python docs/figures.py`.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Final

import msgspec
from simulated_points import half_width, measure

from faser.controller.evaluate import decided
from faser.engine_adapter.protocol import ActionSet
from faser.env.engine_model import Split
from faser.env.state import EngineState
from faser.models.evaluate import DRIFT, FULL, Cell, Meter
from faser.models.policy import make_policy
from faser.models.simulated import SimulatedEngine
from faser.models.worlds import LOADS, WorldSpec, side_by_side

ROOT: Final = Path(__file__).resolve().parent.parent
RESULT: Final = ROOT / "benchmarks" / "results" / "splits.json"
STEPS: Final = 2400  # without speculation, of a full batch
DRIFT_STEPS: Final = 4800
POLICIES: Final = ("price", "learned")


def run(world: WorldSpec, load: int, seed: int, steps: int = 0, chosen: str = POLICIES[0]) -> tuple[float, list[float]]:
    """Return tokens per second, goodput where the load drifts, and the share of the counted steps under each split.

    :param load: running requests, or DRIFT
    """
    engine = SimulatedEngine(world.drifting() if load == DRIFT else world.closed(load), seed)
    policy, state = make_policy(chosen, engine.capabilities), EngineState(engine.capabilities)
    pace_s = float(engine.simulator.origins.pace_s[0])
    horizon_s = pace_s * (steps or (DRIFT_STEPS if load == DRIFT else STEPS))
    meter = Meter(engine.simulator, horizon_s, int(FULL * load))
    under = [0] * len(world.profile.splits)
    actions: ActionSet | None = None
    while True:
        record = engine.step(actions)
        if meter.is_over():
            break
        if meter.start is not None:
            under[record.split or 0] += 1
        actions = decided(state, record, policy, record.counter)
    score = meter.run(Cell(chosen, world.name, load, seed, steps)).score
    return score, [share / max(sum(under), 1) for share in under]


def unsplit(world: WorldSpec) -> WorldSpec:
    """Return the same engine, which offers no split."""
    profile = msgspec.structs.replace(world.profile, splits=(Split("unsplit"),))
    return WorldSpec(world.name, world.note, profile, world.has_confidence)


def compared(world: WorldSpec, load: int, seeds: range) -> dict[str, Any]:
    """Return the ratios of the scores at one load with 95 % half-widths, and the shares of the steps, by policy."""
    return {
        "world": world.name,
        "load": load,
        "policies": {name: _beside(world, load, seeds, name) for name in POLICIES},
    }


def _beside(world: WorldSpec, load: int, seeds: range, chosen: str) -> dict[str, Any]:
    ratios, shares = [], []
    for seed in seeds:
        rate, under = run(world, load, seed, chosen=chosen)
        ratios.append(rate / run(unsplit(world), load, seed, chosen=chosen)[0])
        shares.append(under)
    names = [split.name for split in world.profile.splits]
    mean_shares = map(statistics.mean, zip(*shares, strict=True))
    return {
        "ratio": statistics.mean(ratios), "half_width": half_width(ratios),
        "share_of_steps": dict(zip(names, mean_shares, strict=True)),
    }  # fmt: skip


if __name__ == "__main__":
    measure(__doc__ or "", RESULT, side_by_side(), (*LOADS, DRIFT), 301, compared)
