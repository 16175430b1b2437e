"""How well a score foretells whether a token is accepted: ROC-AUC, reliability by tenths, calibration error. Pure.

Called by whatever judges a drafter's confidence or an exit head. Scores and outcomes are (n,) each.
"""

from __future__ import annotations

import numpy as np

from ...engine_adapter.arrays import Bools, Floats

BINS = 10


def auc(score: Floats, is_accepted: Bools) -> float:
    """Return the chance that an accepted token scores above a rejected one, ties by half; NaN without one of both."""
    accepted, rejected = int(is_accepted.sum()), int((~is_accepted).sum())
    if not accepted or not rejected:
        return float("nan")
    _, place, counts = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2.0)[place]
    return float((rank[is_accepted].sum() - accepted * (accepted + 1) / 2.0) / (accepted * rejected))


def reliability(chance: Floats, is_accepted: Bools) -> tuple[tuple[float, float, int], ...]:
    """Return (mean chance, share accepted, tokens) of each tenth of 0..1 that has tokens."""
    place = np.minimum((chance * BINS).astype(np.int64), BINS - 1)
    return tuple(
        (float(chance[inside].mean()), float(is_accepted[inside].mean()), int(inside.sum()))
        for inside in (place == index for index in range(BINS))
        if inside.any()
    )


def calibration_error(chance: Floats, is_accepted: Bools) -> float:
    """Return the expected distance of chance and share accepted, weighted by tokens; NaN without tokens."""
    if not len(chance):
        return float("nan")
    return sum(abs(mean - share) * count for mean, share, count in reliability(chance, is_accepted)) / len(chance)
