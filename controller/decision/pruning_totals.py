"""What pruned verification did in one engine, added up record by record: for status readers and metrics."""

from __future__ import annotations

import math

from ...engine_adapter.protocol import StepRecord
from ...env.estimate.step_rows import StepRows
from ..snapshot import PruningStatus


class PruningTotals:
    """Sums since the sidecar met the engine."""

    def __init__(self) -> None:
        self._steps = self._pruned_rows = self._wrongly_pruned = 0
        self._saved_rows = self._spent_s = 0.0

    def add(self, record: StepRecord) -> None:
        """Take a record in; one of a step without exit heads costs nothing."""
        if record.prune_layer is None:
            return
        self._steps += 1
        self._pruned_rows += int(StepRows.of(record.rows).pruned.sum())
        self._saved_rows += record.saved_rows
        self._wrongly_pruned += record.wrongly_pruned
        self._spent_s += record.prune_s

    def status(self) -> PruningStatus:
        """Return the sums; of times and rows that cannot be, 0."""
        saved_rows, spent_s = (
            value if math.isfinite(value) else 0.0 for value in (self._saved_rows, self._spent_s)
        )  # fmt: skip
        return PruningStatus(self._steps, self._pruned_rows, saved_rows, self._wrongly_pruned, spent_s)
