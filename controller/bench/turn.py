"""An arm's turn in a benchmark: the slices it was served in, summed, with what the machine did meanwhile.

Called by controller/bench/course.py. This machine's speed changes within seconds, so that arms which work for many
seconds each are compared by its moods more than by their merits; a round is therefore cut into slices of about a
second that go round among the arms.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..engine.machine import Noise, Processor
from .arm import Drafting
from .clients import Served
from .ratio import Goodput
from .result import Turn

LEAST_STEPS: Final = 8  # of a slice without speculation: the first costs a twelfth more, its caches being cold

Place = tuple[str, int | str, str, int]  # phase, load, kinds, round


@dataclass(frozen=True, slots=True)
class Look:
    """The machine, the benchmark's own work and one arm's at a moment."""

    at_s: float
    machine: Processor
    own_s: float
    arm_s: float
    drafting: Drafting
    finished: int = 0  # requests


@dataclass(frozen=True, slots=True)
class Slice:
    """What was served between two looks."""

    served: Served
    before: Look
    after: Look


def slice_tokens(rate: float, slice_s: float, load: int) -> float:
    """Return the tokens of a slice of about so many seconds at a rate in tokens/s, some steps at least."""
    return max(rate * slice_s, LEAST_STEPS * load)


def slice_ends(tokens: int, tokens_per_slice: float) -> list[int]:
    """Return where the slices of a round end, in tokens since its start: equal parts."""
    parts = max(round(tokens / tokens_per_slice), 1)
    return [tokens * (part + 1) // parts for part in range(parts)]


def compute_s(served: Sequence[Served], threads: int) -> float | None:
    """Return the CPU time of the threads that compute: of a server's, so many that used most; None if nobody looked."""
    names = {thread for each in served for thread in each.thread_s}
    spent_s = sorted(sum(each.thread_s.get(thread, 0.0) for each in served) for thread in names)
    return sum(spent_s[-threads:]) if spent_s else None


def as_turn(
    place: Place,
    name: str,
    slices: Sequence[Slice],
    own_load: float,
    goodput: Goodput | None = None,
    failed: int = 0,
    start: int = 0,
    threads: int = 1,
) -> Turn:
    """Return an arm's turn.

    :param own_load: the part of the kernel's load average that the benchmark itself explains
    :param start: which one of the servers it was measured in
    :param threads: of the server that compute
    """
    phase, load, kinds, round_ = place
    cores, average = os.cpu_count() or 1, os.getloadavg()[0]
    ends = [(each.before, each.after) for each in slices]
    spent = Processor(
        sum(after.machine.busy_s - before.machine.busy_s for before, after in ends),
        sum(after.machine.steal_s - before.machine.steal_s for before, after in ends),
    )
    noise = Noise.between(
        Processor(0.0, 0.0), spent, sum(after.own_s - before.own_s for before, after in ends),
        sum(after.at_s - before.at_s for before, after in ends), cores, excess_load=average - own_load,
    )  # fmt: skip
    tokens, seconds = sum(each.served.tokens for each in slices), sum(each.served.seconds for each in slices)
    requests = sum(after.finished - before.finished for before, after in ends)
    tokens_per_s = tokens / seconds
    return Turn(
        phase=phase, load=load, kinds=kinds, round=round_, arm=name, start=start,
        # A ratio to nothing has no logarithm: where no request met its objective, one ordinary request is assumed.
        rate=tokens_per_s if goodput is None else max(goodput.tokens_per_s, tokens_per_s / max(requests, 1)),
        tokens_per_s=tokens_per_s, seconds=seconds, tokens=tokens, requests=requests, failed=failed,
        draft_tokens=sum(after.drafting.draft_tokens - before.drafting.draft_tokens for before, after in ends),
        accepted_tokens=sum(after.drafting.accepted_tokens - before.drafting.accepted_tokens for before, after in ends),
        unverified_tokens=sum(
            after.drafting.unverified_tokens - before.drafting.unverified_tokens for before, after in ends
        ),
        prompt_tokens=sum(each.served.prompt_tokens for each in slices),
        cpu_s=sum(after.arm_s - before.arm_s for before, after in ends),
        compute_s=compute_s([each.served for each in slices], threads), other_cpu=noise.other_cpu,
        steal_share=noise.steal_share, load_average=average, disturbed=noise.reason(cores),
        at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), slices=len(slices),
        mean_tpot_ms=goodput.mean_tpot_ms if goodput else None, good_share=goodput.share if goodput else None,
    )  # fmt: skip
