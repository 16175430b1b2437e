"""What choosing to draft ahead is worth in simulation: `python benchmarks/frontiers.py [--json FILE]`.

The policies `price` and `learned` in the worlds that can draft ahead (models/evaluation/worlds.py), each against
itself where the same engine cannot: same requests, same luck. The policy asks where the bound promises something, and
the gate of a real engine measures whether it comes true; the simulated engine goes ahead of all requests at full
length. Simulated time, so the machine does not matter. Five minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import simulated_points
from simulated_points import measure

from faser.engine_adapter.protocol import StepRecord
from faser.models.evaluation.evaluate import DRIFT
from faser.models.evaluation.worlds import LOADS, WorldSpec, going_ahead

ROOT: Final = Path(__file__).resolve().parent.parent
RESULT: Final = ROOT / "benchmarks" / "results" / "frontiers.json"
KINDS: Final = ("in turn", "asked for", "ahead")


def kind_of(record: StepRecord) -> int:
    """Return which of KINDS a step was: nothing asked for; asked for, but nothing drafted ahead; drafted ahead."""
    return (2 if record.overlap_s else 1) if record.frontier else 0


def run(world: WorldSpec, load: int, seed: int, steps: int = 0) -> tuple[float, list[float]]:
    """Return tokens per second and the share of the counted steps of each of KINDS."""
    return simulated_points.run(world, load, seed, len(KINDS), kind_of, steps=steps)


def in_turn(world: WorldSpec) -> WorldSpec:
    """Return the same engine, which drafts nothing ahead."""
    profile = msgspec.structs.replace(world.profile, ahead=None)
    return WorldSpec(world.name, world.note, profile, world.has_confidence)


def compared(world: WorldSpec, load: int, seeds: range) -> dict[str, Any]:
    """Return what drafting ahead is worth at one load."""
    return simulated_points.compared(world, in_turn(world), load, seeds, KINDS, kind_of)


if __name__ == "__main__":
    measure(__doc__ or "", RESULT, going_ahead(), (*LOADS, DRIFT), 301, compared)
