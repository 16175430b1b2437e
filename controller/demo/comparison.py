"""What a demo was for: its load's first requests once more on plain vLLM without speculation, and the two side by side.

Called by controller/demo/demo.py. The same requests are compared, each with itself, so a load's hard parts weigh on
both sides; what follows them arrives in both runs alike.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np

from ...env.workload.workload import TimedRequest
from ..engine.launch import EngineLaunch
from ..engine.load_generator import LoadGenerator, LoadOptions
from ..engine.load_summary import RequestResult, attainment_of
from ..engine.machine import Noise, Processor

COMPARED_SHARE: Final = 0.5  # of the load's time: it has risen to its peak by then
MOST_COMPARED_S: Final = 60.0
BLOCKS: Final = 8  # of requests one behind another: neighbours share a batch, and are no independent witnesses
_T_OF_BLOCKS: Final = 2.365  # Student's 97.5 % quantile with BLOCKS - 1 degrees of freedom
_LOOK_S: Final = 0.1


class Bystanders:
    """What others on the machine did since the start: the two runs lie minutes apart, and only one may be disturbed.

    :param own_s: the CPU time of everything that the demo runs, s
    """

    def __init__(self, own_s: Callable[[], float]) -> None:
        self._own_s = own_s
        self._began = (time.monotonic(), Processor.now(), own_s())

    def reason(self) -> str:
        """Return why the time since does not count as quiet; empty if it does."""
        began_s, before, own_s = self._began
        seconds, cores = max(time.monotonic() - began_s, 1e-3), os.cpu_count() or 1
        return Noise.between(before, Processor.now(), self._own_s() - own_s, seconds, cores).reason(cores)


class Speedup(msgspec.Struct, frozen=True):
    """Time per token without speculation over that with FASER: geometric mean of requests, 95 % interval."""

    value: float
    low: float | None  # None: too few requests for an interval
    high: float | None
    requests: int
    disturbed: str = ""  # by what other work, in either run; the interval does not tell of it


@dataclass(frozen=True, slots=True)
class SideBySide:
    """The requests that finished in both runs, in the order of their arrival."""

    steered: Sequence[RequestResult]
    plain: Sequence[RequestResult]
    disturbed: str = ""

    @classmethod
    def of(
        cls, steered: Sequence[RequestResult], plain: Sequence[RequestResult], until_s: float, disturbed: str = ""
    ) -> SideBySide:
        """Return the comparison of those that arrived before a moment."""
        both = [
            (one, other)
            for one, other in zip(steered, plain, strict=True)
            if one.due_s < until_s and one.outcome == other.outcome == "finished"
        ]
        return cls([one for one, _ in both], [other for _, other in both], disturbed)

    def speedup(self) -> Speedup | None:
        """Return how much faster tokens came; None without a request of two tokens and more on both sides."""
        pairs = [(one.tpot_ms, other.tpot_ms) for one, other in zip(self.steered, self.plain, strict=True)]
        logs = np.array([math.log(without / ours) for ours, without in pairs if ours and without])
        if not len(logs):
            return None
        mean = float(logs.mean())
        if len(logs) < BLOCKS:
            return Speedup(round(math.exp(mean), 4), None, None, len(logs), self.disturbed)
        blocks = [float(block.mean()) for block in np.array_split(logs, BLOCKS)]
        reach = _T_OF_BLOCKS * float(np.std(blocks, ddof=1)) / math.sqrt(BLOCKS)
        value, low, high = (round(math.exp(mean + shift), 4) for shift in (0.0, -reach, reach))
        return Speedup(value, low, high, len(logs), self.disturbed)

    def attainment(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the share in time by class, with FASER and without speculation."""
        return attainment_of(self.steered), attainment_of(self.plain)

    def line(self) -> str:
        """Return what came of it in one line."""
        speedup = self.speedup()
        if speedup is None:
            return "no request to compare with no speculation; pass a longer --duration"
        interval = "" if speedup.low is None else f" ({speedup.low:.2f} to {speedup.high:.2f})"
        told = f"{speedup.value:.2f}{interval} times as fast per token as without speculation, on {speedup.requests}"
        doubt = f"; disturbed by other work: {self.disturbed}" if self.disturbed else ""
        return f"{told} requests{_told_shares(*self.attainment())}{doubt}"


def _told_shares(ours: Mapping[str, float], plain: Mapping[str, float]) -> str:
    if not ours:
        return ""
    parts = (f"{name} {share:.0%} (without {plain.get(name, math.nan):.0%})" for name, share in ours.items())
    return f"; in time: {', '.join(parts)}"


def compared_until_s(duration_s: float) -> float:
    """Return until when requests arrive that are compared."""
    return min(COMPARED_SHARE * duration_s, MOST_COMPARED_S)


def plain_launch(launch: EngineLaunch) -> EngineLaunch:
    """Return the same server as vLLM is without speculation and without FASER."""
    return replace(
        launch, speculative=None, has_faser=False, endpoint="", draft_max=None,
        environment_extra={**launch.environment_extra, "VLLM_PLUGINS": "none"},
    )  # fmt: skip


async def serve_plainly(
    requests: Sequence[TimedRequest], options: LoadOptions, until_s: float, most_s: float, stop: asyncio.Event
) -> list[RequestResult]:
    """Send the load, and stop when all requests that arrived before a moment have ended, after `most_s` at most."""
    generator = LoadGenerator(requests, options)
    running = asyncio.create_task(generator.run(stop))
    compared = [each for each in generator.results if each.due_s < until_s]
    while not running.done() and any(each.outcome == "pending" for each in compared):
        if generator.started_s and generator.elapsed_s > most_s:
            break
        await asyncio.sleep(_LOOK_S)
    stop.set()
    await running
    return generator.results
