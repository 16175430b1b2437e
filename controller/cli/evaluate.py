"""`faser evaluate`: every policy against every rival in simulated worlds, through the decision core; or of pipelines.

Registered by controller/cli/main.py. The core is injected into models/evaluation/evaluate.py from here, the floor
above.
"""

from __future__ import annotations

import contextlib
import json as json_module
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from ..whole_file import replacing, require_place

if TYPE_CHECKING:  # numpy comes with them: `faser --help` must not wait for it
    from ...engine_adapter.protocol import ActionSet, StepRecord
    from ...env.estimate.engine_state import EngineState
    from ...models.policies.policy import Policy


OURS = "price price:history"
MOST_REQUESTS = 256  # running at once in a simulated engine


def explained(state: EngineState, record: StepRecord, policy: Policy, sequence: int) -> tuple[ActionSet, str]:
    """Return what the decision core answers to a record, and why."""
    from ..decision.decide import LeaseTerms, decide

    decision = decide(state, record, policy, LeaseTerms(), 1, sequence)
    return decision.action_set, decision.reason


def decided(state: EngineState, record: StepRecord, policy: Policy, sequence: int) -> ActionSet:
    """Return what the decision core answers to a record."""
    return explained(state, record, policy, sequence)[0]


@contextlib.contextmanager
def pool(workers: int) -> Iterator[Executor | None]:
    """Give so many worker processes, one BLAS thread each; None for one."""
    if workers == 1:
        yield None
        return
    one_thread()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=end_with_parent) as executor:
        try:
            yield executor
        except BaseException:
            executor.shutdown(cancel_futures=True)
            raise


def one_thread() -> None:
    """Give each process that is started from now on one thread for its arithmetic."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")


def end_with_parent() -> None:
    """Leave no worker behind when the command is killed: a pool's workers wait for work forever."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="faser-parent", daemon=True).start()


def whole_numbers(text: str, what: str, most: int) -> tuple[int, ...]:
    """Return different whole numbers in 0..most, given with commas between them; raise UsageError otherwise."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{what} {text!r}", "whole numbers with commas between them") from None
    if not values or len(set(values)) != len(values) or min(values) < 0 or max(values) > most:
        raise UsageError(f"{what} {text!r}", f"different numbers in 0..{most}")
    return values


def loads_of(text: str) -> tuple[int, ...]:
    """Return the loads of `1,2,drift,swing`, as models/evaluation/evaluate.py numbers them.

    Raise UsageError for others.
    """
    from ...models.evaluation.evaluate import CHANGING

    numbers = {name: number for number, name in CHANGING.items()}
    parts = [part.strip() for part in text.split(",")]
    found = [numbers.get(part, int(part) if part.isdecimal() else 0) for part in parts]
    is_known = all(part in numbers or 1 <= load <= MOST_REQUESTS for part, load in zip(parts, found, strict=True))
    if not is_known or len(set(found)) < len(found):
        raise UsageError(f"loads {text!r}", f"different ones of 1..{MOST_REQUESTS}, {', '.join(numbers)}")
    return tuple(found)


def evaluate(
    policies: Annotated[
        str,
        typer.Option(
            help="Policies to judge, with spaces between them; default: price price:history, or of pipelines all."
        ),
    ] = "",
    rivals: Annotated[str, typer.Option(help="Rivals beside off, fixed lengths and the best table.")] = (
        "goodput smartspec adaspec ema bandit gplcb"
    ),
    bounds: Annotated[str, typer.Option(help="Upper bounds; oracle:request is always added.")] = (
        "oracle:request oracle:uniform"
    ),
    worlds: Annotated[str, typer.Option(help="Names of held-out worlds, with commas; default: all.")] = "",
    loads: Annotated[str, typer.Option(help="Running requests, with commas; drift and swing change over time.")] = (
        "1,2,4,8,16,32,64,128,drift,swing"
    ),
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Runs of each cell, with different requests.")] = 3,
    steps: Annotated[
        int,
        typer.Option(min=20, max=100_000, help="Length of a run, in steps without speculation."),
    ] = 1000,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes.")] = 1,
    objectives: Annotated[
        bool, typer.Option("--objectives", help="Who keeps the objectives of urgent requests, where few can be fast.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the JSON object to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="End with one JSON object instead of a table.")] = False,
    pipeline: Annotated[
        bool, typer.Option("--pipeline", help="Judge who decides about pipeline stages; -o FILE also draws FILE.svg.")
    ] = False,
    traces: Annotated[str, typer.Option(help="With --pipeline: arrivals, with commas; default: all.")] = "",
    minutes: Annotated[float, typer.Option(help="With --pipeline: length of a run.")] = 20.0,
    serial: Annotated[bool, typer.Option("--serial", help="With --pipeline: a batch holds one request.")] = False,
) -> None:
    """Compare policies with rivals and upper bounds in held-out simulated worlds."""
    if pipeline:
        options = PipelineFlags(policies, traces, seeds, minutes, serial, workers, output, json)
        _evaluate_pipeline(options)
        return
    policies = policies or OURS
    from rich.console import Console

    from ...env.spaces import Capabilities
    from ...models.evaluation.evaluate import ORACLES, Comparison
    from ...models.evaluation.evaluate import evaluate as run
    from ...models.evaluation.standing import summary
    from ...models.evaluation.worlds import held_out
    from ...models.registry import make_policy
    from ..engine.machine import provenance
    from ..progress import progress_bar

    if output is not None:
        require_place(output, "--output")
    if objectives:
        from . import evaluate_objectives as on_time

        attained = on_time.objectives(policies, worlds, seeds, steps, pool(workers), decided) | provenance()
        _tell(attained, on_time.drawn, output, as_json=json)
        return
    known = {world.name: world for world in held_out()}
    named = [name for name in worlds.split(",") if name] or list(known)
    if unknown := [name for name in named if name not in known]:
        raise UsageError(f"world {', '.join(unknown)}", f"some of {', '.join(known)}")
    if beyond := [name for name in bounds.split() if name not in ORACLES]:
        raise UsageError(f"bounds {' '.join(beyond)}", f"some of {' '.join(ORACLES)}")
    plan = Comparison(
        policies=tuple(dict.fromkeys(policies.split())),
        worlds=tuple(known[name] for name in named),
        loads=loads_of(loads),
        seeds=tuple(101 + number for number in range(seeds)),
        steps=steps,
        rivals=tuple(dict.fromkeys(rivals.split())),
        bounds=tuple(name for name in ORACLES if name in (ORACLES[0], *bounds.split())),
    )
    for spec in (*plan.policies, *plan.rivals):
        make_policy(spec, Capabilities(k_max=min(world.profile.k_max for world in plan.worlds)))
    if both := set(plan.policies) & set(plan.rivals):
        raise UsageError(f"{', '.join(sorted(both))} as policy and as rival", "one of them")
    console = Console(stderr=True)
    with progress_bar(console) as show, pool(workers) as executor:
        table = run(plan, decided, executor, lambda done, total: show("evaluating", done / total))
    _tell(summary(table) | provenance(), drawn, output, as_json=json)


def _tell(
    result: dict[str, Any], draw: Callable[[dict[str, Any]], str], output: Path | None, *, as_json: bool
) -> None:  # fmt: skip
    """Print a result, and write it where the user wants it."""
    text = json_module.dumps(result, indent=None if as_json else 1)
    typer.echo(text if as_json else draw(result))
    if output is not None:  # behind what is printed: a full disk must not cost hours
        with replacing(output) as place:
            place.write_text(text + "\n")


@dataclass(frozen=True, slots=True)
class PipelineFlags:
    """The flags that `--pipeline` goes by."""

    policies: str
    traces: str
    seeds: int
    minutes: float
    is_serial: bool
    workers: int
    output: Path | None
    is_json: bool


def _evaluate_pipeline(flags: PipelineFlags) -> None:
    """Judge pipeline policies; print a table or JSON, and write JSON and picture."""
    import shlex
    import sys

    from rich.console import Console
    from rich.progress import Progress

    from ..calibrate.profile import command_line
    from ..pipeline.evaluation import PipelineOptions, drawn_table, evaluate_pipeline, plan_of, write_picture

    if flags.output is not None:
        require_place(flags.output, "--output")
    options = PipelineOptions(
        flags.policies, flags.traces, flags.seeds, flags.minutes, flags.is_serial,
        command_line(("faser", *map(shlex.quote, sys.argv[1:]))),
    )  # fmt: skip
    plan_of(options)
    console = Console(stderr=True)
    with (
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
        pool(flags.workers) as executor,
    ):
        task = bar.add_task("evaluating", total=None)
        result = evaluate_pipeline(options, executor, lambda done, total: bar.update(task, completed=done, total=total))
    text = json_module.dumps(result, indent=None if flags.is_json else 1)
    typer.echo(text if flags.is_json else drawn_table(result))
    if flags.output is not None:
        with replacing(flags.output) as place:
            place.write_text(text + "\n")
        write_picture(result, flags.output.with_suffix(".svg"))


def drawn(result: dict[str, Any]) -> str:
    """Return the summary as text."""
    lines = [f"{'policy':16} {'goodput':>9} {'95 % interval':>21} {'envelope min':>13} {'mean':>6} {'gap closed':>11}"]
    ranked = sorted(result["policies"].items(), key=lambda entry: -entry[1]["goodput"])
    for name, row in ranked:
        low, high = row["ci"]
        span = "" if low is None else f"{low:.1f} .. {high:.1f}"
        gap = "" if row["gap_closed"] is None else f"{row['gap_closed']:.0%}"
        # Lengths beyond what a world's drafter gives are not judged there: their goodput is of other engines.
        judged = sum(map(bool, row["worlds"].values()))
        part = f"  in {judged} of {result['worlds']} worlds" if judged < result["worlds"] else ""
        lines.append(
            f"{name:16} {row['goodput']:9.1f} {span:>21} {row['envelope_ratio_min']:13.3f} "
            f"{row['envelope_ratio_mean']:6.3f} {gap:>11}{part}"
        )
    tables = [f"best table in {world}: {spec}" for world, spec in result["tables"].items()]
    return "\n".join([*lines, "", *tables, f"{result['worlds']} worlds, {result['seeds']} seeds"])
