"""From the measured steps of one kind of engine to its profile: step costs, acceptance, matches, exit heads, drafting
ahead, splits.

Called by controller/calibrate/calibrate.py, which reads the files and prints. Nothing here reads or writes any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np

from ...engine_adapter.arrays import Floats, Ints
from ...engine_adapter.protocol import Hello
from ..profile.acceptance_model import AcceptanceModel
from ..profile.engine_profile import PROFILE_VERSION, Card, EngineProfile, PhaseModel
from ..profile.step_basis import Phase
from .acceptance_fit import DraftTrial, fit_acceptance
from .ahead_fit import LEAST_STEPS, AheadSteps, fit_ahead
from .drift import WINDOW_S, drift
from .exit_fit import PruneObservation, fit_exits
from .match_fit import MatchTrials, fit_matches
from .split_fit import WHOLE, fit_splits, settled
from .step_fit import HELD_OUT_SHARE, CalibrationError, Fit, domain_of, fit_phase, fitted_kinds, phase_level
from .step_samples import StepSamples

PHASES: Final[tuple[Phase, ...]] = ("verify", "draft", "host")
LEAST_REPEATS: Final = 3  # of a kind of step that is fitted
_MOST_HOST_REPEATS: Final = 5  # no more are asked for of a kind of pause: there are few kinds
_BLOCK_TOKENS: Final = 128  # vLLM's KV block on a CPU; with another size only the count of blocks differs
_CPU_CATCH_UP_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """n steps of one file, by engine and then in its order.

    :param engine: (n,) number of each step's engine
    :param time_s: (n,) when each step ended, on its engine's clock
    :param samples: times without those of waiting for a core
    :param ahead: the same steps, with what was drafted ahead beside them
    :param split: (n,) of HELLO's splits, which each step ran under; NaN: none is offered
    :param looks: what exit heads did
    """

    engine: Ints
    time_s: Floats
    samples: StepSamples
    ahead: AheadSteps
    split: Floats
    looks: list[PruneObservation]


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """What is known of one kind of engine: how it introduced itself, its files, drafts, of `source`, and copies."""

    hello: Hello
    files: list[RecordedSteps]
    drafts: list[DraftTrial]
    source: str
    copies: MatchTrials = field(default_factory=MatchTrials)


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How a profile is fitted, and what of it no telemetry tells. `card`: where it comes from, without spreads."""

    name: str
    card: Card
    least_repeats: int = LEAST_REPEATS
    held_out: bool = True
    max_context: int = 2048
    keeps_costs: bool = False  # of the base


@dataclass(frozen=True, slots=True)
class Fitted:
    """A profile and how it was found.

    :param fits: by phase; empty where a base was levelled
    :param levels: how many times as long each phase took as in the base; empty where there was none, or it was kept
    :param slower: (n,) by what factor the machine was slower around each step
    :param busy_steps: beside which drafts were made ahead
    :param refusals: why drafting ahead, or a split, was not fitted
    """

    profile: EngineProfile
    fits: dict[Phase, Fit]
    levels: dict[Phase, float]
    slower: Floats
    looks: list[PruneObservation]
    busy_steps: int
    refusals: list[str]


def profile_from(measured: MeasuredEngine, base: EngineProfile | None, options: FitOptions) -> Fitted:
    """Fit a profile, or a base's level and acceptance; raise CalibrationError where too little was measured."""
    acceptance = fit_acceptance(measured.drafts, measured.hello.k_max, measured.source)
    split = np.concatenate([settled(one.engine, one.split) for one in measured.files])
    slower = _slower(measured.files, split, options.held_out)
    ends = np.cumsum([len(one.samples) for one in measured.files])[:-1]
    parts = np.split(slower, ends)
    steps = AheadSteps.joined(
        [
            replace(one.ahead, samples=one.ahead.samples.on_a_machine(part))
            for one, part in zip(measured.files, parts, strict=True)
        ]
    )
    samples = StepSamples.joined(
        [one.samples.on_a_machine(part) for one, part in zip(measured.files, parts, strict=True)]
    )
    alone = _alone(samples, steps, split)
    fits: dict[Phase, Fit] = {}
    levels: dict[Phase, float] = {}
    if base is None:
        fits = _fit_all(alone, options, tuple(measured.hello.graph_sizes))
        profile = _profile_of(measured.hello, fits, alone, acceptance, options)
    else:
        levels = {} if options.keeps_costs else _levels_of(base, alone)
        profile = msgspec.structs.replace(_levelled(base, levels), acceptance=acceptance)
    matches = fit_matches(measured.copies, measured.hello.copy_max, measured.source)
    profile = msgspec.structs.replace(profile, matches=matches)
    looks = [look for one in measured.files for look in one.looks]
    if looks:  # else a base keeps the exits that it has
        profile = msgspec.structs.replace(profile, exits=fit_exits(looks, measured.hello.released_prune))
    refusals: list[str] = []
    if steps.is_busy.any() and not options.keeps_costs:
        profile, refusals = with_ahead(profile, steps)
    if len(measured.hello.splits) > 1 and not options.keeps_costs:
        profile, more = with_splits(profile, samples, split, measured.hello.splits)
        refusals = refusals + more
    return Fitted(profile, fits, levels, slower, looks, int(steps.is_busy.sum()), refusals)


def _slower(files: list[RecordedSteps], split: Ints, held_out: bool) -> Floats:
    """Return (n,) of all steps by what factor the machine was slower than usual.

    Files are laid one behind the other, far apart: one of a slower day drifts against the others.
    """
    clock_s, start_s = [], 0.0
    for one in files:
        for engine in np.unique(one.engine):
            own_s = one.time_s[one.engine == engine]
            clock_s.append(own_s - own_s[0] + start_s)
            start_s += own_s[-1] - own_s[0] + 2.0 * WINDOW_S
    samples = StepSamples.joined([one.samples for one in files])
    kinds = np.where(split == WHOLE, fitted_kinds(samples, HELD_OUT_SHARE if held_out else 0.0), -1)
    return drift(np.concatenate(clock_s), samples.verify_s, kinds)


def _alone(samples: StepSamples, steps: AheadSteps, split: Ints) -> StepSamples:
    """Return the steps beside which nothing was drafted, on the whole device: what a step costs by itself."""
    found = samples.where(~steps.is_busy & (split == WHOLE))
    if len(found) < LEAST_STEPS < len(samples):
        raise CalibrationError(
            f"{len(found)} of {len(samples)} steps without drafting ahead or a split; expected {LEAST_STEPS} or more; "
            "measure with FASER_DRAFT_AHEAD=auto and FASER_PING_PONG=auto, or add such telemetry"
        )
    return found


def with_ahead(profile: EngineProfile, steps: AheadSteps) -> tuple[EngineProfile, list[str]]:
    """Return the profile with what drafting ahead changes; unchanged, and the reason, where too few steps did."""
    try:
        ahead = fit_ahead(steps, *_coefficients(profile), profile.graph_sizes)
    except CalibrationError as error:
        return profile, [f"drafting ahead is not fitted: {error}"]
    return msgspec.structs.replace(profile, ahead=ahead), []


def with_splits(
    profile: EngineProfile, samples: StepSamples, split: Ints, names: Sequence[str]
) -> tuple[EngineProfile, list[str]]:
    """Return the profile with what splits change; and a line for each of which too little was measured.

    Such a one stays as it was in a profile that knew it.
    """
    splits, refused = fit_splits(samples, split, names, *_coefficients(profile), profile.graph_sizes, profile.splits)
    return msgspec.structs.replace(profile, splits=splits), [f"not fitted: {line}" for line in refused]


def _coefficients(profile: EngineProfile) -> tuple[Floats, Floats]:
    return np.array(profile.verify.coefficients), np.array(profile.draft.coefficients)


def _fit_all(samples: StepSamples, options: FitOptions, graph_sizes: tuple[int, ...]) -> dict[Phase, Fit]:
    share = HELD_OUT_SHARE if options.held_out else 0.0
    least = dict.fromkeys(PHASES, options.least_repeats)
    least["host"] = min(options.least_repeats, _MOST_HOST_REPEATS)
    return {phase: fit_phase(samples, phase, least[phase], share, graph_sizes) for phase in PHASES}


def _profile_of(
    hello: Hello, fits: dict[Phase, Fit], samples: StepSamples, acceptance: AcceptanceModel, options: FitOptions
) -> EngineProfile:
    return EngineProfile(
        version=PROFILE_VERSION,
        name=options.name,
        card=_with_spreads(options.card, fits),
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
        catch_up_tokens=_CPU_CATCH_UP_TOKENS if hello.device == "cpu" else 0,
        graph_sizes=tuple(hello.graph_sizes),
    )


def _with_spreads(card: Card, fits: dict[Phase, Fit]) -> Card:
    """Return the card with how far repeats of one kind of step lie apart."""
    steps = [fits[phase].cells for phase in ("verify", "draft")]
    halves = np.concatenate([cells.halves for cells in steps])
    known = halves[np.isfinite(halves)]
    return msgspec.structs.replace(
        card,
        spread=float(np.median(known)) / 2.0 if len(known) else None,
        step_spread=float(np.median(np.concatenate([cells.step_spread for cells in steps]))),
    )


def _levels_of(base: EngineProfile, samples: StepSamples) -> dict[Phase, float]:
    """Return how many times as long these steps took in all as the profile has it, by phase."""
    models: dict[Phase, PhaseModel] = {phase: getattr(base, phase) for phase in PHASES}
    return {
        phase: phase_level(samples, phase, np.array(model.coefficients), base.graph_sizes)
        for phase, model in models.items()
    }


def _levelled(base: EngineProfile, levels: dict[Phase, float]) -> EngineProfile:
    """Return the profile with each phase as much slower."""
    phases = {}
    for phase, level in levels.items():
        model: PhaseModel = getattr(base, phase)
        scaled = tuple(value * level for value in model.coefficients)
        phases[phase] = msgspec.structs.replace(model, coefficients=scaled)
    return msgspec.structs.replace(base, **phases)
