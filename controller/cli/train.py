"""`faser train`: the learned policy from a configuration file. Registered by controller/cli/main.py."""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..engine.machine import commit
from ..extras import require_extra
from ..whole_file import require_folder


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
    from .evaluate import decided

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
            f"{result.manifest}: {result.steps} steps in {result.seconds:.0f} s, {gain:+.2%} tokens/s on unseen "
            f"engines over where it began; try --policy learned:{result.manifest}"
        )
