"""Compare FASER with fixed draft lengths and the best table while the load swings: `python benchmarks/swing.py`.

The arrivals are a piece of the Azure conversation trace whose rate rises from under to far over what the machine serves
and falls again, so that one request runs, then some twenty, then one. Their clock is not the wall's: a request comes
when its arm has emitted so many tokens. So every arm has as many requests running at the same token, however fast it
is, and all can take turns in slices, on the same held texts, as in closed_loop.py, whose engines these are. A round is
one swing, each of another piece of the trace; its figure is tokens per second from the first token to the last.
The rivals are no speculation, fixed lengths and vLLM's own table by batch size, with the best length of each load of
benchmarks/results/closed_loop.json. Every round is in the JSON when it is over; docs/results.md's table is made of it
by docs/figures.py. About five minutes a round, and eight before the first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from closed_loop import add_shared_options, exit_with, settings_of
from closed_loop_result import RESULTS, Results, Settings, read_results, write_results
from closed_loop_run import Bench, Plan
from closed_loop_turn import Slice, as_turn
from rich.console import Console
from swing_report import RESULT, SWING, TABLE, Swings, lines

from faser.controller.bench_machine import commit, machine_facts, versions
from faser.controller.bench_plan import length_of, turn_order
from faser.controller.bench_ratio import OURS
from faser.controller.bench_result import name_of
from faser.controller.bench_table import best_table
from faser.controller.bench_turn import LEAST_STEPS
from faser.controller.errors import UsageError
from faser.controller.serve import stopping_on_sigterm
from faser.env.trace import shipped_trace
from faser.env.workload import Swell, swelling_arrivals

ARMS: Final = ("none", "k1", "k2", "k3", TABLE, OURS)
LENGTH_TOKENS: Final = 1500  # of the clock, from the first arrival to the last
LOW, PEAK = 0.8, 3.5  # tokens that arrive per token emitted
LEAST_ANSWER: Final = 16  # tokens
LEAST_SLICE: Final = 12  # tokens
MAX_REQUESTS: Final = 64
WHOLE: Final = 10**9  # tokens: more than a swing has

Arrivals = list[tuple[float, int]]


def arrivals_of(seed: int, most: int) -> Arrivals:
    """Return when requests come, in tokens emitted, and the tokens of their answers, `most` at most."""
    swell = Swell(LENGTH_TOKENS, LOW / most, PEAK / most)
    piece = swelling_arrivals(shipped_trace("azure-conv"), swell, seed)
    answers = np.clip(piece.output_tokens, LEAST_ANSWER, most)
    return [(float(at), int(tokens)) for at, tokens in zip(piece.arrival_s, answers, strict=True)]


def running(arrivals: Arrivals) -> list[int]:
    """Return how many requests run at each emitted token, if each gets one token a step."""
    waiting, live, found = list(arrivals), [], []  # type: Arrivals, list[int], list[int]
    while waiting or live:
        while waiting and (waiting[0][0] <= len(found) or not live):
            live.append(waiting.pop(0)[1])
        found += [len(live)] * len(live)
        live = [left - 1 for left in live if left > 1]
    return found


def slice_goals(load: Sequence[int]) -> list[int]:
    """Return where slices end, in tokens: so that each has some steps and tokens."""
    goals, at = [], 0
    while at < len(load):
        at += max(LEAST_STEPS * load[at], LEAST_SLICE)
        goals.append(min(at, len(load)))
    if len(goals) > 1 and goals[-1] - goals[-2] < LEAST_SLICE:
        del goals[-2]
    return goals


class SwingBench(Bench):
    """The run."""

    def run(self) -> None:
        """Measure as many swings as are asked for."""
        first = max((turn.round for turn in self.results.turns), default=-1) + 1
        self._prepare(first)
        for round_ in range(first, first + self.plan.rounds):
            self._swing(round_)

    def _prepare(self, seed: int) -> None:
        self.say("every arm serves a swing unmeasured")
        arrivals = arrivals_of(10_000 + seed, self.plan.settings.max_tokens)
        for name in self.plan.arms:
            self.arms[name].ask("replay", self.order, arrivals)
            self.arms[name].ask("turn", WHOLE)

    def _swing(self, round_: int) -> None:
        arrivals = arrivals_of(round_, self.plan.settings.max_tokens)
        turn = int(np.random.default_rng(round_).integers(len(self.order)))
        order = self.order[turn:] + self.order[:turn]
        for name in self.plan.arms:
            self.arms[name].ask("replay", order, arrivals)
        load = running(arrivals)
        slices: dict[str, list[Slice]] = {name: [] for name in self.plan.arms}
        for at, goal in enumerate(slice_goals(load)):
            for name in turn_order(self.plan.arms, round_ + at):
                slices[name].append(self._slice(name, goal))
        self.results.turns += [as_turn(name, SWING, round_, slices[name]) for name in self.plan.arms]
        write_results(self.results, self.path)
        rates = {turn.arm: turn.tokens_per_s for turn in self.results.turns if turn.round == round_}
        told = ", ".join(f"{name_of(name)} {rates[name]:.1f}" for name in self.plan.arms)
        self.say(f"swing {round_ + 1}, 1 to {max(load)} requests: {told} tokens/s")


def tuned_table(closed_loop: Results) -> list[list[int]]:
    """Return the best length of each load, as vLLM's table."""
    lengths = {arm: length for arm in closed_loop.arms() if (length := length_of(arm)) is not None}
    levels: dict[int, dict[int, float]] = {}
    for load in closed_loop.loads():
        rates = closed_loop.rates(load, is_even=True)
        over_none = {arm: np.log(rates[arm]) - np.log(rates["none"]) for arm in lengths}
        levels[load] = {lengths[arm]: float(np.nanmean(logs)) for arm, logs in over_none.items()}
    return [list(row) for row in best_table(levels, MAX_REQUESTS)]


def opened(path: Path, settings: Settings, table: list[list[int]], is_resumed: bool) -> Swings:
    """Return new results, or the file's if they can be continued."""
    now = commit()
    if is_resumed and path.is_file():
        found = msgspec.json.decode(path.read_bytes(), type=Swings)
        if (found.settings, found.machine, found.table) != (settings, machine_facts(), table):
            raise UsageError(f"{path} was measured otherwise", "the same settings, table and machine", "drop --resume")
        found.commits += [] if now in found.commits else [now]
        return found
    return Swings(machine_facts(), versions(), [now], settings, table)


def run(options: argparse.Namespace) -> int:
    """Measure, print the table, return the exit code."""
    arms = tuple(arm for arm in ARMS if arm in options.arms.split(","))
    if unknown := set(options.arms.split(",")) - set(ARMS):
        raise UsageError(f"--arms {','.join(sorted(unknown))}", f"some of {','.join(ARMS)}")
    if not {OURS, "none"} <= set(arms):
        raise UsageError(f"--arms {options.arms}", f"none and {OURS} among them")
    settings, table = settings_of(options), tuned_table(read_results(RESULTS))
    results = opened(options.json, settings, table, options.resume)
    if results.turns and set(results.arms()) != set(arms):
        raise UsageError(f"{options.json} has {', '.join(results.arms())}", "the same arms", "drop --resume")
    folder = (Path("runs") / time.strftime("swing-%Y%m%d-%H%M%S")).absolute()
    rows = tuple((first, last, length) for first, last, length in table)
    plan = Plan({SWING: arms}, options.rounds, settings, rows)
    bench = SwingBench(plan, results, options.json, folder, Console(stderr=True, highlight=False))
    code = 0
    with stopping_on_sigterm():
        try:
            bench.measure()
        except KeyboardInterrupt:
            code = 130
    print("\n".join(lines(results)))
    return code


def main() -> None:
    """Parse, run, exit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.set_defaults(slice_s=0.0)  # slices are cut by tokens
    add_shared_options(parser, RESULT)
    exit_with(run, parser.parse_args())


if __name__ == "__main__":
    main()
