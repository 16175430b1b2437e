"""`faser profile`: measure what an engine's steps cost, over a grid, on the real engine, and write its profile.

Called by the CLI. It starts a server and a sidecar as `faser serve` does, with the survey policy; what was measured is
an ordinary telemetry file, from which controller/calibrate/calibrate.py fits the profile, written whole or not at all.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console

from ...engine_adapter.protocol import Hello
from ...env.calibration.profile_fit import LEAST_REPEATS
from ...models.embedded.pair import ensure_embedded_pair
from ..config import Config, Value
from ..config_layers import load
from ..engine.launch import EngineLaunch
from ..engine.processes import Terminated, deferred_interrupts, stopping_on_sigterm
from ..engine.running import RunningEngine
from ..engine.serve import EMBEDDED, embedded_launch, flag_value, model_launch
from ..engine.sidecar_child import own_sidecar
from ..errors import EngineError, UsageError
from ..link.endpoint import socket_folder
from ..progress import progress_bar
from ..telemetry.telemetry_file import TelemetryFile
from ..whole_file import require_place
from .calibrate import CalibrateOptions, calibrate
from .starvation import WaitingMeter, save_waiting
from .survey_load import Grid, SurveyLoad

# As in the demo, whose telemetry the embedded profile is checked against.
_EMBEDDED_ARGUMENTS: Final = ("--max-num-batched-tokens", "512")
_SMOKE_GRID: Final = Grid(requests=(1, 3), contexts=(32,), steps=30)
_START_LIMIT_S: Final = 900.0
_LEASE_MS: Final = 60_000  # a slow step must not let the lengths run out
_INTRODUCTION_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What `faser profile` was asked for."""

    model: str = EMBEDDED
    arguments: tuple[str, ...] = ()
    output: Path | None = None
    telemetry: Path | None = None
    minutes: float = 8.0
    seed: int = 0
    splits: str = ""  # that the survey asks for in turn, with commas between them; empty: none
    smoke: bool = False
    json: bool = False
    command: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.minutes) and 0.05 <= self.minutes <= 600.0):
            raise UsageError(f"--minutes {self.minutes:g}", "0.05 to 600")
        if not 0 <= self.seed < 10**9:
            raise UsageError(f"--seed {self.seed}", "0 to 999999999")


def run_profile(options: ProfileOptions) -> int:
    """Measure, fit, write, print; return 0, or 130 after Ctrl-C: then nothing is written."""
    output = options.output or Path(f"{Path(options.model).name}.profile.json")
    require_place(output, "--output")
    console = Console(stderr=True, highlight=False)
    if options.telemetry is not None:
        require_place(options.telemetry, "--telemetry")
        if options.telemetry.exists():
            raise UsageError(f"--telemetry {options.telemetry} exists", "a new file")
    with _scratch(options, console) as telemetry, stopping_on_sigterm():
        fit = CalibrateOptions(
            (telemetry,), output, name=Path(options.model).name, command=options.command, json=options.json,
            least_repeats=1 if options.smoke else LEAST_REPEATS, held_out=not options.smoke,
        )  # fmt: skip
        try:
            measure(options, telemetry, console)
            return calibrate(fit, console)
        except KeyboardInterrupt as interrupt:
            console.print("faser: stopped; no profile was written", highlight=False)
            return 143 if isinstance(interrupt, Terminated) else 130


@contextmanager
def _scratch(options: ProfileOptions, console: Console) -> Iterator[Path]:
    """Yield where the telemetry goes, a folder that is gone afterwards unless --telemetry names a file.

    After an error what is in the folder stays: the minutes that were measured, or the log that the error names.
    """
    if options.telemetry is not None:
        yield options.telemetry
        return
    folder = Path(tempfile.mkdtemp(prefix="faser-profile-"))
    telemetry = folder / "telemetry.sqlite"
    try:
        yield telemetry
    except Exception:
        if telemetry.exists():
            console.print(f"faser: what was measured stays in {telemetry}", highlight=False, soft_wrap=True)
        elif not any(folder.iterdir()):
            folder.rmdir()
        raise
    shutil.rmtree(folder, ignore_errors=True)


def measure(options: ProfileOptions, telemetry: Path, console: Console) -> None:
    """Run engine, sidecar and load for the time asked for; the telemetry file and what it waited remain."""
    with socket_folder("profile") as sockets, ExitStack() as stack, progress_bar(console) as show:
        config = _configure(options, sockets, telemetry)
        launch = _launch(options, config)
        launch = replace(launch, environment_extra={**launch.environment_extra, **_surveyed(options)})
        with deferred_interrupts():
            stack.enter_context(own_sidecar(config, telemetry.with_suffix(".sidecar.log")))
            engine = stack.enter_context(RunningEngine(launch, telemetry.with_suffix(".engine.log")))
        engine.wait_ready(_START_LIMIT_S, progress=show)
        hello = _introduction(telemetry)
        grid = _SMOKE_GRID if options.smoke else Grid()
        _tell_splits(options, hello, telemetry.with_suffix(".engine.log"), console)
        stops = grid.stops(hello.max_requests, _max_context(launch, hello), hello.kv_tokens)
        if not stops:
            raise EngineError(f"an engine with room for {hello.kv_tokens} KV tokens", "room for one request")
        model = flag_value(launch.arguments, "--served-model-name") or launch.model
        load_ = SurveyLoad(launch.url, model, stops, options.seed)
        end_s = time.monotonic() + options.minutes * 60.0
        with WaitingMeter(engine.pid) as meter:
            asyncio.run(load_.run(end_s, show, 3 if options.smoke else None))
        engine.require_running()
        save_waiting(meter.read(), telemetry)
        console.print(f"faser: {load_.batches} batches of {len(stops)} kinds", highlight=False)


def _tell_splits(options: ProfileOptions, hello: Hello, log: Path, console: Console) -> None:
    """Tell of splits that the engine cannot have; raise EngineError if that is all of them."""
    asked = [name.strip() for name in options.splits.split(",") if name.strip()]
    refused = [name for name in asked if name not in hello.splits]
    if not refused:
        return
    reasons = [line.partition("FASER offers no other split: ")[2] for line in log.read_text().splitlines()]
    reason = "; ".join(dict.fromkeys(filter(None, reasons))) or "the engine gave no reason"
    if len(hello.splits) == 1:
        raise EngineError(f"an engine that cannot be split: {reason}", "a split that it can have", "drop --splits")
    console.print(f"faser: not offered: {', '.join(refused)}: {reason}", highlight=False, soft_wrap=True)


def _surveyed(options: ProfileOptions) -> dict[str, str]:
    """Return what the engine is told so that it does as the survey asks: no gate may go back."""
    told = {"FASER_LEASE_MS": str(_LEASE_MS), "FASER_SPLITS": options.splits}
    return told | {"FASER_PING_PONG": "always"} if options.splits else told


def _launch(options: ProfileOptions, config: Config) -> EngineLaunch:
    endpoint = config.link.endpoint
    if options.model == EMBEDDED:
        return embedded_launch(
            ensure_embedded_pair(), endpoint, arguments=(*_EMBEDDED_ARGUMENTS, *options.arguments),
            splits=options.splits,
        )  # fmt: skip
    return model_launch(options.model, endpoint, options.arguments)


def _max_context(launch: EngineLaunch, hello: Hello) -> int:
    text = flag_value(launch.arguments, "--max-model-len") or ""
    return int(text) if text.isdecimal() else (hello.kv_tokens or 4096)


def _introduction(telemetry: Path) -> Hello:
    """Return the engine's introduction as soon as the sidecar has stored it."""
    end_s = time.monotonic() + _INTRODUCTION_S
    while time.monotonic() < end_s:
        if telemetry.is_file():
            with TelemetryFile(telemetry) as file:
                engines = file.engines()
            if engines:
                return engines[-1]
        time.sleep(0.1)
    raise EngineError("vLLM runs but did not introduce itself to the sidecar", remedy="run: faser doctor")


def _configure(options: ProfileOptions, sockets: Path, telemetry: Path) -> Config:
    flags: dict[str, Value | None] = {
        "link.endpoint": f"ipc://{sockets / 'engine.sock'}",
        "link.status_endpoint": f"ipc://{sockets / 'status.sock'}",
        "policy.spec": f"survey:{options.seed}",
        "lease.ms": _LEASE_MS,
        # The survey steers badly on purpose and on the busiest of machines: no guard may step in.
        "guard.stale_ms": 600_000,
        "guard.envelope_margin": 1.0,
        "store.enabled": True,
        "store.path": telemetry.absolute(),
    }
    return load(None, os.environ, flags).config


def command_line(arguments: Sequence[str]) -> str:
    """Return the command as one line, for the card; paths are cut to their last part."""
    return " ".join(Path(argument).name if "/" in argument else argument for argument in arguments)
