"""`faser profile`, `faser calibrate` and `faser fidelity`, for controller/cli/main.py.

Only parses; heavy imports are inside the commands.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..extras import require_simulator

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Files = Annotated[list[Path], typer.Argument(help="Telemetry files, all of the same model and drafter.")]


def profile(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="The model, as vLLM takes it.")] = "embedded",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The profile to write; default: MODEL.profile.json.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="How long to measure.")] = 8.0,
    seed: Annotated[int, typer.Option(help="Seed of order and prompts.")] = 0,
    telemetry: Annotated[Path | None, typer.Option(help="Keep the measured telemetry in this new file.")] = None,
    splits: Annotated[
        str, typer.Option(help="Measure these splits of the device too, drafter to target, as 1:1 or streams,1:7.")
    ] = "",
    smoke: Annotated[bool, typer.Option("--smoke", help="Measure a tiny grid, as a trial.")] = False,
    json: Json = False,
) -> None:
    """Measure an engine's step costs and write its profile; unknown options go to vLLM."""
    require_simulator()
    from ..calibrate.profile import ProfileOptions, command_line, run_profile

    options = ProfileOptions(
        model=model,
        arguments=tuple(context.args),
        output=output,
        telemetry=telemetry,
        minutes=minutes,
        seed=seed,
        splits=splits,
        smoke=smoke,
        json=json,
        command=command_line(("faser", *map(shlex.quote, sys.argv[1:]))),
    )
    raise typer.Exit(run_profile(options))


def calibrate(
    telemetry: Files,
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write.")],
    base: Annotated[
        Path | None,
        typer.Option(help="Take step costs from this profile (a file, or embedded); fit their level and acceptance."),
    ] = None,
    keep_costs: Annotated[
        bool, typer.Option("--keep-costs", help="Leave the base's step costs as they are; fit only acceptance.")
    ] = False,
    acceptance: Annotated[
        str,
        typer.Option(help="Fit acceptance to this accept trace instead: a name such as spec_bench__eagle, or a file."),
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Fewest repeats of a kind of step that is fitted.")] = 3,
    name: Annotated[str, typer.Option(help="The profile's name; default: the model's.")] = "",
    json: Json = False,
) -> None:
    """Fit a profile to telemetry of demo, serve or bench runs."""
    require_simulator()
    from rich.console import Console

    from ..calibrate.calibrate import CalibrateOptions
    from ..calibrate.calibrate import calibrate as run_calibration
    from ..calibrate.profile import command_line

    command = command_line(("faser", *map(shlex.quote, sys.argv[1:])))
    options = CalibrateOptions(
        tuple(telemetry), output, name=name, base=base, keeps_costs=keep_costs, acceptance=acceptance,
        command=command, json=json, least_repeats=repeats,
    )  # fmt: skip
    raise typer.Exit(run_calibration(options, Console(stderr=True, highlight=False)))


def fidelity(
    telemetry: Annotated[Path, typer.Argument(help="A telemetry file that the profile was not fitted to.")],
    profile: Annotated[Path | None, typer.Option(help="The profile; default: the shipped one.")] = None,
    repeat: Annotated[
        Path | None, typer.Option(help="Another run of the same load; it shows the engine's own spread.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, max=1000, help="Replays to average.")] = 8,
    json: Json = False,
) -> None:
    """Replay a telemetry file in the simulator and print the simulator's errors."""
    require_simulator()
    from ..calibrate.fidelity import FidelityOptions, run_fidelity

    raise typer.Exit(run_fidelity(FidelityOptions(telemetry, profile, repeat, runs, json)))
