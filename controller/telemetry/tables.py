"""A telemetry file's steps and draft lengths as arrays, and the figures computed from them.

Filled by controller/telemetry/telemetry_file.py; read by the demo, the report and calibration. Every figure is defined
here once, from what the engine reported, whatever a client saw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ...engine_adapter.arrays import Bools, Floats, Ints
from ...engine_adapter.protocol import MAX_DRAFT_LENGTH
from ..quantiles import Quantiles


@dataclass(frozen=True, slots=True)
class CutSteps:
    """What one engine did while its pipeline was cut in one way."""

    layers: tuple[int, ...]  # of each rank, in order
    steps: int
    moving: int  # of these, while layers were under way
    tokens: int  # emitted
    seconds: float  # spent in steps
    moves: int  # of the engine that were complete at the latest of these steps


@dataclass(frozen=True, slots=True)
class StepTable:
    """All steps of a file, by engine and then in the engine's order; arrays (n,). Units as in protocol.StepRecord.

    `decision_*` is NaN where no decision was made on a record, `draft_rounds` and `drawn_tokens` where the engine did
    not say, `prune_layer` where no exit heads looked, `frontier` where nothing was to be drafted ahead,
    `split` where the engine offered none.
    """

    engine: Ints
    counter: Ints
    step: Ints
    running: Ints
    waiting: Ints
    prefill_tokens: Ints
    decode_tokens: Ints
    draft_tokens: Ints
    drafted: Ints
    verified: Ints
    pruned: Ints
    accepted: Ints
    emitted: Ints
    verified_copies: Ints
    accepted_copies: Ints
    lease_epoch: Ints
    dropped: Ints
    rejected: Ints
    caught_up: Ints
    wrongly_pruned: Ints
    frontier_hits: Ints
    time_s: Floats
    step_s: Floats
    schedule_s: Floats
    verify_s: Floats
    sample_s: Floats
    draft_s: Floats
    overlap_s: Floats
    adapter_s: Floats
    kv_usage: Floats
    prune_s: Floats
    saved_rows: Floats
    draft_rounds: Floats
    drawn_tokens: Floats
    prune_layer: Floats
    frontier: Floats
    split: Floats
    decision_sequence: Floats
    decision_is_sent: Floats
    decision_s: Floats
    decision_price: Floats

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True)
class DraftedLengths:
    """What was asked for and drafted per request and step: one row for each request that emitted tokens.

    Requests in the middle of their prompt draft nothing and are left out.
    :param step_index: (m,) row of the StepTable
    :param limit: (m,) draft length in force when the step drafted, tokens
    :param drafted: (m,) tokens proposed in the step, by the drafter or copied
    :param is_copy: (m,) whether they were copied
    """

    step_index: Ints
    limit: Ints
    drafted: Ints
    is_copy: Bools


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """What became of the drafts of one source. NaN where there is nothing to divide by."""

    verified_tokens: int
    accepted_tokens: int
    acceptance_rate: float
    waste: float  # tokens rejected, or drawn and never handed over, per token emitted


@dataclass(frozen=True, slots=True)
class TelemetrySummary:
    """The figures of a file. Shares and rates are NaN where there is nothing to divide by.

    Drafted, verified and accepted tokens and draft lengths are those of all drafts, whoever made them.
    """

    steps: int
    decisions: int  # records a decision was made on
    decisions_sent: int
    steps_under_lease: int
    lease_share_after_first_second: float  # each engine's own first second left out
    dropped_records: int  # the engine could not hand them to the link
    gaps: int  # records missing between the first and the last
    rejected_messages: int  # from a controller, refused by the engine
    drafted_tokens: int
    verified_tokens: int
    accepted_tokens: int
    emitted_tokens: int
    acceptance_rate: float  # accepted / verified draft tokens
    mean_draft_length: float  # tokens drafted per request and step
    mean_emitted: float  # tokens emitted per request and step
    draft_length_histogram: Mapping[int, int]  # request-steps by tokens drafted
    # At least two requests of one step had different lengths: in force, or by where a stop rule ended their drafts.
    steps_with_mixed_lengths: int
    steps_with_mixed_drafts: int  # ... had different numbers of tokens drafted
    adapter_us_per_step: Quantiles
    adapter_share: float  # of the steps' time
    step_ms: Quantiles
    decision_us: Quantiles
    peak_running: int
    drafter: SourceSummary
    copies: SourceSummary
    seconds_of_steps: float = field(default=0.0)


def summarise(steps: StepTable, lengths: DraftedLengths) -> TelemetrySummary:
    """Compute the figures of a file from its tables."""
    verified, accepted = int(steps.verified.sum()), int(steps.accepted.sum())
    has_decision = ~np.isnan(steps.decision_sequence)
    return TelemetrySummary(
        steps=len(steps),
        decisions=int(has_decision.sum()),
        decisions_sent=int(np.nansum(steps.decision_is_sent)),
        steps_under_lease=int((steps.lease_epoch > 0).sum()),
        lease_share_after_first_second=_share(steps.lease_epoch[_after_first_second(steps)] > 0),
        dropped_records=_sum_of_last(steps, steps.dropped),
        gaps=_missing(steps),
        rejected_messages=_sum_of_last(steps, steps.rejected),
        drafted_tokens=int(steps.drafted.sum()),
        verified_tokens=verified,
        accepted_tokens=accepted,
        emitted_tokens=int(steps.emitted.sum()),
        acceptance_rate=accepted / verified if verified else float("nan"),
        mean_draft_length=float(lengths.drafted.mean()) if len(lengths.drafted) else float("nan"),
        mean_emitted=int(steps.emitted.sum()) / len(lengths.drafted) if len(lengths.drafted) else float("nan"),
        draft_length_histogram=_histogram(lengths.drafted),
        steps_with_mixed_lengths=_mixed(lengths.step_index, lengths.limit * (MAX_DRAFT_LENGTH + 1) + lengths.drafted),
        steps_with_mixed_drafts=_mixed(lengths.step_index, lengths.drafted),
        adapter_us_per_step=Quantiles.of((steps.adapter_s * 1e6).tolist()),
        adapter_share=float(steps.adapter_s.sum() / steps.step_s.sum()) if steps.step_s.sum() else float("nan"),
        step_ms=Quantiles.of((steps.step_s * 1e3).tolist()),
        decision_us=Quantiles.of((steps.decision_s[has_decision] * 1e6).tolist()),
        peak_running=int(steps.running.max(initial=0)),
        drafter=_drafter(steps, lengths),
        copies=_source(steps.verified_copies, steps.accepted_copies, 0, steps),
        seconds_of_steps=float(steps.step_s.sum()),
    )


def _drafter(steps: StepTable, lengths: DraftedLengths) -> SourceSummary:
    copied = np.bincount(lengths.step_index[lengths.is_copy], lengths.drafted[lengths.is_copy], len(steps))
    in_vain = np.nan_to_num(steps.drawn_tokens - (steps.drafted - copied)).clip(0.0)  # NaN: the engine did not say
    own = (steps.verified - steps.verified_copies, steps.accepted - steps.accepted_copies)
    return _source(*own, int(in_vain.sum()), steps)


def _source(verified: Ints, accepted: Ints, unverified: int, steps: StepTable) -> SourceSummary:
    tests, hits, emitted = (int(tokens.sum()) for tokens in (verified, accepted, steps.emitted))
    return SourceSummary(
        tests,
        hits,
        hits / tests if tests else float("nan"),
        (tests - hits + unverified) / emitted if emitted else float("nan"),
    )


def _histogram(values: Ints) -> dict[int, int]:
    distinct, counts = np.unique(values, return_counts=True)
    return {int(value): int(count) for value, count in zip(distinct, counts, strict=True)}


def _share(flags: Bools) -> float:
    return float(flags.mean()) if len(flags) else float("nan")


def _after_first_second(steps: StepTable) -> Bools:
    start_s = np.full(len(steps), np.inf)
    for engine in np.unique(steps.engine):
        own = steps.engine == engine
        start_s[own] = steps.time_s[own].min()
    return steps.time_s >= start_s + 1.0


def _sum_of_last(steps: StepTable, counted: Ints) -> int:
    """Sum a counter that each engine only ever raises."""
    return sum(int(counted[steps.engine == engine].max()) for engine in np.unique(steps.engine))


def _missing(steps: StepTable) -> int:
    is_same_engine = np.diff(steps.engine) == 0
    return int((np.diff(steps.counter) - 1)[is_same_engine].clip(0).sum())


def _mixed(step_index: Ints, length: Ints) -> int:
    """Count the steps whose requests do not all have one length."""
    pairs = np.unique(np.stack((step_index, length)), axis=1)
    _, distinct = np.unique(pairs[0], return_counts=True)
    return int((distinct > 1).sum())
