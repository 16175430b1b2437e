"""`faser fleet`. Registered by controller/cli/main.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..config_layers import load


def fleet(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="The model, as vLLM takes it, or embedded.")],
    replicas: Annotated[str, typer.Option(help="LEAST:MOST engines; 0:MOST keeps none while idle.")] = "1:2",
    cores_per_replica: Annotated[
        int | None, typer.Option(help="Cores of each engine; default: an even share of this machine's.")
    ] = None,
    requests_per_replica: Annotated[
        float, typer.Option(help="Requests in flight that one engine is to have; above that another is added.")
    ] = 8.0,
    idle_s: Annotated[float, typer.Option(help="Seconds for which an engine was not needed before it goes.")] = 300.0,
    host: Annotated[str, typer.Option(help="Where the entry point listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where the entry point listens.")] = 8000,
    address: Annotated[
        str | None, typer.Option(help="Address of a running Ray; default: a local one is started.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Where engines and sidecar meet: ipc://PATH or tcp://127.0.0.1:PORT.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="TOML file; see `faser config`.")] = None,
) -> None:
    """Serve replicas of a model behind one address (needs the extra fleet); unknown options go to vLLM."""
    from ..fleet.options import FleetOptions
    from ..fleet.run import run_fleet

    options = FleetOptions(
        model=model, arguments=tuple(context.args), replicas=replicas, cores_per_replica=cores_per_replica,
        requests_per_replica=requests_per_replica, idle_s=idle_s, host=host, port=port, address=address,
    )  # fmt: skip
    effective = load(config, os.environ, {"link.endpoint": endpoint})
    raise typer.Exit(run_fleet(options, effective.config))
