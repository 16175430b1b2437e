"""Fits the acceptance generator: to verified drafts of telemetry, or to the accept lengths of published traces.

Called by env/calibration/profile_fit.py, docs and tests. Deterministic: what is drawn for the comparison is drawn
with a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from msgspec.structs import replace

from ...engine_adapter.arrays import Bools, Floats, Ints
from ...engine_adapter.steering.stop_rule import logit
from ..profile.acceptance_model import (
    QUANTILES,
    AcceptanceModel,
    accept_chance,
    confidence_logit,
    default_acceptance,
    draft_chain,
)
from . import judgement

NEWTON_STEPS: Final = 25
PRIOR_TRIALS: Final = 20.0  # what slope 1 and intercept 0 count for, at each position
LEAST_TRIALS: Final = 50
MATCHINGS: Final = 4
MATCHING_DRAFTS: Final = 3000
DEFAULT_SPREAD: Final = 1.5  # of the confidence's logit, where a trace has none: AUC of about 0.8


@dataclass(frozen=True, slots=True)
class DraftTrial:
    """One verified draft: whose it is, tokens verified and tested, tokens accepted, and the confidences if known.

    :param dropped: tokens behind the verified ones that were left out for their confidence, which is told
    """

    request: tuple[int, int]
    verified: int
    tested: int
    accepted: int
    confidences: tuple[float, ...] = ()
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """All tested draft tokens, in order; arrays (n,). `logit` is NaN where no confidence is known."""

    request: Ints
    position: Ints
    logit: Floats
    is_accepted: Bools


@dataclass(frozen=True, slots=True)
class Description:
    """How the generator compares with what it was fitted to; per draft position unless said otherwise."""

    trials: list[int]
    measured_means: list[float]
    model_means: list[float]
    measured_auc: list[float]
    model_auc: list[float]
    measured_request_spread: float  # standard deviation of requests' acceptance beyond chance
    model_request_spread: float


def fit_acceptance(drafts: Iterable[DraftTrial], k_max: int, source: str = "") -> AcceptanceModel:
    """Return the generator for these drafts; positions without trials continue the last one that has some."""
    drafts = list(drafts)
    tokens, scores = unfold(drafts, k_max)
    if len(tokens.position) < LEAST_TRIALS:
        return replace(default_acceptance(k_max), source=f"default: {len(tokens.position)} draft tokens measured")
    quantiles = _quantiles(scores, k_max)
    has_confidence = bool(np.isfinite(tokens.logit).mean() > 0.5)
    share, carry = _score_structure(scores) if has_confidence else (0.1, 0.3)
    if not has_confidence:
        return _matched(_fit_blind(tokens, k_max, share, carry, source), drafts)
    intercepts, slopes = np.zeros(k_max), np.ones(k_max)
    for position in range(k_max):
        own = (tokens.position == position) & np.isfinite(tokens.logit)
        if own.sum() < LEAST_TRIALS and position:
            intercepts[position], slopes[position] = intercepts[position - 1], slopes[position - 1]
        else:
            intercepts[position], slopes[position] = _logistic(tokens.logit[own], tokens.is_accepted[own])
    known = np.isfinite(tokens.logit)
    chance = _sigmoid(intercepts[tokens.position] + slopes[tokens.position] * np.nan_to_num(tokens.logit))
    hidden = _hidden_spread(tokens.request[known], tokens.is_accepted[known], chance[known])
    widened = math.sqrt(1.0 + 0.346 * hidden * hidden)  # a logistic curve averaged over a normal shift is flatter
    model = AcceptanceModel(
        intercepts=tuple((intercepts * widened).tolist()),
        slopes=tuple((slopes * widened).tolist()),
        quantiles=tuple(tuple(row) for row in quantiles.tolist()),
        request_share=share,
        carry=carry,
        hidden=hidden,
        auc=tuple(_aucs(tokens, k_max)),
        means=tuple(_means(tokens, k_max)),
        source=source,
    )
    # Drafts that end by their confidence cannot be drawn again by length alone.
    return model if any(draft.dropped for draft in drafts) else _matched(model, drafts)


def _fit_blind(tokens: Tokens, k_max: int, share: float, carry: float, source: str) -> AcceptanceModel:
    """Fit means per position and requests' differences; the confidence is the default one, calibrated."""
    means = _means(tokens, k_max)
    flat = np.array(means)[tokens.position]
    hidden = _hidden_spread(tokens.request, tokens.is_accepted, flat)
    model = replace(
        default_acceptance(k_max, 0.0, DEFAULT_SPREAD),
        request_share=share, carry=carry, hidden=hidden, means=tuple(means), source=source,
    )  # fmt: skip
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / 200) for i in range(200)])
    spread = math.hypot(DEFAULT_SPREAD, hidden)
    intercepts = []
    for position, mean in enumerate(means):
        low, high = -15.0, 15.0
        for _ in range(60):
            middle = 0.5 * (low + high)
            is_low = float(_sigmoid(middle + spread * normal).mean()) < mean
            low, high = (middle, high) if is_low else (low, middle)
        intercepts.append(0.5 * (low + high) + 0.15 * position)  # the default's confidence falls by as much
    return replace(model, intercepts=tuple(intercepts))


def _matched(model: AcceptanceModel, drafts: list[DraftTrial]) -> AcceptanceModel:
    """Shift the intercepts until drawn drafts have the measured means: those that get deep are not like all."""
    repeats = max(1, MATCHING_DRAFTS // len(drafts))
    many = [DraftTrial((turn, draft.request[1]), *_lengths(draft)) for turn in range(repeats) for draft in drafts]
    for seed in range(MATCHINGS):
        found = _means(unfold(draw_like(model, many, seed), model.k_max)[0], model.k_max)
        shifted = [
            intercept + logit(wanted) - logit(mean)
            for intercept, wanted, mean in zip(model.intercepts, model.means, found, strict=True)
        ]
        model = replace(model, intercepts=tuple(shifted))
    return model


def _lengths(draft: DraftTrial) -> tuple[int, int, int]:
    return draft.verified, draft.tested, draft.accepted


def unfold(drafts: Iterable[DraftTrial], k_max: int) -> tuple[Tokens, list[list[Floats]]]:
    """Return the tested tokens, and per request the logits of its drafts in order, tested or not."""
    numbers: dict[tuple[int, int], int] = {}
    rows: list[tuple[int, int, float, bool]] = []
    scores: list[list[Floats]] = []
    for draft in drafts:
        request = numbers.setdefault(draft.request, len(numbers))
        if request == len(scores):
            scores.append([])
        logits = [logit(value) for value in draft.confidences[: min(draft.verified + draft.dropped, k_max)]]
        if logits:
            scores[request].append(np.array(logits))
        for position in range(min(draft.tested, draft.accepted + 1, k_max)):
            value = logits[position] if position < len(logits) else math.nan
            rows.append((request, position, value, position < draft.accepted))
    if not rows:
        empty = np.zeros(0)
        return Tokens(empty.astype(np.int64), empty.astype(np.int64), empty, empty.astype(np.bool_)), scores
    request_, position_, logit_, accepted_ = zip(*rows, strict=True)
    return (
        Tokens(np.array(request_), np.array(position_), np.array(logit_, np.float64), np.array(accepted_, np.bool_)),
        scores,
    )


def describe(model: AcceptanceModel, drafts: list[DraftTrial]) -> Description:
    """Draw from the generator what was measured, draft by draft, and compare."""
    k_max = model.k_max
    drawn = draw_like(model, drafts, seed=0)
    (measured, _), (model_tokens, _) = unfold(drafts, k_max), unfold(drawn, k_max)
    return Description(
        trials=[int((measured.position == position).sum()) for position in range(k_max)],
        measured_means=_means(measured, k_max),
        model_means=_means(model_tokens, k_max),
        measured_auc=_aucs(measured, k_max),
        model_auc=_aucs(model_tokens, k_max),
        measured_request_spread=_rate_spread(measured, k_max),
        model_request_spread=_rate_spread(model_tokens, k_max),
    )


def draw_like(model: AcceptanceModel, drafts: Iterable[DraftTrial], seed: int) -> list[DraftTrial]:
    """Return drafts of the same requests and lengths with confidences and acceptances drawn from the generator."""
    intercepts, slopes, quantiles, (share, carry, hidden) = model.tables()
    chance = np.random.default_rng(seed)
    traits: dict[tuple[int, int], list[float]] = {}
    drawn = []
    for draft in drafts:
        level, residual = traits.setdefault(draft.request, chance.standard_normal(2).tolist())
        confidences, accepted, is_alive = [], 0, True
        for position, score in enumerate(draft_chain(chance, min(draft.verified, model.k_max), carry)):
            x = confidence_logit(quantiles, position, level, score, share)
            confidences.append(1.0 / (1.0 + math.exp(-x)))
            is_alive = is_alive and chance.random() < accept_chance(intercepts, slopes, position, x, residual, hidden)
            accepted += is_alive
        drawn.append(DraftTrial(draft.request, draft.verified, draft.tested, accepted, tuple(confidences)))
    return drawn


def _quantiles(scores: list[list[Floats]], k_max: int) -> Floats:
    ranks = np.linspace(0.0, 1.0, QUANTILES)
    table = np.zeros((k_max, QUANTILES))
    for position in range(k_max):
        values = [row[position] for request in scores for row in request if len(row) > position]
        if len(values) >= LEAST_TRIALS or (values and not position):
            table[position] = np.quantile(values, ranks)
        elif position:
            table[position] = table[position - 1]
    return table


def _score_structure(scores: list[list[Floats]]) -> tuple[float, float]:
    """Return (share of the score's variance that is the request's own, correlation of a draft's neighbours besides)."""
    k_max = max((len(row) for request in scores for row in request), default=0)
    normal = [request for request in _normal_scores(scores, k_max) if sum(map(len, request)) >= 8]
    if len(normal) < 8:
        return 0.1, 0.3
    # Neighbours within a draft share the request's level and, besides, a fading part; far ones share the level only.
    far_products: list[float] = []
    near_products = [float(x) for request in normal for row in request for x in row[1:] * row[:-1]]
    if not near_products:
        return 0.1, 0.3
    for values in map(np.concatenate, normal):
        half = len(values) // 2
        far_products.append(float(values[:half].mean() * values[half:].mean()))
    share = float(np.clip(np.mean(far_products), 0.0, 0.9))
    near = float(np.clip(np.mean(near_products), 0.0, 0.98))
    return share, float(np.clip((near - share) / (1.0 - share), 0.0, 0.95))


def _normal_scores(scores: list[list[Floats]], k_max: int) -> list[list[Floats]]:
    """Return the logits as normal scores of their rank among all of the same position."""
    inverse = np.vectorize(NormalDist().inv_cdf)
    ordered = [
        np.sort([row[position] for request in scores for row in request if len(row) > position])
        for position in range(k_max)
    ]

    def one(row: Floats) -> Floats:
        ranks = [
            (np.searchsorted(ordered[p], x, "left") + np.searchsorted(ordered[p], x, "right") + 1.0)
            / (2.0 * len(ordered[p]) + 2.0)
            for p, x in enumerate(row)
        ]
        return np.asarray(inverse(np.clip(ranks, 1e-4, 1.0 - 1e-4)), np.float64)

    return [[one(row) for row in request] for request in scores]


def _logistic(x: Floats, y: Bools) -> tuple[float, float]:
    """Return (intercept, slope) with a weak pull towards (0, 1)."""
    center = np.array([0.0, 1.0])
    weights = center.copy()
    prior = PRIOR_TRIALS * np.array([0.2, 0.2])
    design = np.stack([np.ones(len(x)), x], axis=1)
    for _ in range(NEWTON_STEPS):
        chance = _sigmoid(design @ weights)
        gradient = design.T @ (y - chance) - prior * (weights - center)
        hessian = (design * (chance * (1.0 - chance))[:, None]).T @ design + np.diag(prior)
        weights = weights + np.clip(np.linalg.solve(hessian, gradient), -2.0, 2.0)
    return float(weights[0]), float(max(weights[1], 0.0))


def _hidden_spread(request: Ints, accepted: Bools, chance: Floats) -> float:
    """Return the standard deviation of requests' shifts on the logit scale, beyond what chance explains."""
    size = int(request.max()) + 1
    surplus = np.bincount(request, accepted - chance, size)
    variance = np.bincount(request, chance * (1.0 - chance), size)
    found = float((np.square(surplus) - variance).sum() / max(np.square(variance).sum(), 1e-9))
    return math.sqrt(min(max(found, 0.0), 4.0))


def _means(tokens: Tokens, k_max: int) -> list[float]:
    means: list[float] = []
    for position in range(k_max):
        own = tokens.is_accepted[tokens.position == position]
        means.append(float(own.mean()) if len(own) >= 20 or (len(own) and not means) else (means or [0.5])[-1])
    return means


def _aucs(tokens: Tokens, k_max: int) -> list[float]:
    return [auc(tokens.logit[own], tokens.is_accepted[own]) for own in
            ((tokens.position == position) & np.isfinite(tokens.logit) for position in range(k_max))]  # fmt: skip


def auc(x: Floats, y: Bools) -> float:
    """Return the chance that an accepted token has the larger x of two; 0.5 where there is nothing to compare."""
    found = judgement.auc(x, y)
    return 0.5 if math.isnan(found) else found


def _rate_spread(tokens: Tokens, k_max: int) -> float:
    means = np.array(_means(tokens, k_max))[tokens.position]
    size = int(tokens.request.max(initial=0)) + 1
    count = np.bincount(tokens.request, minlength=size).astype(np.float64)
    surplus = np.bincount(tokens.request, tokens.is_accepted - means, size)
    variance = np.bincount(tokens.request, means * (1.0 - means), size)
    found = float((np.square(surplus) - variance).sum() / max(np.square(count).sum(), 1e-9))
    return math.sqrt(max(found, 0.0))


def _sigmoid(value: Floats) -> Floats:
    result: Floats = 1.0 / (1.0 + np.exp(-np.clip(value, -40.0, 40.0)))
    return result
