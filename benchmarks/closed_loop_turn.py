"""An arm's round in closed_loop.py: the sums of the slices it was served in."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from closed_loop_result import Turn

from faser.controller.bench_machine import Noise, Processor


@dataclass(frozen=True, slots=True)
class Slice:
    """What an arm did in its part of a round, and what the machine did meanwhile; CPU time in seconds."""

    served: dict[str, float]  # the child's answer
    whole_s: float
    own_s: float
    busy_s: float
    steal_s: float


def as_turn(name: str, load: int, round_: int, slices: Sequence[Slice], start: int = 0) -> Turn:
    """Return an arm's round: the sums of its slices."""
    total = {key: sum(each.served[key] for each in slices) for key in slices[0].served}
    whole_s, own_s = sum(each.whole_s for each in slices), sum(each.own_s for each in slices)
    cores = os.cpu_count() or 1
    busy = Processor(sum(each.busy_s for each in slices), sum(each.steal_s for each in slices))
    noise = Noise.between(Processor(0.0, 0.0), busy, own_s, whole_s, cores)
    seconds = total["seconds"]
    return Turn(
        round=round_, load=load, arm=name, tokens_per_s=total["tokens"] / seconds, seconds=seconds, slices=len(slices),
        steps=int(total["steps"]), tokens=int(total["tokens"]), requests=int(total["requests"]),
        prompt_tokens=int(total["prompt_tokens"]),
        draft_tokens=int(total["draft_tokens"]), accepted_tokens=int(total["accepted_tokens"]),
        engine_cpu=total["cpu_s"] / seconds, own_cpu=own_s / whole_s, other_cpu=noise.other_cpu,
        steal_share=noise.steal_share, is_disturbed=bool(noise.reason(cores)),
        at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), start=start,
        prompt_steps=int(total["prompt_steps"]), prompt_steps_s=total["prompt_steps_s"],
        plain_firsts=int(total["plain_firsts"]), plain_firsts_s=total["plain_firsts_s"],
    )  # fmt: skip
