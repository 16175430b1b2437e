"""What a policy sees of the cluster, once as numbers with units and once as the environment's vector.

Filled by env/pipeline/cluster.py. Rules read the numbers, learned policies the vector; neither sees the future.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ...engine_adapter.arrays import Floats, Singles
from ..layout.observation import Feature
from .constants import GIGA, STAGES

WINDOWS_S: Final = (15.0, 60.0, 180.0, 900.0)  # 15 s and 180 s are the paper's; its 3 h and 12 h are longer than runs
MOVES: Final = (-3, -2, -1, 0, 1, 2, 3)  # changes of the number of pipelines that an action can name


@dataclass(frozen=True, slots=True, eq=False)
class ClusterView:
    """One moment. Tuples over granularities are in the order of STAGES."""

    now_s: float
    rates: tuple[float, ...]  # arrivals/s by window
    variations: tuple[float, ...]  # CV of the gaps by window
    waiting: int
    oldest_s: float  # how long the first of them has waited
    running: int
    kv_bytes: float
    serving: tuple[int, ...]  # pipelines that take requests, those that are being given other stages included
    coming: tuple[int, ...]  # pipelines that load, or get so many stages
    moving: tuple[int, ...]  # of those that serve: are being given other stages
    gpus_held: int
    room: tuple[int, ...]  # GPUs on which one more stage would fit
    free_memory: tuple[float, ...]  # share of GPUs by eighths of free memory
    load_s: tuple[float, ...]  # how long one more pipeline would load; infinite: there is no room
    last_move_s: float
    last_move_bytes: float
    since_move_s: float
    arrived_s: Floats  # (n,) when requests came since the last decision

    def settled(self) -> tuple[int, ...]:
        """Return the pipelines by granularity once everything under way is done."""
        return tuple(
            serving - moving + coming
            for serving, moving, coming in zip(self.serving, self.moving, self.coming, strict=True)
        )

    def vector(self) -> Singles:
        """Return the observation, (features,) float32 in 0..1."""
        values = [
            *(_squashed(rate, 20.0) for rate in self.rates),
            *(_squashed(variation, 2.0) for variation in self.variations),
            _squashed(self.waiting, 16.0), _squashed(self.oldest_s, 1.0), _squashed(self.running, 16.0),
            *(_squashed(count, 2.0) for count in (*self.serving, *self.coming, *self.moving)),
            _squashed(self.kv_bytes, 50.0 * GIGA), _squashed(self.gpus_held, 16.0),
            *(_squashed(gpus, 16.0) for gpus in self.room),
            *self.free_memory, *(_squashed(seconds, 5.0) for seconds in self.load_s),
            _squashed(self.last_move_s, 5.0), _squashed(self.last_move_bytes, 50.0 * GIGA),
            _squashed(self.since_move_s, 60.0),
        ]  # fmt: skip
        return np.array(values, np.float32)


def _squashed(value: float, half: float) -> float:
    """Return x / (x + half), 1 for infinity."""
    return 1.0 if value == float("inf") else value / (value + half)


def _layout() -> tuple[Feature, ...]:
    windows = [f"{window_s:g}" for window_s in WINDOWS_S]
    named = [
        *((f"rate_{window}", f"x/(x+20), x arrivals per second in a window of {window} s") for window in windows),
        *(
            (f"cv_{window}", f"x/(x+2), x the CV of gaps between arrivals in a window of {window} s")
            for window in windows
        ),
        ("waiting", "x/(x+16), x waiting requests"),
        ("oldest", "x/(x+1), x seconds that the first of them has waited"),
        ("running", "x/(x+16), x requests in pipelines"),
        *((f"serving_{stages}", f"x/(x+2), x pipelines of {stages} stages that serve") for stages in STAGES),
        *(
            (f"coming_{stages}", f"x/(x+2), x pipelines of {stages} stages that load or come about")
            for stages in STAGES
        ),
        *((f"moving_{stages}", f"x/(x+2), x pipelines of {stages} stages that get others") for stages in STAGES),
        ("kv", "x/(x+50), x GB of KV of requests in pipelines"),
        ("gpus", "x/(x+16), x GPUs held"),
        *((f"room_{stages}", f"x/(x+16), x GPUs with room for one of {stages} stages") for stages in STAGES),
        *(
            (f"free_{part}", f"share of GPUs, without our stages, whose free memory is at {part} eighths and above")
            for part in range(8)
        ),
        *((f"load_{stages}", f"x/(x+5), x seconds that one more of {stages} stages would load") for stages in STAGES),
        ("move_time", "x/(x+5), x seconds of the last move"),
        ("move_bytes", "x/(x+50), x GB on links of the last move"),
        ("since_move", "x/(x+60), x seconds since then"),
    ]
    return tuple(Feature(name, 0.0, 1.0, meaning) for name, meaning in named)


PIPELINE_FEATURES: Final = _layout()
