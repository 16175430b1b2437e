"""Compare FASER with what else could be configured, at a constant number of concurrent requests.

    python benchmarks/closed_loop.py [--loads 1,2,4,8] [--arms none,k3,faser] [--starts 5] [--resume] [--docs docs]

Every arm is a vLLM engine in a process of its own, FASER's with a real sidecar beside it, as those of papers' rules;
the other rivals are vLLM without FASER. The engines take turns in slices of about eight steps without speculation: who
is not at work waits with its requests half done. All serve the same stream of held-out prompts, and a slice ends when
its arm has emitted the same total of tokens as the others, so that what the machine's speed does within seconds falls
on all of them. Every arm is held to the same answers, recorded before by the first arm (held_text.py): else those whose
texts happen to be easier would win. At each load arms with a sidecar serve for half a minute before they are measured,
for their sidecar is new to the engine. A round is as many slices as make an answer of every client, or of sixteen of
them, and 384 tokens at least. Every step counts: with a first step left out, whose caches are cold, an arm that emits a
token a step would have had the same of its prompts left out in every round, those that end an answer in step with the
slices. Where an engine has one thread, all engines' stay on one core. Their memory is in huge pages, for in small ones
engines alike differ by where their weights lie. What an engine is like for as long as it lives no interval over rounds
would see: so all are started anew several times, and intervals are over these starts. The first start measures every
arm, later ones FASER, no speculation and the rivals near the best of each load. A load is done when its ratio is sharp,
with LEAST_STARTS starts at least, or --starts are over. The best table is the one that the sweep of `faser bench` found
(benchmarks/results/bench_full.json), unless --table gives another. Every round is in the JSON file when it is over;
closed_loop_report.py makes table and picture of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec
from closed_loop_report import ROOT, table_rows, write_documents
from closed_loop_result import RESULTS, Results, Settings, envelope_at, read_results
from closed_loop_run import Bench, Plan
from remote import RemoteError
from rich.console import Console
from rich.table import Table

from faser.controller.bench_machine import commit, machine_facts, versions
from faser.controller.bench_plan import ARMS as EVERY_ARM
from faser.controller.bench_plan import MAX_LENGTH, NONE, SUFFIX, TABLE, VARIANTS, contenders
from faser.controller.bench_ratio import OURS
from faser.controller.bench_table import Table as BatchLengths
from faser.controller.bench_table import described
from faser.controller.errors import FaserError, UsageError
from faser.controller.launch import available_cores, default_threads
from faser.controller.serve import stopping_on_sigterm
from faser.env.spaces import Capabilities
from faser.models.baselines import LengthTable
from faser.models.embedded import EMBEDDED_K_MAX, TARGET_NAME
from faser.models.policy import PolicyError

TUNED = ROOT / "benchmarks" / "results" / "bench_full.json"
# Suffix decoding is left out: it remembers answers, and here the same ones are given over and over.
ARMS = tuple(arm for arm in EVERY_ARM if arm not in (SUFFIX, *VARIANTS))
USUAL_ARMS = (NONE, "k1", "k2", "k3", "k4", "k6", TABLE, OURS)  # what fits into memory
MAX_LOAD = 64  # requests: what an engine takes at once, and its KV cache holds
HALF_WIDTH = 0.02  # at which a load is done: at the bar's own 3 % a ratio of 1.00 would often not be seen to meet it
LEAST_STARTS = 4  # before that a ratio may look sharp by luck


@dataclass(frozen=True, slots=True)
class Orders:
    """What the whole run is to measure."""

    loads: tuple[int, ...]
    arms: tuple[str, ...]
    rounds: int  # of each load in each start
    starts: int  # at most
    settings: Settings
    table: BatchLengths = ()  # of the arm `table`

    def plan(self, results: Results) -> Plan:
        """Return what the next start measures, by what was measured so far; at no load: nothing."""
        arms = {load: self._arms_at(load, results) for load in self.loads}
        return Plan({load: names for load, names in arms.items() if names}, self.rounds, self.settings, self.table)

    def _arms_at(self, load: int, results: Results) -> tuple[str, ...]:
        starts = results.starts(load)
        if not starts:
            return self.arms
        is_steady = OURS in self.arms and len(starts) >= LEAST_STARTS
        if is_steady and envelope_at(results, load).ratio.half_width <= HALF_WIDTH:
            return ()
        return contenders(results.rates(load, is_even=True), self.arms)


def open_results(path: Path, plan: Orders, is_resumed: bool) -> Results:
    """Return new results, or the file's if they can be continued."""
    now, settings = commit(), plan.settings
    if not is_resumed or not path.exists():
        return Results(machine_facts(), versions(), [now], settings, table=plan.table)
    try:
        results = read_results(path)
    except (OSError, msgspec.MsgspecError) as error:
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


def orders_of(options: argparse.Namespace) -> Orders:
    """Return what to measure; raise UsageError for what cannot be measured."""
    if options.smoke:
        options.loads, options.arms, options.rounds = "1,2", f"none,{OURS}", 2
        options.slice_s, options.starts, options.max_tokens, options.answers = 0.3, 1, 24, 20
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
    return Orders(loads, arms, options.rounds, options.starts, settings_of(options), table)


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
        has_huge_pages=True,
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure, print the table, return the exit code."""
    orders = orders_of(options)
    results = open_results(options.json, orders, options.resume)
    folder = (Path("runs") / time.strftime("closed-loop-%Y%m%d-%H%M%S")).absolute()
    console, begin_s, code = Console(stderr=True, highlight=False), time.monotonic(), 0
    answers: list[list[int]] = []
    first = max(results.starts(), default=-1) + 1
    with stopping_on_sigterm():
        try:
            for number in range(first, first + orders.starts):
                if not (plan := orders.plan(results)).arms:
                    break
                place = folder / f"start-{number}"
                bench = Bench(plan, results, options.json, place, console, number, answers, begin_s)
                bench.measure()
                answers = bench.answers
        except KeyboardInterrupt:
            code = 130
    if results.turns:
        print_table(results)
        if options.docs is not None:
            write_documents(results, options.docs)
            console.print(f"closed_loop: wrote {options.docs / 'results.md'} and closed_loop.svg")
    return code


def print_table(results: Results) -> None:
    """Print what was measured so far."""
    heading, rows = table_rows(results)
    table = Table(title=f"tokens/s, {results.settings.target}")
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
    parser.add_argument("--loads", default="1,2,4,8,16,32,64", help="concurrent requests")
    parser.add_argument("--arms", default=",".join(USUAL_ARMS), help=f"some of {','.join(ARMS)}")
    parser.add_argument("--table", help="the best table, as 1-5=3,6-64=0; default: that of bench_full.json")
    parser.add_argument("--starts", type=int, default=6, help="of all engines, at most")
    parser.add_argument("--rounds", type=int, default=3, help="at each load in each start")
    parser.add_argument(
        "--slice-s",
        type=float,
        default=0.25,
        help="of a slice without speculation, where that is more than eight steps",
    )
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
