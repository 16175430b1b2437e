"""The last seconds of one engine, as running totals: what status, top and the demo's live table show.

Called by the session after each record. Costs a few microseconds per record and nothing per second of window;
it holds no record.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from ..engine_adapter.protocol import StepRecord

WINDOW_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Step:
    time_s: float
    step_s: float
    emitted: int
    is_under_lease: bool
    lengths: Counter[int]  # drafted tokens -> requests
    outcomes: Counter[tuple[int, int]]  # (verified, accepted) -> requests


class Window:
    """Totals over the steps that ended in the last `span_s` seconds of the engine's own clock."""

    def __init__(self, span_s: float = WINDOW_S) -> None:
        self._span_s = span_s
        self._steps: deque[_Step] = deque()
        self._lengths: Counter[int] = Counter()
        self._outcomes: Counter[tuple[int, int]] = Counter()
        self._emitted = self._leased = 0
        self._busy_s = 0.0

    def add(self, record: StepRecord, is_under_lease: bool) -> None:
        """Take a step in and let those go that are too old by now."""
        decoding = [row for row in record.rows if row.emitted]
        step = _Step(
            record.time_s,
            record.step_s,
            sum([row.emitted for row in decoding]),
            is_under_lease,
            Counter([row.drafted for row in decoding]),
            Counter([(row.verified, row.accepted) for row in record.rows if row.verified]),
        )
        if self._steps and step.time_s < self._steps[-1].time_s:  # no clock to go by: nothing before would ever go
            self._clear()
        self._steps.append(step)
        self._lengths.update(step.lengths)
        self._outcomes.update(step.outcomes)
        self._emitted += step.emitted
        self._leased += is_under_lease
        self._busy_s += step.step_s
        while self._steps[0].time_s < record.time_s - self._span_s:
            self._forget(self._steps.popleft())

    def _clear(self) -> None:
        self._steps.clear()
        self._lengths.clear()
        self._outcomes.clear()
        self._emitted = self._leased = 0
        self._busy_s = 0.0

    def _forget(self, step: _Step) -> None:
        self._lengths.subtract(step.lengths)
        self._outcomes.subtract(step.outcomes)
        self._emitted -= step.emitted
        self._leased -= step.is_under_lease
        self._busy_s -= step.step_s

    def steps_per_s(self) -> float:
        """Return engine steps per second over the window."""
        return self._per_s(len(self._steps))

    def tokens_per_s(self) -> float:
        """Return emitted tokens per second over the window."""
        return self._per_s(self._emitted)

    def mean_step_s(self) -> float:
        """Return the mean duration of a step, seconds."""
        return max(self._busy_s, 0.0) / len(self._steps) if self._steps else 0.0

    def lease_share(self) -> float:
        """Return the share of steps (0..1) that ran under this sidecar's lease."""
        return self._leased / len(self._steps) if self._steps else 0.0

    def length_histogram(self, k_max: int) -> list[int]:
        """Return how many request-steps drafted 0..k_max tokens."""
        return [self._lengths[length] for length in range(k_max + 1)]

    def mean_length(self) -> float:
        """Return the mean of drafted tokens per request and step."""
        requests = self._lengths.total()
        return sum(length * count for length, count in self._lengths.items()) / requests if requests else 0.0

    def acceptance_rate(self) -> float | None:
        """Return accepted / verified draft tokens, None without drafts."""
        verified = sum(verified * count for (verified, _), count in self._outcomes.items())
        accepted = sum(accepted * count for (_, accepted), count in self._outcomes.items())
        return accepted / verified if verified else None

    def acceptance_by_position(self, k_max: int) -> list[float | None]:
        """Return, for draft position 1..k_max, the share of drafts that reached it and had it accepted."""
        shares: list[float | None] = []
        for position in range(1, k_max + 1):
            reached = sum(n for (verified, _), n in self._outcomes.items() if verified >= position)
            held = sum(n for (verified, accepted), n in self._outcomes.items() if min(verified, accepted) >= position)
            shares.append(held / reached if reached else None)
        return shares

    def _per_s(self, count: int) -> float:
        """Divide by the time covered: from the first step's start to the last one's end, pauses included."""
        if not self._steps:
            return 0.0
        covered_s = self._steps[-1].time_s - self._steps[0].time_s + self._steps[0].step_s
        return count / covered_s if covered_s > 0 else 0.0
