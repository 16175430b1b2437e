"""The live requests of one engine as one numpy table, a row per request, in order of first appearance.

Called by env/state.py only. Requests appear by an arrival or by a step's row, and leave by finish or abort, or
when nothing was heard of them for very long. Never loops over rows in Python on the common path.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple

from ..engine_adapter.protocol import MAX_DRAFT_LENGTH, MAX_REQUESTS, RequestEvent, RequestRow
from .acceptance import REQUEST_MEMORY_STEPS, UNTRIED_RECORDS, Floats, Ints

Bools = npt.NDArray[np.bool_]

IDLE_RECORDS = 64  # not in a step for this long: not counted as running
FORGOTTEN_RECORDS = 4096  # its finish event was lost


@dataclass(frozen=True, slots=True)
class StepRows:
    """One record's rows as (n,) int64 arrays; names and units as in RequestRow."""

    handle: tuple[int, ...]
    draft_limit: Ints
    drafted: Ints
    verified: Ints
    pruned: Ints
    accepted: Ints
    emitted: Ints
    context: Ints
    is_prefill: Bools
    confidences: list[tuple[float, ...]]

    @classmethod
    def from_rows(cls, rows: list[RequestRow]) -> StepRows:
        """Unfold the rows; columns of equal small numbers, which is most of them, cost next to nothing."""
        n = len(rows)
        if not n:
            none = np.zeros(0, np.int64)
            return cls((), none, none, none, none, none, none, none, none.astype(np.bool_), [])
        columns = tuple(zip(*map(astuple, rows), strict=True))
        handle, _, limit, drafted, verified, pruned, accepted, emitted, context, is_prefill, confidences = columns
        try:  # bytes make the fastest arrays; only prompts emit or draft beyond 255
            small = np.frombuffer(bytes(limit + drafted + verified + pruned + accepted + emitted), np.uint8)
            told = small.reshape(6, n).astype(np.int64)
        except ValueError:
            told = np.array((limit, drafted, verified, pruned, accepted, emitted), np.int64)
        prompts = np.frombuffer(bytes(is_prefill), np.bool_)
        seen = np.fromiter(context, np.int64, n)
        return cls(handle, told[0], told[1], told[2], told[3], told[4], told[5], seen, prompts, list(confidences))


@dataclass(slots=True)
class RequestTable:
    """Live requests; `rows` is a structured array whose first `size` entries are alive."""

    k_max: int
    size: int = 0
    _rows: npt.NDArray[Any] = field(init=False)
    _evidence: Floats = field(init=False)  # (trials, successes), (2, capacity, k_max)
    _place: dict[int, int] = field(default_factory=dict)  # handle -> row
    _last_order: tuple[int, ...] = ()
    _last_places: Ints | slice = field(default_factory=lambda: slice(0, 0))

    def __post_init__(self) -> None:
        layout = np.dtype(
            [
                ("handle", np.int64),
                ("seen", np.int64),  # number of the last record with a row of this request; -1: none yet
                ("born", np.int64),  # number of the record in which it appeared
                ("context", np.int64),  # tokens
                ("drafter", np.int64),  # tokens of it that the drafter has seen, if it skips where nothing is drafted
                ("emitted", np.int64),  # tokens
                ("limit", np.int64),  # draft length in force when the draft that waits for verification was made
                ("priority", np.int64),
                ("most", np.int64),  # longest draft that its client allows
                ("arrival_s", np.float64),
                ("is_prefill", np.bool_),
                ("is_preempted", np.bool_),
            ]
        )
        self._rows = np.zeros(64, layout)
        self._evidence = np.zeros((2, 64, self.k_max))

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a view of one column of the live requests, (size,)."""
        return self._rows[: self.size][name]

    @property
    def rows(self) -> npt.NDArray[Any]:
        """View of the live requests' columns, (size,) structured."""
        return self._rows[: self.size]

    @property
    def trials(self) -> Floats:
        """(size, k_max) view: how often each position was tried, with forgetting."""
        return self._evidence[0, : self.size]

    @property
    def successes(self) -> Floats:
        """(size, k_max) view: how often it was accepted."""
        return self._evidence[1, : self.size]

    def running(self, record_number: int) -> Bools:
        """Return (size,) which requests are in the batch now."""
        seen = self.column("seen")
        recent: Bools = (seen >= 0) & (record_number - seen < IDLE_RECORDS) & ~self.column("is_preempted")
        return recent

    def missed(self, chosen: Bools) -> int:
        """Return how many tokens of the chosen requests, (size,), a drafter lacks that skips where none are drafted."""
        lag = self.column("context") - self.column("drafter")
        return int(np.maximum(lag[chosen], 0).sum())

    def apply(self, events: list[RequestEvent], record_number: int) -> None:
        """Take in arrivals and preemptions."""
        for event in events:
            if event.kind == "arrival":
                place = self._add(event.handle, record_number)  # may re-allocate the table
                row = self._rows[place]
                row["arrival_s"], row["priority"] = event.time_s, max(min(event.priority, 1 << 62), -(1 << 62))
                row["most"] = event.most
            elif event.kind == "preempt" and event.handle in self._place:
                self._rows[self._place[event.handle]]["is_preempted"] = True

    def depart(self, events: list[RequestEvent]) -> None:
        """Take in finishes and aborts; after `update`, since a record has the last row of a request it ends."""
        if gone := [event.handle for event in events if event.kind in ("finish", "abort")]:
            self._remove(gone)

    def update(self, rows: StepRows, trials: Floats, successes: Floats, record_number: int, caught_up: int = 0) -> Ints:
        """Take in one step's rows; trials and successes are (n, k_max) as from `count_trials`.

        :param caught_up: tokens the drafter made up for: while it does, only who drafts is known to be up to date
        Return (n,) draft lengths that were in force when the verified drafts were made, 0 where not known.
        """
        where = self._locate(rows.handle, record_number)
        is_slice = isinstance(where, slice)
        table = self._rows[where]  # a view of a slice, else a copy
        table["seen"] = record_number
        table["context"] = rows.context
        is_current = rows.drafted > 0 if caught_up else rows.draft_limit > 0
        table["drafter"] = np.where(is_current, rows.context, table["drafter"])
        table["emitted"] += np.minimum(rows.emitted, 1 << 32)
        limit: Ints = table["limit"].copy()
        # A step in the middle of the prompt drafts nothing.
        is_idle = rows.is_prefill & (rows.drafted == 0)
        table["limit"] = np.where(is_idle, 0, rows.draft_limit) if is_idle.any() else rows.draft_limit
        table["is_prefill"] = rows.is_prefill
        table["is_preempted"] = False
        evidence = self._evidence[:, where]
        has_tried = trials[:, :1] > 0.0
        if has_tried.any():
            evidence *= np.where(has_tried, 1.0 - 1.0 / REQUEST_MEMORY_STEPS, 1.0 - 1.0 / UNTRIED_RECORDS)
            evidence[0] += trials
            evidence[1] += successes
        else:
            evidence *= 1.0 - 1.0 / UNTRIED_RECORDS
        if not is_slice:
            self._rows[where], self._evidence[:, where] = table, evidence
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

    def _locate(self, handles: tuple[int, ...], record_number: int) -> Ints | slice:
        if handles == self._last_order:  # the common case: the same batch as in the step before
            return self._last_places
        places = [self._place.get(handle, -1) for handle in handles]
        if -1 in places:
            places = [self._add(handle, record_number) for handle in handles]
        in_order = places == list(range(len(places)))  # a slice is much faster to read and write
        self._last_order = handles
        self._last_places = slice(0, len(places)) if in_order else np.array(places, np.int64)
        return self._last_places

    def _add(self, handle: int, record_number: int) -> int:
        place = self._place.get(handle)
        if place is not None:
            return place
        if self.size == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
            self._evidence = np.concatenate([self._evidence, np.zeros_like(self._evidence)], axis=1)
        place = self._place[handle] = self.size
        self._rows[place] = np.zeros((), self._rows.dtype)
        self._evidence[:, place] = 0.0
        self._rows[place]["handle"], self._rows[place]["seen"] = handle, -1
        self._rows[place]["born"], self._rows[place]["most"] = record_number, MAX_DRAFT_LENGTH
        self.size += 1
        return place

    def _remove(self, handles: list[int]) -> None:
        places = [place for handle in handles if (place := self._place.pop(handle, None)) is not None]
        if not places:
            return
        keep = np.ones(self.size, np.bool_)
        keep[places] = False
        stay = np.flatnonzero(keep)
        whole = self._rows.view(np.dtype((np.void, self._rows.itemsize)))  # moved as they are, not field by field
        left, evidence = whole.take(stay), self._evidence.take(stay, axis=1)
        self.size = len(stay)
        self._evidence[:, : self.size] = evidence
        whole[: self.size] = left
        self._place = dict(zip(self.column("handle").tolist(), range(self.size), strict=True))
        self._last_order, self._last_places = (), slice(0, 0)
