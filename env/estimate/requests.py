"""The live requests of one engine as one numpy table, an entry per request, in order of first appearance.

Called by env/estimate/engine_state.py only. Requests appear by an arrival or by a step's row, and leave by finish or
abort, or when nothing was heard of them for very long. Never loops over rows in Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...engine_adapter.arrays import Bools, Floats, Ints
from ...engine_adapter.protocol import LARGEST_PRIORITY, MAX_DRAFT_LENGTH, MAX_REQUESTS, RequestEvent
from ..estimate import requests_kernel as kernel
from .acceptance import REQUEST_MEMORY_STEPS, UNTRIED_RECORDS
from .objectives import NO_CLASSES, ObjectiveClasses
from .step_rows import StepRows

IDLE_RECORDS = 64  # not in a step for this long: not counted as running
FORGOTTEN_RECORDS = 4096  # its finish event was lost
KEEP, FADE = 1.0 - 1.0 / REQUEST_MEMORY_STEPS, 1.0 - 1.0 / UNTRIED_RECORDS

COLUMNS: Final = {
    "handle": kernel.HANDLE, "seen": kernel.SEEN, "born": kernel.BORN, "context": kernel.CONTEXT,
    "drafter": kernel.DRAFTER, "emitted": kernel.EMITTED, "limit": kernel.LIMIT, "priority": kernel.PRIORITY,
    "most": kernel.MOST, "is_prefill": kernel.IS_PREFILL, "is_preempted": kernel.IS_PREEMPTED,
}  # fmt: skip
TIMES: Final = {
    "arrival_s": kernel.ARRIVED, "first_token_s": kernel.FIRST_TOKEN, "ttft_s": kernel.TTFT, "tpot_s": kernel.TPOT,
}  # fmt: skip


class Slack(NamedTuple):
    """How far requests are ahead (+) of their objectives or behind (-), (n,) each; infinite where there is none."""

    seconds: Floats  # that are left for the first token, while there is none
    tokens: Floats  # after it: what is there beyond what was due


@dataclass(slots=True)
class RequestTable:
    """Live requests: of every array the first `size` entries."""

    k_max: int
    size: int = 0
    _table: Ints = field(init=False)  # (fields, capacity)
    _evidence: Floats = field(init=False)  # (trials, successes), (2, capacity, k_max)
    _times: Floats = field(init=False)  # (TIMES, capacity)
    _places: Ints = field(init=False)  # (capacity,) of the last record's rows
    _batch: tuple[Bools, Bools] | None = None  # running and decoding, until something changes
    _batch_record: int = -1

    def __post_init__(self) -> None:
        self._table = np.zeros((kernel.FIELDS, 64), np.int64)
        self._evidence = np.zeros((2, 64, self.k_max))
        self._times, self._places = np.zeros((kernel.TIMES, 64)), np.zeros(64, np.int64)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one column of the live requests, (size,); a view, but for what is true or false."""
        if name in TIMES:
            return self._times[TIMES[name], : self.size]
        values = self._table[COLUMNS[name], : self.size]
        return values != 0 if name.startswith("is_") else values

    @property
    def trials(self) -> Floats:
        """(size, k_max) view: how often each position was tried, with forgetting."""
        return self._evidence[0, : self.size]

    @property
    def successes(self) -> Floats:
        """(size, k_max) view: how often it was accepted."""
        return self._evidence[1, : self.size]

    def running(self, record_number: int) -> Bools:
        """Return (size,) which requests are in the batch now; not to be written to."""
        return self._in_batch(record_number)[0]

    def decoding(self, record_number: int) -> Bools:
        """Return (size,) which of them are past their prompt; not to be written to."""
        return self._in_batch(record_number)[1]

    def missed(self, chosen: Bools) -> int:
        """Return how many tokens of the chosen requests, (size,), a drafter lacks that skips where none are drafted."""
        lag = self.column("context") - self.column("drafter")
        return int(np.maximum(lag[chosen], 0).sum())

    def slack(self, now_s: float) -> Slack:
        """Return how far each request is ahead of its objectives at this time of the engine's clock."""
        return Slack._make(kernel.slack(self._table, self._times, self.size, now_s))

    def apply(self, events: list[RequestEvent], record_number: int, classes: ObjectiveClasses = NO_CLASSES) -> None:
        """Take in arrivals, with the objectives that their classes give them, and preemptions."""
        for event in events:
            if event.kind == "arrival":
                self._arrive(event, record_number, classes)
            elif event.kind == "preempt":
                place = kernel.find(self._table, self.size, event.handle, 0)
                if place >= 0:
                    self._table[kernel.IS_PREEMPTED, place] = 1
                    self._batch = None

    def depart(self, events: list[RequestEvent]) -> None:
        """Take in finishes and aborts; after `update`, since a record has the last row of a request it ends."""
        if gone := [event.handle for event in events if event.kind in ("finish", "abort")]:
            self._remove(gone)

    def update(
        self,
        rows: StepRows,
        trials: Floats,
        successes: Floats,
        record_number: int,
        caught_up: int = 0,
        time_s: float = 0.0,
    ) -> Ints:
        """Take in one step's rows; trials and successes are (n, k_max) as from `count_trials`.

        :param time_s: of the step's end; the first tokens that were seen in it count as of then
        :param caught_up: tokens the drafter made up for: while it does, only who drafts is known to be up to date
        Return (n,) draft lengths that were in force when the verified drafts were made, 0 where not known.
        """
        self._reserve(rows.told.shape[1])
        self.size, limit = kernel.take_in(
            self._table, self._evidence, self._times, self._places, self.size, rows.told, trials, successes,
            record_number, float(time_s), MAX_DRAFT_LENGTH, caught_up > 0, KEEP, FADE,
        )  # fmt: skip
        self._batch = None
        return limit

    def evict(self, record_number: int) -> int:
        """Drop requests that nothing was heard of for very long; return how many."""
        last = np.maximum(self.column("seen"), self.column("born"))
        stale = self.column("handle")[record_number - last > FORGOTTEN_RECORDS].tolist()
        if self.size - len(stale) > MAX_REQUESTS:
            order = np.argsort(last, kind="stable")
            stale = self.column("handle")[order[: self.size - MAX_REQUESTS]].tolist()
        if stale:
            self._remove(stale)
        return len(stale)

    def _in_batch(self, record_number: int) -> tuple[Bools, Bools]:
        if self._batch is None or self._batch_record != record_number:
            self._batch = kernel.in_batch(self._table, self.size, record_number, IDLE_RECORDS)
            self._batch_record = record_number
        return self._batch

    def _arrive(self, event: RequestEvent, record_number: int, classes: ObjectiveClasses) -> None:
        self._reserve(1)
        wanted = classes.objective(event)
        self.size = kernel.arrive(
            self._table, self._evidence, self._times, self.size, event.handle, record_number,
            float(event.time_s), max(min(event.priority, LARGEST_PRIORITY), -LARGEST_PRIORITY), event.most,
            wanted.ttft_s, wanted.tpot_s,
        )  # fmt: skip
        self._batch = None

    def _reserve(self, more: int) -> None:
        """Make room for so many requests more."""
        capacity = len(self._places)
        if self.size + more <= capacity:
            return
        wider = max(2 * capacity, self.size + more) - capacity
        self._table = np.concatenate([self._table, np.zeros((kernel.FIELDS, wider), np.int64)], axis=1)
        self._evidence = np.concatenate([self._evidence, np.zeros((2, wider, self.k_max))], axis=1)
        self._times = np.concatenate([self._times, np.zeros((kernel.TIMES, wider))], axis=1)
        self._places = np.concatenate([self._places, np.zeros(wider, np.int64)])

    def _remove(self, handles: list[int]) -> None:
        gone = np.array(handles, np.int64)
        self.size = kernel.remove(self._table, self._evidence, self._times, self.size, gone)
        self._batch = None
