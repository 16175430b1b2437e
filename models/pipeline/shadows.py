"""What each fixed set of pipelines would have cost under the arrivals that came: shadows that serve them, too.

For models/pipeline/weigh.py. A shadow has the world's serving times, every stage beside other models, and no moves; it
is given each decision's arrivals once they have come, so it knows no future.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...engine_adapter.arrays import Floats
from ...env.pipeline.cluster import KEEP_UP
from ...env.pipeline.constants import SEGMENTS, PipelineConstants
from ...env.pipeline.serve_kernel import serve, sustaining
from ...env.pipeline.view import WINDOWS_S

MOST_PIPELINES: Final = {4: 12, 8: 8, 16: 4, 32: 2}  # by stages: what finds room on 82 GPUs
SETS: Final = tuple((stages, count) for stages, most in MOST_PIPELINES.items() for count in range(1, most + 1))
LATENCY_WEIGHT: Final = 0.5  # missed requests that a second of one request is worth, so that no rule rests at the limit


def gpus_of(pipelines: tuple[int, int]) -> int:
    """Return the GPUs of (stages, count)."""
    return pipelines[0] * pipelines[1]


class Shadow:
    """One set of pipelines that serves what has come."""

    def __init__(self, pipelines: tuple[int, int], constants: PipelineConstants, latency_weight: float) -> None:
        stages, count = pipelines
        self.constants, self.count, self.latency_weight = constants, count, latency_weight
        self.compute_s = constants.of(stages).compute_s
        self.most = constants.most_in_batch(stages)
        self._open = np.ones(count, np.bool_)
        self._stages = np.full(count, stages, np.int64)
        self._most = np.full(count, self.most, np.int64)
        self._base_s = np.full((count, SEGMENTS), self.compute_s)
        self._free_s = np.zeros((count, SEGMENTS))
        self._used_s = np.zeros(count)
        self._waiting = np.zeros(0)

    def advance(self, until_s: float, arrived_s: Floats, rate_rps: float, penalty: float) -> float:
        """Serve until a time; return the cost of what was sent, GPUs left out."""
        constants, slower = self.constants, 1.0 + penalty
        times = np.concatenate((self._waiting, arrived_s)) if len(self._waiting) else arrived_s
        share = rate_rps / self.count
        least = sustaining(share, self.compute_s * slower, self.most, constants.batch_slope, KEEP_UP)
        finish_s = np.zeros(len(times))
        head = serve(
            until_s, 0, times, np.zeros(len(times)), finish_s, np.zeros(len(times), np.int64), self._open, self._stages,
            np.full(self.count, least, np.int64), self._most, self._base_s * slower, self._free_s, self._used_s,
            constants.hop_s, constants.batch_slope,
        )  # fmt: skip
        latency_s = finish_s[:head] - times[:head]
        self._waiting = times[head:].copy()
        return float(self.latency_weight * latency_s.sum() + (latency_s > constants.objective_s).sum())


class Shadows:
    """A shadow of every set, and what it cost per second of late, GPUs included."""

    def __init__(self, constants: PipelineConstants, latency_weight: float = LATENCY_WEIGHT) -> None:
        """Take the missed requests that a second of one request is worth."""
        self.constants = constants
        self._shadows = [Shadow(each, constants, latency_weight) for each in SETS]
        self._gpu_cost: Floats = constants.gpu_weight * np.array([gpus_of(each) for each in SETS], np.float64)

    def advance(self, until_s: float, span_s: float, arrived_s: Floats, rate_rps: float, variation: float) -> Floats:
        """Serve the last span's arrivals; return (sets,) cost per second of it."""
        penalty = self.constants.sharing_penalty(variation)
        spent = [shadow.advance(until_s, arrived_s, rate_rps, penalty) for shadow in self._shadows]
        return np.array(spent) / span_s + self._gpu_cost


def day_costs(arrival_s: Floats, constants: PipelineConstants, step_s: float = 5.0) -> Floats:
    """Return (sets,) what each set costs per second over a whole day of arrivals."""
    gaps = np.diff(arrival_s, prepend=0.0)
    shadows, steps = Shadows(constants), int(np.ceil(float(arrival_s[-1]) / step_s)) if len(arrival_s) else 0
    total = np.zeros(len(SETS))
    for step in range(steps):
        low, high = np.searchsorted(arrival_s, (step * step_s, (step + 1) * step_s))
        end_s = (step + 1) * step_s
        of_rate, of_gaps = np.searchsorted(arrival_s, end_s - np.array(WINDOWS_S[:2]))
        recent = gaps[of_gaps + 1 : high]
        variation = float(recent.std() / max(recent.mean(), 1e-12)) if len(recent) > 2 else 1.0
        rate = float(high - of_rate) / min(WINDOWS_S[0], end_s)
        total += shadows.advance(end_s, step_s, arrival_s[low:high], rate, variation)
    return total / max(steps, 1)
