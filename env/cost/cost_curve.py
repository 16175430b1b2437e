"""What a step costs by its rows, as a handful of running means: the cost curve that a learned policy sees.

Called by env/estimate/engine_state.py (learning) and env/layout/observation.py (asking); the simulator keeps the same
means in its kernel. Coarser than env/cost/cost_table.py and cheap enough for half a million steps per second.
Reads no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from .cost_table import MAX_STEP_S, MIN_STEP_S, StepCost

OCTAVES: Final = 11  # 1, 2..3, 4..7, ..., 1024 and more rows
LEAST_GAIN: Final = 0.05  # a mean follows drift within about 20 of its own steps
STEPS: Final = 8.0  # memory of the drafting means


@dataclass(slots=True)
class StepOctaves:
    """Mean log seconds of everything but drafting, by octave of rows; and the means of drafting."""

    log_s: list[float] = field(default_factory=lambda: [0.0] * OCTAVES)
    visits: list[float] = field(default_factory=lambda: [0.0] * OCTAVES)
    draft_s: float = 0.0
    rounds: float = 0.0

    def learn(self, cost: StepCost) -> None:
        """Take in one step; steps that mostly compute prompts say nothing about drafts."""
        verify_s = cost.total_s - cost.draft_s + cost.overlap_s
        if not (MIN_STEP_S < verify_s < MAX_STEP_S and 0.0 <= cost.draft_s < MAX_STEP_S and cost.rows > 0):
            return
        self.draft_s += (cost.draft_s - self.draft_s) / STEPS
        self.rounds += (cost.rounds - self.rounds) / STEPS
        if cost.prefill_rows * 2 > cost.rows:
            return
        octave = min(cost.rows.bit_length() - 1, OCTAVES - 1)
        gain = max(1.0 / (self.visits[octave] + 1.0), LEAST_GAIN)
        self.log_s[octave] += gain * (math.log(verify_s) - self.log_s[octave])
        self.visits[octave] += 1.0
