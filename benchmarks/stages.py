"""What pipeline stages bring and what moving them takes, on this machine: `python benchmarks/stages.py`.

The embedded target in float32, greedy, on four engines that take turns, each started anew for each turn: vLLM alone on
all cores, vLLM alone on one core, and FASER with two and four ranks, which have a core each or share them. Throughput:
so many clients' answers to short held-out prompts, by number of stages; they come in as many groups as there are ranks,
which is what keeps all ranks busy. Recovery: with eight requests decoding, the stages move again and again at the pace
that a user gets, and each step is timed from output to output. A move is over when the step that switches, or one
behind it, takes at most 1.2 times the 25th percentile of the steps until the next move: FlexPipe's measure of a
recovery. `steps_of_run` goes by that of all undisturbed steps of the run under the same cut, `slow_share` is how many
of those take longer by themselves: the machine's bursts; `other_cores` is what other processes used meanwhile. Every
answer is compared with vLLM's: `answers` has one digest for each load. The file is written behind each turn; another
start goes on from it. A quarter of an hour.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from measured_cells import begun, fill
from remote import Remote

from faser.controller.bench.markdown import markdown_table
from faser.controller.engine.launch import rank_cores
from faser.controller.engine.machine import NOISE_CPU, machine_facts, versions

FOLDER: Final = Path(__file__).resolve().parent
RESULT: Final = FOLDER / "results" / "stages.json"
ENGINE: Final = FOLDER / "stages_engine.py"
QUICK: Final = 1.2  # times the 25th percentile: FlexPipe calls such a step recovered
NEAR_STEPS: Final = 8  # behind a switch, which are not taken for undisturbed


@dataclass(frozen=True, slots=True)
class Served:
    """One way to serve the target; `cuts` by what a table calls them."""

    ranks: int
    cores: int
    cuts: dict[str, list[int] | None]
    moves: tuple[list[int], ...] = ()  # cuts that are taken in turn


ENGINES: Final = {
    "vllm": Served(1, 2, {"vLLM": None}),
    "vllm-one-core": Served(1, 1, {"vLLM, one core": None}),
    "two-ranks": Served(2, 2, {"1 of 2": [0], "2 of 2": [15]}, ([15], [0], [15], [8])),
    "four-ranks": Served(
        4, 2, {"1 of 4": [0, 0, 0], "2 of 4": [0, 0, 15], "4 of 4": [8, 15, 22]}, ([8, 15, 22], [0, 0, 0], [0, 0, 15])
    ),
}


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step, from the output before it to its own."""

    ms: float
    bounds: tuple[int, ...]
    is_moving: bool  # a move is under way
    is_switch: bool


def recoveries(steps: Sequence[TimedStep], is_of_run: bool = False) -> Iterator[tuple[int, float]]:
    """Yield for each move how many steps from its switch on were slow, and what they took in ms.

    Slow is what takes longer than 1.2 times the 25th percentile of the steps from this move to the next one, or, with
    `is_of_run`, of all undisturbed steps of the run under the same cut: there bursts of the machine count, too.
    """
    limits = limits_ms(steps)
    for at in (at for at, step in enumerate(steps) if step.is_switch):
        visit = visit_of(steps, at)
        limit = limits.get(steps[at].bounds) if is_of_run else QUICK * percentile_ms(visit)
        count = next((n for n, step in enumerate(steps[at:]) if limit is not None and step.ms <= limit), None)
        if count is not None and len(visit) >= NEAR_STEPS:  # else the run ended before
            yield count, sum(step.ms for step in steps[at : at + count])


def visit_of(steps: Sequence[TimedStep], switch: int) -> list[TimedStep]:
    """Return the steps from a switch on until the next move begins."""
    return [steps[switch], *takewhile(lambda step: not (step.is_moving or step.is_switch), steps[switch + 1 :])]


def percentile_ms(steps: Sequence[TimedStep]) -> float:
    """Return the 25th percentile of what steps take."""
    return float(np.percentile([step.ms for step in steps], 25))


def undisturbed(steps: Sequence[TimedStep]) -> Iterator[TimedStep]:
    """Yield the steps that no move is near."""
    since = NEAR_STEPS
    for step in steps:
        since = 0 if step.is_switch or step.is_moving else since + 1
        if since >= NEAR_STEPS:
            yield step


def limits_ms(steps: Sequence[TimedStep]) -> dict[tuple[int, ...], float]:
    """Return by cut what a step may take that counts as recovered."""
    calm = list(undisturbed(steps))
    cuts = {step.bounds for step in calm}
    return {cut: QUICK * percentile_ms([step for step in calm if step.bounds == cut]) for cut in cuts}


def recovery(steps: Sequence[TimedStep], ranks: int) -> dict[str, Any]:
    """Return what the moves of a run took, in steps and ms."""
    limits, calm, found = limits_ms(steps), list(undisturbed(steps)), list(recoveries(steps))
    moving = [step.ms * QUICK / limits[step.bounds] for step in steps if step.is_moving and step.bounds in limits]
    counts, lost_ms = zip(*found, strict=True)
    of_run = [count for count, _ in recoveries(steps, is_of_run=True)]
    return {
        "moves": len(found), "within": sum(count <= ranks + 1 for count in counts), "steps": list(counts),
        "ms": [round(ms, 1) for ms in lost_ms],
        "steps_of_run": of_run, "within_of_run": sum(count <= ranks + 1 for count in of_run),
        "slow_share": sum(step.ms > limits[step.bounds] for step in calm) / len(calm),
        "p25_ms": {",".join(map(str, cut)): limit / QUICK for cut, limit in limits.items()},
        "steps_under_way": len(moving) / len(found),
        "under_way_over_p25": statistics.median(moving) if moving else None,
    }  # fmt: skip


def throughput_rows(runs: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the table of tokens per second: a row for each way to serve, with a median and what turns lie between."""
    names = dict.fromkeys(name for run in runs for name in run["tokens_per_s"])
    for name in names:
        rates = [run["tokens_per_s"][name] for run in runs if name in run["tokens_per_s"]]
        yield [name, *(_spread([rate[load] for rate in rates]) for load in rates[0])]


def _spread(values: Sequence[float]) -> str:
    middle = f"{statistics.median(values):.1f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.1f} to {max(values):.1f})"


def recovery_rows(runs: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the table of recoveries: a row for each number of ranks, all turns together."""
    for name, served in ENGINES.items():
        found = [run["recovery"] for run in runs if run["engine"] == name and "recovery" in run]
        if not found:
            continue
        steps, ms = ([value for each in found for value in each[kind]] for kind in ("steps", "ms"))
        low, middle, high = np.percentile(ms, (25, 50, 75))
        within = sum(each["within"] for each in found)
        yield [
            str(served.ranks), str(len(steps)), f"{np.median(steps):.0f}", f"{np.percentile(steps, 90):.0f}",
            f"{middle:.0f} ({low:.0f} to {high:.0f})", f"{within} of {len(steps)}",
            f"{sum(each['within_of_run'] for each in found)} of {sum(len(each['steps_of_run']) for each in found)}",
            f"{100 * statistics.mean(each['slow_share'] for each in found):.0f} %",
            f"{statistics.mean(each['steps_under_way'] for each in found):.0f}",
            f"{statistics.median(each['under_way_over_p25'] for each in found):.2f}",
        ]  # fmt: skip


RECOVERY: Final = (
    "ranks", "moves", "slow steps, median", "p90", "ms, median (quartiles)", "back within ranks + 1 steps",
    "by the run's P25", "other steps as slow", "steps under way", "one of these over P25",
)  # fmt: skip


def is_disturbed(run: dict[str, Any]) -> bool:
    """Tell whether other processes used so much of the machine in a turn that it does not count as quiet."""
    return any(run[part]["other_cores"] > NOISE_CPU for part in ("throughput", "recovery") if part in run)


def read_options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="starts of each engine")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8], help="loads")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--moves", type=int, default=36, help="in a turn of an engine with ranks")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--again", action="store_true", help="measure disturbed turns of the file once more")
    parser.add_argument("--json", type=Path, default=RESULT, help="write the report here")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("one core; expected two")
    return options


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what one start of an engine showed."""
    served = ENGINES[name]
    cores = sorted(os.sched_getaffinity(0))[: served.cores]
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        environment = {
            "FASER_STAGES": "1", "FASER_ENDPOINT": f"ipc://{folder}/engine.sock",  # where nobody listens
            "VLLM_CPU_OMP_THREADS_BIND": rank_cores(cores, served.ranks), "OMP_NUM_THREADS": "",
        }  # fmt: skip
        with Remote(str(ENGINE), [str(served.ranks)], folder, environment) as engine:
            found = engine.ask("throughput", served.cuts, options.requests, options.tokens)
            if served.moves:
                seen = engine.ask("moves", served.moves, max(options.requests), options.moves)
                steps = [TimedStep(ms, tuple(cut), *kind) for ms, cut, *kind in seen.pop("steps")]
                found["recovery"] = recovery(steps, served.ranks) | seen
    return dict(found)


def main() -> None:
    """Measure what is not there yet."""
    options = read_options()
    said = {
        "requests": options.requests, "tokens": options.tokens, "moves": options.moves, "dtype": "float32",
        "command": f"python benchmarks/stages.py --turns {options.turns}",
        "machine": msgspec.to_builtins(machine_facts()), "versions": versions(),
    }  # fmt: skip
    report = begun(options.json, said, {"runs": []})
    if options.again:
        report["runs"] = [run for run in report["runs"] if not is_disturbed(run)]
    wanted = [(turn, name) for turn in range(options.turns) for name in options.engines]
    fill(
        options.json, report, "runs", wanted, lambda run: (run["turn"], run["engine"]),
        lambda one: {"turn": one[0], "engine": one[1]} | measure(one[1], options),
    )  # fmt: skip
    print(markdown_table(("tokens/s at requests", *map(str, options.requests)), throughput_rows(report["runs"])))
    print(markdown_table(RECOVERY, recovery_rows(report["runs"])))


if __name__ == "__main__":
    main()
