"""What a load run measured, per request and summed up. Filled by controller/engine/load_generator.py; reads no clock
itself.

Definitions (vLLM's benchmarks, except that time counts from the scheduled arrival, so that a client-side queue is
not hidden): TTFT = first token - arrival; E2E = last token - arrival; TPOT = (E2E - TTFT) / (tokens - 1). Who was in
time is counted as the sidecar does (docs/guide/objectives.md), by the client's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...env.estimate.objectives import NONE, OWN, TimeObjective
from ..quantiles import Quantiles

Outcome = Literal["pending", "finished", "failed", "cancelled"]


@dataclass(slots=True)
class RequestResult:
    """One request's life. Times in seconds since the run's start; `token_counts` is cumulative per chunk."""

    index: int
    kind: str
    prompt_id: str
    due_s: float
    sent_s: float | None = None
    outcome: Outcome = "pending"
    failure: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str = ""
    text: list[str] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    class_name: str = ""
    objective: TimeObjective = NONE

    @property
    def is_in_time(self) -> bool | None:
        """Return whether the request kept its objective; None if it has none or did not finish."""
        if not self.objective.is_given or self.outcome != "finished" or not self.token_times_s:
            return None
        first_s, last_s = self.token_times_s[0], self.token_times_s[-1]
        return self.objective.is_kept(first_s - self.due_s, last_s - first_s, self.output_tokens)

    @property
    def ttft_ms(self) -> float | None:
        """Return the time from arrival to the first token."""
        return 1e3 * (self.token_times_s[0] - self.due_s) if self.token_times_s else None

    @property
    def e2e_ms(self) -> float | None:
        """Return the time from arrival to the last token."""
        return 1e3 * (self.token_times_s[-1] - self.due_s) if self.token_times_s else None

    @property
    def tpot_ms(self) -> float | None:
        """Return the mean time per token after the first; None for a response of fewer than two tokens."""
        if self.output_tokens < 2 or not self.token_times_s:
            return None
        return 1e3 * (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """A whole run. `wall_s` is from the start to the last token; cancelled requests are neither finished nor failed."""

    finished: int
    failed: int
    cancelled: int
    failures: Mapping[str, int]
    output_tokens: int
    wall_s: float
    tokens_per_s: float
    ttft_ms: Quantiles
    tpot_ms: Quantiles
    e2e_ms: Quantiles
    peak_in_flight: int
    late_ms_p99: float  # how late requests left, the client's own queueing
    cpu_share: float  # of one core, the generator's thread
    attainment: Mapping[str, float] = field(default_factory=dict)  # by class, of the finished: who was in time

    @classmethod
    def of(cls, results: Sequence[RequestResult], peak_in_flight: int, cpu_share: float) -> LoadSummary:
        """Sum up the results of a run."""
        finished = [result for result in results if result.outcome == "finished"]
        failed = [result for result in results if result.outcome == "failed"]
        wall_s = max((result.token_times_s[-1] for result in results if result.token_times_s), default=0.0)
        tokens = sum(result.output_tokens for result in results)
        late_ms = [1e3 * (result.sent_s - result.due_s) for result in results if result.sent_s is not None]
        return cls(
            finished=len(finished),
            failed=len(failed),
            cancelled=sum(result.outcome == "cancelled" for result in results),
            failures=dict(Counter(result.failure for result in failed)),
            output_tokens=tokens,
            wall_s=wall_s,
            tokens_per_s=tokens / wall_s if wall_s > 0 else 0.0,
            ttft_ms=Quantiles.of([value for result in finished if (value := result.ttft_ms) is not None]),
            tpot_ms=Quantiles.of([value for result in finished if (value := result.tpot_ms) is not None]),
            e2e_ms=Quantiles.of([value for result in finished if (value := result.e2e_ms) is not None]),
            peak_in_flight=peak_in_flight,
            late_ms_p99=Quantiles.of(late_ms).p99,
            cpu_share=cpu_share,
            attainment=attainment_of(results),
        )


def attainment_of(results: Sequence[RequestResult]) -> dict[str, float]:
    """Return the share of requests in time by class, of those that have an objective and finished."""
    verdicts: dict[str, list[bool]] = {}
    for result in results:
        if (is_in_time := result.is_in_time) is not None:
            verdicts.setdefault(result.class_name or OWN, []).append(is_in_time)
    return {name: sum(each) / len(each) for name, each in verdicts.items()}
