"""What a learned policy may tell the price policy: what tokens are worth by objectives. Neutral advice changes nothing.

Given by models/learned/learned.py, learnt in models/training/advised.py. Which token is worth how much follows from a
request's slack (models/policies/token_values.py); how steeply is what no one setting has right for every engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from ...engine_adapter.arrays import Singles
from ..policies.token_values import VALUES, TokenValues

SPAN_DECISIONS: Final = 16  # advice is renewed this often
FACTORS: Final = (8.0, 4.0, 4.0, 8.0)  # of what leanings of 1 stand for; the released policy was trained with these


class Advice(NamedTuple):
    """Four leanings, each -1..1, and an output of the head: settings of TokenValues over the released ones."""

    urgency: float = 0.0  # above 0 who lacks tokens is worth more
    horizon: float = 0.0  # ... what is lacking is looked for further ahead
    reserve: float = 0.0  # ... requests shall be further ahead of their schedules
    patience: float = 0.0  # ... who is behind has longer to catch up

    @classmethod
    def of(cls, outputs: Singles) -> Advice:
        """Return what the outputs of the head, (4,), mean; beyond -1..1 they are clipped."""
        return cls(*np.minimum(np.maximum(outputs, np.float32(-1.0)), np.float32(1.0)).tolist())

    def values(self) -> TokenValues:
        """Return the settings that are advised; without a leaning the released ones to the bit."""
        urgency, horizon, reserve, patience = (factor**leaning for factor, leaning in zip(FACTORS, self, strict=True))
        return replace(
            VALUES, urgency=VALUES.urgency * urgency, horizon=VALUES.horizon * horizon,
            reserve=VALUES.reserve * reserve, patience=VALUES.patience * patience,
        )  # fmt: skip


NEUTRAL: Final = Advice()
