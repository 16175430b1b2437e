"""`faser train` and `faser sweep`, for controller/cli/main.py.

The learned policy from a configuration file: one run, or many over seeds and hyper-parameters, on processes or Ray.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine.launch import available_cores
from ..engine.machine import commit
from ..errors import UsageError
from ..extras import require_extra
from ..whole_file import require_folder
from .evaluate import decided, whole_numbers

if TYPE_CHECKING:  # torch comes with them: `faser --help` must not wait for it
    from ...models.training.sweep import Outcome, TrainingRun, Value

MOST_RUNS = 10_000
MOST_SEED = 2**31 - 1


def train(
    config: Annotated[Path, typer.Option("--config", help="TOML file, such as models/weights/policy.recipe.toml.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the run.")] = Path("runs/policy"),
    seed: Annotated[int | None, typer.Option(help="Seed; overrides the file's.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the folder's checkpoint.")] = False,
    json: Annotated[bool, typer.Option("--json", help="End with one JSON object.")] = False,
) -> None:
    """Train a policy in simulation with PPO."""
    require_extra("train", "torch", "stable_baselines3")
    from ...models.training.config import load_config
    from ...models.training.train import train as run
    from ..progress import stage_bars

    settings = load_config(config)
    if seed is not None:
        settings = replace(settings, seed=seed)
    require_folder(output, "--output")
    with stage_bars() as bars:
        result = run(settings, output, decided, resume=resume, progress=bars.stage, commit=commit())
    if json:
        typer.echo(
            json_module.dumps(
                {
                    "manifest": str(result.manifest), "first": result.first, "best": result.best,
                    "steps": result.steps, "seconds": result.seconds,
                }
            )
        )  # fmt: skip
    else:
        gain = result.best - result.first
        typer.echo(
            f"{result.manifest}: {result.steps} steps in {result.seconds:.0f} s, on unseen engines {gain:+.2%} worth, "
            f"in tokens in time, over where it began; try --policy learned:{result.manifest}"
        )


def sweep(
    config: Annotated[Path, typer.Option("--config", help="TOML file, as for `faser train`.")],
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between them; default: the file's.")] = "",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="FIELD=VALUE,VALUE,... of the file; repeatable.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the runs' folders.")] = Path("runs/sweep"),
    ray: Annotated[bool, typer.Option("--ray", help="Run on Ray (needs the extra sweep).")] = False,
    address: Annotated[
        str | None, typer.Option(help="Address of a running Ray; default: a local one is started.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Runs at a time; default: one for each core.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="End with one JSON object instead of a table.")] = False,
) -> None:
    """Train every combination of seeds and values; finished ones are skipped."""
    if address is not None and (not ray or workers is not None):
        raise UsageError("--address", "--ray and no --workers beside it: the cluster's CPUs say how many run at a time")
    runs = _planned(config, seeds, set_ or [], output)
    require_folder(output, "--output")
    outcomes: list[Outcome] = []
    interrupted = False
    try:
        with closing(_outcomes(runs, ray, address, workers or available_cores())) as coming:
            for outcome in coming:
                outcomes.append(outcome)
                typer.echo(f"{len(outcomes)}/{len(runs)} {progress(outcome)}", err=True)
    except KeyboardInterrupt:
        interrupted = True
        typer.echo(f"faser: interrupted; {len(runs) - len(outcomes)} runs are left for the same command", err=True)
    typer.echo(json_module.dumps(summary(outcomes, interrupted)) if json else drawn(outcomes))
    if interrupted or any(outcome.trained is None for outcome in outcomes):
        raise typer.Exit(130 if interrupted else 1)


def _planned(config: Path, seeds: str, settings: Sequence[str], output: Path) -> list[TrainingRun]:
    """Return the runs; whatever is wrong with one of them is said before the first begins."""
    require_extra("train", "torch", "stable_baselines3")
    from ...models.training.config import load_config
    from ...models.training.sweep import grid, parsed

    recipe = load_config(config)
    values: dict[str, tuple[Value, ...]] = {}
    for name, texts in map(split, settings):
        if name in values:
            raise UsageError(f"--set {name} twice", "it once, with commas between its values")
        values[name] = parsed(name, texts)
    chosen = whole_numbers(seeds, "seeds", MOST_SEED) if seeds else (recipe.seed,)
    runs = grid(recipe, chosen, values, output.resolve())
    if len(runs) > MOST_RUNS:
        raise UsageError(f"{len(runs)} runs", f"at most {MOST_RUNS}")
    return runs


def split(setting: str) -> tuple[str, list[str]]:
    """Return the field and the values' texts of FIELD=VALUE,VALUE."""
    name, equals, values = setting.partition("=")
    if not equals or not name.strip() or not all(text.strip() for text in values.split(",")):
        raise UsageError(f"--set {setting!r}", "FIELD=VALUE,VALUE,... such as hidden=16,32")
    return name.strip(), [text.strip() for text in values.split(",")]


def _outcomes(runs: Sequence[TrainingRun], ray: bool, address: str | None, workers: int) -> Generator[Outcome]:
    """Yield what came of each run: first of those that were there, then of the others as they end."""
    from ...models.training.sweep import Outcome, finished
    from .sweep_workers import on_processes, on_ray

    found = [(run, finished(run)) for run in runs]
    left = [run for run, trained in found if trained is None]
    yield from (Outcome(run, trained) for run, trained in found if trained is not None)
    if left and ray:
        yield from on_ray(left, workers, address, decided, commit())
    elif left:
        yield from on_processes(left, min(workers, len(left)), decided, commit())


def progress(outcome: Outcome) -> str:
    """Return what is said when a run has ended."""
    trained = outcome.trained
    if trained is None:
        return f"{outcome.run.name}: failed, {outcome.reason}"
    if outcome.pid is None:
        return f"{outcome.run.name}: {trained.best:.5f}, finished before"
    return f"{outcome.run.name}: {trained.best:.5f} after {trained.steps} steps, {trained.seconds:.0f} s"


def summary(outcomes: Sequence[Outcome], interrupted: bool) -> dict[str, Any]:
    """Return everything as one JSON object, best first."""
    from ...models.training.sweep import best_first, means

    return {
        "interrupted": interrupted,
        "runs": [_row(outcome) for outcome in best_first(outcomes)],
        "means": [{"values": values, "best": round(best, 5), "seeds": n} for values, best, n in means(outcomes)],
    }


def _row(outcome: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {"values": outcome.run.values, "folder": str(outcome.run.folder), "pid": outcome.pid}
    trained = outcome.trained
    if trained is None:
        return {**row, "failed": outcome.reason}
    return {
        **row, "manifest": str(trained.manifest), "first": round(trained.first, 5), "best": round(trained.best, 5),
        "steps": trained.steps, "seconds": round(trained.seconds, 1),
    }  # fmt: skip


def drawn(outcomes: Sequence[Outcome]) -> str:
    """Return the tables as text: runs by their best judgement and, with several seeds, means over them."""
    from ...models.training.sweep import best_first, means

    lines = [f"{'best':>9} {'gain':>7} {'steps':>9} {'s':>6}  run"]
    for outcome in best_first(outcomes):
        trained = outcome.trained
        if trained is None:
            lines.append(f"{'failed':>9} {'':>7} {'':>9} {'':>6}  {outcome.run.name}: {outcome.reason}")
        else:
            gain = f"{trained.best - trained.first:+.2%}"
            lines.append(f"{trained.best:9.5f} {gain:>7} {trained.steps:9} {trained.seconds:6.0f}  {outcome.run.name}")
    groups = means(outcomes)
    if len(groups) > 1 and max(n for *_, n in groups) > 1:
        lines += ["", f"{'mean':>9} {'seeds':>7}  values"]
        lines += [
            f"{best:9.5f} {n:7}  {' '.join(f'{name}={value}' for name, value in values.items())}"
            for values, best, n in groups
        ]
    return "\n".join(lines)
