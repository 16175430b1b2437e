"""The engine's side of the loop: lengths for the next step, a record of the last one, and who is alive.

Owned by the scheduler mixin and called on the engine thread only; knows nothing of vLLM but the few request
attributes named in `LiveRequest`. Never waits: what cannot be sent is dropped and counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import msgspec

from ..link.quiet_moment import MOST_S, QUIET_MOMENTS
from ..operator_log import operator_log
from ..protocol import (
    MAX_REQUESTS,
    ActionSet,
    Admission,
    EventKind,
    FromController,
    FromEngine,
    Goodbye,
    Hello,
    HelloRequest,
    MatchRule,
    Prune,
    RequestEvent,
    StepRecord,
)
from .draft_room import latched
from .extra_args import wishes_of
from .lease import Lease
from .orders import StepOrder, StepReport
from .record import Entry, LiveRequest, RawStep, RecordBuilder, StageStanding
from .resting import Resting
from .sampled_tokens import SampledTokens

logger = operator_log(__name__)

_NO_REPORT = StepReport()
# Behind a step the engine's thread is in Python for a millisecond or two, and waits while the link's thread is.
# A record may come later: its answer is looked for when the next step is over. Best in that step's quiet moment,
# which an idle engine does not have; where the runner is in another process, so much later behind a long step.
LONG_STEP_S: Final = 0.04
REST_S: Final = 0.003


class Link(Protocol):
    """Both directions of the wire (`EngineLink`); no call may wait."""

    dropped: int
    refused: Counter[str]

    def send(self, message: FromEngine) -> None: ...

    def send_later(self, make: Callable[[], StepRecord], rest_s: float = ...) -> None: ...

    def receive(self) -> list[FromController]: ...

    def close(self, wait_s: float = ...) -> None: ...


@dataclass(slots=True)
class BatchOutcome:
    """One step's result, as the scheduler mixin found it on vLLM's objects."""

    scheduled: dict[str, int]
    drafts: dict[str, list[int]]
    row_of: dict[str, int]
    sampled: SampledTokens
    delivered: dict[str, int]  # tokens that vLLM handed out, by request
    running: int
    waiting: int
    kv_usage: float
    report: StepReport | None
    invalid: dict[str, int] = field(default_factory=dict)  # scheduled drafts that a grammar forbade, by request
    counted: tuple[int, int] | None = None  # vLLM's own (drafted, accepted); None: it keeps no statistics
    stages: StageStanding | None = None  # None: stages cannot move


@dataclass(slots=True)
class Default:
    """Draft lengths without a lease: the operator's Dynamic-SD lookup by batch size, else one number."""

    length: int
    lookup: list[int] | None = None
    frontier: int = 0  # tokens to draft ahead

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
    context: int | None = None  # longest sequence beside which anybody is drafted for; None: a runner looks at each
    entries: dict[str, Entry] = field(default_factory=dict)
    events: list[RequestEvent] = field(default_factory=list)
    step: int = 0
    records: int = 0
    cost_s: float = 0.0  # thread CPU time spent here since the last record
    rested: int = 0  # requests that are left out of the step that is scheduled next
    stage_bounds: tuple[int, ...] | None = None  # last asked for: what a lease ordered outlasts it; None: nothing yet
    is_sharing: bool = False  # requests may copy what others with the same salt answered
    _salts: dict[str, str] = field(default_factory=dict)  # of requests that came since the last order
    _resting: Resting = field(init=False)
    _handles: int = 0
    _departed: list[tuple[Entry, int | None]] = field(default_factory=list)  # and where its event is
    _preempted: list[Entry] = field(default_factory=list)  # since the last record
    _builder: RecordBuilder = field(init=False)
    _last_end_s: float = 0.0
    _looked_s: float | None = None  # for messages
    _prune: Prune | None = None  # what was in force when the drafts of the step under way were drawn

    def __post_init__(self) -> None:
        self._builder = RecordBuilder(self.hello.boot_id, self.link)
        self._resting = Resting(self.hello.is_async)

    def introduce(self) -> None:
        """Send HELLO with every live request."""
        roster = [entry.arrival() for entry in list(self.entries.values())[:MAX_REQUESTS]]
        self.link.send(msgspec.structs.replace(self.hello, roster=roster, epoch=self.lease.epoch))

    def arrive(self, request_id: str, request: LiveRequest) -> None:
        """Count a new request in."""
        self._handles += 1
        wishes = wishes_of(request)
        for reason, fault in wishes.faults:
            self._refuse(reason, fault)
        arrived_s = time.monotonic() - waited_s(request)
        entry = Entry(self._handles, request_id[:512], request, arrived_s, wishes.most, wishes.ttft_ms, wishes.tpot_ms)
        self.entries[request_id] = entry
        if self.is_sharing:
            self._salts[request_id] = str(getattr(request, "cache_salt", None) or "")
        if len(self.events) < MAX_REQUESTS:
            self.events.append(entry.arrival())

    def go_on(self, request_id: str) -> None:
        """Note that a request will have another prompt, and other limits."""
        if (entry := self.entries.get(request_id)) is not None:
            entry.is_session, entry.roomy_until = True, 0

    def leave(self, request_id: str, is_abort: bool, has_stop_strings: bool = False) -> None:
        """Count a request out; its row in the step under way is still written.

        vLLM's front end finds stop strings, and ends a request that said one by an abort, as if its client had gone.
        """
        entry = self.entries.get(request_id)
        if entry is not None:
            place = self._note("abort" if is_abort else "finish", entry, is_abort and has_stop_strings)
            self._departed.append((entry, place))

    def preempt(self, request_id: str) -> None:
        """Note that a request lost its KV cache."""
        if (entry := self.entries.get(request_id)) is not None:
            entry.was_preempted = True
            entry.roomy_until = 0
            self._preempted.append(entry)
            self._note("preempt", entry)

    def _note(self, kind: EventKind, entry: Entry, may_be_stop: bool = False) -> int | None:
        """Note an event; return its place among those of the next record, None if there is no room for it."""
        if len(self.events) >= MAX_REQUESTS:
            return None
        event = RequestEvent(kind, entry.handle, time.monotonic(), entry.emitted, may_be_stop=may_be_stop)
        self.events.append(event)
        return len(self.events) - 1

    def order(self, scheduled: dict[str, int], started_s: float) -> StepOrder:
        """Latch the draft length of every scheduled request: the drafting of this step, the verification of the next.

        A lease that arrives later waits for the next call, so that no length ever depends on a token drawn in
        this round (docs/design/exactness.md).
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
        match = None if action is None or action.match is None or not self.hello.copy_max else action.match
        copied = None if match is None else match.most
        longest = max(self.lease.k_max, self.lease.copy_max)
        lengths, copies = latched(scheduled, self.entries, self.step, longest, (named, default), copied)
        sat_out = 0
        if self.context is not None and self._longest(scheduled) + self.lease.k_max > self.context:
            sat_out = sum(map(bool, lengths.values()))
            lengths = dict.fromkeys(scheduled, 0)
        prune, self._prune = self._prune, None if action is None else action.prune
        frontier = self._frontier(action)
        schedule_s, ahead = now_s - started_s, self._prune
        order = StepOrder(
            lengths, self.step, started_s, schedule_s, epoch, sequence, stop, prune, ahead, frontier, sat_out
        )
        order.split = self._split(action)
        order.rested, self.rested = self.rested, 0
        if action is not None and action.stage_bounds is not None and self.hello.stages is not None:
            self.stage_bounds = action.stage_bounds
        if action is not None and action.admission is not None and self.hello.is_adaptive:
            self._admit(order, action, action.admission)
        if self._salts:
            order.salts, self._salts = self._salts, {}
        if match is not None:
            self._copy(order, match, copies)
        return order

    def _copy(self, order: StepOrder, match: MatchRule, copies: dict[str, int]) -> None:
        order.match, order.match_lengths = match, copies
        if match.handles:
            weights, known = dict(zip(match.handles, match.weights, strict=True)), self.entries
            order.match_weights = {name: weights.get(known[name].handle, 1.0) for name in copies if name in known}

    def leave_out(self, running: int, vllm_step: int) -> None:
        """Leave those who rest out of the step that is about to be scheduled.

        :param running: requests in vLLM's batch
        :param vllm_step: vLLM's number of the step
        """
        action = self.lease.in_force(self.step + 1, time.monotonic()) if self.hello.rest_steps else None
        rest = None if action is None else action.rest
        self.rested = self._resting.leave_out(rest, running, self.entries, vllm_step)

    def _admit(self, order: StepOrder, action: ActionSet, admission: Admission) -> None:
        order.costs = admission.rows, admission.seconds
        if admission.weights and order.lengths:
            named = dict(zip(action.handles, admission.weights, strict=True))
            known = self.entries
            weights = {name: named.get(known[name].handle, 1.0) if name in known else 1.0 for name in order.lengths}
            mean = sum(weights.values()) / len(weights)
            order.weights = {name: weight / mean for name, weight in weights.items()}

    def _longest(self, scheduled: dict[str, int]) -> int:
        """Return the tokens of the longest sequence in the step, its drafts included."""
        known = self.entries
        return max(
            (known[name].request.num_computed_tokens + rows for name, rows in scheduled.items() if name in known),
            default=0,
        )

    def _frontier(self, action: ActionSet | None) -> int:
        """Return how many tokens may be drafted ahead; none where HELLO offers none."""
        asked = None if action is None else action.frontier
        return min(self.default.frontier if asked is None else asked, self.hello.frontier)

    def _split(self, action: ActionSet | None) -> int | None:
        """Return which split is asked for: unsplit without an opinion or for one that is not offered."""
        offered = len(self.hello.splits)
        if offered < 2:
            return None
        asked = None if action is None else action.split
        return asked if asked is not None and asked < offered else 0

    def record(self, order: StepOrder, outcome: BatchOutcome) -> None:
        """Gather what the step did; the link's thread makes a record of it."""
        now_s = time.monotonic()
        scheduled, drafts = outcome.scheduled, outcome.drafts
        known = self.entries
        try:
            entries = [known[request_id] for request_id in scheduled]
        except KeyError:  # it came before FASER, or left before its last step was reported
            scheduled = {request_id: rows for request_id, rows in scheduled.items() if request_id in known}
            entries = [known[request_id] for request_id in scheduled]
        delivered = list(map(outcome.delivered.get, scheduled))
        for entry, tokens in zip(entries, delivered, strict=True):
            if tokens:
                entry.emitted += tokens
        if self._departed:
            self._forget_departed()
        self.records += 1
        deferred = _told_later(outcome.report, scheduled, order.rested)
        raw = RawStep(
            order,
            outcome.report or _NO_REPORT,
            scheduled,
            entries,
            list(map(outcome.row_of.get, scheduled)),
            [entry.request.num_computed_tokens for entry in entries],
            delivered,
            drafts,
            list(map(len, drafts.values())),
            outcome.invalid,
            outcome.sampled,
            self.events,
            self._preempted,
            self.records,
            now_s,
            # With batches in flight a step begins before the last one ended: count each second once.
            now_s - max(order.started_s, self._last_end_s),
            self.cost_s,
            outcome.running,
            outcome.waiting,
            outcome.kv_usage,
            [(known[name], told) for name, told in deferred.items() if name in known],
            outcome.counted,
            outcome.stages,
        )
        self._last_end_s = now_s
        self.cost_s = 0.0
        self.events, self._preempted = [], []
        is_idle = not outcome.running and not outcome.waiting  # no step follows, and no quiet moment
        self.link.send_later(partial(self._builder.build, raw), 0.0 if is_idle else rest_s(raw.step_s))

    def _forget_departed(self) -> None:
        """Let go of requests that left, whose last tokens are counted now."""
        for entry, place in self._departed:
            if place is not None:
                self.events[place] = msgspec.structs.replace(self.events[place], tokens=entry.emitted)
            if self.entries.get(entry.request_id) is entry:
                del self.entries[entry.request_id]
        self._departed.clear()

    def _poll(self, now_s: float) -> None:
        looked_s = self._looked_s
        if looked_s is not None and self._last_end_s > looked_s:
            looked_s += now_s - self._last_end_s  # a step may outlast a lease; a pause between two of them ends it
        for message in self.link.receive():
            if isinstance(message, ActionSet):
                if reason := self.lease.offer(message, self.step, now_s, looked_s):
                    self._refuse(reason, f"action set {message.epoch}.{message.sequence}")
            elif isinstance(message, HelloRequest):
                self.introduce()
            elif not self.lease.release(message):
                self._refuse("foreign", f"release of epoch {message.epoch}")
        self._looked_s = now_s

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


def _told_later(report: StepReport | None, scheduled: dict[str, int], rested: int) -> dict[str, tuple[float, ...]]:
    """Return confidences of drafts whose requests are not in the step: of two groups, or of who was left out of it."""
    if report is None or not rested:
        return {} if report is None else report.deferred
    return report.deferred | {name: told for name, told in report.late_confidences.items() if name not in scheduled}


def rest_s(step_s: float) -> float:
    """Return how long a record may wait behind a step of this length; a quiet moment in the next one ends the wait."""
    if QUIET_MOMENTS.is_told:
        return min(step_s, MOST_S)
    return REST_S if step_s >= LONG_STEP_S else 0.0


def waited_s(request: LiveRequest) -> float:
    """Return the time since the server took a request in: the engine looks at new ones between two steps only.

    By the wall clock, as vLLM notes it; a clock that was set meanwhile is limited to a minute.
    """
    arrived_s: float | None = getattr(request, "arrival_time", None)
    return 0.0 if arrived_s is None else min(max(time.time() - arrived_s, 0.0), 60.0)
