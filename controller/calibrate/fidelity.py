"""`faser fidelity TELEMETRY`: how far the simulator is from the engine that wrote a telemetry file.

Called by the CLI. Two looks: each recorded step's time against the model's, and the whole run again through the
simulator, with only arrivals, lengths, decisions and confidences replayed. The engine's own spread comes from a second
recording of the same load.

Acceptances are drawn at the chances that the model gives the recorded confidences, where those are known: drafts that
a policy made or ended because of its drafter's confidence are not like all others.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ...engine_adapter.arrays import Floats
from ...engine_adapter.protocol import Hello
from ...env.calibration.ahead_fit import AheadSteps
from ...env.calibration.recorded_request import RecordedDraft, RecordedRequest
from ...env.calibration.step_samples import StepSamples
from ...env.profile.engine_profile import EngineProfile, shipped_profile
from ...env.simulator.serve_requests import replay
from ..errors import ModelError, StoreError, UsageError
from .calibrate import load_profile_or_fail, require_fitting, require_same
from .measured import Life, Measured, ahead_steps, lives, read_measured
from .starvation import Waiting, freed, load_waiting, of_engine

EDGE_REQUESTS = 2  # fewer than this cannot be compared


@dataclass(frozen=True, slots=True)
class FidelityOptions:
    """What `faser fidelity` was asked for."""

    telemetry: Path
    profile: Path | None = None  # None: the shipped profile of the embedded pair
    repeat: Path | None = None  # another run of the same load
    runs: int = 8
    json: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.runs <= 1000:
            raise UsageError(f"--runs {self.runs}", "1 to 1000")


@dataclass(frozen=True, slots=True)
class Run:
    """Per request, (n,) each: seconds to the first token, per further token, and in all; and the run's tokens/s."""

    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    tokens_per_s: float


def run_fidelity(options: FidelityOptions) -> int:
    """Compare and print; return 0."""
    measured = read_measured(options.telemetry)
    result = compare(measured, fitting_profile(require_same([measured]), options.profile), options)
    if options.json:
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    else:
        Console(highlight=False).print(_table(result))
    return 0


def fitting_profile(hello: Hello, path: Path | None) -> EngineProfile:
    """Return a profile of this kind of engine, the shipped one unless another is named; raise ModelError otherwise."""
    profile = load_profile_or_fail(path) if path else shipped_profile()
    return require_fitting(profile, hello, path or Path("the shipped profile"))


def compare(measured: Measured, profile: EngineProfile, options: FidelityOptions) -> dict[str, object]:
    """Return all errors, as the last line of --json."""
    waiting = load_waiting(measured.path)
    found = recorded_requests(measured, waiting)
    if len(found) < EDGE_REQUESTS:
        raise StoreError(
            f"{measured.path}: {len(found)} requests that arrived and finished", f"{EDGE_REQUESTS} or more"
        )
    real = run_of([life for life, _ in found])
    requests = [request for _, request in found]
    seeds = track(range(options.runs), "replaying", console=Console(stderr=True), transient=True)
    if not profile.exits and not np.isnan(measured.steps.prune_layer).all():
        raise ModelError(f"{measured.path}: steps with pruning", "a profile that knows exit heads", "calibrate one")
    samples = freed(measured.samples, measured.steps, waiting)
    steps = ahead_steps(measured, samples)
    if profile.ahead is None and steps.is_usual:
        raise ModelError(f"{measured.path}: drafts made ahead", "a profile that knows of it", "calibrate one")
    simulated = [replayed(profile, requests, seed, goes_ahead=steps.is_usual) for seed in seeds]
    result: dict[str, object] = step_errors(samples, steps, profile)
    result |= {f"{name}_error": value for name, value in run_errors(real, simulated).items()}
    result["repeat_spread"] = _repeat_spread(real, found, options.repeat)
    result["requests"] = len(found)
    result["steps"] = len(measured.steps)
    result["runs"] = options.runs
    result["copied_tokens"] = measured.copied_tokens
    return result


def recorded_requests(measured: Measured, waiting: Waiting) -> list[tuple[Life, RecordedRequest]]:
    """Return every whole request with what is replayed of it, by the clock that leaves noted waiting out.

    Copied drafts are left out: a replay draws none, whatever the profile knows of matches.
    """
    drafts: dict[tuple[int, int], list[RecordedDraft]] = {}
    emitted: dict[tuple[int, int], int] = {}
    for index, rows in enumerate(measured.rows):
        engine, copies = int(measured.steps.engine[index]), measured.copies[index]
        for row in rows:
            key = (engine, row.handle)
            own = drafts.setdefault(key, [])
            is_drafters = row.verified > 0 and row.handle not in copies.verified
            if is_drafters and own and own[-1].emitted == emitted[key]:  # of the drafts that were decided there
                is_looked_at = not np.isnan(measured.steps.prune_layer[index])
                own[-1] = own[-1]._replace(is_looked_at=is_looked_at, confidences=tuple(row.confidences))
            emitted[key] = emitted.get(key, 0) + row.emitted
            if row.emitted:
                own.append(RecordedDraft(emitted[key], 0 if row.handle in copies.drafted else row.drafted))
    found = []
    for life in _undisturbed(lives(measured.path), of_engine(waiting, measured.steps)):
        if life.output_tokens < 1 or life.prompt_tokens < 1:
            continue
        key = (life.engine, life.handle)
        request = RecordedRequest(life.arrival_s, life.prompt_tokens, life.output_tokens, tuple(drafts.get(key, ())))
        found.append((life, request))
    return found


def _undisturbed(found: list[Life], waiting: Waiting) -> list[Life]:
    names = ("arrival_s", "first_token_s", "end_s")
    times = [waiting.undisturbed(np.array([getattr(life, name) for life in found], np.float64)) for name in names]
    return [
        replace(life, **dict(zip(names, map(float, moments), strict=True)))
        for life, *moments in zip(found, *times, strict=True)
    ]


def run_of(found: list[Life]) -> Run:
    """Return the figures of a recorded run."""
    arrival_s, first_s, end_s = (
        np.array([getattr(life, name) for life in found]) for name in ("arrival_s", "first_token_s", "end_s")
    )
    return _figures(arrival_s, first_s, end_s, np.array([life.output_tokens for life in found], np.float64))


def replayed(
    profile: EngineProfile,
    requests: list[RecordedRequest],
    seed: int,
    *,
    goes_ahead: bool = False,
    by_confidence: bool = True,
) -> Run:
    """Run the recording once through the simulator; with drafts made ahead always, or never.

    :param by_confidence: draw acceptances at the chances of the recorded confidences, if the profile's model of
        acceptance was fitted to any
    """
    chance = np.random.default_rng(seed)
    decided = [request.replayed(chance) for request in requests]
    is_fitted = by_confidence and bool(profile.acceptance.auc)
    served = replay(
        [request.arrival_s for request in requests],
        [request.prompt_tokens for request in requests],
        [request.output_tokens for request in requests],
        [[each.handed for each in own] for own in decided],
        profile,
        seed=seed,
        pruned=[[each.is_looked_at for each in own] for own in decided],
        confidences=[[each.confidences for each in own] for own in decided] if is_fitted else None,
        goes_ahead=goes_ahead,
    )
    return Run(served.ttft_s, served.tpot_s, served.e2e_s, served.tokens_per_s)


def _figures(arrival_s: Floats, first_s: Floats, end_s: Floats, tokens: Floats) -> Run:
    tpot_s = np.where(tokens > 1, (end_s - first_s) / np.maximum(tokens - 1, 1), np.nan)
    return Run(first_s - arrival_s, tpot_s, end_s - arrival_s, float(tokens.sum() / (end_s.max() - arrival_s.min())))


def run_errors(real: Run, simulated: list[Run]) -> dict[str, float]:
    """Return median relative errors over requests, of the mean over simulated runs; and that of tokens/s."""
    found = {}
    for name in ("ttft", "tpot", "e2e"):
        wanted = getattr(real, f"{name}_s")
        means = np.mean([getattr(run, f"{name}_s") for run in simulated], axis=0)
        found[name] = _median_error(means, wanted)
    rate = float(np.mean([run.tokens_per_s for run in simulated]))
    found["tokens_per_s"] = abs(rate / real.tokens_per_s - 1.0)
    return found


def _median_error(value: Floats, wanted: Floats) -> float:
    known = np.isfinite(value) & np.isfinite(wanted) & (wanted > 0.0)
    return float(np.median(np.abs(value[known] / wanted[known] - 1.0))) if known.any() else math.nan


def step_errors(samples: StepSamples, steps: AheadSteps, profile: EngineProfile) -> dict[str, object]:
    """Return the errors over recorded steps, each of them a single one: its own scatter is in them.

    Deciding what is pruned is in neither side; it is a fraction of a step. Drafting beside a verification is in
    neither side either: of drafts, what was waited for counts.
    """
    verify_s = samples.basis("verify", profile.graph_sizes) @ np.array(profile.verify.coefficients)
    draft_s = samples.basis("draft") @ np.array(profile.draft.coefficients)
    real_draft_s = np.nan_to_num(samples.draft_s)
    drafted = samples.drafting_requests > 0
    if profile.ahead is not None and (busy := steps.is_busy).any():
        serial_s = steps.serial_s(np.array(profile.draft.coefficients))
        verify_s[busy] *= profile.ahead.verify_factor
        left_s = serial_s - profile.ahead.hidden * steps.hideable_s(serial_s, verify_s)
        draft_s[busy], real_draft_s[busy] = left_s[busy], steps.waited_s[busy]
        drafted[busy] = steps.samples.drafting_requests[busy] > 0
    return {
        "step_time_error": _quantiles(verify_s + draft_s, samples.verify_s + real_draft_s),
        "draft_error": _quantiles(draft_s[drafted], real_draft_s[drafted]),
        "verify_error": _quantiles(verify_s, samples.verify_s),
    }


def _quantiles(value: Floats, wanted: Floats) -> dict[str, float | None]:
    known = np.isfinite(value) & np.isfinite(wanted) & (wanted > 0.0)
    if not known.any():
        return {"median": None, "p90": None}
    errors = np.abs(value[known] / wanted[known] - 1.0)
    return {"median": float(np.median(errors)), "p90": float(np.percentile(errors, 90))}


def _repeat_spread(real: Run, found: list[tuple[Life, RecordedRequest]], path: Path | None) -> dict[str, float] | None:
    """Return by how much another real run of the same load differs, in the same figures; None without one."""
    if path is None:
        return None
    other = recorded_requests(read_measured(path), load_waiting(path))
    mine, theirs = ([(life.prompt_tokens, request.output_tokens) for life, request in runs] for runs in (found, other))
    pairs = _matched(mine, theirs)
    if len(pairs) < EDGE_REQUESTS:
        raise StoreError(f"{path}: {len(pairs)} requests in common with the first file", "another run of the same load")
    again = run_of([life for life, _ in other])
    spread = {}
    for name in ("ttft", "tpot", "e2e"):
        first, second = getattr(real, f"{name}_s"), getattr(again, f"{name}_s")
        spread[name] = _median_error(second[[b for _, b in pairs]], first[[a for a, _ in pairs]])
    spread["tokens_per_s"] = abs(again.tokens_per_s / real.tokens_per_s - 1.0)
    return spread


def _matched(mine: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return pairs of places with the same prompt length, in order of arrival; answers may differ in length."""
    pairs, used = [], set[int]()
    for place, (prompt, _) in enumerate(mine):
        for other in range(max(0, place - 8), min(len(theirs), place + 9)):
            if other not in used and theirs[other][0] == prompt:
                used.add(other)
                pairs.append((place, other))
                break
    return pairs


def _table(result: dict[str, object]) -> Table:
    copied = f"; {tokens} copied tokens are replayed one by one" if (tokens := result["copied_tokens"]) else ""
    table = Table(title=f"simulator against engine: {result['requests']} requests, {result['steps']} steps{copied}")
    for name in ("what", "median error", "p90", "engine's own spread"):
        table.add_column(name, justify="left" if name == "what" else "right")
    spread = result["repeat_spread"]
    for name in ("verify", "draft", "step_time"):
        values = result[f"{name}_error"]
        assert isinstance(values, dict)
        table.add_row(name, _percent(values["median"]), _percent(values["p90"]), "")
    for name in ("ttft", "tpot", "e2e", "tokens_per_s"):
        own = spread.get(name) if isinstance(spread, dict) else None
        table.add_row(name, _percent(result[f"{name}_error"]), "", _percent(own))
    return table


def _percent(value: object) -> str:
    return f"{value:.1%}" if isinstance(value, float) and math.isfinite(value) else "-"
