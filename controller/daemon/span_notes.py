"""What the loop keeps for a trace of one decision, and the door to the part that exports it
(controller/daemon/spans.py).

Called by the daemon's loop. Imports nothing of OpenTelemetry unless `trace.enabled` is set.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...engine_adapter.protocol import ActionSet, StepRecord
from ..config import TraceConfig
from ..errors import UsageError

if TYPE_CHECKING:
    from .spans import SpanWriter


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


def open_traces(config: TraceConfig) -> SpanWriter | None:
    """Return where traces go, None if they are off; raise UsageError where OpenTelemetry is not installed."""
    if not config.enabled:
        return None
    try:
        from .spans import SpanWriter
    except ImportError as error:
        raise UsageError(
            f"trace.enabled is set, but {error.name} is not installed",
            "the extra otel",
            "pip install 'faser-vllm[otel]'",
        ) from None
    return SpanWriter(config)
