"""What choosing a split is worth in simulation: `python benchmarks/splits.py [--json FILE]`.

The policies `price` and `learned` in the worlds that offer splits (models/evaluation/worlds.py), each against itself
where the same engine offers none: same requests, same luck. Simulated time, so the machine does not matter. Ten
minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import simulated_points
from simulated_points import measure

from faser.engine_adapter.protocol import StepRecord
from faser.env.profile.engine_profile import Split
from faser.models.evaluation.evaluate import DRIFT
from faser.models.evaluation.worlds import LOADS, WorldSpec, side_by_side

ROOT: Final = Path(__file__).resolve().parent.parent
RESULT: Final = ROOT / "benchmarks" / "results" / "splits.json"


def split_of(record: StepRecord) -> int:
    """Return the index of the split that a step ran under; 0: unsplit."""
    return record.split or 0


def run(world: WorldSpec, load: int, seed: int, steps: int = 0) -> tuple[float, list[float]]:
    """Return tokens per second and the share of the counted steps under each split."""
    return simulated_points.run(world, load, seed, len(world.profile.splits), split_of, steps=steps)


def unsplit(world: WorldSpec) -> WorldSpec:
    """Return the same engine, which offers no split."""
    profile = msgspec.structs.replace(world.profile, splits=(Split("unsplit"),))
    return WorldSpec(world.name, world.note, profile, world.has_confidence)


def compared(world: WorldSpec, load: int, seeds: range) -> dict[str, Any]:
    """Return what the splits are worth at one load."""
    names = [split.name for split in world.profile.splits]
    return simulated_points.compared(world, unsplit(world), load, seeds, names, split_of)


if __name__ == "__main__":
    measure(__doc__ or "", RESULT, side_by_side(), (*LOADS, DRIFT), 301, compared)
