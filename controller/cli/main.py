"""The `faser` command: parses flags, calls one function per command, prints errors as one line.

The only place that prints. Bodies are imported inside the commands, so that `faser --help` stays fast and works
where vLLM, torch or a command's own dependencies are missing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path
from typing import Annotated, Final, Literal, NoReturn

import typer

from ... import __version__
from ...engine_adapter.protocol import Mode
from ..config import Value
from ..config_layers import Effective, as_json, as_toml, load
from ..errors import FaserError, UsageError
from ..interrupts import remember_interrupts
from .bench import bench
from .drafter import app as drafter_app
from .evaluate import evaluate
from .exits import app as exits_app
from .groups import GroupedCommands
from .keys import app as keys_app
from .policy import app as policy_app
from .simulation import calibrate, fidelity, profile
from .training import sweep, train

app = typer.Typer(
    name="faser",
    cls=GroupedCommands,
    help="Chooses the speculation length of every request of a vLLM engine, every step.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
store_app = typer.Typer(help="Read telemetry files.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(store_app, name="store")
app.add_typer(keys_app, name="keys")
app.add_typer(drafter_app, name="drafter")
app.add_typer(exits_app, name="exits")
app.add_typer(policy_app, name="policy")
PASSED_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True}  # to vLLM
app.command(context_settings=PASSED_ON)(profile)
for command in (calibrate, fidelity, evaluate, bench, train, sweep):
    app.command()(command)

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file; see `faser config`.")]
Endpoint = Annotated[
    str | None, typer.Option(help="Where engines and sidecar meet: ipc://PATH or tcp://127.0.0.1:PORT.")
]
Policy = Annotated[str | None, typer.Option(help="price, price:history, off, fixed:K or table:FIRST-LAST=K,...")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def main() -> NoReturn:
    """Run the command line; exit with the error's code after one line on stderr."""
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:  # it was closed by who started us
                sys.stdout.flush()
    except FaserError as error:
        typer.echo(f"faser: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        sys.exit(_failed(error))
    sys.exit(0)


def _failed(error: OSError) -> int:
    """Tell what the system refused, such as a full disk; return the exit code. What stdout still holds is dropped."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno != errno.EPIPE:  # else the reader, such as `head`, has seen enough
        typer.echo(f"faser: {_told(error)}", err=True)
    return FaserError.exit_code


def _told(error: OSError) -> str:
    if error.filename:
        return f"{error.filename}: {error.strerror or error}"
    if "temporary directory" in str(error.strerror):  # tempfile's own words
        return f"{error.strerror}; set TMPDIR to a folder you can write to"
    try:
        os.getcwd()
    except OSError:
        return "the folder this runs in was deleted; change to one that is there"
    return error.strerror or str(error)


def _load(config: Path | None, flags: dict[str, Value | None]) -> Effective:
    return load(config, os.environ, flags)


def _version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"faser {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Hold the options of the bare command."""


@app.command()
def demo(
    duration: Annotated[float, typer.Option(help="Seconds of load.")] = 60.0,
    policy: Policy = None,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, prompts and sampling.")] = 0,
    peak_rps: Annotated[
        float | None,
        typer.Option(help="Requests/s at the load's peak; default: 1.5 times what the machine serves."),
    ] = None,
    json: Json = False,
    method: Annotated[str | None, typer.Option(help="Drafting method: draft_model, ngram, eagle, eagle3.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Path of the drafter; default: the embedded one.")] = None,
    splits: Annotated[
        str, typer.Option(help="Splits of the cores, drafter to target, that the policy may ask for, as 1:1.")
    ] = "",
    stages: Annotated[
        int, typer.Option(help="Serve on so many ranks, as 2, whose layers move under load; every token is checked.")
    ] = 0,
    tour: Annotated[
        bool,
        typer.Option("--tour", help="Force each mechanism on in turn, on the same prompts; every token is checked."),
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Folder for report and telemetry.")] = None,
    classes: Annotated[
        bool, typer.Option("--classes", help="Two classes of requests, interactive and batch, with objectives.")
    ] = False,
    interactive_share: Annotated[float, typer.Option(help="Share of interactive requests with --classes.")] = 0.25,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Serve the load's first half without speculation too.")
    ] = True,
    config: ConfigFile = None,
) -> None:
    """Serve a replayed production load with the embedded model and FASER."""
    from ..demo.demo import run_demo
    from ..demo.options import DemoOptions

    options = DemoOptions(
        duration_s=duration,
        policy=policy,
        seed=seed,
        peak_rps=peak_rps,
        json=json,
        method=method,
        drafter=drafter,
        splits=splits,
        output=output,
        config=config,
        has_classes=classes,
        interactive_share=interactive_share,
        has_comparison=compare,
        stages=stages,
        has_tour=tour,
    )
    if tour:
        from ..demo.tour.tour import run_tour

        raise typer.Exit(run_tour(options))
    if stages:
        from ..demo.stages import run_stages_demo

        raise typer.Exit(run_stages_demo(options))
    raise typer.Exit(run_demo(options))


@app.command(context_settings=PASSED_ON)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="The model, as vLLM takes it.")],
    endpoint: Endpoint = None,
    config: ConfigFile = None,
) -> None:
    """Start vLLM's API server with FASER switched on; unknown options go to vLLM."""
    from ..engine.serve import run_serve

    effective = _load(config, {"link.endpoint": endpoint})
    raise typer.Exit(run_serve(model, context.args, effective.config))


@app.command(context_settings=PASSED_ON)
def fleet(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="The model, as vLLM takes it.")],
    replicas: Annotated[str, typer.Option(help="LEAST:MOST engines; 0:MOST keeps none while idle.")] = "1:2",
    cores_per_replica: Annotated[
        int | None, typer.Option(help="Cores of each engine; default: an even share of this machine's.")
    ] = None,
    requests_per_replica: Annotated[
        float, typer.Option(help="Requests in flight that an engine is to have; with more another is added.")
    ] = 8.0,
    idle_s: Annotated[float, typer.Option(help="Seconds for which an engine was not needed before it goes.")] = 300.0,
    host: Annotated[str, typer.Option(help="Where the entry point listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where the entry point listens.")] = 8000,
    address: Annotated[
        str | None, typer.Option(help="Address of a running Ray; default: a local one is started.")
    ] = None,
    endpoint: Endpoint = None,
    config: ConfigFile = None,
) -> None:
    """Serve replicas of a model behind one address (needs the extra fleet); unknown options go to vLLM."""
    from ..fleet.options import FleetOptions
    from ..fleet.run import run_fleet

    options = FleetOptions(
        model=model,
        arguments=tuple(context.args),
        replicas=replicas,
        cores_per_replica=cores_per_replica,
        requests_per_replica=requests_per_replica,
        idle_s=idle_s,
        host=host,
        port=port,
        address=address,
    )
    raise typer.Exit(run_fleet(options, _load(config, {"link.endpoint": endpoint}).config))


@app.command()
def sidecar(
    endpoint: Endpoint = None,
    policy: Policy = None,
    store: Annotated[Path | None, typer.Option(help="The telemetry file.")] = None,
    record: Annotated[bool | None, typer.Option("--record/--no-record", help="Write telemetry.")] = None,
    trace: Annotated[
        bool | None, typer.Option("--trace/--no-trace", help="Send a span per decision (OpenTelemetry).")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Run the daemon that answers the engines' step records with draft lengths."""
    interrupts = remember_interrupts()  # before imports whose machine code swallows what a signal raises
    from ..daemon.sidecar import run_sidecar

    flags: dict[str, Value | None] = {
        "link.endpoint": endpoint, "policy.spec": policy, "store.path": store, "store.enabled": record,
        "trace.enabled": trace,
    }  # fmt: skip
    raise typer.Exit(run_sidecar(_load(config, flags).config, lambda: _load(config, flags).config, interrupts))


@app.command()
def status(endpoint: Endpoint = None, json: Json = False, config: ConfigFile = None) -> None:
    """Print the state of the running sidecar and its engines."""
    from ..link.ask import run_status

    raise typer.Exit(run_status(_load(config, {"link.endpoint": endpoint}).config.link, json))


@app.command()
def mode(
    mode: Annotated[
        Mode | None, typer.Argument(help="The mode to set; without one the current modes are printed.")
    ] = None,
    engine: Annotated[str, typer.Option(help="An engine's boot id or name; *: every engine.")] = "*",
    forget: Annotated[bool, typer.Option("--forget", help="Go back to the default mode.")] = False,
    endpoint: Endpoint = None,
    config: ConfigFile = None,
) -> None:
    """Switch engines between active, advisory, canary and off; survives a restart of either side."""
    from ..link.ask import run_mode

    if mode is not None and forget:
        raise UsageError("a mode and --forget", "one of them")
    link = _load(config, {"link.endpoint": endpoint}).config.link
    raise typer.Exit(run_mode(link, mode, engine, forget))


@app.command()
def top(
    endpoint: Endpoint = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 0.5,
    config: ConfigFile = None,
) -> None:
    """Watch load, lengths, acceptance and the link, live."""
    from .top import run_top

    raise typer.Exit(run_top(_load(config, {"link.endpoint": endpoint}).config.link, interval))


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A telemetry file, or forward-pass metrics (JSON lines, -: stdin).")],
    policy: Annotated[str | None, typer.Option(help="Also let this policy decide, and estimate its gain.")] = None,
    counterfactual: Annotated[
        bool,
        typer.Option("--counterfactual", help="Simulate the policy's speed; prints the simulator's error too."),
    ] = False,
    profile: Annotated[Path | None, typer.Option(help="The simulator's profile; default: the shipped one.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report with pictures to this file.")] = None,
    floor: Annotated[float, typer.Option(min=10.0, help="Fewest effective samples for an estimate.")] = 100.0,
    json: Json = False,
) -> None:
    """Make every recorded decision again and compare it byte for byte."""
    from .replay import ReplayOptions, run_replay

    raise typer.Exit(run_replay(ReplayOptions(file, policy, counterfactual, profile, report, floor, json)))


@app.command()
def doctor(json: Json = False) -> None:
    """Name what is wrong with this installation and how to mend it."""
    from ..doctor.doctor import run_doctor

    raise typer.Exit(run_doctor(json))


@app.command(name="config")
def show_config(json: Json = False, config: ConfigFile = None) -> None:
    """Print the effective configuration and where each value came from."""
    effective = _load(config, {})
    typer.echo(as_json(effective) if json else as_toml(effective))


@store_app.command()
def export(
    file: Annotated[Path, typer.Argument(help="A telemetry file.")],
    format: Annotated[
        Literal["csv", "jsonl", "parquet"], typer.Option(help="csv, jsonl, or parquet (needs the extra parquet).")
    ] = "jsonl",
    table: Annotated[
        Literal["requests", "steps", "events"],
        typer.Option(help="One line per request and step, per step, or per event."),
    ] = "requests",
    output: Annotated[Path | None, typer.Option(help="Where to write; default: stdout (not for parquet).")] = None,
) -> None:
    """Unfold the packed columns of a telemetry file."""
    from ..telemetry.export import run_export

    raise typer.Exit(run_export(file, format, table, output))


TelemetryFile = Annotated[Path, typer.Argument(help="A telemetry file.")]


@store_app.command(name="check")
def store_check(file: TelemetryFile, json: Json = False) -> None:
    """Read everything in a telemetry file and say whether it is sound."""
    from ..telemetry.maintenance import run_check

    raise typer.Exit(run_check(file, json))


@store_app.command(name="vacuum")
def store_vacuum(file: TelemetryFile) -> None:
    """Give the space of deleted steps back to the disk; the sidecar must be stopped."""
    from ..telemetry.maintenance import run_vacuum

    raise typer.Exit(run_vacuum(file))
