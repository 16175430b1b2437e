"""The fragments: GPUs that other models fill in part, stages of ours on them, copies of weights in servers' memory.

Called by env/pipeline/cluster.py. Two stages of the model are never on one GPU (paper, section 6.2). Placement follows
equation (13) for every policy: to give it to one of them alone would mix two questions.
"""

from __future__ import annotations

import numpy as np

from ...engine_adapter.arrays import Bools, Floats, Ints
from .constants import SEGMENTS, PipelineConstants

NOBODY = -1


def segments_of(stage: int, stages: int) -> slice:
    """Return the segments that a stage holds."""
    width = SEGMENTS // stages
    return slice(stage * width, (stage + 1) * width)


class Gpus:
    """What each GPU has free, whose stage it holds, and which segments each server still has in memory."""

    def __init__(self, constants: PipelineConstants, seed: int) -> None:
        self.constants = constants
        self._random = np.random.default_rng([seed, 13])
        self.server: Ints = np.arange(constants.gpus) * constants.servers // constants.gpus
        self.owner: Ints = np.full(constants.gpus, NOBODY, np.int64)  # replica whose stage it holds
        self.used: Floats = self._draw(constants.gpus)  # share of memory that other models hold
        self.kept_until_s: Floats = np.full((constants.servers, SEGMENTS), -np.inf)
        self.held: Ints = np.zeros((constants.servers, SEGMENTS), np.int64)  # GPUs of the server that hold the segment
        self.hosted_s: Floats = np.full(constants.servers, -np.inf)  # equation (13): when it last hosted the model

    def _draw(self, count: int) -> Floats:
        shares, used = np.array(self.constants.used_quantiles).T
        return np.asarray(np.interp(self._random.random(count), shares, used), np.float64)

    def churn(self) -> None:
        """Let other models come and go on the GPUs that hold no stage."""
        free = self.owner == NOBODY
        self.used[free] = self._draw(int(free.sum()))

    def fitting(self, stages: int) -> Bools:
        """Return (gpus,) whether a stage fits beside what others hold."""
        room = (1.0 - self.used) * self.constants.gpu_bytes
        return np.asarray((self.owner == NOBODY) & (room >= self.constants.needed_bytes(stages)))

    def is_shared(self, gpus: Ints) -> Bools:
        """Return (n,) whether other models hold a part of these GPUs."""
        return np.asarray(self.used[gpus] > self.constants.shared_from)

    def choose(self, count: int, stages: int, now_s: float) -> Ints | None:
        """Return the GPUs for so many stages, servers by equation (13), emptier GPUs first; None: there is no room."""
        fits = self.fitting(stages)
        if fits.sum() < count:
            return None
        constants = self.constants
        available = np.bincount(self.server[fits], minlength=constants.servers)
        recency = np.exp(-constants.affinity_decay_per_s * (now_s - self.hosted_s))
        score = constants.affinity_recency * recency + constants.affinity_gpus * available
        candidates = np.flatnonzero(fits)
        order = np.lexsort((candidates, self.used[candidates], -score[self.server[candidates]]))
        chosen: Ints = candidates[order[:count]]
        return chosen

    def in_memory(self, server: int, now_s: float) -> Bools:
        """Return (SEGMENTS,) which segments a server has in its memory."""
        return np.asarray((self.kept_until_s[server] > now_s) | (self.held[server] > 0))

    def hit_shares(self, gpus: Ints, stages: int, now_s: float) -> Floats:
        """Return (gpus, stages) the share of each stage's weights that each GPU's server has in memory."""
        server = self.server[gpus]
        memory = (self.kept_until_s[server] > now_s) | (self.held[server] > 0)
        return np.asarray(memory.reshape(len(gpus), stages, SEGMENTS // stages).mean(axis=2), np.float64)

    def assign(self, gpus: Ints, wanted: list[int], stages: int, now_s: float) -> dict[int, int]:
        """Return a GPU for each wanted stage, so that stages go where their weights lie."""
        shares = self.hit_shares(gpus, stages, now_s)
        left = np.zeros(stages, np.bool_)
        left[wanted] = True
        found = {}
        for row, gpu in enumerate(gpus.tolist()):
            stage = int(np.where(left, shares[row], -1.0).argmax())
            left[stage] = False
            found[stage] = gpu
        return found

    def load_s(self, placed: dict[int, int], stages: int, now_s: float) -> float:
        """Return the seconds until all stages are loaded: Table 2 from storage, less what servers' memory has."""
        shares = self.hit_shares(np.fromiter(placed.values(), np.int64), stages, now_s)
        hit = float(shares[np.arange(len(placed)), list(placed)].min())
        return (1.0 - hit) * self.constants.of(stages).load_s + hit * self.constants.warm_load_s(stages)

    def reserve(self, gpu: int, replica: int) -> None:
        """Keep a GPU for a replica; what it held of ours must be released before."""
        assert self.owner[gpu] == NOBODY
        self.owner[gpu] = replica

    def hold(self, gpu: int, stage: int, stages: int, now_s: float) -> None:
        """Note that a stage is loaded on a GPU that is reserved."""
        server = int(self.server[gpu])
        self.held[server, segments_of(stage, stages)] += 1
        self.hosted_s[server] = now_s

    def release(self, gpu: int, stage: int, stages: int, now_s: float) -> None:
        """Take a stage off a GPU; its server keeps the weights for a while."""
        self.owner[gpu] = NOBODY
        server, part = int(self.server[gpu]), segments_of(stage, stages)
        self.held[server, part] -= 1
        self.kept_until_s[server, part] = now_s + self.constants.host_keep_s
        self.hosted_s[server] = now_s

    def free_histogram(self) -> Floats:
        """Return (8,) the share of all GPUs by eighths of free memory, those without a stage of ours."""
        free = (1.0 - self.used)[self.owner == NOBODY]
        return np.histogram(free, bins=8, range=(0.0, 1.0))[0] / self.constants.gpus
