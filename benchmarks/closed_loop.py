"""Compare FASER with what else could be configured, at a constant number of concurrent requests.

    python benchmarks/closed_loop.py [--loads 1,2,4,8] [--arms none,k3,faser] [--minutes 8] [--resume] [--docs docs]

Every arm is a vLLM engine in a process of its own, FASER's with a real sidecar beside it, as those of papers' rules;
the other rivals are vLLM without FASER. The engines take turns in slices of half a second or more: who is not at work
waits with its requests half done. All serve the same stream of held-out prompts, and a slice ends when its arm has
emitted the same total of tokens as the others, so that what the machine's speed does within seconds falls on all of
them. Every arm is held to the same answers, recorded before by the first arm (held_text.py): else those whose texts
happen to be easier would win. At each load arms with a sidecar serve for half a minute before they are measured, for
their sidecar is new to the engine. A round is as many slices as make an answer of every client, or of eight of them.
Every step counts: with a first step left out, whose caches are cold, an arm that emits a token a step would have had
the same of its prompts left out in every round, those that end an answer in step with the slices. Where an engine has
one thread, all engines' stay on one core: left to the system, two engines of the same kind differed by over a per cent
in two runs of five. What else differs between two processes, no interval over rounds shows. The best table is the
one that the sweep of `faser bench` found (benchmarks/results/bench_full.json), unless --table gives another. After
--rounds full rounds a load goes on with FASER, no speculation and the rivals near the best until its ratio is sharp,
with eight rounds at least, or its minutes are over. Every round is in the JSON file when it is over;
closed_loop_report.py makes table and picture of it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np
from closed_loop_report import (
    OURS,
    RESULTS,
    ROOT,
    Results,
    Settings,
    envelope_at,
    name_of,
    read_results,
    table_rows,
    write_documents,
    write_results,
)
from closed_loop_turn import Slice, as_turn
from remote import Remote, RemoteError, process_cpu_s
from rich.console import Console
from rich.table import Table

from faser.controller.bench_machine import Processor, commit, machine_facts, require_memory, versions
from faser.controller.bench_plan import ARMS as EVERY_ARM
from faser.controller.bench_plan import MAX_LENGTH, NONE, SUFFIX, TABLE, VARIANTS, contenders, turn_order
from faser.controller.bench_server import LEASE_MS, Bed, is_steered
from faser.controller.bench_table import Table as BatchLengths
from faser.controller.bench_table import described
from faser.controller.bench_turn import LEAST_STEPS, slice_ends, slice_tokens
from faser.controller.bench_work import staggered, stream_order
from faser.controller.endpoint import socket_folder
from faser.controller.errors import EngineError, FaserError, UsageError
from faser.controller.launch import available_cores, default_threads
from faser.controller.processes import ProcessTree
from faser.controller.serve import ensure_embedded_pair, start_sidecar, stopping_on_sigterm
from faser.controller.status import ask
from faser.env.spaces import Capabilities
from faser.models.baselines import LengthTable
from faser.models.embedded import EMBEDDED_K_MAX, TARGET_NAME
from faser.models.policy import PolicyError
from faser.models.precision import dtype_on, number_bytes

TUNED = ROOT / "benchmarks" / "results" / "bench_full.json"
ARM = str(Path(__file__).with_name("closed_loop_arm.py"))
# Suffix decoding is left out: it remembers answers, and here the same ones are given over and over.
ARMS = tuple(arm for arm in EVERY_ARM if arm not in (SUFFIX, *VARIANTS))
USUAL_ARMS = (NONE, "k1", "k2", "k3", "k4", "k6", TABLE, OURS)  # what fits into memory
MAX_LOAD = 48  # requests of the longest prompt and answer that fit the KV cache
RECORDED_AT_ONCE = 32  # answers
LEAST_TOKENS = 192  # of a round: fewer depend too much on where in a text it begins and ends
WHOLE_ANSWERS = 8  # of a round at most: one prompt more or less is then a small part of it
HALF_WIDTH = 0.02  # at which a load is done: at the bar's own 3 % a ratio of 1.00 would often not be seen to meet it
LEAST_ROUNDS = 8  # before that a ratio may look sharp by luck: three rounds once said 1.8 % at four requests
LEARNING_TOKENS = 300  # of each client: the sidecar has never seen this engine, a user's has after half a minute
ENGINE_GIB = 1.5 + 0.35 * number_bytes(dtype_on("cpu"))  # of memory an engine takes


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    loads: tuple[int, ...]
    arms: tuple[str, ...]
    rounds: int
    minutes: float  # for each load
    is_sharpened: bool
    settings: Settings
    table: BatchLengths = ()  # of the arm `table`


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
    """The run: engines, plan and what was measured."""

    plan: Plan
    results: Results
    path: Path
    folder: Path
    console: Console
    arms: dict[str, Remote] = field(default_factory=dict)
    sidecars: dict[str, ProcessTree] = field(default_factory=dict)
    bed: Bed = field(init=False)
    order: list[int] = field(default_factory=list)  # of the prompts whose answers are recorded
    begin_s: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Tell the user what happens now."""
        self.console.print(f"closed_loop {time.monotonic() - self.begin_s:5.0f} s: {text}", soft_wrap=True)

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
        """Have the first arm answer the prompts, and teach its answers to all."""
        settings = self.plan.settings
        order = stream_order(settings.max_prompt_tokens, np.random.default_rng(0))
        self.order = order[: settings.answers]
        self.say(f"recording {len(self.order)} answers")
        answers = self.arms[self.plan.arms[0]].ask("record", self.order, RECORDED_AT_ONCE)
        for name in self.plan.arms:
            self.arms[name].ask("learn", self.order, answers)

    # -- measuring -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Measure every load until its ratio is sharp or its minutes are over."""
        for load in self.plan.loads:
            self.say(f"{load} requests: every arm settles")
            rate = self._settle(load)
            end_s = time.monotonic() + 60.0 * self.plan.minutes
            first = max((turn.round for turn in self.results.turns if turn.load == load), default=-1) + 1
            names = self.plan.arms
            tokens = round_tokens(load, self.plan.settings.max_tokens)
            ends = slice_ends(tokens, slice_tokens(rate, self.plan.settings.slice_s, load, LEAST_STEPS))
            for round_ in itertools.count(first):
                names = self.contenders(load, round_ - first, names)
                if time.monotonic() > end_s or not names:
                    break
                began = settled_tokens(load, self.plan.settings.max_tokens) + (round_ - first) * tokens
                self._round(load, round_, names, [began + end for end in ends])

    def _settle(self, load: int) -> float:
        """Serve a round in every arm, more where a sidecar learns, unmeasured; return the first arm's tokens/s."""
        settings = self.plan.settings
        random = np.random.default_rng((len(self.results.turns), load))
        turn = int(random.integers(len(self.order)))
        order = self.order[turn:] + self.order[:turn]
        firsts = staggered(load, settings.max_tokens, random)
        rates: list[float] = []
        for name in self.plan.arms:
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
        """Give each arm its slices, in rotating order; those no longer measured stay where they are."""
        slices: dict[str, list[Slice]] = {name: [] for name in names}
        for at, goal in enumerate(goals):
            for name in turn_order(names, round_ + at):
                slices[name].append(self._slice(name, goal))
        self.results.turns += [as_turn(name, load, round_, slices[name]) for name in names]
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

    def contenders(self, load: int, rounds: int, names: Sequence[str]) -> Sequence[str]:
        """Return which of those of the last round have a turn in a load's next one; none: the load is done."""
        if rounds < self.plan.rounds:
            return self.plan.arms
        if not self.plan.is_sharpened or not {OURS, "none"} <= set(names):
            return ()
        if rounds >= LEAST_ROUNDS and envelope_at(self.results, load).ratio.half_width <= HALF_WIDTH:
            return ()
        return contenders(self.results.rates(load, is_even=True), names)


def open_results(path: Path, plan: Plan, is_resumed: bool) -> Results:
    """Return new results, or the file's if they can be continued."""
    now, settings = commit(), plan.settings
    if not is_resumed or not path.exists():
        return Results(machine_facts(), versions(), [now], settings, table=plan.table)
    try:
        results = read_results(path)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path}: {error}", "turns of this version", "drop --resume") from None
    if (results.settings, results.machine) != (settings, machine_facts()):
        raise UsageError(f"{path} was measured with {results.settings}", f"{settings} on this machine", "drop --resume")
    if plan.table and results.table not in ((), plan.table):
        seen, wanted = (f"the table {described(each.table)}" for each in (results, plan))
        raise UsageError(f"{path} was measured with {seen}", wanted, "drop --resume, or give that --table")
    results.table = plan.table or results.table
    if now not in results.commits:
        results.commits.append(now)
    return results


def plan_of(options: argparse.Namespace) -> Plan:
    """Return the plan; raise UsageError for what cannot be measured."""
    if options.smoke:
        options.loads, options.arms, options.rounds = "1,2", f"none,{OURS}", 2
        options.slice_s, options.minutes, options.max_tokens, options.answers = 0.3, 1.0, 24, 20
    arms = tuple(arm for arm in ARMS if arm in options.arms.split(","))
    if unknown := set(options.arms.split(",")) - set(ARMS):
        raise UsageError(f"--arms {','.join(sorted(unknown))}", f"some of {','.join(ARMS)}")
    try:
        loads = tuple(sorted({int(text) for text in options.loads.split(",")}))
    except ValueError:
        loads = ()
    if not loads or loads[0] < 1 or loads[-1] > MAX_LOAD:
        raise UsageError(f"--loads {options.loads}", f"numbers from 1 to {MAX_LOAD}, separated by commas")
    if options.answers < 1:
        raise UsageError(f"--answers {options.answers}", "1 or more")
    table = table_of(options.table) if TABLE in arms else ()
    return Plan(loads, arms, options.rounds, options.minutes, not options.smoke, settings_of(options), table)


def table_of(text: str | None) -> BatchLengths:
    """Return the rows of `1-5=3,6-64=0`; without a text what a whole run of `faser bench` found by its sweep."""
    if text is None and not TUNED.exists():
        raise UsageError(f"no {TUNED.name}", "a table", "give --table, or leave that arm out")
    text = text or described(json.loads(TUNED.read_text())["table"])
    try:
        rows = LengthTable.parse(text, Capabilities(MAX_LENGTH)).rows
    except PolicyError as error:
        raise UsageError(f"--table {text}: {error}", "rows such as 1-5=3,6-64=0") from None
    return tuple((first, last or MAX_LOAD, length) for first, last, length in rows)


def settings_of(options: argparse.Namespace) -> Settings:
    """Return what must be the same for rounds to be compared."""
    card = json.loads((ROOT / "models" / "weights" / "drafter.card.json").read_text())
    threads, cores = options.threads or default_threads(available_cores()), os.sched_getaffinity(0)
    return Settings(
        slice_s=options.slice_s, answers=options.answers, max_tokens=options.max_tokens,
        max_prompt_tokens=options.max_prompt_tokens,
        threads=threads, k_max=EMBEDDED_K_MAX, policy=options.policy, target=TARGET_NAME,
        drafter_sha256=card["sha256"], core=max(cores) if threads == 1 and len(cores) > 1 else None,
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure, print the table, return the exit code."""
    plan = plan_of(options)
    results = open_results(options.json, plan, options.resume)
    folder = (Path("runs") / time.strftime("closed-loop-%Y%m%d-%H%M%S")).absolute()
    bench = Bench(plan, results, options.json, folder, Console(stderr=True, highlight=False))
    code = 0
    with stopping_on_sigterm(), socket_folder("bench") as sockets:
        try:
            with ExitStack() as stack:
                bench.say(f"{len(plan.arms)} engines, {plan.settings.threads} threads each, logs in {folder}")
                bench.start(stack, sockets)
                bench.record()
                bench.run()
                bench.say("stopping")
        except KeyboardInterrupt:
            code = 130
    if results.turns:
        print_table(results)
        if options.docs is not None:
            write_documents(results, options.docs)
            bench.say(f"wrote {options.docs / 'results.md'} and closed_loop.svg")
    return code


def print_table(results: Results) -> None:
    """Print what was measured so far."""
    heading, rows = table_rows(results)
    table = Table(title=f"tokens/s, {results.settings.target}, slices of {results.settings.slice_s:g} s")
    for text in heading:
        table.add_column(text, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 220, highlight=False).print(table)


def add_shared_options(parser: argparse.ArgumentParser, results: Path) -> None:
    """Add what this benchmark and swing.py both take."""
    parser.add_argument("--max-tokens", type=int, default=96, help="length of each answer")
    parser.add_argument("--answers", type=int, default=160, help="different prompts")
    parser.add_argument("--max-prompt-tokens", type=int, default=300)
    parser.add_argument("--policy", default="price", help="FASER's policy")
    parser.add_argument("--threads", type=int, help="of each engine; default: all cores but one")
    parser.add_argument("--json", type=Path, default=results, help="where the rounds are written")
    parser.add_argument("--resume", action="store_true", help="continue the JSON file")


def exit_with(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> NoReturn:
    """Run and exit; what stops it is one line, and what was measured stays."""
    try:
        code = run(options)
    except (FaserError, RemoteError) as error:
        print(f"{Path(sys.argv[0]).stem}: {error}; what was measured is in {options.json}", file=sys.stderr)
        code = getattr(error, "exit_code", 3)
    sys.exit(code)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="1,2,4,8,16,32", help="concurrent requests")
    parser.add_argument("--arms", default=",".join(USUAL_ARMS), help=f"some of {','.join(ARMS)}")
    parser.add_argument("--table", help="the best table, as 1-5=3,6-64=0; default: that of bench_full.json")
    parser.add_argument("--rounds", type=int, default=10, help="full rounds at each load before some arms drop out")
    parser.add_argument("--slice-s", type=float, default=0.5, help="about what a slice takes without speculation")
    parser.add_argument("--minutes", type=float, default=8.0, help="at most, for each load")
    add_shared_options(parser, RESULTS)
    parser.add_argument(
        "--docs", type=Path, help="folder whose results.md and closed_loop.svg are rewritten at the end"
    )
    parser.add_argument("--smoke", action="store_true", help="two loads, two arms, two short rounds")
    return parser.parse_args(arguments)


def main() -> None:
    """Parse, run, exit."""
    exit_with(run, parsed())


if __name__ == "__main__":
    main()
