"""Quantiles of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Median and tail of one quantity; NaN where nothing was measured."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """Return the quantiles of values, linearly interpolated."""
        if not len(values):
            return cls(float("nan"), float("nan"), float("nan"))
        p50, p90, p99 = np.percentile(np.asarray(values, np.float64), (50, 90, 99))
        return cls(float(p50), float(p90), float(p99))
