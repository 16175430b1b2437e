"""Off-policy estimates from a canary: what another policy's lengths would have earned, without running it.

Called by the replay; pure. The estimand is tokens accepted and rows spent per request and step. Never tokens/s:
requests share the batch, so the effect on step time cannot be told apart. Self-normalised inverse propensity weights
per request, with the spread between requests; too few effective samples are refused, not shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...engine_adapter.arrays import Floats, Ints

FLOOR: Final = 100.0  # effective samples
MIN_REQUESTS: Final = 10  # an interval needs that many


@dataclass(frozen=True, slots=True)
class Sample:
    """One request in one step whose length was drawn by chance."""

    request: int
    propensity: float  # of the drawn length, under the policy that ran
    is_match: bool  # the other policy wants just this length
    accepted: int  # tokens, of the draft made under the drawn length
    rows: int  # draft rows verified for it


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % half-width."""

    mean: float
    half_width: float


@dataclass(frozen=True, slots=True)
class OffPolicy:
    """What the samples say; the estimates are None if `refusal` says why."""

    samples: int
    requests: int
    effective_samples: float  # (sum w)^2 / sum w^2
    coverage: float  # share of samples in which the other policy wants the length that was drawn
    refusal: str
    accepted: Estimate | None = None  # per request and step, of the other policy
    rows: Estimate | None = None
    accepted_logged: Estimate | None = None  # of the canary itself
    rows_logged: Estimate | None = None


def estimate(samples: Sequence[Sample], floor: float = FLOOR) -> OffPolicy:
    """Return the estimates for the policy that `is_match` speaks of."""
    request = np.array([sample.request for sample in samples], np.int64)
    weight = np.array([sample.is_match / sample.propensity for sample in samples], np.float64)
    total = float(weight.sum())
    effective = total**2 / float((weight**2).sum()) if total > 0.0 else 0.0
    coverage = float(np.mean([sample.is_match for sample in samples])) if samples else 0.0
    requests = len(np.unique(request[weight > 0.0])) if samples else 0
    refusal = ""
    if effective < floor:
        refusal = (
            f"{effective:.0f} effective samples; expected {floor:.0f}: record a longer canary, or with more epsilon"
        )
    elif requests < MIN_REQUESTS:
        refusal = f"{requests} requests; expected {MIN_REQUESTS}: their spread would not be known"
    if refusal:
        return OffPolicy(len(samples), requests, effective, coverage, refusal)
    accepted = np.array([sample.accepted for sample in samples], np.float64)
    rows = np.array([sample.rows for sample in samples], np.float64)
    ones = np.ones(len(samples))
    return OffPolicy(
        len(samples), requests, effective, coverage, "",
        _ratio(accepted, weight, request), _ratio(rows, weight, request),
        _ratio(accepted, ones, request), _ratio(rows, ones, request),
    )  # fmt: skip


def _ratio(value: Floats, weight: Floats, request: Ints) -> Estimate:
    """Return sum(w y) / sum(w), with the linearised spread between requests, whose steps are not independent."""
    total = float(weight.sum())
    mean = float((weight * value).sum()) / total
    _, place = np.unique(request, return_inverse=True)
    influence = np.bincount(place, weight * (value - mean)) / total
    groups = len(influence)
    variance = float((influence**2).sum()) * groups / max(groups - 1, 1)
    return Estimate(mean, 1.96 * math.sqrt(variance))
