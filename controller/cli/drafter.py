"""`faser drafter ...`: train, evaluate and export a drafter of one's own target. A typer sub-app for
controller/cli/main.py.

Only parses, shows progress and turns refusals into one line; the work is done in models/drafter. The only heavy imports
are inside the commands.
"""

from __future__ import annotations

import dataclasses
import json as encoder
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from ...models.drafter.evaluate import Acceptance
    from ...models.drafter.recipe import Recipe
    from ...models.drafter.train import Trainer, TrainingReport
    from ..progress import StageBars

app = typer.Typer(
    help="Distil a drafter from a target, score it, export it.", no_args_is_help=True, rich_markup_mode=None
)

RecipeFile = Annotated[Path | None, typer.Option("--config", help="The recipe, a TOML file.")]
Work = Annotated[str | None, typer.Option(help="Folder of cache and checkpoints; overrides the recipe's.")]
_SMOKE: Final[dict[str, object]] = {
    "draft_vocabulary": 2048,
    "intermediate_size": 256,
    "teacher_top": 32,
    "cache_tokens": 6000,
    "minimum_response_tokens": 1000,
    "evaluation_conversations": 4,
    "tokens": 12_000,
    "batch_tokens": 1200,
    "warmup_steps": 3,
}


@app.command()
def train(
    config: RecipeFile = None,
    work: Work = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run a trial of under two minutes in a temporary folder.")
    ] = False,
) -> None:
    """Prepare the data, train and export; an interrupted call is resumed."""
    with tempfile.TemporaryDirectory(prefix="faser-smoke-") as scratch:
        recipe = _smoke_recipe(Path(scratch)) if smoke else _recipe(config, work)
        _train(recipe)


@app.command()
def evaluate(
    weights: Annotated[Path, typer.Argument(help="Own weights of a head (drafter.safetensors).")],
    config: RecipeFile = None,
    work: Work = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Score a head on the held-out conversations: acceptance by position, greedy and sampled, without vLLM."""
    from ...models.drafter.pipeline import acceptance_fields, evaluate_drafter, open_workshop
    from ..progress import stage_bars

    with stage_bars() as bars:
        # As start weights the head is read, and refused, before the features are computed.
        recipe = dataclasses.replace(_recipe(config, work), initial=str(weights))
        found = evaluate_drafter(open_workshop(recipe, bars.stage), weights)
    if json:
        typer.echo(encoder.dumps([acceptance_fields(figure) for figure in found], indent=1))
    else:
        typer.echo(_lines(found))


@app.command()
def export(config: RecipeFile = None, work: Work = None) -> None:
    """Export the head of the last checkpoint."""
    from ...models.drafter.drafter_error import DrafterError
    from ...models.drafter.pipeline import export_trained, open_workshop
    from ..progress import stage_bars

    with stage_bars() as bars:
        workshop = open_workshop(_recipe(config, work), bars.stage)
        if not workshop.checkpoint.exists():
            raise DrafterError(f"{workshop.checkpoint} does not exist; run: faser drafter train")
        folder = export_trained(workshop, workshop.trainer(), _command_line())
    typer.echo(str(folder))


def _train(recipe: Recipe) -> None:
    from ...models.drafter.pipeline import open_workshop, train_drafter
    from ..progress import stage_bars

    with stage_bars() as bars:
        workshop = open_workshop(recipe, bars.stage)
        trainer = workshop.trainer()
        if trainer.position.step:
            typer.echo(f"resumed at step {trainer.position.step}", err=True)
        with stops(trainer):
            folder = train_drafter(workshop, trainer, partial(_told, bars), _command_line())
        scores = trainer.score()
    if trainer.stop_asked:
        typer.echo(f"stopped at step {trainer.position.step}; the same command goes on from there", err=True)
    typer.echo(_lines(scores))
    typer.echo(str(folder))


def _recipe(config: Path | None, work: str | None) -> Recipe:
    from ...models.drafter.recipe import make_recipe, read_recipe

    overrides: dict[str, object] = {} if work is None else {"work": work}
    return read_recipe(config, overrides) if config else make_recipe(overrides, "flags")


def _smoke_recipe(scratch: Path) -> Recipe:
    from ...models.drafter.recipe import make_recipe

    corpus = Path(__file__).parents[2] / "models" / "weights" / "drafter.smoke.jsonl.gz"
    return make_recipe({**_SMOKE, "work": str(scratch), "corpus": str(corpus)}, "--smoke")


def _command_line() -> str:
    return shlex.join(["faser", *sys.argv[1:]])


def _lines(figures: list[Acceptance] | tuple[Acceptance, ...]) -> str:
    return "\n".join(figure.line() for figure in figures)


@contextmanager
def stops(trainer: Trainer) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end the run at the next step, with a checkpoint."""

    def ask(_signal: int, _frame: object) -> None:
        trainer.stop_asked = True

    before = [(number, signal.signal(number, ask)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _told(bars: StageBars, report: TrainingReport) -> None:
    """Show how far the training is, and how good the head is where it was scored."""
    bars.stage("training", int(1000 * report.share_done), 1000, f"training, loss {report.loss:.3f}")
    if report.acceptance:
        position = report.position
        bars.say(
            f"step {position.step}, {position.answer_tokens / 1e6:.2f} M answer tokens, loss {report.loss:.3f}\n"
            + _lines(report.acceptance)
        )
