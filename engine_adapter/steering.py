"""The engine's side of the loop: lengths for the next step, a record of the last one, and who is alive.

Owned by the scheduler mixin and called on the engine thread only; knows nothing of vLLM but the few request
attributes named in `LiveRequest`. Never waits: what cannot be sent is dropped and counted.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from .lease import Lease
from .protocol import (
    MAX_REQUESTS,
    ActionSet,
    EventKind,
    FromController,
    FromEngine,
    Goodbye,
    Hello,
    HelloRequest,
    Prune,
    RequestEvent,
    RequestRow,
    StepRecord,
)
from .steps import StepOrder, StepReport

logger = logging.getLogger(__name__)

_NO_REPORT = StepReport()


class Link(Protocol):
    """Both directions of the wire (`EngineLink`); no call may wait."""

    dropped: int
    refused: Counter[str]

    def send(self, message: FromEngine) -> None: ...

    def receive(self) -> list[FromController]: ...

    def close(self, wait_s: float = ...) -> None: ...


class LiveRequest(Protocol):
    """What is read of vLLM's Request (0.32, v1/request.py)."""

    num_computed_tokens: int
    max_tokens: int
    priority: int
    is_prefill_chunk: bool
    num_prompt_tokens: int

    @property
    def num_output_tokens(self) -> int: ...


@dataclass(slots=True)
class Entry:
    """One live request as the adapter sees it."""

    handle: int
    request_id: str
    request: LiveRequest
    arrived_s: float
    emitted: int = 0
    confidences: tuple[float, ...] = ()  # of the draft tokens that wait for verification, and of a dropped one

    def arrival(self) -> RequestEvent:
        """Return the event that tells a controller which id the handle stands for."""
        request = self.request
        return RequestEvent(
            "arrival", self.handle, self.arrived_s, request.num_prompt_tokens, self.request_id, request.priority
        )


@dataclass(slots=True)
class BatchOutcome:
    """One step's result, as the scheduler mixin found it on vLLM's objects."""

    scheduled: dict[str, int]
    drafts: dict[str, list[int]]
    row_of: dict[str, int]
    sampled: list[list[int]]
    running: int
    waiting: int
    kv_usage: float
    report: StepReport | None


@dataclass(slots=True)
class Default:
    """Draft lengths without a lease: the operator's Dynamic-SD lookup by batch size, else one number."""

    length: int
    lookup: list[int] | None = None

    def at(self, batch: int) -> int:
        """Return the length for `batch` scheduled requests."""
        if self.lookup is None:
            return self.length
        return self.lookup[min(batch, len(self.lookup) - 1)]


@dataclass
class Steering:
    """State between two steps of one engine."""

    hello: Hello
    link: Link
    lease: Lease
    default: Default
    entries: dict[str, Entry] = field(default_factory=dict)
    events: list[RequestEvent] = field(default_factory=list)
    step: int = 0
    records: int = 0
    cost_s: float = 0.0  # thread CPU time spent here since the last record
    _handles: int = 0
    _departed: list[Entry] = field(default_factory=list)
    _last_end_s: float = 0.0
    _prune: Prune | None = None  # what was in force when the drafts of the step under way were drawn

    def introduce(self) -> None:
        """Send HELLO with every live request."""
        roster = [entry.arrival() for entry in list(self.entries.values())[:MAX_REQUESTS]]
        self.link.send(msgspec.structs.replace(self.hello, roster=roster))

    def arrive(self, request_id: str, request: LiveRequest) -> None:
        """Count a new request in."""
        self._handles += 1
        entry = Entry(self._handles, request_id[:512], request, time.monotonic())
        self.entries[request_id] = entry
        if len(self.events) < MAX_REQUESTS:
            self.events.append(entry.arrival())

    def leave(self, request_id: str, is_abort: bool) -> None:
        """Count a request out; its row in the step under way is still written."""
        entry = self.entries.get(request_id)
        if entry is not None:
            self._note("abort" if is_abort else "finish", entry, entry.request.num_output_tokens)
            self._departed.append(entry)

    def preempt(self, request_id: str) -> None:
        """Note that a request lost its KV cache."""
        if (entry := self.entries.get(request_id)) is not None:
            entry.confidences = ()
            self._note("preempt", entry, entry.request.num_output_tokens)

    def _note(self, kind: EventKind, entry: Entry, tokens: int) -> None:
        if len(self.events) < MAX_REQUESTS:
            self.events.append(RequestEvent(kind, entry.handle, time.monotonic(), tokens))

    def order(self, scheduled: dict[str, int], started_s: float) -> StepOrder:
        """Latch the draft length of every scheduled request: the drafting of this step, the verification of the next.

        A lease that arrives later waits for the next call, so that no length ever depends on a token drawn in
        this round (docs/decisions.md, exactness).
        """
        self.step += 1
        now_s = time.monotonic()
        self._poll(now_s)
        action = self.lease.in_force(self.step, now_s)
        if action is None:
            default = min(self.default.at(len(scheduled)), self.lease.k_max)
            named: dict[int, int] = {}
            epoch = sequence = 0
            stop = None
        else:
            default, epoch, sequence = action.default_length, action.epoch, action.sequence
            named = dict(zip(action.handles, action.lengths, strict=True))
            # With async scheduling the next step is scheduled, at full lengths, before this one has drafted.
            stop = None if self.hello.is_async else action.stop
        lengths = self._lengths(scheduled, named, default)
        prune, self._prune = self._prune, None if action is None else action.prune
        return StepOrder(lengths, self.step, started_s, now_s - started_s, epoch, sequence, stop, prune)

    def _lengths(self, scheduled: dict[str, int], named: dict[int, int], default: int) -> dict[str, int]:
        lengths: dict[str, int] = {}
        entries = self.entries
        for request_id, rows in scheduled.items():
            entry = entries.get(request_id)
            if entry is None:
                lengths[request_id] = default
                continue
            length = named.get(entry.handle, default) if named else default
            if length and not entry.emitted and _is_mid_prompt(entry.request, rows):
                length = 0  # nothing is sampled, so nothing is drafted; it must not deepen the others' rounds
            if length:
                # This step emits one token at least and the next one ends with a token of its own, so a longer
                # draft than what then remains could never be emitted.
                room = entry.request.max_tokens - entry.request.num_output_tokens - 2
                if length > room:
                    length = room if room > 0 else 0
            lengths[request_id] = length
        return lengths

    def record(self, order: StepOrder, outcome: BatchOutcome) -> None:
        """Send what the step did."""
        now_s = time.monotonic()
        report = outcome.report or _NO_REPORT
        rows, prefill, decode, drafts = self._rows(order, outcome, report)
        self.records += 1
        record = StepRecord(
            boot_id=self.hello.boot_id,
            counter=self.records,
            step=order.step,
            time_s=now_s,
            # With batches in flight a step begins before the last one ended: count each second once.
            step_s=now_s - max(order.started_s, self._last_end_s),
            schedule_s=order.schedule_s,
            verify_s=report.verify_s,
            sample_s=report.sample_s,
            draft_s=report.draft_s,
            overlap_s=report.overlap_s,
            adapter_s=self.cost_s,
            running=outcome.running,
            waiting=outcome.waiting,
            prefill_tokens=prefill,
            decode_tokens=decode,
            draft_tokens=drafts,
            kv_usage=outcome.kv_usage,
            split=None,
            frontier=None,
            lease_epoch=order.lease_epoch,
            lease_sequence=order.lease_sequence,
            dropped=self.link.dropped,
            rejected=self.link.refused.total(),
            events=self.events,
            rows=rows,
            caught_up=report.caught_up,
            draft_rounds=None if report.rounds is None else len(report.rounds),
            drawn_tokens=None if report.rounds is None else sum(report.rounds),
        )
        self._last_end_s = now_s
        self.cost_s = 0.0
        self.events = []
        self.link.send(record)
        self._forget_departed()

    def _rows(
        self, order: StepOrder, outcome: BatchOutcome, report: StepReport
    ) -> tuple[list[RequestRow], int, int, int]:
        rows: list[RequestRow] = []
        prefill = decode = drafts = 0
        entries, lengths, draft_of, row_of = self.entries, order.lengths, outcome.drafts, outcome.row_of
        sampled, drafted, confidences, pruned = outcome.sampled, report.drafted, report.confidences, report.pruned
        for request_id, scheduled in outcome.scheduled.items():
            entry = entries.get(request_id)
            row = row_of.get(request_id)
            if entry is None or row is None:
                continue
            request = entry.request
            generated = len(sampled[row]) if sampled else 0
            draft = draft_of.get(request_id)
            verified = len(draft) if draft else 0
            emitted = request.num_output_tokens
            fresh = emitted - entry.emitted
            # An emitting step with one row per token decodes; anything else computes prompt.
            is_prefill = scheduled > verified + 1 or not generated
            if is_prefill:
                prefill += scheduled
            else:
                decode += 1
                drafts += verified
            if fresh and not entry.emitted:
                self._note("first_token", entry, emitted)
            entry.emitted = emitted
            rows.append(
                RequestRow(
                    entry.handle,
                    scheduled,
                    lengths.get(request_id, 0),
                    drafted[row] if drafted else 0,
                    verified,
                    pruned[row] if pruned else 0,
                    _accepted(draft, sampled[row], pruned[row] if pruned else 0) if draft and generated else 0,
                    fresh if fresh > 0 else 0,
                    request.num_computed_tokens,
                    is_prefill,
                    entry.confidences[: verified + 1],  # scheduler and grammar only ever cut a draft's end
                )
            )
            entry.confidences = confidences[row] if confidences else ()
        return rows[:MAX_REQUESTS], prefill, decode, drafts

    def _forget_departed(self) -> None:
        for entry in self._departed:
            if self.entries.get(entry.request_id) is entry:
                del self.entries[entry.request_id]
        self._departed.clear()

    def _poll(self, now_s: float) -> None:
        for message in self.link.receive():
            if isinstance(message, ActionSet):
                if reason := self.lease.offer(message, self.step, now_s):
                    self._refuse(reason, f"action set {message.epoch}.{message.sequence}")
            elif isinstance(message, HelloRequest):
                self.introduce()
            elif not self.lease.release(message):
                self._refuse("foreign", f"release of epoch {message.epoch}")

    def _refuse(self, reason: str, detail: str) -> None:
        refused = self.link.refused
        refused[reason] += 1
        if refused[reason] == 1:
            logger.warning("FASER refused a message (%s): %s; further ones are only counted", reason, detail)

    def close(self) -> None:
        """Say goodbye and give the socket back."""
        self.link.send(Goodbye(self.hello.boot_id))
        self.link.close()

    def abandon(self) -> None:
        """Say goodbye without waiting for anything, after a failure on the engine thread."""
        self.link.send(Goodbye(self.hello.boot_id))
        self.link.close(wait_s=0.0)


def _is_mid_prompt(request: LiveRequest, rows: int) -> bool:
    return request.num_computed_tokens + rows < request.num_prompt_tokens


def _accepted(draft: list[int], sampled: list[int], pruned: int) -> int:
    """Return how many draft tokens were accepted; a pruned draft ends without a token of the target's own.

    A token that replaces a rejected one is never the rejected one, so the last token tells which it was.
    """
    tests = len(draft) + 1 - pruned
    is_all = pruned > 0 and len(sampled) == tests and sampled[-1] == draft[tests - 1]
    return tests if is_all else len(sampled) - 1
