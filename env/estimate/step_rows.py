"""One record's rows as numpy columns, read from their msgpack without a Python object for each request.

Called by the daemon's link on every record, by env/estimate/engine_state.py, and by whoever stores or shows what a
record said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, overload

import msgspec
import numpy as np

from ...engine_adapter.arrays import Bools, Floats, Ints
from ...engine_adapter.protocol import MAX_DRAFT_LENGTH, MAX_REQUESTS, RequestRow
from ..estimate import requests_kernel as kernel

LARGEST = 1 << 62  # number in a row

_encoder = msgspec.msgpack.Encoder(enc_hook=lambda value: value.item())  # numpy's numbers, in rows that no engine sent
_decoder = msgspec.msgpack.Decoder(list[RequestRow])


class StepSums(NamedTuple):
    """What one step did for all its requests, in tokens."""

    emitted: float
    context: int
    longest: int  # draft
    drafted: int
    is_full: bool  # everybody drafted as much as it was allowed


class Confidences(NamedTuple):
    """The drafter's confidences of n requests' drafts."""

    counts: Ints  # (n,) how many each has
    values: Floats  # all of them in a line

    @classmethod
    def of(cls, drafts: Iterable[Sequence[float]]) -> Confidences:
        """Unfold one sequence for each request."""
        drafts = list(drafts)
        values = [value for draft in drafts for value in draft]
        return cls(np.array([len(draft) for draft in drafts], np.int64), np.array(values, np.float64))


class StepRows(Sequence[RequestRow]):
    """One record's rows: as (n,) int64 columns, names and units as in RequestRow, and one by one on demand."""

    __slots__ = ("_frame", "confidences", "is_single", "told")

    def __init__(self, frame: bytes | memoryview, told: Ints, confidences: Confidences, is_single: bool) -> None:
        self._frame = frame  # the rows as msgpack
        self.told = told  # (11, n), the numbers together, and how many confidences each has
        self.confidences = confidences
        self.is_single = is_single  # 32 bits hold every confidence exactly

    @classmethod
    def of(cls, rows: Sequence[RequestRow]) -> StepRows:
        """Return the rows unfolded, by way of msgpack: msgspec writes it faster than Python takes rows apart."""
        if isinstance(rows, cls):
            return rows
        found = _read(cls, _encoder.encode(rows), is_bounded=False)
        assert found is not None, "a row holds something else than numbers"
        return found

    @classmethod
    def read(cls, frame: bytes | memoryview) -> StepRows | None:
        """Return the rows an engine sent as msgpack; None if they are beyond the bounds, or not as msgspec writes."""
        return _read(cls, frame, is_bounded=True)

    def __len__(self) -> int:
        n: int = self.told.shape[1]
        return n

    @overload
    def __getitem__(self, place: int) -> RequestRow: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[RequestRow]: ...
    def __getitem__(self, place: int | slice) -> RequestRow | Sequence[RequestRow]:
        return _decoder.decode(self._frame)[place]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @property
    def handle(self) -> Ints:
        """Requests' handles."""
        return self._column(kernel.ROW_HANDLE)

    @property
    def draft_limit(self) -> Ints:
        """Draft lengths in force when this step drafted."""
        return self._column(kernel.ROW_LIMIT)

    @property
    def drafted(self) -> Ints:
        """Tokens that were handed over by the drafter."""
        return self._column(kernel.ROW_DRAFTED)

    @property
    def verified(self) -> Ints:
        """Draft tokens verified."""
        return self._column(kernel.ROW_VERIFIED)

    @property
    def pruned(self) -> Ints:
        """Of those, how many left early."""
        return self._column(kernel.ROW_PRUNED)

    @property
    def accepted(self) -> Ints:
        """Draft tokens accepted."""
        return self._column(kernel.ROW_ACCEPTED)

    @property
    def emitted(self) -> Ints:
        """Tokens emitted."""
        return self._column(kernel.ROW_EMITTED)

    @property
    def is_prefill(self) -> Bools:
        """Whether each is still in its prompt."""
        truths: Bools = self._column(kernel.ROW_IS_PREFILL) != 0
        return truths

    def without(self, drafts: Bools, verified: Bools) -> StepRows:
        """Return the rows as if some, (n,), had got no draft, and others, (n,), had verified none."""
        told = self.told.copy()
        for row in (kernel.ROW_LIMIT, kernel.ROW_DRAFTED):
            told[row, drafts] = 0
        for row in (kernel.ROW_VERIFIED, kernel.ROW_PRUNED, kernel.ROW_ACCEPTED):
            told[row, verified] = 0
        return StepRows(self._frame, told, self.confidences, self.is_single)

    def _column(self, row: int) -> Ints:
        column: Ints = self.told[row]
        return column

    @property
    def frame(self) -> msgspec.Raw:
        """The rows as msgpack, byte for byte as they came."""
        return msgspec.Raw(self._frame)

    def sums(self) -> StepSums:
        """Return what all rows come to."""
        return StepSums._make(kernel.add_up(self.told))


def _read(kind: type[StepRows], frame: bytes | memoryview, *, is_bounded: bool) -> StepRows | None:
    content = np.frombuffer(frame, np.uint8)
    content.setflags(write=False)  # the kernel is compiled for this kind
    told, values, is_single, end = kernel.read_rows(content, is_bounded, MAX_REQUESTS, MAX_DRAFT_LENGTH, LARGEST)
    return (
        kind(frame, told, Confidences(told[kernel.ROW_CONFIDENCES], values), is_single) if end == len(content) else None
    )
