"""One start of closed_loop.py's engines: what is to be measured, the engines, their sidecars, and the rounds.

Called by closed_loop.py and swing.py, which choose what each start measures.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from closed_loop_result import Results, Settings, envelope_at, write_results
from closed_loop_turn import Slice, as_turn
from remote import Remote, process_cpu_s
from rich.console import Console

from faser.controller.bench_machine import Processor, require_memory
from faser.controller.bench_plan import ARMS, turn_order
from faser.controller.bench_result import name_of
from faser.controller.bench_server import LEASE_MS, Bed, is_steered
from faser.controller.bench_table import Table as BatchLengths
from faser.controller.bench_turn import slice_ends, slice_tokens
from faser.controller.bench_work import staggered, stream_order
from faser.controller.endpoint import socket_folder
from faser.controller.errors import EngineError, FaserError
from faser.controller.launch import available_cores
from faser.controller.processes import ProcessTree
from faser.controller.serve import ensure_embedded_pair, start_sidecar
from faser.controller.status import ask
from faser.models.precision import dtype_on, number_bytes

# What glibc's malloc hands out lies in huge pages, where the system lets it. In small ones engines alike read their
# weights up to 9 % faster or slower than one another for as long as they live, by where these happen to lie; in huge
# ones 2 %.
HUGE_PAGES: Final = ":".join((
    "glibc.malloc.hugetlb=1", f"glibc.malloc.mmap_threshold={1 << 30}", f"glibc.malloc.trim_threshold={1 << 32}",
))  # fmt: skip
ARM: Final = str(Path(__file__).with_name("closed_loop_arm.py"))
RECORDED_AT_ONCE: Final = 32  # answers
LEAST_TOKENS: Final = 384  # of a round: fewer depend too much on where in a text it begins and ends
WHOLE_ANSWERS: Final = 16  # of a round at most: one prompt more or less is then a small part of it
LEARNING_TOKENS: Final = 300  # of each client: the sidecar has never seen this engine, a user's has after half a minute
ENGINE_GIB: Final = 1.5 + 0.475 * number_bytes(dtype_on("cpu"))  # of memory an engine takes


@dataclass(frozen=True, slots=True)
class Plan:
    """What one start of the engines measures."""

    arms_at: Mapping[int, tuple[str, ...]]  # by load
    rounds: int  # at each load
    settings: Settings
    table: BatchLengths = ()  # of the arm `table`

    @property
    def arms(self) -> tuple[str, ...]:
        """Return every arm that a load names, in their order."""
        return tuple(sorted({arm for arms in self.arms_at.values() for arm in arms}, key=ARMS.index))


def round_tokens(load: int, answer_tokens: int) -> int:
    """Return the tokens of an arm's round, an answer of every client or of enough of them.

    With fewer, one prompt more or less, which costs as much as several steps, would be most of what arms differ by.
    """
    return max(LEAST_TOKENS, min(load, WHOLE_ANSWERS) * answer_tokens)


def settled_tokens(load: int, answer_tokens: int) -> int:
    """Return the tokens of each arm before the first round, unmeasured: a round and half of an answer.

    So rounds begin half-way between the ends of two answers, where the clients' progress differs little between arms: a
    prompt that one arm reads before a round's end and another one behind it is what few rounds would differ by.
    """
    return round_tokens(load, answer_tokens) + answer_tokens // 2


@dataclass(slots=True)
class Bench:
    """The run: engines, plan and what was measured before and now."""

    plan: Plan
    results: Results
    path: Path
    folder: Path
    console: Console
    start_number: int = 0  # which start of the engines this is
    answers: list[list[int]] = field(default_factory=list)  # recorded by an earlier start; empty: to be recorded
    begin_s: float = field(default_factory=time.monotonic)
    arms: dict[str, Remote] = field(default_factory=dict)
    sidecars: dict[str, ProcessTree] = field(default_factory=dict)
    bed: Bed = field(init=False)
    order: list[int] = field(default_factory=list)  # of the prompts whose answers are recorded

    def say(self, text: str) -> None:
        """Tell the user what happens now."""
        self.console.print(f"closed_loop {time.monotonic() - self.begin_s:5.0f} s: {text}", soft_wrap=True)

    def measure(self) -> None:
        """Start the engines, measure every load, and end them."""
        with socket_folder("bench") as sockets, ExitStack() as stack:
            threads = self.plan.settings.threads
            self.say(f"{len(self.plan.arms)} engines, {threads} threads each, logs in {self.folder}")
            self.start(stack, sockets)
            self.record()
            self.run()
            self.say("stopping")

    # -- processes -----------------------------------------------------------------------------------------------

    def start(self, stack: ExitStack, sockets: Path) -> None:
        """Start sidecars and arms, as many at a time as there are cores."""
        require_memory(len(self.plan.arms), ENGINE_GIB)
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = self.plan.settings
        self.bed = Bed(ensure_embedded_pair(), sockets, self.folder, settings.policy, settings.threads)
        for name in filter(is_steered, self.plan.arms):
            self._start_sidecar(stack, name)
        cores, names = available_cores(), self.plan.arms
        for group in (names[at : at + cores] for at in range(0, len(names), cores)):
            for name in group:
                self.arms[name] = self._launch(name)
                stack.callback(self.arms[name].end)
            for name in group:
                self.arms[name].wait_ready()
                self.say(f"{name_of(name)} is ready")

    def _launch(self, name: str) -> Remote:
        settings = self.plan.settings
        order = {
            "speculative": self.bed.drafting(name, self.plan.table), "is_steered": is_steered(name),
            "max_tokens": settings.max_tokens, "max_prompt_tokens": settings.max_prompt_tokens, "core": settings.core,
        }  # fmt: skip
        environment = {"VLLM_PLUGINS": "none"}
        if is_steered(name):
            endpoint = self.bed.config(name).link.endpoint
            environment = {"VLLM_PLUGINS": "faser", "FASER_ENDPOINT": endpoint, "FASER_LEASE_MS": str(LEASE_MS)}
        if settings.has_huge_pages:
            environment["GLIBC_TUNABLES"] = HUGE_PAGES
        log = self.folder / f"{name}.log"
        return Remote(ARM, [json.dumps(order)], self.folder, settings.threads, environment, log)

    def _start_sidecar(self, stack: ExitStack, name: str) -> None:
        config, log = self.bed.config(name), self.folder / f"{name}.sidecar.log"
        sidecar = start_sidecar(config, log)
        assert sidecar is not None
        self.sidecars[name] = stack.enter_context(sidecar)
        end_s = time.monotonic() + 30.0
        while time.monotonic() < end_s:
            with contextlib.suppress(FaserError):
                ask(config.link, timeout_s=1.0)
                return
            time.sleep(0.1)
        raise EngineError(f"the sidecar of {name} did not start", remedy=f"see {log}")

    def record(self) -> None:
        """Have the first arm answer the prompts, unless one has before, and teach its answers to all."""
        settings = self.plan.settings
        order = stream_order(settings.max_prompt_tokens, np.random.default_rng(0))
        self.order = order[: settings.answers]
        if not self.answers:
            self.say(f"recording {len(self.order)} answers")
            self.answers = self.arms[self.plan.arms[0]].ask("record", self.order, RECORDED_AT_ONCE)
        for name in self.plan.arms:
            self.arms[name].ask("learn", self.order, self.answers)

    # -- measuring -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Measure every load."""
        settings = self.plan.settings
        for load, names in self.plan.arms_at.items():
            self.say(f"{load} requests: every arm settles")
            rate = self._settle(load, names)
            first = max((turn.round for turn in self.results.turns if turn.load == load), default=-1) + 1
            tokens = round_tokens(load, settings.max_tokens)
            ends = slice_ends(tokens, slice_tokens(rate, settings.slice_s, load))
            for done in range(self.plan.rounds):
                began = settled_tokens(load, settings.max_tokens) + done * tokens
                self._round(load, first + done, names, [began + end for end in ends])

    def _settle(self, load: int, names: Sequence[str]) -> float:
        """Serve a round in every arm, more where a sidecar learns, unmeasured; return the first arm's tokens/s."""
        settings = self.plan.settings
        random = np.random.default_rng((len(self.results.turns), load))
        turn = int(random.integers(len(self.order)))
        order = self.order[turn:] + self.order[:turn]
        firsts = staggered(load, settings.max_tokens, random)
        rates: list[float] = []
        for name in names:
            engine = self.arms[name]
            if name in self.sidecars:
                engine.ask("begin", order, firsts)
                engine.ask("turn", LEARNING_TOKENS * load)
            engine.ask("begin", order, firsts)
            engine.ask("turn", 2 * load)  # the first prompts
            settled = engine.ask("turn", settled_tokens(load, settings.max_tokens))
            rates.append(settled["tokens"] / settled["seconds"])
        return rates[0]

    def _round(self, load: int, round_: int, names: Sequence[str], goals: Sequence[int]) -> None:
        """Give each arm its slices, in rotating order; those that are not measured stay where they are."""
        slices: dict[str, list[Slice]] = {name: [] for name in names}
        for at, goal in enumerate(goals):
            for name in turn_order(names, round_ + at):
                slices[name].append(self._slice(name, goal))
        self.results.turns += [as_turn(name, load, round_, slices[name], self.start_number) for name in names]
        write_results(self.results, self.path)
        rates = {
            each.arm: each.tokens_per_s for each in self.results.turns if (each.load, each.round) == (load, round_)
        }
        told = ", ".join(f"{name_of(name)} {rates[name]:.1f}" for name in self.plan.arms if name in rates)
        self.say(f"{load:2d} requests, round {round_ + 1}: {told} tokens/s; {envelope_at(self.results, load).ratio}")

    def _slice(self, name: str, goal: int) -> Slice:
        machine, own_s, start_s = Processor.now(), self._own_cpu_s(name), time.monotonic()
        served = self.arms[name].ask("turn", goal)
        after, whole_s = Processor.now(), time.monotonic() - start_s
        return Slice(
            served, whole_s, self._own_cpu_s(name) - own_s, after.busy_s - machine.busy_s,
            after.steal_s - machine.steal_s,
        )  # fmt: skip

    def _own_cpu_s(self, name: str) -> float:
        """Return the CPU time of an arm, with its sidecar."""
        sidecar = self.sidecars.get(name)
        return process_cpu_s(self.arms[name].process.pid) + (sidecar.cpu_s() if sidecar is not None else 0.0)
