"""The envelope watchdog: are we faster than no speculation would be on this engine, now?

Called by the governor after an answer is out. It compares tokens per second that were measured under our lease with
what the engine's own measured step costs say of the same batches without drafts; no second engine is needed.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from ...engine_adapter.protocol import StepRecord
from ...env.cost.cost_table import CostTable
from ...env.estimate.step_rows import StepRows

SAMPLED: Final = 4  # one record in so many is looked at
MIN_CONFIDENCE: Final = 0.5  # of the cost table in a batch of that size without drafts
MAX_STEP_S: Final = 60.0  # beyond: a broken clock, not a step


class EnvelopeSums:
    """Fading sums of tokens and seconds, as they were and as they would be without drafts."""

    def __init__(self, memory_steps: int) -> None:
        self._memory_steps = max(memory_steps // SAMPLED, 1)
        self.clear()

    def clear(self) -> None:
        """Forget all that was measured."""
        self.steps = 0  # records taken in, SAMPLED steps each
        self._tokens = self._seconds = self._plain_tokens = self._plain_seconds = 0.0

    def add(self, record: StepRecord, cost: CostTable) -> None:
        """Take in a step that ran under our lease; most are skipped, as are those that tell nothing."""
        if record.counter % SAMPLED or not record.decode_tokens or not 0.0 < record.step_s < MAX_STEP_S:
            return
        plain_rows = record.prefill_tokens + record.decode_tokens
        if float(cost.confidence(plain_rows)) < MIN_CONFIDENCE:
            return
        plain_s = float(cost.verify_time_s(plain_rows))
        rows = StepRows.of(record.rows)
        emitted = float(rows.emitted[~rows.is_prefill].sum(dtype=np.float64))
        keep = 1.0 - 1.0 / self._memory_steps
        self._tokens = self._tokens * keep + emitted
        self._seconds = self._seconds * keep + record.step_s
        self._plain_tokens = self._plain_tokens * keep + record.decode_tokens
        self._plain_seconds = self._plain_seconds * keep + plain_s
        self.steps += 1

    def ratio(self) -> float | None:
        """Return measured tokens/s over those of no speculation, None before enough was measured."""
        if self.steps < self._memory_steps or self._seconds <= 0.0 or self._plain_seconds <= 0.0:
            return None
        plain = self._plain_tokens / self._plain_seconds
        ratio = self._tokens / self._seconds / plain if plain > 0.0 else math.inf
        return ratio if math.isfinite(ratio) else None
