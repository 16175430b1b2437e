"""`faser calibrate TELEMETRY... -o PROFILE`: fit step costs and acceptance to what engines really did.

Called by the CLI and by `faser profile`, whose grid is telemetry like any other. All files must be of the same model,
drafter and versions. The profile is written whole or not at all.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from ...engine_adapter.protocol import Hello
from ...env.calibration.accept_traces import SHIPPED, read_accept_trace, shipped_accept_trace
from ...env.calibration.acceptance_fit import DraftTrial, describe
from ...env.calibration.match_fit import joined
from ...env.calibration.profile_fit import (
    LEAST_REPEATS,
    FitOptions,
    Fitted,
    MeasuredEngine,
    RecordedSteps,
    profile_from,
)
from ...env.calibration.step_fit import CalibrationError
from ...env.profile.engine_profile import SHIPPED as SHIPPED_PROFILES
from ...env.profile.engine_profile import (
    Card,
    EngineProfile,
    load_profile,
    save_profile,
    shipped_profile,
)
from ...env.workload.request_trace import TraceError
from ..engine.machine import commit, machine_facts
from ..errors import ModelError, StoreError, UsageError
from ..whole_file import replacing, require_place
from .measured import Measured, ahead_steps, looks, match_trials, read_measured, trials
from .report import acceptance_table, ahead_line, drift_range, error_table, exit_table, figures, match_line, split_table
from .starvation import freed, load_waiting

_SAME: Final = ("model", "drafter", "method", "vllm_version", "device", "k_max", "graph_sizes")


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """What `faser calibrate` was asked for."""

    telemetry: tuple[Path, ...]
    output: Path
    name: str = ""
    base: Path | None = None  # a profile whose step costs keep their shape: their level and acceptance are fitted
    keeps_costs: bool = False  # the base's step costs stay altogether
    acceptance: str = ""  # an accept trace, shipped or a file, instead of the telemetry's own drafts
    command: str = ""
    json: bool = False
    least_repeats: int = LEAST_REPEATS
    held_out: bool = True
    max_context: int = 2048

    def __post_init__(self) -> None:
        if not self.telemetry:
            raise UsageError("no telemetry", "one file at least")
        if any(self.output.absolute() == path.absolute() for path in self.telemetry):
            raise UsageError(f"--output {self.output} is a telemetry file itself", "another one")
        if self.keeps_costs and self.base is None:
            raise UsageError("--keep-costs without --base", "the profile whose costs are kept")
        require_place(self.output, "--output")


def calibrate(options: CalibrateOptions, console: Console) -> int:
    """Read, fit, write and print; return 0."""
    measured = [read_measured(path) for path in options.telemetry]
    hello = with_splits(require_same(measured), measured)
    drafts = [draft for one in measured for draft in trials(one)]
    if options.acceptance:
        drafts = accept_trace(options.acceptance)
    source = Path(options.acceptance or ", ".join(path.name for path in options.telemetry)).name
    base = require_fitting(load_profile_or_fail(options.base), hello, options.base) if options.base else None
    copies = joined(match_trials(one) for one in measured)
    engine = MeasuredEngine(hello, [recorded_steps(one) for one in measured], drafts, source, copies)
    try:
        fitted = profile_from(engine, base, fit_options(hello, options))
    except CalibrationError as error:
        raise ModelError(f"{', '.join(map(str, options.telemetry))}: {error}") from None
    for line in fitted.refusals:
        console.print(f"faser: {line}", highlight=False, soft_wrap=True)
    try:
        with replacing(options.output) as place:
            save_profile(fitted.profile, place)
    except OSError as error:
        raise ModelError(f"{options.output} cannot be written: {error.strerror}", "a writable path") from None
    if options.json:
        told = figures(fitted.fits, fitted.profile, drafts)
        told |= {"drift": drift_range(fitted.slower), "levels": fitted.levels}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
    else:
        print_tables(fitted, drafts)
    console.print(f"faser: profile {options.output}", highlight=False, soft_wrap=True)
    return 0


def recorded_steps(measured: Measured) -> RecordedSteps:
    """Return a file's steps without what they waited for a core."""
    samples = freed(measured.samples, measured.steps, load_waiting(measured.path))
    steps = measured.steps
    ahead = ahead_steps(measured, samples)
    return RecordedSteps(steps.engine, steps.time_s, samples, ahead, steps.split, list(looks(measured)))


def fit_options(hello: Hello, options: CalibrateOptions) -> FitOptions:
    """Return what the fit needs to know of the command, the machine and the day."""
    here = machine_facts()
    card = Card(
        model=model_name(hello.model), drafter=model_name(hello.drafter), method=hello.method,
        vllm_version=hello.vllm_version, device=hello.device, machine=f"{here.cpu}, {here.cores} cores",
        threads=here.cores, date=time.strftime("%Y-%m-%d"), command=options.command,
        commit=commit(),
    )  # fmt: skip
    return FitOptions(
        options.name or card.model, card, options.least_repeats, options.held_out, options.max_context,
        options.keeps_costs,
    )  # fmt: skip


def print_tables(fitted: Fitted, drafts: list[DraftTrial]) -> None:
    """Print how well the profile describes what it was fitted to."""
    out = Console(highlight=False)
    if fitted.fits:
        out.print(error_table(fitted.fits))
        low, high = drift_range(fitted.slower)
        out.print(f"the machine's own drift, taken out: {low - 1.0:+.1%} to {high - 1.0:+.1%} in 90 % of the steps")
    if fitted.levels:
        levels = ", ".join(f"{name} {of:.2f}" for name, of in fitted.levels.items())
        out.print("times as long as in the base: " + levels)
    out.print(acceptance_table(describe(fitted.profile.acceptance, drafts)) if drafts else "no drafts measured")
    if fitted.looks:
        out.print(exit_table(fitted.profile.exits, fitted.looks))
    if fitted.busy_steps and fitted.profile.ahead is not None:
        out.print(ahead_line(fitted.profile.ahead, fitted.busy_steps))
    if len(fitted.profile.splits) > 1:
        out.print(split_table(fitted.profile.splits))
    if fitted.profile.matches is not None:
        out.print(match_line(fitted.profile.matches))


def require_same(measured: list[Measured]) -> Hello:
    """Return the engine of all files; raise StoreError if they are not of one kind."""
    first: Hello | None = None
    for one in measured:
        for hello in one.engines:
            if first is None:
                first = hello
            for name in _SAME:
                if getattr(hello, name) != getattr(first, name):
                    raise StoreError(
                        f"{one.path}: {name} {getattr(hello, name)!r}",
                        f"{getattr(first, name)!r} as in {measured[0].path}",
                        "calibrate one kind of engine at a time",
                    )
    if first is None:
        raise StoreError(f"{measured[0].path} names no engine", "telemetry of an engine that introduced itself")
    return first


def with_splits(hello: Hello, measured: list[Measured]) -> Hello:
    """Return an introduction with the splits of the files' engines, of which some may offer none."""
    offered = {tuple(engine.splits): one.path for one in measured for engine in one.engines if len(engine.splits) > 1}
    if len(offered) > 1:
        first, other = list(offered)[:2]
        raise StoreError(
            f"{offered[other]}: splits {', '.join(other)}", f"{', '.join(first)} as in {offered[first]}",
            "calibrate engines of the same splits at a time",
        )  # fmt: skip
    return msgspec.structs.replace(hello, splits=list(next(iter(offered), hello.splits)))


def accept_trace(name: str) -> list[DraftTrial]:
    """Return a shipped accept trace or one of a file; raise UsageError if it cannot be read."""
    try:
        return shipped_accept_trace(name) if name in SHIPPED else read_accept_trace(Path(name))
    except TraceError as error:
        raise UsageError(str(error), f"a file, or one of {', '.join(SHIPPED)}") from None


def load_profile_or_fail(path: Path) -> EngineProfile:
    """Return a profile, of a file or a shipped one's name; raise ProfileError with the reason if it cannot be used."""
    return shipped_profile(str(path)) if str(path) in SHIPPED_PROFILES else load_profile(path)


def require_fitting(profile: EngineProfile, hello: Hello, path: Path) -> EngineProfile:
    """Raise ModelError if a profile is of another model, drafter or vLLM than an engine."""
    for name, seen, wanted in (
        ("model", profile.card.model, model_name(hello.model)),
        ("drafter", profile.card.drafter, model_name(hello.drafter)),
        ("vLLM", profile.card.vllm_version, hello.vllm_version),
        ("k_max", str(profile.k_max), str(hello.k_max)),
    ):
        if seen != wanted:
            raise ModelError(f"{path}: a profile of {name} {seen}", f"{wanted}, as in the telemetry", "profile again")
    return profile


def model_name(text: str) -> str:
    """Return the model's name without the folder it lies in; what follows a hash of our cache stays."""
    return Path(text).name if text.startswith("/") else text
