"""The course of a benchmark with classes: every arm serves all classes for a while, from an idle server on.

Called by controller/bench/classes/bench.py. The servers, the sweep for the table and what the machine did are those
of controller/bench/course.py; only the load points are others. While one arm serves, the others stay frozen and idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from ....models.embedded.pair import TARGET_NAME
from ...errors import EngineError, StoreError
from ..arm import Arm
from ..clients import Served, replay, spent_since
from ..course import Bench
from ..plan import NONE, TABLE, Progress, groups, learns, turn_order
from ..ratio import OURS
from ..result import name_of
from ..turn import Slice
from ..workload import Mix, Replay, closed_stream
from .clients import ClassLoad, open_load, serve_classes
from .plan import ClassPlan, busiest, dealt, marked
from .result import PHASE, ClassResults, ClassTurn, write_class_results

SETTLE_S: Final = 20.0  # of each arm at each load point, unmeasured
LEAST_PIECES: Final = 0.5  # a token, without speculation: where a busy server joins more, times per token mean little
_BASE_ROUND: Final = -2  # of prompts, for the time per token without speculation
_BASE_TURNS: Final = 2.0  # as long as so many turns: every objective is a multiple of what is found
_SETTLE_ROUND: Final = -1
_CLOSE_S: Final = 0.3  # for a server to notice that clients are gone


@dataclass(slots=True, kw_only=True)
class ClassCourse(Bench):
    """One run with classes."""

    class_plan: ClassPlan
    found: ClassResults

    def _first_start(self) -> int:
        last = max((each.turn.start for each in self.found.class_turns), default=-1)
        return last + 1 if self.plan.starts > 1 else max(last, 0)

    async def _measure_start(self, is_first: bool) -> None:
        """Measure every arm at every load point: attainment is no ratio, so none is left out for being behind."""
        await self._begin_start()
        is_due = self.found.base_tpot_ms is None or self.plan.starts > 1
        for group in groups(self.plan.arms, OURS, self.arms.capacity()):
            running = await self._arrange(group)
            if is_due:  # the first group has no speculation in it
                await self._measure_base()
                is_due = False
            for name, each in self.class_plan.points.items():
                await self._class_point(name, each, running)

    async def _measure_base(self) -> None:
        """Measure the time per token without speculation, with as many requests as all classes have clients.

        Once in each start: machines change, and an objective of yesterday's pace is another one today. A later start
        in which that fails goes on with the pace of the one before.
        """
        try:
            self.found.base_tpot_ms = await self._base_tpot_ms()
        except EngineError as error:
            if self.found.base_tpot_ms is None:
                raise
            self.tell(f"{error}; objectives stay as they were in the start before")
            return
        told = ", ".join(f"{each.name} {each.pace * self.found.base_tpot_ms:.1f}" for each in self.found.classes)
        self.tell(f"no speculation takes {self.found.base_tpot_ms:.1f} ms a token; objectives, ms a token: {told}")
        self._write()

    async def _base_tpot_ms(self) -> float:
        load = await self.arms.attempt(NONE, self._base)
        if load is None:
            raise EngineError(f"no server without speculation to take the pace from: {self.results.failed.get(NONE)}")
        if not (times_ms := load.times_per_token_ms()):
            raise EngineError(
                f"no answer ended within {self.found.seconds:g} s without speculation",
                "some", "pass a longer --class-seconds or a shorter --max-tokens",
            )  # fmt: skip
        pieces, tokens = load.pieces()
        if pieces < LEAST_PIECES * tokens:
            raise EngineError(
                f"without speculation {tokens} tokens came in {pieces} pieces", "one by one",
                "let less run beside the benchmark",
            )  # fmt: skip
        return round(float(np.median(times_ms)), 3)

    async def _base(self, arm: Arm) -> ClassLoad:
        """Serve all classes' clients, of which nobody is promised anything."""
        await arm.thaw()
        load = await self._closed_load(arm, _BASE_ROUND, _BASE_TURNS * self.found.seconds, None)
        await self._leave(arm)
        return load

    async def _class_point(self, point: str, each: Replay | None, names: Sequence[str]) -> None:
        for name in names:
            if self.plan.learn_s and learns(name) and (name, point) not in self._met:
                self._met.add((name, point))  # elsewhere it serves for hours, here for seconds
                await self.arms.attempt(name, partial(self._settle_classes, point, each))
            await self.arms.attempt(name, partial(self._settle_classes, point, each))
            self._step(f"{point}: settling", 1.0)
        round_ = 1 + max((turn.turn.round for turn in self.found.turns_at(point)), default=-1)
        progress = Progress(self.plan.pairs, 0.0, self._repeats())
        while not progress.is_complete():
            running = [name for name in names if name in self.arms.running]
            turns = []
            for name in turn_order(running, round_):
                turn = await self.arms.attempt(name, partial(self._class_turn, point, each, round_))
                turns += [turn] if turn is not None else []
                self._step(point, 1.0)
            self._close_class_round(point, turns, progress)
            round_ += 1

    async def _settle_classes(self, point: str, each: Replay | None, arm: Arm) -> None:
        await self._class_turn(point, each, _SETTLE_ROUND, arm)

    async def _class_turn(self, point: str, each: Replay | None, round_: int, arm: Arm) -> ClassTurn:
        """Serve all classes once; a round's prompts are the same for every arm."""
        await arm.thaw()
        before, spent_s = await self._look(arm), arm.thread_cpu_s()
        load = await self._load(each, round_, arm)
        arm.engine.require_running()
        thread_s = spent_since(spent_s, arm)
        after = await self._look(arm)
        await self._leave(arm)
        counts = load.counts()
        served = Served(sum(count.tokens for count in counts.values()), load.seconds, thread_s=thread_s)
        slices = [Slice(served, before, replace(after, finished=sum(count.finished for count in counts.values())))]
        failed = sum(result.outcome == "failed" for results in load.results.values() for result in results)
        turn = self._turn((PHASE, point, self._mix.name, round_), arm.name, slices, None, failed)
        peak_rps = None if each is None else each.peak_rps
        return ClassTurn(turn, counts, peak_rps, self.found.base_tpot_ms)

    async def _load(self, each: Replay | None, round_: int, arm: Arm) -> ClassLoad:
        if each is None:
            seconds = self.found.seconds if round_ >= 0 else min(SETTLE_S, self.found.seconds)
            return await self._closed_load(arm, round_, seconds, self.found.base_tpot_ms)
        requests = each.requests(self._mix, self.plan.seed + round_ + 1, self._prompts(self._mix))
        if round_ < 0:
            requests = busiest(requests, SETTLE_S)
        assert self.found.base_tpot_ms is not None
        work = marked(requests, self.found.classes, self.found.base_tpot_ms)
        generator = await replay(arm, work, TARGET_NAME, self.plan.temperature)
        return open_load(generator, self.found.classes)

    async def _closed_load(self, arm: Arm, round_: int, seconds: float, base_tpot_ms: float | None) -> ClassLoad:
        plan, classes = self.plan, self.found.classes
        seed = plan.seed + round_ - _BASE_ROUND
        stream = closed_stream(
            self.class_plan.clients, self._mix, plan.max_tokens, plan.max_prompt_tokens, seed, plan.held
        )
        work = dealt(stream, classes, base_tpot_ms)
        return await serve_classes(arm, work, classes, seconds, TARGET_NAME, plan.temperature)

    async def _leave(self, arm: Arm) -> None:
        """Freeze a server that clients have just left, so that it is idle when it is thawed."""
        await asyncio.sleep(_CLOSE_S)
        await arm.freeze()
        arm.halt()

    def _close_class_round(self, point: str, turns: Sequence[ClassTurn], progress: Progress) -> None:
        """Keep a round; one with a disturbed turn is repeated whole."""
        self.found.class_turns += turns
        reasons = list(dict.fromkeys(each.turn.disturbed for each in turns if each.turn.disturbed))
        progress.add(bool(reasons))
        self._write()
        told = "; ".join(map(_told, turns))
        self.tell(f"{point}, goodput and in time: {told}" + (f"; disturbed: {reasons[0]}" if reasons else ""))

    @property
    def _mix(self) -> Mix:
        return self.plan.mixes[0]

    def _write(self) -> None:
        try:
            write_class_results(self.found, self.path)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be written: {error.strerror}", "a place with room") from None

    def _expected_steps(self) -> float:
        arms, points = len(self.plan.arms), len(self.class_plan.points)
        sweep = 0
        if TABLE in self.plan.rivals and not self.results.table:
            sweep = len(self.plan.sweep_loads) * len(self.plan.table_lengths) * (1 + self.plan.sweep_rounds)
        return float(sweep + self.plan.starts * (2 * arms + points * arms * (1 + self.plan.pairs)))


def _told(turn: ClassTurn) -> str:
    shares = " ".join(f"{each.in_time}/{each.finished}" for each in turn.classes.values())
    return f"{name_of(turn.turn.arm)} {turn.goodput:.1f} {shares}"
