"""Telemetry files as input for calibration and fidelity: steps as samples, drafts as trials, requests as lives.

Called by controller/calibrate/calibrate.py and controller/calibrate/fidelity.py. Refuses what cannot be measured
time, naming file and row; never guesses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...engine_adapter.arrays import Floats
from ...engine_adapter.protocol import Hello, RequestRow
from ...env.calibration.acceptance_fit import DraftTrial
from ...env.calibration.ahead_fit import AheadSteps, Chains
from ...env.calibration.exit_fit import PruneObservation
from ...env.calibration.match_fit import CopyRecord, MatchTrials, trials_of
from ...env.calibration.step_samples import StepSamples
from ..errors import StoreError
from ..telemetry.packing import StepCopies
from ..telemetry.tables import StepTable
from ..telemetry.telemetry_file import TelemetryFile

MOST_TOKENS: Final = 1 << 24  # of one request, or rows of a step: beyond lies a damaged file


@dataclass(frozen=True, slots=True)
class Measured:
    """One telemetry file; lists have one entry per step."""

    path: Path
    engines: list[Hello]
    steps: StepTable
    rows: list[list[RequestRow]]
    copies: list[StepCopies]  # whose drafts are none of the drafter's
    samples: StepSamples

    @property
    def copied_tokens(self) -> int:
        """Return how many tokens were accepted of copied drafts."""
        return int(self.steps.accepted_copies.sum())


@dataclass(frozen=True, slots=True)
class Life:
    """One request as its engine saw it; times on the engine's clock."""

    engine: int
    handle: int
    arrival_s: float
    first_token_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int


def read_measured(path: Path) -> Measured:
    """Read a telemetry file; raise StoreError for an empty, foreign or damaged one, or times that cannot be."""
    try:
        with TelemetryFile(path) as file:
            engines, steps = file.engines(), file.steps()
            if not len(steps):
                raise StoreError(f"{path} holds no steps", "telemetry of an engine that worked")
            _require_times(path, steps)
            rows = list(file.request_rows())
            _require_requests(path, steps, rows)
            copies = list(file.copies())
            arrivals = _arrivals(file, steps)
    except StoreError as error:
        raise StoreError(error.seen if str(path) in error.seen else f"{path}: {error.seen}", error.expected,
                         error.remedy) from None  # fmt: skip
    except (TypeError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}", "a whole telemetry file", "the file may be cut") from None
    is_v2 = any(engine.runner == "v2" for engine in engines)
    return Measured(path, engines, steps, rows, copies, _samples(steps, rows, copies, arrivals, is_v2))


def _row(steps: StepTable, index: int) -> str:
    return f"engine {steps.engine[index]}, step {steps.step[index]}"


def _require_times(path: Path, steps: StepTable) -> None:
    for name in ("time_s", "step_s", "verify_s", "sample_s", "draft_s", "overlap_s", "prune_s", "saved_rows"):
        values = getattr(steps, name)
        is_bad = ~np.isfinite(values) | (values < 0.0)
        if name in ("step_s", "time_s"):
            is_bad |= values == 0.0
        if is_bad.any():
            at = int(np.flatnonzero(is_bad)[0])
            raise StoreError(f"{path}, {_row(steps, at)}: {name} is {values[at]:g}", "a measured time above 0")
    for name in ("running", "prefill_tokens", "caught_up"):
        counts = getattr(steps, name)
        if (is_bad := (counts < 0) | (counts > MOST_TOKENS)).any():
            at = int(np.flatnonzero(is_bad)[0])
            raise StoreError(f"{path}, {_row(steps, at)}: {name} is {counts[at]}", f"0 to {MOST_TOKENS}")
    backwards = (np.diff(steps.time_s) < 0.0) & (np.diff(steps.engine) == 0)
    if backwards.any():
        at = int(np.flatnonzero(backwards)[0]) + 1
        raise StoreError(f"{path}, {_row(steps, at)}: time_s goes back", "steps in the engine's order")


def _require_requests(path: Path, steps: StepTable, rows: list[list[RequestRow]]) -> None:
    for number, cells in enumerate(rows):
        if not cells:
            raise StoreError(f"{path}, {_row(steps, number)}: no requests in it", "a step that did something")


def _arrivals(file: TelemetryFile, steps: StepTable) -> Floats:
    """Return how many requests arrived before each step."""
    found = file.arrivals()
    keys = zip(steps.engine.tolist(), steps.counter.tolist(), strict=True)
    return np.array([found.get(key, 0) for key in keys], np.float64)


def _samples(
    steps: StepTable, rows: list[list[RequestRow]], copies: list[StepCopies], arrivals: Floats, is_v2: bool
) -> StepSamples:
    names = [item.name for item in fields(StepSamples)]
    drawn = steps.drawn_tokens
    work = [_work(cells, copies[index], steps, index, drawn[index]) for index, cells in enumerate(rows)]
    table = np.array(work, np.float64)
    host_s = np.full(len(steps), np.nan)
    pause_s = steps.time_s[1:] - steps.step_s[1:] - steps.time_s[:-1]
    follows = (np.diff(steps.engine) == 0) & (np.diff(steps.counter) == 1) & (steps.running[:-1] > 0) & (pause_s > 0)
    host_s[1:][follows] = pause_s[follows]
    verify_s = steps.step_s - steps.draft_s + steps.overlap_s - steps.prune_s
    draft_s, overlap_s = (_told_later(column, steps, is_v2) for column in (steps.draft_s, steps.overlap_s))
    overlap_s = np.nan_to_num(overlap_s)
    draft_s = np.where(draft_s > 0.0, draft_s, np.nan)
    verify_s = np.where(verify_s > 0.0, verify_s, np.nan)
    pruned = steps.pruned.astype(np.float64)
    columns = [*table.T, arrivals, verify_s, draft_s, host_s, pruned, steps.saved_rows, overlap_s]
    return StepSamples(**dict(zip(names, columns, strict=True)))


def _told_later(column: Floats, steps: StepTable, is_v2: bool) -> Floats:
    """Return (n,) what was told of each step's drafting; NaN where nobody said.

    The V2 runner tells it with the next step, under a split with the one behind that.
    """
    if not is_v2:
        return column
    at = np.arange(len(steps))
    told = at + 1 + (np.nan_to_num(steps.split) > 0.0)
    known = told < len(steps)
    known[known] = steps.engine[told[known]] == steps.engine[at[known]]
    known[known] &= steps.counter[told[known]] - steps.counter[at[known]] == told[known] - at[known]
    found = np.full(len(steps), np.nan)
    found[known] = column[told[known]]
    return found


def _work(cells: list[RequestRow], copies: StepCopies, steps: StepTable, index: int, drawn: float) -> tuple[float, ...]:
    """Return the fields of engine_profile.Work up to `draft_attended_tokens`; `drawn` NaN: as many as handed over.

    A copied draft is verified like any other and took nobody's time to make.
    """
    decode = drafts = prompts = prompt_tokens = sampled = kv = attended = drafting = handed = first = 0
    prompt_attended, draft_attended = 0.0, 0
    is_told = not np.isnan(drawn)
    total = sum([row.drafted for row in cells if row.handle not in copies.drafted])
    has_dropped = is_told and drawn > total  # under a stop rule even a request that hands nothing over has drafted
    for row in cells:
        kv += row.context
        if row.is_prefill:
            prompts += 1
            prompt_tokens += row.scheduled
            prompt_attended += row.scheduled * (row.context - 0.5 * (row.scheduled - 1))
            sampled += row.emitted > 0
        else:
            decode += row.scheduled
            drafts += row.verified
            sampled += row.scheduled
            attended += row.scheduled * row.context
        if row.handle in copies.drafted:
            continue
        if row.drafted or (has_dropped and row.draft_limit and row.emitted):
            drafting += 1
            first += row.scheduled - (row.verified - row.accepted)
            draft_attended += max(row.drafted, 1) * row.context
            handed = max(handed, row.drafted)
    if is_told and drawn > 0 and not drafting:
        drafting = 1
    rows = decode + prompt_tokens
    rounds = float(steps.draft_rounds[index]) if is_told else float(handed)
    first_rows = first + int(steps.caught_up[index])
    return (
        float(len(cells)), decode, drafts, prompts, prompt_tokens, sampled, kv, attended, prompt_attended, drafting,
        rounds, float(drawn) if is_told else float(total), first_rows, max(rows - first, 0), draft_attended,
    )  # fmt: skip


def ahead_steps(measured: Measured, samples: StepSamples) -> AheadSteps:
    """Return which steps had drafts made ahead beside them, and what came of those.

    :param samples: the file's own, or with their waiting for a core taken out
    """
    steps = measured.steps
    is_busy = (steps.overlap_s > 0.0) & (steps.frontier > 0.0)
    in_turn = [_work(cells, measured.copies[index], steps, index, np.nan) for index, cells in enumerate(measured.rows)]
    names = [item.name for item in fields(StepSamples)]
    as_handed = dict(zip(names, np.array(in_turn, np.float64).T, strict=False))
    # All drafts count, the wasted ones too, in what the record says was drawn: here only those that were handed over.
    return AheadSteps(replace(samples, **as_handed), is_busy, steps.frontier_hits.astype(np.float64), _chains(measured))


def _chains(measured: Measured) -> Chains:
    newest: dict[tuple[int, int], int] = {}  # by request: place in `found` of the draft that waits for its test
    where, found = list[int](), list[float]()
    for index, cells in enumerate(measured.rows):
        for row in cells:
            key = int(measured.steps.engine[index]), row.handle
            if row.handle in measured.copies[index].verified:
                newest.pop(key, None)
                continue
            if (place := newest.pop(key, None)) is not None and row.verified:
                found[place] = float(row.accepted > 0)
            is_copied = row.handle in measured.copies[index].drafted
            if row.verified and row.accepted == row.verified and row.drafted and not is_copied:
                newest[key] = len(found)
                where.append(index)
                found.append(np.nan)
    return Chains(np.array(where, np.int64), np.array(found, np.float64))


def looks(measured: Measured) -> Iterator[PruneObservation]:
    """Yield every step in which exit heads looked at drafts."""
    steps = measured.steps
    for index in np.flatnonzero(~np.isnan(steps.prune_layer)).tolist():
        drafts = [(row.verified, row.pruned, row.accepted) for row in measured.rows[index] if row.verified]
        if drafts:
            saved_rows, spent_s = float(steps.saved_rows[index]), float(steps.prune_s[index])
            yield PruneObservation(int(steps.prune_layer[index]), spent_s, saved_rows, tuple(drafts))


def trials(measured: Measured) -> Iterator[DraftTrial]:
    """Yield every verified draft of the drafter's in a file, in the engine's order."""
    for index, cells in enumerate(measured.rows):
        engine, copied = int(measured.steps.engine[index]), measured.copies[index].verified
        for row in cells:
            if row.verified and not row.is_prefill and row.handle not in copied:
                tested = row.verified - max(row.pruned - 1, 0)
                yield DraftTrial((engine, row.handle), row.verified, tested, row.accepted, row.confidences)


def match_trials(measured: Measured) -> MatchTrials:
    """Return a file's copies, and the steps behind which there could be one."""
    steps = measured.steps
    told = zip(steps.engine.tolist(), measured.rows, measured.copies, steps.lease_epoch.tolist(), strict=True)
    return trials_of([CopyRecord(engine, rows, *copies, epoch > 0) for engine, rows, copies, epoch in told])


def lives(path: Path) -> list[Life]:
    """Return the requests that arrived and finished within a file, in order of arrival."""
    with TelemetryFile(path) as file:
        return [_life(path, values) for values in file.finished_requests()]


def _life(path: Path, values: tuple[Any, ...]) -> Life:
    """Return a finished request; SQLite keeps what it is given, so everything is looked at."""
    whole, times_s, tokens = values[:2], values[2:5], values[5:]
    is_sound = (
        all(isinstance(value, int) for value in (*whole, *tokens))
        and all(isinstance(value, float | int) and math.isfinite(value) for value in times_s)
        and all(0 <= value <= MOST_TOKENS for value in tokens)
    )
    if not is_sound:
        raise StoreError(f"{path}, request {values[1]}: {values[2:]}", "times in s and numbers of tokens")
    return Life(*values)
