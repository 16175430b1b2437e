"""Fits the model of matches to what an engine copied: how often, how long, how sure it was, and what was accepted.

Called by env/calibration/profile_fit.py. What a rule did not let pass is in no record. So `fit_matches` describes the
matches that the recording's rule let through: under a laxer rule a simulated engine copies no more often than the real
one did, under a stricter one less. Of a draft that the rule cut, the engine tells the chance of the token behind the
cut: this token counts for lengths and chances, so that the same rule cuts as often in the simulation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final, NamedTuple

import msgspec
import numpy as np

from ...engine_adapter.arrays import Bools, Floats, Ints
from ...engine_adapter.protocol import RequestRow
from ..profile.acceptance_model import AcceptanceModel
from ..profile.match_model import MatchModel
from .acceptance_fit import LEAST_TRIALS, DraftTrial, fit_acceptance

SPREADS: Final = tuple(0.25 * step for step in range(17))  # tried, on the logit scale
NODES: Final = 41  # of a request's propensity
ROUNDS: Final = 40
PRIOR_STEPS: Final = 2.0  # what a chance of one half counts for
MOST_LOGIT: Final = 8.0


@dataclass(frozen=True, slots=True)
class CopyingStep:
    """One step of one request behind which a draft could be copied."""

    request: tuple[int, int]
    is_behind_whole: bool  # it verified a copy and accepted all of it
    is_copied: bool  # a copy followed


@dataclass(frozen=True, slots=True)
class MatchTrials:
    """The verified copies of a recording, and the steps behind which there could be some.

    :param behind_whole: of each draft, whether the step that it was found in accepted a copy as a whole
    """

    drafts: Sequence[DraftTrial] = ()
    behind_whole: Sequence[bool] = ()
    steps: Sequence[CopyingStep] = ()


class CopyRecord(NamedTuple):
    """What one step record says of copies."""

    engine: int
    rows: Sequence[RequestRow]
    drafted: Collection[int]  # handles of those whose next draft is a copy
    verified: Collection[int]  # ... and whose verified one was
    is_led: bool  # under a lease, else nobody asked for copies


def trials_of(records: Iterable[CopyRecord]) -> MatchTrials:
    """Return the verified copies of records, each engine's in its order, and the steps behind which there could be one.

    A request's last step is none of these: nobody sees what would follow.
    """
    drafts, behind_whole, steps = list[DraftTrial](), list[bool](), list[CopyingStep]()
    waiting: dict[tuple[int, int], CopyingStep] = {}
    for record in records:
        for row in record.rows:
            key, is_copy = (record.engine, row.handle), row.verified > 0 and row.handle in record.verified
            if (step := waiting.pop(key, None)) is not None:
                steps.append(step)
            if is_copy:
                drafts.append(_copy_trial(key, row))
                behind_whole.append(step is not None and step.is_behind_whole)
            if row.emitted and record.is_led:
                is_whole = is_copy and row.accepted == row.verified
                waiting[key] = CopyingStep(key, is_whole, row.handle in record.drafted)
    return MatchTrials(drafts, behind_whole, steps)


def _copy_trial(key: tuple[int, int], row: RequestRow) -> DraftTrial:
    tested, dropped = row.verified - max(row.pruned - 1, 0), max(len(row.confidences) - row.verified, 0)
    return DraftTrial(key, row.verified, tested, row.accepted, row.confidences, dropped)


def joined(parts: Iterable[MatchTrials]) -> MatchTrials:
    """Return those of all files, whose engines are numbered on: two files know the same numbers."""
    drafts, behind_whole, steps, before = list[DraftTrial](), list[bool](), list[CopyingStep](), 0
    for part in parts:
        moved = [replace(one, request=(one.request[0] + before, one.request[1])) for one in part.steps]
        drafts += [replace(one, request=(one.request[0] + before, one.request[1])) for one in part.drafts]
        behind_whole += part.behind_whole
        before = max((one.request[0] for one in moved), default=before) + 1
        steps += moved
    return MatchTrials(drafts, behind_whole, steps)


def fit_matches(trials: MatchTrials, longest: int, source: str = "") -> MatchModel | None:
    """Return the model of these matches; None where nothing was copied.

    :param longest: the most tokens that the engine copies
    """
    if not trials.drafts or not trials.steps or not longest:
        return None
    after_whole, after_other, spread = _chances(trials.steps)
    tokens, quantiles_whole = _tokens(trials, longest, source)
    return MatchModel(
        after_whole=after_whole,
        after_other=after_other,
        spread=spread,
        lengths=tuple(_lengths(trials.drafts, longest)),
        tokens=tokens,
        quantiles_whole=quantiles_whole,
        copies=len(trials.drafts),
        source=source,
    )


def _tokens(trials: MatchTrials, longest: int, source: str) -> tuple[AcceptanceModel, tuple[tuple[float, ...], ...]]:
    """Return the tokens of matches, and their quantiles behind copies accepted as a whole; of few, those of all."""
    tokens = fit_acceptance(trials.drafts, longest, source)
    pairs = list(zip(trials.drafts, trials.behind_whole, strict=True))
    other, whole = ([draft for draft, is_whole in pairs if is_whole == kind] for kind in (False, True))
    found = [fit_acceptance(own, longest) if len(own) >= LEAST_TRIALS else tokens for own in (other, whole)]
    usual, surer = found
    same = {"quantiles": usual.quantiles, "request_share": usual.request_share, "carry": usual.carry}
    return msgspec.structs.replace(tokens, **same), surer.quantiles


def _lengths(drafts: Sequence[DraftTrial], longest: int) -> list[float]:
    """Return the share of matches by tokens offered: of a draft that was cut it is known that it was longer.

    By Kaplan and Meier: of all matches that offer at least so many tokens, those that offer no more.
    """
    at_risk, ended = np.zeros(longest + 1), np.zeros(longest + 1)
    for draft in drafts:
        told = min(len(draft.confidences), longest)
        at_risk[1 : max(draft.verified, told) + 1] += 1.0
        if told == draft.verified < longest:
            ended[draft.verified] += 1.0
        elif draft.verified < longest:
            at_risk[max(draft.verified, told)] -= 1.0  # may offer more or not
    shares, left = list[float](), 1.0
    for length in range(1, longest):
        ends = left * ended[length] / at_risk[length] if at_risk[length] else 0.0
        shares.append(float(ends))
        left -= ends
    return [*shares, float(left)]


def _chances(steps: Sequence[CopyingStep]) -> tuple[float, float, float]:
    """Return logits of a copy behind one that was accepted as a whole and behind any other step, and the spread.

    By the likelihood of what each request did, over normal propensities.
    """
    numbers: dict[tuple[int, int], int] = {}
    request = np.array([numbers.setdefault(step.request, len(numbers)) for step in steps], np.int64)
    whole, copied = (np.array([getattr(step, name) for step in steps]) for name in ("is_behind_whole", "is_copied"))
    counts = _counts(request, whole, copied, len(numbers))
    normal = NormalDist()
    nodes = np.array([normal.inv_cdf((node + 0.5) / NODES) for node in range(NODES)])
    nodes /= np.sqrt(np.mean(np.square(nodes)))
    found = [(*_fit_at(counts, spread * nodes), spread) for spread in SPREADS]
    _, after_whole, after_other, spread = max(found)
    return after_whole, after_other, spread


def _counts(request: Ints, whole: Bools, copied: Bools, size: int) -> Floats:
    """Return (2, 2, requests): behind a whole copy and behind others, steps and copies."""
    counts = [
        [np.bincount(request[mask], weights, size) for weights in (None, copied[mask].astype(np.float64))]
        for mask in (whole, ~whole)
    ]
    return np.array(counts, np.float64)


def _fit_at(counts: Floats, shifts: Floats) -> tuple[float, float, float]:
    """Return the log likelihood at its greatest and the two logits, with requests shifted by one of `shifts` each."""
    steps, copies = counts[:, 0], counts[:, 1]
    totals = copies.sum(axis=1) + 0.5 * PRIOR_STEPS
    means = totals / (steps.sum(axis=1) + PRIOR_STEPS)
    logits = np.log(means) - np.log1p(-means)
    likelihood = -np.inf
    for _ in range(ROUNDS):
        chances = _sigmoid(logits[:, None] + shifts)  # (2, nodes)
        logs = np.einsum("ar,an->rn", copies, np.log(chances))
        logs += np.einsum("ar,an->rn", steps - copies, np.log1p(-chances))
        highest = logs.max(axis=1, keepdims=True)
        weights = np.exp(logs - highest)
        sums = weights.sum(axis=1, keepdims=True)
        likelihood = float((highest + np.log(sums)).sum())
        weighted = steps @ (weights / sums)  # (2, nodes) steps
        surplus = copies.sum(axis=1) - (weighted * chances).sum(axis=1) + PRIOR_STEPS * (0.5 - _sigmoid(logits))
        slope = (weighted * chances * (1.0 - chances)).sum(axis=1) + 0.25 * PRIOR_STEPS
        logits = np.clip(logits + np.clip(surplus / slope, -1.0, 1.0), -MOST_LOGIT, MOST_LOGIT)
    return likelihood, float(logits[0]), float(logits[1])


def _sigmoid(value: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(value, -30.0, 30.0))), np.float64)
