"""The last seconds of one engine, as running totals: what status, top and the demo's live table show.

Called by the session after each record. Costs a few microseconds per record and nothing per second of window;
it holds no record.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final, TypeAlias

from ..engine_adapter.protocol import StepRecord

WINDOW_S: Final = 5.0

Outcome: TypeAlias = tuple[int, int, int, int]  # tokens of one request and step: emitted, drafted, verified, accepted


@dataclass(frozen=True, slots=True)
class _Step:
    time_s: float
    step_s: float
    is_under_lease: bool
    outcomes: Counter[Outcome]  # -> requests


class Window:
    """Totals over the steps that ended in the last `span_s` seconds of the engine's own clock."""

    def __init__(self, span_s: float = WINDOW_S) -> None:
        self._span_s = span_s
        self._steps: deque[_Step] = deque()
        self._outcomes: Counter[Outcome] = Counter()
        self._leased = 0
        self._busy_s = 0.0

    def add(self, record: StepRecord, is_under_lease: bool) -> None:
        """Take a step in and let those go that are too old by now."""
        outcomes = Counter([(row.emitted, row.drafted, row.verified, row.accepted) for row in record.rows])
        step = _Step(record.time_s, record.step_s, is_under_lease, outcomes)
        if self._steps and step.time_s < self._steps[-1].time_s:  # no clock to go by: nothing before would ever go
            self._clear()
        self._steps.append(step)
        self._outcomes.update(step.outcomes)
        self._leased += is_under_lease
        self._busy_s += step.step_s
        while self._steps[0].time_s < record.time_s - self._span_s:
            self._forget(self._steps.popleft())

    def _clear(self) -> None:
        self._steps.clear()
        self._outcomes.clear()
        self._leased = 0
        self._busy_s = 0.0

    def _forget(self, step: _Step) -> None:
        for outcome, count in step.outcomes.items():
            if not (left := self._outcomes[outcome] - count):
                del self._outcomes[outcome]
            else:
                self._outcomes[outcome] = left
        self._leased -= step.is_under_lease
        self._busy_s -= step.step_s

    def steps_per_s(self) -> float:
        """Return engine steps per second over the window."""
        return self._per_s(len(self._steps))

    def tokens_per_s(self) -> float:
        """Return emitted tokens per second over the window."""
        return self._per_s(sum(emitted * count for (emitted, *_), count in self._outcomes.items()))

    def mean_step_s(self) -> float:
        """Return the mean duration of a step, seconds."""
        return max(self._busy_s, 0.0) / len(self._steps) if self._steps else 0.0

    def lease_share(self) -> float:
        """Return the share of steps (0..1) that ran under this sidecar's lease."""
        return self._leased / len(self._steps) if self._steps else 0.0

    def length_histogram(self, k_max: int) -> list[int]:
        """Return how many request-steps drafted 0..k_max tokens."""
        lengths = self._lengths()
        return [lengths[length] for length in range(k_max + 1)]

    def mean_length(self) -> float:
        """Return the mean of drafted tokens per request and step."""
        lengths = self._lengths()
        requests = lengths.total()
        return sum(length * count for length, count in lengths.items()) / requests if requests else 0.0

    def acceptance_rate(self) -> float | None:
        """Return accepted / verified draft tokens, None without drafts."""
        verified = sum(verified * count for (*_, verified, _), count in self._outcomes.items())
        accepted = sum(accepted * count for (*_, verified, accepted), count in self._outcomes.items() if verified)
        return accepted / verified if verified else None

    def acceptance_by_position(self, k_max: int) -> list[float | None]:
        """Return, for draft position 1..k_max, the share of drafts that reached it and had it accepted."""
        shares: list[float | None] = []
        for position in range(1, k_max + 1):
            reached = sum(n for (*_, verified, _), n in self._outcomes.items() if verified >= position)
            held = sum(n for (*_, verified, told), n in self._outcomes.items() if min(verified, told) >= position)
            shares.append(held / reached if reached else None)
        return shares

    def _lengths(self) -> Counter[int]:
        """Return how many requests that emitted anything drafted so many tokens."""
        lengths: Counter[int] = Counter()
        for (emitted, drafted, *_), count in self._outcomes.items():
            if emitted:
                lengths[drafted] += count
        return lengths

    def _per_s(self, count: int) -> float:
        """Divide by the time covered: from the first step's start to the last one's end, pauses included."""
        if not self._steps:
            return 0.0
        covered_s = self._steps[-1].time_s - self._steps[0].time_s + self._steps[0].step_s
        return count / covered_s if covered_s > 0 else 0.0
