"""`faser calibrate TELEMETRY... -o PROFILE`: fit step costs and acceptance to what engines really did.

Called by the CLI and by `faser profile`, whose grid is telemetry like any other. All files must be of the same model,
drafter and versions. The profile is written whole or not at all.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from rich.console import Console

from ...engine_adapter.arrays import Floats
from ...engine_adapter.protocol import Hello
from ...env.calibration.accept_traces import SHIPPED, read_accept_trace, shipped_accept_trace
from ...env.calibration.acceptance_fit import DraftTrial, describe, fit_acceptance
from ...env.calibration.ahead_fit import LEAST_STEPS, AheadSteps, fit_ahead
from ...env.calibration.drift import WINDOW_S, drift
from ...env.calibration.exit_fit import fit_exits
from ...env.calibration.step_fit import (
    HELD_OUT_SHARE,
    CalibrationError,
    Fit,
    domain_of,
    fit_phase,
    fitted_kinds,
    phase_level,
)
from ...env.calibration.step_samples import StepSamples
from ...env.profile.acceptance_model import AcceptanceModel
from ...env.profile.engine_profile import (
    PROFILE_VERSION,
    Card,
    EngineProfile,
    PhaseModel,
    load_profile,
    save_profile,
    shipped_profile,
)
from ...env.profile.engine_profile import SHIPPED as SHIPPED_PROFILES
from ...env.profile.step_basis import Phase
from ...env.workload.request_trace import TraceError
from ..engine.machine import commit
from ..errors import ModelError, StoreError, UsageError
from ..whole_file import replacing, require_place
from .measured import Measured, ahead_steps, looks, read_measured, trials
from .report import acceptance_table, ahead_line, drift_range, error_table, exit_table, figures
from .starvation import freed, load_waiting

PHASES: Final[tuple[Phase, ...]] = ("verify", "draft", "host")
LEAST_REPEATS: Final = 3  # of a kind of step that is fitted
_BLOCK_TOKENS: Final = 128  # vLLM's KV block on a CPU; with another size only the count of blocks differs
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
    """Fit, print and write; return 0."""
    measured = [read_measured(path) for path in options.telemetry]
    hello = require_same(measured)
    drafts = [draft for one in measured for draft in trials(one)]
    if options.acceptance:
        drafts = accept_trace(options.acceptance)
    source = options.acceptance or ", ".join(path.name for path in options.telemetry)
    acceptance = fit_acceptance(drafts, hello.k_max, Path(source).name)
    seen = [look for one in measured for look in looks(one)]
    fits: dict[Phase, Fit] = {}
    each, slower = steadied(measured, options.held_out)
    steps = AheadSteps.joined([ahead_steps(one, own) for one, own in zip(measured, each, strict=True)])
    samples = quiet(StepSamples.joined(each), steps)
    levels: dict[Phase, float] = {}
    if options.base is not None:
        base = require_fitting(load_profile_or_fail(options.base), hello, options.base)
        if not options.keeps_costs:
            levels = levels_of(base, samples)
        profile = msgspec.structs.replace(levelled(base, levels), acceptance=acceptance)
    else:
        fits = fit_all(samples, options, tuple(hello.graph_sizes))
        profile = profile_of(hello, fits, samples, acceptance, options)
    if seen:  # else a base keeps the exits that it has
        profile = msgspec.structs.replace(profile, exits=fit_exits(seen, hello.released_prune))
    if steps.is_busy.any() and not options.keeps_costs:
        profile = with_ahead(profile, steps, console)
    try:
        with replacing(options.output) as place:
            save_profile(profile, place)
    except OSError as error:
        raise ModelError(f"{options.output} cannot be written: {error.strerror}", "a writable path") from None
    if options.json:
        told = figures(fits, profile, drafts) | {"drift": drift_range(slower), "levels": levels}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
    else:
        out = Console(highlight=False)
        if fits:
            out.print(error_table(fits))
            low, high = drift_range(slower)
            out.print(f"the machine's own drift, taken out: {low - 1.0:+.1%} to {high - 1.0:+.1%} in 90 % of the steps")
        if levels:
            out.print("times as long as in the base: " + ", ".join(f"{name} {of:.2f}" for name, of in levels.items()))
        out.print(acceptance_table(describe(profile.acceptance, drafts)) if drafts else "no drafts measured")
        if seen:
            out.print(exit_table(profile.exits, seen))
        if steps.is_busy.any() and profile.ahead is not None:
            out.print(ahead_line(profile.ahead, int(steps.is_busy.sum())))
    console.print(f"faser: profile {options.output}", highlight=False, soft_wrap=True)
    return 0


def steadied(measured: list[Measured], held_out: bool = True) -> tuple[list[StepSamples], Floats]:
    """Return each file's steps without waiting for a core and the machine's drift; and of all, how much slower it was.

    Files are laid one behind the other, far apart: one of a slower day drifts against the others.
    """
    each = [freed(one.samples, one.steps, load_waiting(one.path)) for one in measured]
    clock_s, start_s = [], 0.0
    for one in measured:
        for engine in np.unique(one.steps.engine):
            own_s = one.steps.time_s[one.steps.engine == engine]
            clock_s.append(own_s - own_s[0] + start_s)
            start_s += own_s[-1] - own_s[0] + 2.0 * WINDOW_S
    samples = StepSamples.joined(each)
    kinds = fitted_kinds(samples, HELD_OUT_SHARE if held_out else 0.0)
    slower = drift(np.concatenate(clock_s), samples.verify_s, kinds)
    ends = np.cumsum([len(one) for one in each])[:-1]
    parts = np.split(slower, ends)
    return [one.on_a_machine(part) for one, part in zip(each, parts, strict=True)], slower


def quiet(samples: StepSamples, steps: AheadSteps) -> StepSamples:
    """Return the steps beside which nothing was drafted: what a step costs by itself."""
    found = samples.where(~steps.is_busy)
    if len(found) < LEAST_STEPS < len(samples):
        raise ModelError(
            f"{len(found)} of {len(samples)} steps without drafting ahead", f"{LEAST_STEPS} or more",
            "measure with FASER_DRAFT_AHEAD=auto, or add such telemetry",
        )  # fmt: skip
    return found


def with_ahead(profile: EngineProfile, steps: AheadSteps, console: Console) -> EngineProfile:
    """Return the profile with how steps differ beside which drafts were made ahead; as it is where too few were."""
    verify, draft = np.array(profile.verify.coefficients), np.array(profile.draft.coefficients)
    try:
        return msgspec.structs.replace(profile, ahead=fit_ahead(steps, verify, draft, profile.graph_sizes))
    except CalibrationError as error:
        console.print(f"faser: drafting ahead is not fitted: {error}", highlight=False, soft_wrap=True)
        return profile


def fit_all(samples: StepSamples, options: CalibrateOptions, graph_sizes: tuple[int, ...]) -> dict[Phase, Fit]:
    """Fit every phase; raise ModelError where too little was measured."""
    fits: dict[Phase, Fit] = {}
    for phase in PHASES:
        share = HELD_OUT_SHARE if options.held_out else 0.0
        least = min(options.least_repeats, 5) if phase == "host" else options.least_repeats
        try:
            fits[phase] = fit_phase(samples, phase, least, share, graph_sizes)
        except CalibrationError as error:
            raise ModelError(f"{', '.join(map(str, options.telemetry))}: {error}") from None
    return fits


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


def profile_of(
    hello: Hello, fits: dict[Phase, Fit], samples: StepSamples, acceptance: AcceptanceModel, options: CalibrateOptions
) -> EngineProfile:
    """Put the profile together."""
    steps = [fits[phase].cells for phase in ("verify", "draft")]
    halves = np.concatenate([cells.halves for cells in steps])
    known = halves[np.isfinite(halves)]
    return EngineProfile(
        version=PROFILE_VERSION,
        name=options.name or model_name(hello.model),
        card=Card(
            model=model_name(hello.model),
            drafter=model_name(hello.drafter),
            method=hello.method,
            vllm_version=hello.vllm_version,
            device=hello.device,
            machine=machine(),
            threads=len(os.sched_getaffinity(0)),
            date=time.strftime("%Y-%m-%d"),
            spread=float(np.median(known)) / 2.0 if len(known) else None,
            step_spread=float(np.median(np.concatenate([cells.step_spread for cells in steps]))),
            command=options.command,
            commit=commit(),
        ),
        verify=fits["verify"].model,
        draft=fits["draft"].model,
        host=fits["host"].model,
        domain=domain_of(samples),
        k_max=hello.k_max,
        kv_blocks=max(hello.kv_tokens // _BLOCK_TOKENS, 1),
        block_size=_BLOCK_TOKENS,
        token_budget=hello.max_batched_tokens or 8192,
        max_requests=hello.max_requests,
        max_context=options.max_context,
        acceptance=acceptance,
        catch_up_tokens=512 if hello.device == "cpu" else 0,
        graph_sizes=tuple(hello.graph_sizes),
    )


def levels_of(base: EngineProfile, samples: StepSamples) -> dict[Phase, float]:
    """Return how many times as long these steps took in all as the profile has it, by phase."""
    models: dict[Phase, PhaseModel] = {phase: getattr(base, phase) for phase in PHASES}
    return {
        phase: phase_level(samples, phase, np.array(model.coefficients), base.graph_sizes)
        for phase, model in models.items()
    }


def levelled(base: EngineProfile, levels: dict[Phase, float]) -> EngineProfile:
    """Return the profile with each phase as much slower."""
    phases = {}
    for phase, level in levels.items():
        model: PhaseModel = getattr(base, phase)
        scaled = tuple(value * level for value in model.coefficients)
        phases[phase] = msgspec.structs.replace(model, coefficients=scaled)
    return msgspec.structs.replace(base, **phases)


def machine() -> str:
    """Return the processor's name and the number of cores."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


__all__ = ["LEAST_REPEATS", "CalibrateOptions", "calibrate"]
