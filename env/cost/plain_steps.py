"""What steps without any draft take beside what the cost curve says of as many rows.

Learnt and asked by cost_table.py. With the first draft a step jumps: the sampler compares, and kernels take rows in
blocks. Between two nodes of the curve lies a line, so steps of a few drafts, if they are many, make the step without
any look dear, by some percent, and drafts look worth it that are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

REMEMBERED_STEPS: Final = 50.0  # of each number of requests
CLIP: Final = 0.2  # log: beyond, something else happened
DOUBT: Final = 3.0  # standard errors below which a mean is not believed
FIRST_SPREAD: Final = 0.1


@dataclass(slots=True)
class PlainSteps:
    """By number of requests: steps seen, the mean log of their time over the curve's, and its usual deviation."""

    _seen: dict[int, tuple[float, float, float]] = field(default_factory=dict)

    def learn(self, requests: int, surprise: float) -> None:
        """Take in a step's log of time over what the curve said."""
        steps, mean, spread = self._seen.get(requests, (0.0, 0.0, FIRST_SPREAD))
        steps = min(steps + 1.0, REMEMBERED_STEPS)
        off = min(max(surprise, -CLIP), CLIP) - mean
        self._seen[requests] = steps, mean + off / steps, spread + (abs(off) - spread) / (steps + 1.0)

    def factor(self, requests: int) -> float:
        """Return by how much such a step is to be multiplied; 1 where nothing is sure."""
        steps, mean, spread = self._seen.get(requests, (0.0, 0.0, FIRST_SPREAD))
        doubt = DOUBT * spread / math.sqrt(steps + 1.0)
        return math.exp(mean * (1.0 - (doubt / mean) ** 2)) if abs(mean) > doubt else 1.0  # Breiman's garrote
