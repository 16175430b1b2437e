"""What the loop keeps for a trace of one decision; controller/daemon/spans.py exports it. Called by the daemon."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ...engine_adapter.protocol import ActionSet, StepRecord


class StageClock:
    """How long the stages of one answer took: two clocks are read at the start, one at the end of each stage."""

    __slots__ = ("_last_ns", "stages_ns", "started_ns")

    def __init__(self) -> None:
        self.started_ns = time.time_ns()
        self.stages_ns: list[tuple[str, int]] = []
        self._last_ns = time.perf_counter_ns()

    def lap(self, stage: str) -> None:
        """End a stage."""
        now_ns = time.perf_counter_ns()
        self.stages_ns.append((stage, now_ns - self._last_ns))
        self._last_ns = now_ns


@dataclass(frozen=True, slots=True)
class TraceNote:
    """One decision as it is handed over; `engine` is the name that outlives a restart."""

    engine: str
    record: StepRecord
    action_set: ActionSet
    policy: str
    reason: str
    lengths_sum: int  # tokens that all live requests together may draft
    requests: int  # live, lengths were chosen for them
    backlog: int  # older records that came with this one and were only learnt from
    lag_s: float
    is_sent: bool
    watch: StageClock
