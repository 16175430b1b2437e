"""The last seconds of one engine, as running totals, and what pruning did in all: what status, top and the demo show.

Called by the session after each record. Costs a few microseconds per record and nothing per second of window;
it holds no record.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

import numpy as np

from ...engine_adapter.arrays import Bools, Ints
from ...engine_adapter.compiled import compiled
from ...engine_adapter.protocol import StepRecord
from ...env.estimate.engine_state import NO_COPIES
from ...env.estimate.step_rows import StepRows
from ..snapshot import PruningStatus, SourceStatus

WINDOW_S: Final = 5.0  # what status, metrics and top show
MANY: Final = 1 << 32  # tokens: more of one request in a step is nonsense, and must not overflow a sum

# Sums over rows. Behind them: requests by draft length, 0..k_max; drafts that reached position 1..k_max; and those that
# were accepted there.
EMITTED, REQUESTS, DRAFTED = range(3)  # requests and drafted: of those that emitted
DECODING, DRAFTS, VERIFIED, ACCEPTED = range(3, 7)  # requests past their prompt, and drafts of theirs, by anyone
COPIES, VERIFIED_COPIES, ACCEPTED_COPIES, UNVERIFIED = range(7, 11)  # ... copied; and what the drafter drew in vain
BY_LENGTH: Final = 11


class _WindowStep(NamedTuple):
    time_s: float
    step_s: float
    is_under_lease: bool
    sums: Ints


class Window:
    """Totals over the steps that ended in the last `span_s` seconds of the engine's own clock.

    Lengths and acceptance are those of all drafts, whoever made them; `drafter` and `copies` tell them apart.
    """

    def __init__(self, k_max: int, span_s: float = WINDOW_S) -> None:
        self._k_max = k_max
        self._span_s = span_s
        self._steps: deque[_WindowStep] = deque()
        self._sums = np.zeros(BY_LENGTH + 1 + 3 * k_max, np.int64)
        self._ever = np.zeros(BY_LENGTH, np.int64)  # no step leaves these
        self._leased = 0
        self._busy_s = 0.0

    def add(
        self,
        record: StepRecord,
        rows: StepRows,
        is_under_lease: bool,
        is_copy: Bools = NO_COPIES,
        unverified: int = 0,
    ) -> None:
        """Take a step in, with its rows unfolded, and let those go that are too old by now.

        :param is_copy: (n,) whose verified draft was copied; empty: nobody's
        :param unverified: tokens that the drafter drew and did not hand over
        """
        step = _WindowStep(record.time_s, record.step_s, is_under_lease, np.zeros(self._sums.shape, self._sums.dtype))
        if self._steps and step.time_s < self._steps[-1].time_s:  # no clock to go by: nothing before would ever go
            self._clear()
        self._steps.append(step)
        _add_up(
            rows.emitted, rows.drafted, rows.verified, rows.accepted, rows.is_prefill, is_copy, self._k_max, step.sums
        )
        step.sums[UNVERIFIED] = min(unverified, MANY)
        self._sums += step.sums
        self._ever += step.sums[:BY_LENGTH]
        self._leased += is_under_lease
        self._busy_s += step.step_s
        while self._steps[0].time_s < record.time_s - self._span_s:
            self._forget(self._steps.popleft())

    def _clear(self) -> None:
        self._steps.clear()
        self._sums[:] = 0
        self._leased = 0
        self._busy_s = 0.0

    def _forget(self, step: _WindowStep) -> None:
        self._sums -= step.sums
        self._leased -= step.is_under_lease
        self._busy_s -= step.step_s

    def steps_per_s(self) -> float:
        """Return engine steps per second over the window."""
        return self._per_s(len(self._steps))

    def tokens_per_s(self) -> float:
        """Return emitted tokens per second over the window."""
        return self._per_s(self._sums.item(EMITTED))

    def mean_step_s(self) -> float:
        """Return the mean duration of a step, seconds."""
        return max(self._busy_s, 0.0) / len(self._steps) if self._steps else 0.0

    def lease_share(self) -> float:
        """Return the share of steps (0..1) that ran under this sidecar's lease."""
        return self._leased / len(self._steps) if self._steps else 0.0

    def length_histogram(self) -> list[int]:
        """Return how many request-steps drafted 0..k_max tokens."""
        lengths: list[int] = self._sums[BY_LENGTH : BY_LENGTH + self._k_max + 1].tolist()
        return lengths

    def mean_length(self) -> float:
        """Return the mean of drafted tokens per request and step."""
        requests = self._sums.item(REQUESTS)
        return self._sums.item(DRAFTED) / requests if requests else 0.0

    def acceptance_rate(self) -> float | None:
        """Return accepted / verified draft tokens, None without drafts."""
        verified = self._sums.item(VERIFIED)
        return self._sums.item(ACCEPTED) / verified if verified else None

    def acceptance_by_position(self) -> list[float | None]:
        """Return, for draft position 1..k_max, the share of drafts that reached it and had it accepted."""
        reached, held = self._sums[BY_LENGTH + self._k_max + 1 :].reshape(2, self._k_max).tolist()
        return [kept / tried if tried else None for kept, tried in zip(held, reached, strict=True)]

    def drafter(self) -> SourceStatus:
        """Return what became of the drafter's own drafts."""
        own, ever = self._sums, self._ever
        return self._source(
            own.item(DRAFTS) - own.item(COPIES),
            own.item(VERIFIED) - own.item(VERIFIED_COPIES),
            own.item(ACCEPTED) - own.item(ACCEPTED_COPIES),
            own.item(UNVERIFIED),
            ever.item(VERIFIED) - ever.item(VERIFIED_COPIES),
            ever.item(ACCEPTED) - ever.item(ACCEPTED_COPIES),
        )

    def copies(self) -> SourceStatus:
        """Return what became of the drafts that were copied from requests' own texts."""
        own, ever = self._sums, self._ever
        return self._source(
            own.item(COPIES),
            own.item(VERIFIED_COPIES),
            own.item(ACCEPTED_COPIES),
            0,
            ever.item(VERIFIED_COPIES),
            ever.item(ACCEPTED_COPIES),
        )

    def _source(
        self, drafts: int, verified: int, accepted: int, unverified: int, verified_total: int, accepted_total: int
    ) -> SourceStatus:
        decoding, emitted = self._sums.item(DECODING), self._sums.item(EMITTED)
        return SourceStatus(
            share=drafts / decoding if decoding else 0.0,
            verified=verified,
            accepted=accepted,
            acceptance_rate=accepted / verified if verified else None,
            waste=(verified - accepted + unverified) / emitted if emitted else None,
            verified_total=verified_total,
            accepted_total=accepted_total,
        )

    def _per_s(self, count: int) -> float:
        """Divide by the time covered: from the first step's start to the last one's end, pauses included."""
        if not self._steps:
            return 0.0
        covered_s = self._steps[-1].time_s - self._steps[0].time_s + self._steps[0].step_s
        return count / covered_s if covered_s > 0 else 0.0


class PruningTotals:
    """What pruned verification did in one engine since the sidecar met it, added up record by record."""

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


@compiled
def _add_up(
    emitted: Ints,
    drafted: Ints,
    verified: Ints,
    accepted: Ints,
    is_prefill: Bools,
    is_copy: Bools,
    k_max: int,
    sums: Ints,
) -> None:
    """Add the rows' tokens, (n,) each, to the sums; `sums` has BY_LENGTH + 1 + 3 k_max entries."""
    reached = BY_LENGTH + k_max + 1
    for i in range(len(emitted)):
        length = min(max(drafted[i], 0), MANY)
        sums[EMITTED] += min(emitted[i], MANY)
        if emitted[i] != 0:
            sums[REQUESTS] += 1
            sums[DRAFTED] += length
            if length <= k_max:
                sums[BY_LENGTH + length] += 1
        if not is_prefill[i]:
            sums[DECODING] += 1
        if verified[i] > 0:
            sums[DRAFTS] += 1
            sums[VERIFIED] += min(verified[i], MANY)
            sums[ACCEPTED] += min(accepted[i], MANY)
            if i < len(is_copy) and is_copy[i]:
                sums[COPIES] += 1
                sums[VERIFIED_COPIES] += min(verified[i], MANY)
                sums[ACCEPTED_COPIES] += min(accepted[i], MANY)
        for j in range(min(verified[i], k_max)):
            sums[reached + j] += 1
            if accepted[i] > j:
                sums[reached + k_max + j] += 1
