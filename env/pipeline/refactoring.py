"""How a live pipeline gets another number of stages: which GPU keeps what, what is copied, how long that takes.

Called by env/pipeline/cluster.py. The old stages serve meanwhile. A new stage takes a GPU that has a part of its
weights already, where its memory suffices; the rest comes from the server's memory or from the GPU that has it, over
the link. KV of the segments that change their GPU goes over the link, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...engine_adapter.arrays import Ints
from .constants import SEGMENTS
from .gpus import Gpus


@dataclass(frozen=True, slots=True, eq=False)
class Refactoring:
    """A move of one pipeline: the new stages' GPUs, the seconds until they serve, the bytes on links."""

    gpus: Ints  # (new stages,)
    fresh: tuple[int, ...]  # those among them that held no stage of it
    lead_s: float
    moved_bytes: float


def plan_refactoring(gpus: Gpus, old: Ints, stages: int, kv_bytes: float, now_s: float) -> Refactoring | None:
    """Return how the stages on `old`, (stages,), become so many; None: there is no room.

    :param kv_bytes: of the pipeline's requests under way
    """
    kept = _kept(gpus, old, stages)
    missing = [stage for stage in range(stages) if stage not in kept]
    found = gpus.choose(len(missing), stages, now_s)
    if found is None:
        return None
    fresh = gpus.assign(found, missing, stages, now_s)
    placed = np.array([kept.get(stage, fresh.get(stage, -1)) for stage in range(stages)], np.int64)
    lead_s, moved_bytes = _cost(gpus, old, placed, set(fresh.values()), kv_bytes, now_s)
    return Refactoring(placed, tuple(fresh.values()), lead_s, moved_bytes)


def _kept(gpus: Gpus, old: Ints, stages: int) -> dict[int, int]:
    """Return the new stages that stay on a GPU of the old ones."""
    constants, found = gpus.constants, {}
    taken: set[int] = set()
    for stage in range(stages):
        first = stage * len(old) // stages
        last = max((stage + 1) * len(old) // stages, first + 1)
        for gpu in old[first:last].tolist():
            room = (1.0 - gpus.used[gpu]) * constants.gpu_bytes
            if gpu not in taken and room >= constants.needed_bytes(stages):
                found[stage] = gpu
                taken.add(gpu)
                break
    return found


def _cost(gpus: Gpus, old: Ints, placed: Ints, fresh: set[int], kv_bytes: float, now_s: float) -> tuple[float, float]:
    """Return the seconds until every stage has what it needs, and the bytes on links."""
    constants, width_old, width_new = gpus.constants, SEGMENTS // len(old), SEGMENTS // len(placed)
    weight, kv = constants.weights_bytes / SEGMENTS, kv_bytes / SEGMENTS
    sent = dict.fromkeys(old.tolist(), 0.0)
    longest_s, moved = 0.0, 0.0
    for stage, gpu in enumerate(placed.tolist()):
        memory = gpus.in_memory(int(gpus.server[gpu]), now_s)
        from_host, from_link = 0.0, 0.0
        for segment in range(stage * width_new, (stage + 1) * width_new):
            source = int(old[segment // width_old])
            if source == gpu:
                continue
            from_host += weight * memory[segment]
            over_link = kv + weight * (not memory[segment])
            from_link += over_link
            sent[source] += over_link
        start_s = constants.start_s if gpu in fresh else 0.0
        took_s = start_s + from_host / constants.host_bytes_per_s + from_link / constants.link_bytes_per_s
        longest_s, moved = max(longest_s, took_s), moved + from_link
    return max(longest_s, max(sent.values()) / constants.link_bytes_per_s), moved
