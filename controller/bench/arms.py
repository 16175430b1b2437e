"""The arms of a benchmark that run at the moment: started as far as memory goes, lost with a reason, ended.

Called by controller/bench/course.py. A rival that is lost is reported and the run goes on; FASER's own server ends it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import aiohttp

from ..engine.launch import available_cores
from ..engine.machine import free_gib, require_memory
from ..errors import EngineError
from ..held_answers.answers import Answers
from .arm import Arm, Bed
from .ratio import OURS
from .result import Results, name_of

_LOST: Final = (EngineError, aiohttp.ClientError, TimeoutError, OSError)

T = TypeVar("T")
Tell = Callable[[str], None]
Step = Callable[[str, float], None]  # what is done now, weight of what was done


@dataclass(slots=True)
class Arms:
    """The running arms by name."""

    bed: Bed
    results: Results
    tell: Tell
    step: Step
    answers: Answers | None = None  # to which all are held
    running: dict[str, Arm] = field(default_factory=dict)

    def capacity(self) -> int:
        """Return how many servers fit into memory, counting those that run."""
        return len(self.running) + int(max(free_gib() - 1.0, 0.0) / self.bed.server_gib)

    def cpu_s(self) -> float:
        """Return the CPU time of this process and of all that runs."""
        return time.process_time() + sum(arm.cpu_s() for arm in self.running.values())

    async def arrange(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """End the arms not wanted, start those missing, as many at a time as there are cores; return those that run."""
        await self.end([name for name in self.running if name not in wanted])
        missing = [name for name in wanted if name not in self.running and name not in self.results.failed]
        cores = available_cores()
        for names in (missing[at : at + cores] for at in range(0, len(missing), cores)):
            self.step(f"starting {', '.join(map(name_of, names))}", 0.0)
            require_memory(len(names), self.bed.server_gib)
            started = [arm for name in names if (arm := self._start(name)) is not None]
            for arm in started:
                self.running[arm.name] = arm
            for arm in started:
                await self.attempt(arm.name, self._ready)
            for arm in started:
                await self.attempt(arm.name, self._hold)
                await self.quieten(arm.name)
            self.step("servers started", 2.0 * len(names))
        return tuple(name for name in wanted if name in self.running)

    def _start(self, name: str) -> Arm | None:
        try:
            return Arm.start(name, self.bed, self.results.table)
        except (EngineError, OSError) as error:
            self.results.failed[name] = str(error)
            self.tell(f"{name_of(name)} did not start and is no rival: {error}")
            return None

    async def _ready(self, arm: Arm) -> None:
        await asyncio.to_thread(arm.wait_ready, self.bed)

    async def _hold(self, arm: Arm) -> None:
        if self.bed.is_sampled:
            await arm.mend_sampling()
        if self.answers is not None:
            await self.answers.hold(arm)

    async def attempt(self, name: str, measure: Callable[[Arm], Awaitable[T]]) -> T | None:
        """Measure one arm; None if it is lost, or gets lost by this."""
        if name not in self.running:
            return None
        try:
            return await measure(self.running[name])
        except _LOST as error:
            await self.lose(name, error)
            return None

    async def quieten(self, name: str) -> None:
        """Freeze and halt an arm, if it still runs."""
        await self.attempt(name, _frozen)

    async def lose(self, name: str, error: BaseException) -> None:
        """Go on without an arm; what failed is reported and never counted as a loss. Ours ends the run."""
        reason = str(error) or type(error).__name__
        self.results.failed[name] = reason
        self.tell(f"{name_of(name)} is left out from here on: {reason}")
        await self.end([name])
        if name == OURS:
            raise EngineError(f"FASER's own server failed: {reason}", remedy=f"see {self.bed.folder}") from error

    async def end(self, names: Sequence[str] | None = None) -> None:
        """End some arms, or all."""
        gone = [self.running.pop(name) for name in (tuple(self.running) if names is None else names)]
        for arm in gone:
            await arm.close()
        await asyncio.gather(*(asyncio.to_thread(arm.end) for arm in gone))


async def _frozen(arm: Arm) -> None:
    await arm.freeze()
    arm.halt()
