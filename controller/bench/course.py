"""A benchmark's course: servers started, every load point measured in turns, each round in the file when it is over.

Called by controller/bench/bench.py. What to measure says controller/bench/plan.py; what it means
controller/bench/result.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from ...env.workload.prompts import Prompt
from ...models.embedded.pair import TARGET_NAME
from ..engine.machine import OwnLoad, Processor
from ..errors import EngineError, StoreError
from ..held_answers.answers import Answers
from .arm import Arm, Bed
from .arms import Arms, Tell
from .best_table import best_table, described, worth_sweeping
from .clients import Clients, Served, Times, one_by_one, replay, spent_since
from .plan import NONE, REPEATS, TABLE, BenchPlan, Progress, arm_of, contenders, groups, learns, turn_order
from .ratio import OURS, Goodput, Objective
from .result import MAIN, SWEEP, Latency, Results, Spans, Turn, envelope_at, levels_at, name_of, write_results
from .start import arms_at, first_start
from .turn import Look, Place, Slice, as_turn, slice_ends, slice_tokens
from .workload import Mix, Replay, closed_stream, prompt_pool

MAX_REQUESTS: Final = 64  # as the embedded servers are started
SETTLE_TURNS: Final = {SWEEP: 1, MAIN: 2}  # of each arm at each load, unmeasured
LEARN_STEPS: Final = 8  # that are asked for at a time while an arm learns a load
UNLOADED_REQUESTS: Final = 10  # one at a time, for the objective of a replay
_CLOSE_S: Final = 0.3  # for a server to notice that clients are gone

Advance = Callable[[str, float], None]  # what is measured, share done 0..1


@dataclass(slots=True)
class Bench:
    """One run."""

    plan: BenchPlan
    results: Results
    path: Path
    bed: Bed
    tell: Tell
    advance: Advance
    arms: Arms = field(init=False)
    own_load: OwnLoad = field(default_factory=OwnLoad)
    begin_s: float = field(default_factory=time.monotonic)
    start: int = 0  # which one of the servers this is
    _seen: tuple[float, float] = (0.0, 0.0)  # when own_load was last fed, and our CPU time then
    _times: dict[tuple[int | str, str, str], Times] = field(default_factory=dict)
    _met: set[tuple[str, int | str]] = field(default_factory=set)  # arms, and loads that they have learnt
    _done: float = 0.0

    def __post_init__(self) -> None:
        self.arms = Arms(self.bed, self.results, self.tell, self._step, self._answers())

    def _answers(self) -> Answers | None:
        if not self.plan.held:
            return None
        plan, path = self.plan, self.bed.folder / "answers.json"
        mixes = dict.fromkeys((*plan.mixes, plan.sweep_mix))
        texts = dict.fromkeys(prompt.text for mix in mixes for prompt in self._prompts(mix) or ())
        return Answers(tuple(texts), plan.longest_answer, path, self.tell, plan.temperature)

    def _prompts(self, mix: Mix) -> list[Prompt] | None:
        """Return the prompts whose answers are recorded; None: any may be sent."""
        plan = self.plan
        return prompt_pool(mix, plan.max_prompt_tokens, plan.held) if plan.held else None

    async def run(self) -> None:
        """Measure everything; end every server, whatever happens."""
        self._seen = (time.monotonic(), self.arms.cpu_s())
        try:
            if TABLE in self.plan.rivals and not self.results.table:
                await self._sweep()
            first = self._first_start()
            for start in range(first, first + self.plan.starts):
                self.start = start
                await self._measure_start(is_first=start == first)
        finally:
            self.results.wall_s += time.monotonic() - self.begin_s
            try:
                self._write()
            finally:
                await self.arms.end()

    def _first_start(self) -> int:
        return first_start(self.results, self.plan.starts)

    async def _measure_start(self, is_first: bool) -> None:
        """Measure what is still to be told apart with servers of a start of their own."""
        arms = self.plan.arms
        wanted = {
            (name, mix.name): arms if is_first else arms_at(arms, self.results, name, mix.name)
            for mix in self.plan.mixes
            for name in self.plan.points
        }
        names = [arm for arm in arms if any(arm in each for each in wanted.values())]
        await self._begin_start()
        for group in groups(names, OURS, self.arms.capacity()) if names else ():
            running = await self._arrange(group)
            for mix in self.plan.mixes:
                for name, point in self.plan.points.items():
                    here = [arm for arm in running if arm in wanted[name, mix.name]]
                    if is_first or len(here) > 1:
                        await self._point(point, mix, here)

    async def _begin_start(self) -> None:
        """End the servers of the start before, if there are to be several."""
        if self.plan.starts > 1:
            await self.arms.end()
            self._met.clear()
            self.arms.bed = replace(self.bed, folder=self.bed.folder / f"start-{self.start}")

    async def _arrange(self, group: Sequence[str]) -> tuple[str, ...]:
        """Return the arms of a group that run now; raise EngineError without FASER's own."""
        running = await self.arms.arrange(group)
        if OURS not in running:
            raise EngineError(f"FASER itself did not start: {self.results.failed.get(OURS, '')}")
        return running

    async def _point(self, point: int | Replay, mix: Mix, names: Sequence[str]) -> None:
        if isinstance(point, Replay):
            await self._replayed(point, mix, names)
        else:
            await self._closed(MAIN, point, mix, names, self.plan.pairs)

    def _write(self) -> None:
        try:
            write_results(self.results, self.path)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be written: {error.strerror}", "a place with room") from None

    # -- the table -----------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Measure the fixed lengths and make the best table of them."""
        arms = tuple(arm_of(length) for length in self.plan.table_lengths)
        mix = self.plan.sweep_mix
        for group in groups(arms, NONE, self.arms.capacity()):
            names = await self.arms.arrange(group)
            if NONE not in names:
                self.results.failed[TABLE] = f"no sweep without {NONE}: {self.results.failed.get(NONE, '')}"
                return
            for load in self.plan.sweep_loads:
                await self._closed(SWEEP, load, mix, names, self.plan.sweep_rounds)
                left = {NONE, *map(arm_of, worth_sweeping(levels_at(self.results, load, mix.name)))}
                names = tuple(name for name in names if name in left)
        levels = {load: found for load in self.plan.sweep_loads if (found := levels_at(self.results, load, mix.name))}
        if not levels:
            self.results.failed[TABLE] = "no length was swept: every server was lost"
            return
        self.results.table = best_table(levels, MAX_REQUESTS)
        self.tell(f"the best table is {described(self.results.table)}")
        self._write()

    # -- a constant number of clients ----------------------------------------------------------------------------

    async def _closed(self, phase: str, load: int, mix: Mix, names: Sequence[str], pairs: int) -> None:
        plan = self.plan
        what = f"{load} requests, {mix.name}" + (" (sweep)" if phase == SWEEP else "")
        first = self._next_round(phase, load, mix.name)
        work = closed_stream(load, mix, plan.max_tokens, plan.max_prompt_tokens, plan.seed + first, plan.held)
        if phase == MAIN:
            await self._learn(load, mix, names, what)
        arms = {name: self.arms.running[name] for name in names if name in self.arms.running}
        clients = {name: Clients(arm, work, load, TARGET_NAME, plan.temperature) for name, arm in arms.items()}
        try:
            quantum, ends = await self._settle(phase, clients, load, what)
            goal, began_s = SETTLE_TURNS[phase] * quantum, time.monotonic()
            progress = Progress(pairs, plan.minutes if phase == MAIN else 0.0, self._repeats(phase))
            round_ = first
            while progress.wants_more(envelope_at(self.results, load, mix.name).ratio, time.monotonic() - began_s):
                names = [name for name in clients if name in self.arms.running]
                if progress.is_complete():
                    names = list(contenders(self.results.rates(load, mix.name), names))
                slices = await self._round(clients, names, round_, goal, ends, what)
                place = (phase, load, mix.name, round_)
                turns = [self._turn(place, name, each) for name, each in slices.items()]
                self._close_round(turns, progress, what)
                goal += quantum
                round_ += 1
        finally:
            for name, each in clients.items():
                if phase == MAIN:
                    self._keep_times(load, mix.name, name, each.times())
                await self._dismiss(name, each)
            self._write()

    async def _learn(self, load: int, mix: Mix, names: Sequence[str], what: str) -> None:
        """Let arms that learn serve a load that is new to them: elsewhere they serve for hours, here for seconds."""
        for name in names:
            if self.plan.learn_s and learns(name) and (name, load) not in self._met:
                self._met.add((name, load))
                self._step(f"{what}: {name_of(name)} learns", 0.0)
                await self.arms.attempt(name, partial(self._learn_one, load, mix))

    async def _learn_one(self, load: int, mix: Mix, arm: Arm) -> None:
        plan, spent_s = self.plan, 0.0
        work = closed_stream(load, mix, plan.max_tokens, plan.max_prompt_tokens, plan.seed, plan.held)
        clients = Clients(arm, work, load, TARGET_NAME, plan.temperature)
        try:
            while spent_s < plan.learn_s:
                spent_s += (await clients.serve(clients.tokens + LEARN_STEPS * load)).seconds
        finally:
            await self._dismiss(arm.name, clients)

    def _repeats(self, phase: str = MAIN) -> int:
        """Return how many disturbed rounds of the next load point may be repeated."""
        if time.monotonic() - self.begin_s > self.plan.repeat_s:
            return 0
        return REPEATS if phase == MAIN else 1

    async def _settle(self, phase: str, clients: dict[str, Clients], load: int, what: str) -> tuple[int, list[int]]:
        """Start the load in every arm and serve some turns, unmeasured; return a turn's tokens and its slices' ends."""
        quantum, ends = 0, [0]
        for name, each in clients.items():
            if not quantum and (rate := await self.arms.attempt(name, partial(self._trial, each, load))):
                quantum = max(round(rate * self.plan.turn_s), self.plan.least_tokens, self.plan.least_per_client * load)
                ends = slice_ends(quantum, slice_tokens(rate, self.plan.slice_s, load))
            await self.arms.attempt(name, partial(self._settle_one, each, SETTLE_TURNS[phase] * quantum))
            self._step(f"{what}: settling", SETTLE_TURNS[phase])
        return quantum, ends

    async def _trial(self, clients: Clients, load: int, _: Arm) -> float:
        """Return about how many tokens/s an arm gives."""
        await clients.serve(2 * load)  # the first prompts
        trial = await clients.serve(8 * load)
        return trial.tokens / trial.seconds

    async def _settle_one(self, clients: Clients, tokens: int, arm: Arm) -> None:
        await clients.serve(tokens)
        clients.settle()
        arm.halt()

    async def _round(
        self, clients: dict[str, Clients], names: Sequence[str], round_: int, began: int, ends: Sequence[int], what: str
    ) -> dict[str, list[Slice]]:
        """Give each arm its slices in rotating order, until the same totals; return those of who lived through it."""
        slices: dict[str, list[Slice]] = {name: [] for name in names}
        for at, end in enumerate(ends):
            for name in turn_order(names, round_ + at):
                found = await self.arms.attempt(name, partial(self._slice, clients[name], began + end, ends[0] // 2))
                slices[name] += [found] if found is not None else []
                self._step(what, 1.0 / len(ends))
        return {name: found for name, found in slices.items() if len(found) == len(ends)}

    async def _slice(self, clients: Clients, goal: int, least: int, arm: Arm) -> Slice:
        """Serve until the goal, and so many tokens at least.

        No step is left out: an arm that emits a token a step ends its answers in step with its slices, and would have
        the same of its prompts left out in every round.
        """
        arm.wake()  # it is asked for its counters
        before = await self._look(arm, clients.finished)
        served = await clients.serve(max(goal, clients.tokens + least))
        after = await self._look(arm, clients.finished)
        arm.halt()
        return Slice(served, before, after)

    async def _dismiss(self, name: str, clients: Clients) -> None:
        await self.arms.attempt(name, lambda arm: arm.thaw())
        await clients.end()
        if name in self.arms.running:
            await asyncio.sleep(_CLOSE_S)
            await self.arms.quieten(name)

    # -- traces --------------------------------------------------------------------------------------------------

    async def _replayed(self, each: Replay, mix: Mix, names: Sequence[str]) -> None:
        what = f"{each.name}, {mix.name}"
        objective = await self._objective(each, mix)
        if objective is None:
            return
        round_ = self._next_round(MAIN, each.name, mix.name)
        progress, began_s = Progress(self.plan.pairs, self.plan.minutes, self._repeats()), time.monotonic()
        for name in names:  # one replay each unmeasured: FASER learns the load
            await self.arms.attempt(name, partial(self._replay, each, mix, (MAIN, each.name, mix.name, -1), objective))
            self._step(f"{what}: settling", 1.0)
        while progress.wants_more(envelope_at(self.results, each.name, mix.name).ratio, time.monotonic() - began_s):
            running = [name for name in names if name in self.arms.running]
            if progress.is_complete():
                running = list(contenders(self.results.rates(each.name, mix.name), running))
            turns = []
            for name in turn_order(running, round_):
                place = (MAIN, each.name, mix.name, round_)
                turn = await self.arms.attempt(name, partial(self._replay, each, mix, place, objective))
                turns += [turn] if turn is not None else []
                self._step(what, 1.0)
            self._close_round(self._comparable(turns, what), progress, what)
            round_ += 1

    def _comparable(self, turns: list[Turn], what: str) -> list[Turn]:
        """Return a replay's round without its rates where no arm met an objective: it says nothing of goodput."""
        if any(turn.good_share for turn in turns):
            return turns
        self.tell(f"{what}: no request met its objective under any arm, the round does not count; lower --peak-rps")
        return [msgspec.structs.replace(turn, rate=0.0) for turn in turns]

    async def _replay(self, each: Replay, mix: Mix, place: Place, objective: Objective, arm: Arm) -> Turn:
        """Replay a trace once; a round's prompts and part of the trace are the same for every arm."""
        round_ = place[-1]
        requests = each.requests(mix, self.plan.seed + round_ + 1, self._prompts(mix))
        await arm.thaw()
        before, spent_s = await self._look(arm), arm.thread_cpu_s()
        generator = await replay(arm, requests, TARGET_NAME, self.plan.temperature)
        arm.engine.require_running()
        thread_s = spent_since(spent_s, arm)
        after = await self._look(arm)
        await arm.freeze()
        arm.halt()
        summary = generator.summary()
        goodput = Goodput.of(generator.results, objective, summary.wall_s)
        if round_ >= 0:
            self._keep_times(each.name, mix.name, arm.name, Times.of(generator.results))
        served = Served(summary.output_tokens, summary.wall_s, thread_s=thread_s)
        slices = [Slice(served, before, replace(after, finished=summary.finished))]
        return self._turn(place, arm.name, slices, goodput, summary.failed)

    async def _objective(self, each: Replay, mix: Mix) -> Objective | None:
        """Return the objective, measured once per mix without speculation and without load; None if it cannot be."""
        if mix.name not in self.results.objectives:
            if NONE not in self.arms.running:
                self.tell(f"{each.name} is left out: no server without speculation to take the objective from")
                return None
            arm = self.arms.running[NONE]
            await arm.thaw()
            requests = each.requests(mix, self.plan.seed, self._prompts(mix))
            ask = partial(one_by_one, arm, model=TARGET_NAME, temperature=self.plan.temperature)
            await ask(requests[:1])  # the first costs more
            objective = Objective.of_unloaded(await ask(requests[:UNLOADED_REQUESTS]))
            await self.arms.quieten(NONE)
            self.results.objectives[mix.name] = (objective.ttft_ms, objective.tpot_ms)
            self.tell(f"objective: first token in {objective.ttft_ms:.0f} ms, then {objective.tpot_ms:.1f} ms a token")
        return Objective(*self.results.objectives[mix.name])

    # -- what all have in common ---------------------------------------------------------------------------------

    async def _look(self, arm: Arm, finished: int = 0) -> Look:
        drafting = await arm.drafting()
        own_s, now_s = self.arms.cpu_s(), time.monotonic()
        self.own_load.add(max(own_s - self._seen[1], 0.0), now_s - self._seen[0])
        self._seen = (now_s, own_s)
        return Look(time.monotonic(), Processor.now(), own_s, arm.cpu_s(), drafting, finished)

    def _turn(
        self, place: Place, name: str, slices: Sequence[Slice], goodput: Goodput | None = None, failed: int = 0
    ) -> Turn:
        return as_turn(place, name, slices, self.own_load.cores, goodput, failed, self.start, self.bed.threads)

    def _close_round(self, turns: Sequence[Turn], progress: Progress, what: str) -> None:
        """Keep a round; one with a disturbed turn is repeated whole, for its turns are compared with each other."""
        self.results.turns += turns
        reasons = list(dict.fromkeys(turn.disturbed for turn in turns if turn.disturbed))
        progress.add(bool(reasons))
        self._write()
        told = ", ".join(f"{name_of(turn.arm)} {turn.rate:.1f}" for turn in turns)
        self.tell(f"{what}: {told} tokens/s" + (f"; disturbed: {reasons[0]}" if reasons else ""))

    def _next_round(self, phase: str, load: int | str, kinds: str) -> int:
        return 1 + max((turn.round for turn in self.results.turns_at(load, kinds, phase)), default=-1)

    def _keep_times(self, load: int | str, kinds: str, name: str, times: Times) -> None:
        kept = self._times.setdefault((load, kinds, name), Times())
        kept.extend(times)
        spans = [Spans.of(values) for values in (kept.ttft_ms, kept.tpot_ms, kept.e2e_ms)]
        latency = Latency(load, kinds, name, len(kept.tpot_ms), *spans)
        place = (load, kinds, name)
        others = [each for each in self.results.latencies if (each.load, each.kinds, each.arm) != place]
        before = [each for each in self.results.latencies if (each.load, each.kinds, each.arm) == place]
        # Of a run that was gone on with, the larger part: quantiles cannot be joined.
        self.results.latencies = [*others, max([*before, latency], key=lambda each: each.requests)]

    def _step(self, what: str, weight: float) -> None:
        self._done += weight
        self.advance(what, self._done / self._expected_steps())

    def _expected_steps(self) -> float:
        return expected_steps(self.plan)


def expected_steps(plan: BenchPlan) -> float:
    """Return about how many turns a run takes, for the progress bar."""
    arms, mixes = len(plan.arms), len(plan.mixes)
    closed = plan.starts * len(plan.loads) * mixes * arms * (SETTLE_TURNS[MAIN] + plan.pairs)
    open_ = plan.starts * len(plan.replays) * mixes * arms * (1 + plan.pairs)
    sweep = 0
    if TABLE in plan.rivals:
        sweep = len(plan.sweep_loads) * len(plan.table_lengths) * (SETTLE_TURNS[SWEEP] + plan.sweep_rounds)
    return float(closed + open_ + sweep + 2 * arms * plan.starts)
