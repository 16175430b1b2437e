"""Which draft tokens the target accepts, as a generator: per request, per position, with the drafter's confidence.

Called by the simulator (draws) and by calibration (fits). For each draft token a Gaussian score is drawn that is partly
the request's own, partly that of the token before it in the draft; the score's rank becomes the drafter's confidence,
and acceptance is a coin whose chance is the calibrated confidence, shifted by what the request's confidences do not
tell.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np

from ...engine_adapter.arrays import Floats
from ...engine_adapter.compiled import kept

QUANTILES: Final = 33  # points of a confidence distribution, at ranks 0, 1/32, ..., 1


class AcceptanceModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything per draft position is a tuple of k_max numbers; logit as in engine_adapter/steering/stop_rule.py.

    score_j = sqrt(request_share) * level + sqrt(1 - request_share) * chain_j, where level ~ N(0, 1) once per request,
    chain_0 ~ N(0, 1), and chain_j = carry * chain_{j-1} + sqrt(1 - carry^2) * N(0, 1). A draft begins at the target's
    own state, whatever the draft before ended with: carried over, that would punish who stops where the drafter is
    unsure.
    x_j = logit of confidence = the quantile of position j at rank Phi(score_j).
    P(accept j | j-1 accepted) = sigmoid(intercept_j + slope_j * x_j + hidden * residual), residual ~ N(0, 1) once per
    request.
    """

    intercepts: tuple[float, ...]
    slopes: tuple[float, ...]
    quantiles: tuple[tuple[float, ...], ...]  # (k_max, QUANTILES) of x_j, non-decreasing
    request_share: float = 0.0  # 0..1, of the score's variance
    carry: float = 0.0  # 0..1, from token to token of a draft
    hidden: float = 0.0  # standard deviation on the logit scale
    auc: tuple[float, ...] = ()  # measured, of confidence against acceptance; for comparison
    means: tuple[float, ...] = ()  # measured conditional acceptance; for comparison
    source: str = ""

    @property
    def k_max(self) -> int:
        """Draft positions described."""
        return len(self.intercepts)

    def tables(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Return (intercepts (k,), slopes (k,), quantiles (k, QUANTILES), shares (3,)) for compiled code."""
        return (
            np.array(self.intercepts, np.float64),
            np.array(self.slopes, np.float64),
            np.array(self.quantiles, np.float64).reshape(self.k_max, QUANTILES),
            np.array([self.request_share, self.carry, self.hidden], np.float64),
        )


@kept
def next_chain(chain: float, normal: float, carry: float) -> float:
    """Return the chain's next value; `normal` ~ N(0, 1)."""
    return carry * chain + math.sqrt(1.0 - carry * carry) * normal


def draft_chain(chance: np.random.Generator, tokens: int, carry: float) -> list[float]:
    """Return the chain of one draft's tokens; it begins anew with each draft."""
    chain = float(chance.standard_normal()) if tokens else 0.0
    found = [chain][:tokens]
    for _ in range(1, tokens):
        chain = next_chain(chain, float(chance.standard_normal()), carry)
        found.append(chain)
    return found


@kept
def confidence_logit(quantiles: Floats, position: int, level: float, chain: float, request_share: float) -> float:
    """Return x of draft position `position` (0 is the first); a policy may see it."""
    score = math.sqrt(request_share) * level + math.sqrt(1.0 - request_share) * chain
    rank = 0.5 * math.erfc(-score / math.sqrt(2.0)) * (QUANTILES - 1)
    low = min(int(rank), QUANTILES - 2)
    share = rank - low
    logit: float = quantiles[position, low] * (1.0 - share) + quantiles[position, low + 1] * share
    return logit


@kept
def accept_chance(
    intercepts: Floats, slopes: Floats, position: int, logit: float, residual: float, hidden: float
) -> float:
    """Return the chance that position `position` is accepted, given that all before it were; no policy may see it."""
    value = intercepts[position] + slopes[position] * logit + hidden * residual
    return 1.0 / (1.0 + math.exp(-min(max(value, -40.0), 40.0)))


def default_acceptance(k_max: int, mean_logit: float = 1.0, spread: float = 1.5) -> AcceptanceModel:
    """Return a plausible model where nothing was measured: confidence calibrated, 0.7 accepted at the first position.

    Deeper positions lose 0.15 logits each.
    """
    ranks = np.clip(np.linspace(0.0, 1.0, QUANTILES), 0.002, 0.998)
    normal = np.array([_probit(rank) for rank in ranks])
    quantiles = tuple(tuple((mean_logit - 0.15 * position + spread * normal).tolist()) for position in range(k_max))
    return AcceptanceModel(
        intercepts=(0.0,) * k_max,
        slopes=(1.0,) * k_max,
        quantiles=quantiles,
        request_share=0.2,
        carry=0.3,
        hidden=0.3,
        source="default, not measured",
    )


def _probit(rank: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(rank)
