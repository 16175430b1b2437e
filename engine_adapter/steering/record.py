"""What a step left behind, and how its record is made of it.

`RawStep` is filled on the engine thread, with as little as can be; `RecordBuilder` unfolds it on the link's thread
while the engine thread is in the next forward pass. Neither knows vLLM. What vLLM may change later is copied.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol

from ..operator_log import operator_log
from ..protocol import LARGEST_PRIORITY, MAX_DRAFT_LENGTH, MAX_REQUESTS, RequestEvent, RequestRow, StepRecord
from .orders import StepOrder, StepReport
from .sampled_tokens import SampledTokens

logger = operator_log(__name__)


class LiveRequest(Protocol):
    """What is read of vLLM's Request (0.32, v1/request.py)."""

    num_computed_tokens: int
    max_tokens: int
    priority: int
    is_prefill_chunk: bool
    num_prompt_tokens: int
    next_decode_eligible_step: int  # it is left out of steps before
    num_output_placeholders: int  # tokens that steps in flight may emit; 0 without async scheduling

    @property
    def use_structured_output(self) -> bool: ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...


@dataclass(slots=True)
class Entry:
    """One live request as the adapter sees it; `has_emitted` and `confidences` belong to the builder."""

    handle: int
    request_id: str
    request: LiveRequest
    arrived_s: float
    most: int = MAX_DRAFT_LENGTH  # longest draft that its client allows
    ttft_ms: float | None = None  # what its client wants; None: it did not say
    tpot_ms: float | None = None
    was_preempted: bool = False  # what it had is read again
    roomy_until: int = 0  # before this step no draft is too long for it
    is_session: bool = False  # its client may send another turn with other limits
    emitted: int = 0  # tokens handed out so far; only ever grows, where vLLM's own list is emptied between two turns
    has_emitted: bool = False  # a record said so
    is_copy: bool = False  # the draft tokens that wait for verification are a match's
    confidences: tuple[float, ...] = ()  # of the draft tokens that wait for verification, and of a dropped one

    def arrival(self) -> RequestEvent:
        """Return the event that tells a controller which id the handle stands for."""
        request = self.request
        priority = min(max(request.priority, -LARGEST_PRIORITY), LARGEST_PRIORITY)  # clients may ask for any
        return RequestEvent(
            "arrival", self.handle, self.arrived_s, request.num_prompt_tokens, self.request_id, priority, self.most,
            ttft_ms=self.ttft_ms, tpot_ms=self.tpot_ms,
        )  # fmt: skip


class StageStanding(NamedTuple):
    """Where a pipeline's stages stand behind a step."""

    bounds: tuple[int, ...]
    moves: int  # completed since boot
    is_moving: bool


@dataclass(slots=True)
class RawStep:
    """What one step left on vLLM's objects. Lists of numbers are aligned with `scheduled`, which vLLM leaves alone."""

    order: StepOrder
    report: StepReport
    scheduled: dict[str, int]  # rows given to the target, by request
    entries: list[Entry]
    batch_rows: list[int | None]
    computed: list[int]  # tokens of each request after the step
    delivered: list[int | None]  # tokens that vLLM handed out; None: none
    drafts: dict[str, list[int]]
    draft_lengths: list[int]  # aligned with `drafts`
    invalid: dict[str, int]  # of these, how many a grammar forbade: they were rows, but no drafts
    sampled: SampledTokens
    events: list[RequestEvent]
    preempted: list[Entry]
    counter: int
    time_s: float
    step_s: float
    adapter_s: float
    running: int
    waiting: int
    kv_usage: float
    deferred: list[tuple[Entry, tuple[float, ...]]] = field(default_factory=list)  # drafts of requests not in the step
    counted: tuple[int, int] | None = None  # vLLM's own (drafted, accepted); None: it keeps no statistics
    stages: StageStanding | None = None  # None: stages cannot move


class _Work(NamedTuple):
    """What a step's rows sum up to."""

    prefill: int  # tokens of prompts
    decode: int  # requests that decode
    drafts: int  # tokens verified behind these
    offered: int  # drafts that vLLM scheduled, of requests whose tokens it handed out


class Counters(Protocol):
    """What a record says about the link."""

    dropped: int
    refused: Counter[str]


@dataclass(slots=True)
class RecordBuilder:
    """Makes records of raw steps, in the order of the steps; owned by whichever thread sends them."""

    boot_id: str
    link: Counters
    miscounted: int = 0  # verified and accepted tokens so far by which the records differ from vLLM's own counters
    _last: int = 0  # counter of the last record

    def build(self, raw: RawStep) -> StepRecord:
        """Return the record of a step."""
        order, report = raw.order, raw.report
        for entry in raw.preempted:
            entry.confidences, entry.is_copy = (), False
        verified_copies = self._copies(raw)
        rows, work = self._rows(raw)
        copied = self._note_copies(raw)
        self._last = raw.counter
        wrongly_pruned = sum([ends_wrongly(row) for row in rows]) if report.pruned else 0
        if raw.counted is not None:
            self._compare(work.offered, sum([row.accepted for row in rows]) - wrongly_pruned, *raw.counted)
        return StepRecord(
            boot_id=self.boot_id,
            counter=raw.counter,
            step=order.step,
            time_s=raw.time_s,
            step_s=raw.step_s,
            schedule_s=order.schedule_s,
            verify_s=report.verify_s,
            sample_s=report.sample_s,
            draft_s=report.draft_s,
            overlap_s=report.overlap_s,
            adapter_s=raw.adapter_s,
            running=raw.running,
            waiting=raw.waiting,
            prefill_tokens=work.prefill,
            decode_tokens=work.decode,
            draft_tokens=work.drafts,
            kv_usage=raw.kv_usage,
            split=report.split,
            frontier=report.frontier or None,
            lease_epoch=order.lease_epoch,
            lease_sequence=order.lease_sequence,
            dropped=self.link.dropped,
            rejected=self.link.refused.total(),
            events=raw.events,
            rows=rows,
            caught_up=report.caught_up,
            draft_rounds=None if report.rounds is None else len(report.rounds),
            drawn_tokens=None if report.rounds is None else sum(report.rounds),
            frontier_hits=report.frontier_hits,
            frontier_misses=report.frontier_misses,
            prune_layer=report.prune_layer,
            prune_s=report.prune_s,
            saved_rows=report.saved_rows,
            wrongly_pruned=wrongly_pruned,
            sat_out=order.sat_out + report.sat_out,
            rested=order.rested,
            miscounted=self.miscounted,
            copied=copied,
            verified_copies=verified_copies,
            **_told(raw.stages),
        )

    def _copies(self, raw: RawStep) -> tuple[int, ...]:
        """Return the handles of those whose draft in this step is a match's."""
        if raw.counter != self._last + 1:  # what is known of the drafts is that of an earlier step
            return ()
        drafts = raw.drafts
        handles = (entry.handle for entry in raw.entries if entry.is_copy and entry.request_id in drafts)
        return tuple(islice(handles, MAX_REQUESTS))

    def _note_copies(self, raw: RawStep) -> tuple[int, ...]:
        """Note whose next draft is a match's, and return their handles."""
        rows = set(raw.report.copied)
        for entry, row in zip(raw.entries, raw.batch_rows, strict=True):
            entry.is_copy = row in rows
        return tuple(islice((entry.handle for entry in raw.entries if entry.is_copy), MAX_REQUESTS))

    def _compare(self, offered: int, accepted: int, vllms_drafted: int, vllms_accepted: int) -> None:
        """Hold a step's rows against vLLM's own counters.

        vLLM takes the last token of every step for the target's own; behind a draft that was cut at a token which then
        was accepted, it is that token. It counts as drafted whatever it scheduled, also what adaptive verification
        left out.
        """
        apart = abs(offered - vllms_drafted) + abs(accepted - vllms_accepted)
        if apart and not self.miscounted:
            logger.warning("FASER counts drafts otherwise than vLLM (in a step: %d and %d)", offered, vllms_drafted)
        self.miscounted += apart

    def _rows(self, raw: RawStep) -> tuple[list[RequestRow], _Work]:
        """Return a row for each request, and what they sum up to."""
        rows: list[RequestRow] = []
        prefill = decode = drafts = offered = 0
        report, lengths, draft_of, counts = raw.report, raw.order.lengths, raw.drafts, raw.sampled.counts
        drafted, confidences, pruned, invalid = report.drafted, report.confidences, report.pruned, raw.invalid
        late, admitted = report.late_confidences, report.admitted
        verified_of = dict(zip(draft_of, raw.draft_lengths, strict=True))
        is_next = raw.counter == self._last + 1  # else what is known of the drafts is that of an earlier step
        for (request_id, scheduled), entry, row, context, delivered in zip(
            raw.scheduled.items(), raw.entries, raw.batch_rows, raw.computed, raw.delivered, strict=True
        ):
            if row is None:
                continue
            generated = counts[row] if counts else 0
            verified = told_of = verified_of.get(request_id, 0)
            if admitted is not None and verified:
                scheduled -= verified - admitted[row]
                verified = admitted[row]
            left = pruned[row] if pruned else 0
            accepted = 0
            if verified and generated:
                if report.is_last_accepted:  # under asynchronous scheduling the host knows no draft's tokens
                    accepted = generated - 1 + report.is_last_accepted[row]
                else:
                    last = raw.sampled.lasts[row] if left else -1
                    accepted = _accepted(draft_of[request_id], generated, last, left)
            # An emitting step with one row per token decodes; anything else computes prompt.
            is_prefill = scheduled > verified + 1 or not generated
            if is_prefill:
                prefill += scheduled
            else:
                decode += 1
                drafts += verified
            limit = lengths.get(request_id, 0)
            if generated and not delivered:  # it ended while the step ran: vLLM threw its tokens away and counts none
                rows.append(RequestRow(entry.handle, scheduled, limit, 0, 0, 0, 0, 0, context, is_prefill))
                continue
            if delivered and not entry.has_emitted:
                entry.has_emitted = True
                if len(raw.events) < MAX_REQUESTS:
                    raw.events.append(RequestEvent("first_token", entry.handle, raw.time_s, delivered))
            valid = told_of - invalid.get(request_id, 0)  # a grammar forbids the end of a draft
            offered += valid
            known = late.get(request_id, entry.confidences if is_next else ())
            rows.append(
                RequestRow(
                    entry.handle,
                    scheduled,
                    limit,
                    drafted[row] if drafted else 0,
                    min(verified, valid),
                    left,
                    accepted,
                    delivered or 0,
                    context,
                    is_prefill,
                    known[: told_of + 1],  # scheduler and grammar only ever cut a draft's end
                )
            )
            entry.confidences = confidences[row] if confidences else ()
        for entry, told in raw.deferred:
            entry.confidences = told
        return rows[:MAX_REQUESTS], _Work(prefill, decode, drafts, offered)


def _told(stages: StageStanding | None) -> dict[str, Any]:
    """Return a record's fields about stages."""
    if stages is None:
        return {}
    return {"stage_bounds": stages.bounds, "stage_moves": stages.moves, "is_moving": stages.is_moving}


def _accepted(draft: list[int], generated: int, last: int, pruned: int) -> int:
    """Return how many draft tokens were accepted; a pruned draft ends without a token of the target's own.

    A token that replaces a rejected one is never the rejected one, so the last token tells which it was.
    """
    tests = len(draft) + 1 - pruned
    is_all = pruned > 0 and generated == tests and last == draft[tests - 1]
    return tests if is_all else generated - 1


def ends_wrongly(row: RequestRow) -> bool:
    """Tell whether a draft was cut at a token that the target then accepted; it is the last one that was tested."""
    return row.pruned > 0 and row.accepted == row.verified + 1 - row.pruned
