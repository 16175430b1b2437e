"""`faser keys ...`: keys for a link that leaves the host. A typer sub-app for controller/cli/main.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Keys for a link that leaves the host; a running sidecar reloads them on SIGHUP.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
KeyFolder = Annotated[Path, typer.Argument(help="The folder, as in link.keys.")]


@app.command(name="new")
def new(
    folder: KeyFolder,
    engine: Annotated[str | None, typer.Option(help="Make a pair for this engine and let it in.")] = None,
) -> None:
    """Make the sidecar's keys, and an engine's."""
    from ..link.keys import new_keys

    for path in new_keys(folder, engine):
        typer.echo(path)


@app.command(name="list")
def list_(folder: KeyFolder) -> None:
    """Name the engines that are let in."""
    from ..link.keys import engines

    for name in engines(folder):
        typer.echo(name)


@app.command(name="revoke")
def revoke(folder: KeyFolder, engine: Annotated[str, typer.Argument(help="The engine's name.")]) -> None:
    """Let an engine in no longer."""
    from ..link.keys import revoke

    typer.echo(revoke(folder, engine))


@app.command(name="rotate")
def rotate(folder: KeyFolder) -> None:
    """Replace the sidecar's own keys; the old ones stay beside them as .old."""
    from ..link.keys import rotate_server

    for path in rotate_server(folder):
        typer.echo(path)
