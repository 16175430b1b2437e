"""`faser exits ...`: train exit heads, which let verification be pruned. A typer sub-app for controller/cli/main.py.

Only parses, shows progress and turns refusals into one line; the work is done in models/exits, whose imports are inside
the command.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..whole_file import require_place

if TYPE_CHECKING:
    from ...models.exits.pipeline import Figures
    from ...models.exits.record import ExitRecipe

app = typer.Typer(
    help="Train exit heads from recorded states of a target and its drafter.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def train(
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write; its card goes beside it.")],
    target: Annotated[str | None, typer.Option(help="Folder of the target; default: the embedded one.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Folder of the drafter; default: the embedded one.")] = None,
    method: Annotated[str, typer.Option(help="vLLM's name of the drafting method.")] = "eagle3",
    layers: Annotated[str, typer.Option(help="Layers to train heads behind, such as 10,15,20; default: four.")] = "",
    tokens: Annotated[int, typer.Option(help="Draft tokens to record.", min=1000)] = 30_000,
    longest: Annotated[int, typer.Option(help="Draft length.", min=1, max=64)] = 7,
    seed: Annotated[int, typer.Option(help="Seed of prompts, start weights and order.")] = 20,
) -> None:
    """Record, train and judge exit heads; print ROC-AUC by layer and of confidence alone."""
    from ...models.exits.pipeline import train_exits
    from ..progress import stage_bars

    require_place(output, "--output")
    recipe = _recipe(target, drafter, method, layers, tokens, longest)
    with stage_bars() as bars:
        figures = train_exits(recipe, output, shlex.join(["faser", *sys.argv[1:]]), seed, bars.stage)
    typer.echo("\n".join(lines_of(figures)))
    typer.echo(str(output))


def _recipe(target: str | None, drafter: str | None, method: str, layers: str, tokens: int, longest: int) -> ExitRecipe:
    from ...models.embedded.pair import ensure_embedded_drafter, ensure_embedded_target
    from ...models.exits.record import ExitRecipe, ExitTrainingError

    if (target is None) != (drafter is None):
        raise ExitTrainingError("target and drafter belong together; name both or none")
    if method not in ("eagle3", "eagle", "draft_model"):
        raise ExitTrainingError(
            f"method {method!r}: it drafts without likely candidates; expected eagle3, eagle, draft_model"
        )
    try:
        chosen = tuple(int(layer) for layer in layers.split(",") if layer)
    except ValueError:
        raise ExitTrainingError(f"layers {layers!r}: expected numbers such as 10,15,20") from None
    return ExitRecipe(
        Path(target).expanduser() if target else ensure_embedded_target(),
        Path(drafter).expanduser() if drafter else ensure_embedded_drafter(),
        method,
        chosen,
        longest=longest,
        tokens=tokens,
    )


def lines_of(figures: Figures) -> list[str]:
    """Return the table that the command prints."""
    lines = [f"drafter's confidence alone: AUC {figures.control_auc:.3f} on {figures.tokens} held-out draft tokens"]
    for one in figures.layers:
        line = f"layer {one.layer:3d}: AUC {one.auc:.3f}"
        if (rule := one.chosen) is not None:
            line += (
                f"; threshold {rule.threshold:g} drops {rule.dropped:.1%} of the draft rows, "
                f"{rule.wrong:.1%} of the accepted tokens wrongly, time per token x{rule.time_share:.3f}"
            )
        if (rule := one.beside) is not None:
            line += f"; where drafts end by confidence x{rule.time_share:.3f}"
        lines.append(line)
    rival = figures.confidence
    lines.append(
        f"ending drafts at survival {rival.threshold:g} by confidence instead: {rival.dropped:.1%} of the draft rows, "
        f"time per token x{rival.time_share:.3f}"
    )
    return lines
