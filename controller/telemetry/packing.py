"""The packed per-request columns of the telemetry file: one blob per step, exact and versioned.

Called by the daemon, while what it packs is in the processor's cache, and by every reader of a telemetry file. Since
version 4 a blob of rows is a version byte, the number of rows (uint32) and the bytes of a confidence (4, or 8 where 4
would lose something), little-endian; then the integer columns of protocol.RequestRow up to is_prefill, and how many
confidences each row has, as controller/telemetry/packing_kernel.py writes them; then all confidences. A blob of
lengths is a version byte, their number, and the columns handle and length. Older versions, and draws, are zlib
streams: of msgpack, in version 3 of columns of 2, 4 or 8 bytes a value, handles as differences. zlib took ten times
as long, for as much.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from ...engine_adapter.arrays import Ints
from ...engine_adapter.protocol import MAX_REQUESTS, RequestRow
from ...env.estimate.step_rows import StepRows
from ..decision.canary import Draws
from ..errors import StoreError
from ..telemetry import packing_kernel as kernel

PACKING_VERSION: Final = 4
_READABLE: Final = (1, 2, 3, 4)

SUMMED: Final = ("drafted", "verified", "pruned", "accepted", "emitted")
_COLUMNS: Final = 11
_HEAD_3: Final = struct.Struct("<IBB")  # rows, bytes of an integer, bytes of a confidence
_HEAD: Final = struct.Struct("<BIB")  # version, rows, bytes of a confidence
_HEAD_LENGTHS: Final = struct.Struct("<BI")


class _Columns(msgspec.Struct, array_like=True, gc=False):
    """The request columns of versions 1 and 2; meanings as in protocol.RequestRow.

    Handles are differences to the one before, confidences one run of little-endian floats of `width` bytes: 4 where
    that loses nothing, else 8. `counts` says how many of them belong to each request; empty: none has any.
    """

    handle: list[int]
    scheduled: list[int]
    draft_limit: list[int]
    drafted: list[int]
    verified: list[int]
    pruned: list[int]
    accepted: list[int]
    emitted: list[int]
    context: list[int]
    is_prefill: list[bool]
    counts: list[int]
    width: int
    confidences: bytes


_encoder = msgspec.msgpack.Encoder()
_columns_decoder = msgspec.msgpack.Decoder(_Columns)
_draws_decoder = msgspec.msgpack.Decoder(tuple[list[int], list[int], list[int], list[float]])
_pair_decoder = msgspec.msgpack.Decoder(tuple[list[int], list[int]])


class StepCopies(NamedTuple):
    """Handles of requests whose drafts of one step were copied from their own texts."""

    drafted: frozenset[int] = frozenset()  # handed over in it
    verified: frozenset[int] = frozenset()


class PackedRows(NamedTuple):
    """A step's request rows as they are stored, and the sums of their columns in SUMMED."""

    blob: bytes
    sums: dict[str, int]
    requests: int
    verified_copies: int = 0  # of the verified tokens, those that were copied
    accepted_copies: int = 0


def pack_rows(rows: Sequence[RequestRow], verified_copies: Sequence[int] = ()) -> PackedRows:
    """Return the blob of a step's request rows, and the sums of their columns in SUMMED.

    :param verified_copies: handles of requests whose verified tokens were copied
    """
    rows = StepRows.of(rows)
    width = 4 if rows.is_single else 8
    content, sums = _pack_columns(rows.told)
    confidences = rows.confidences.values.astype(f"<f{width}", copy=False).tobytes()
    blob = _HEAD.pack(PACKING_VERSION, len(rows), width) + content + confidences
    told = dict(zip(SUMMED, sums[kernel.FIRST_SUMMED :], strict=False))
    if not verified_copies:
        return PackedRows(blob, told, len(rows))
    is_copy = np.isin(rows.handle, verified_copies)
    return PackedRows(blob, told, len(rows), *(int(column[is_copy].sum()) for column in (rows.verified, rows.accepted)))


def _pack_columns(table: Ints) -> tuple[bytes, list[int]]:
    packed = np.empty(kernel.LARGEST_COLUMN_HEAD * len(table) + table.size * 8, np.uint8)
    sums = np.zeros(len(table), np.int64)
    size = kernel.pack_columns(table, packed, sums)
    return packed[:size].tobytes(), sums.tolist()


def _unpack_columns(content: memoryview, columns: int, n: int) -> tuple[list[list[int]], memoryview]:
    """Return the columns, and what follows them."""
    if n > MAX_REQUESTS:
        raise ValueError(f"{n} rows, at most {MAX_REQUESTS}")
    table = np.zeros((columns, n), np.int64)
    packed = np.frombuffer(content, np.uint8)
    packed.setflags(write=False)
    end = kernel.unpack_columns(packed, table)
    if end > len(packed):
        raise ValueError("it ends too early")
    return table.tolist(), content[end:]


def unpack_rows(blob: bytes) -> list[RequestRow]:
    """Return the request rows of a blob, equal to what was packed; raise StoreError for anything else."""
    try:
        columns, values = _READERS[_version(blob)](blob)
    except (msgspec.MsgspecError, zlib.error, ValueError, struct.error) as error:
        raise StoreError(f"a packed step cannot be read: {error}", remedy="the file may be damaged") from None
    rows, start = [], 0
    if sum(columns[-1]) != len(values):
        raise StoreError("a packed step is cut short or inconsistent", remedy="the file may be damaged")
    try:
        for *fields, count in zip(*columns, strict=True):
            rows.append(msgspec.convert((*fields, values[start : start + count]), RequestRow))
            start += count
    except (msgspec.MsgspecError, ValueError) as error:
        raise StoreError(f"a packed step is inconsistent: {error}", remedy="the file may be damaged") from None
    return rows


def _read_4(blob: bytes) -> tuple[tuple[Sequence[Any], ...], list[float]]:
    """Return the columns of RequestRow with the counts of confidences as the last, and all confidences."""
    _, n, width = _HEAD.unpack_from(blob)
    if width not in (4, 8):
        raise ValueError(f"confidences of {width} bytes")
    (*numbers, flags, counts), behind = _unpack_columns(memoryview(blob)[_HEAD.size :], _COLUMNS, n)
    return (*numbers, _truths(flags, counts), counts), np.frombuffer(behind, f"<f{width}").tolist()


def _truths(flags: list[int], counts: list[int]) -> list[bool]:
    if not {*flags} <= {0, 1} or min(counts, default=0) < 0:
        raise ValueError("a truth value is neither 0 nor 1, or a count is negative")
    return [flag == 1 for flag in flags]


def _read_3(blob: bytes) -> tuple[tuple[Sequence[Any], ...], list[float]]:
    """Return the same of a blob of version 3."""
    content, behind = _open(blob)
    n, width, confidence_width = _HEAD_3.unpack_from(content)
    if width not in (2, 4, 8) or confidence_width not in (4, 8) or len(content) - _HEAD_3.size != width * _COLUMNS * n:
        raise ValueError(f"{len(content)} bytes for {n} rows of {width}-byte integers")
    table = np.frombuffer(content, f"<i{width}", offset=_HEAD_3.size).reshape(_COLUMNS, n).tolist()
    handles, *numbers, flags, counts = table
    values = np.frombuffer(behind, f"<f{confidence_width}").tolist()
    return (_sums(handles), *numbers, _truths(flags, counts), counts), values


def _read_older(blob: bytes) -> tuple[tuple[Sequence[Any], ...], list[float]]:
    """Return the same of a blob of version 1 or 2."""
    content, behind = _open(blob)
    columns = _columns_decoder.decode(content)
    values = np.frombuffer(columns.confidences or behind, "<f4" if columns.width == 4 else "<f8").tolist()
    return (
        _sums(columns.handle), columns.scheduled, columns.draft_limit, columns.drafted, columns.verified,
        columns.pruned, columns.accepted, columns.emitted, columns.context, columns.is_prefill,
        columns.counts or [0] * len(columns.handle),
    ), values  # fmt: skip


_READERS: Final = {1: _read_older, 2: _read_older, 3: _read_3, 4: _read_4}


def pack_lengths(handles: Sequence[int], lengths: Sequence[int]) -> bytes:
    """Return the blob of a decision's draft lengths per request handle."""
    content, _ = _pack_columns(np.array((handles, lengths), np.int64))
    return _HEAD_LENGTHS.pack(PACKING_VERSION, len(handles)) + content


def pack_copies(copied: Sequence[int], verified: Sequence[int]) -> bytes:
    """Return the blob of whose next draft, and whose verified draft, is a copy, by request handle.

    Both are in the order of the batch, and so is the blob: a record comes back as the bytes that it was.
    """
    kinds, both, waiting = dict[int, int](), {*copied} & {*verified}, iter(copied)
    for handle in verified:
        while handle in both and handle not in kinds:
            early = next(waiting)
            kinds[early] = kinds.get(early, 0) | 1
        kinds[handle] = kinds.get(handle, 0) | 2
    for handle in waiting:
        kinds[handle] = kinds.get(handle, 0) | 1
    return pack_lengths(list(kinds), list(kinds.values()))


def unpack_copies(blob: bytes) -> tuple[list[int], list[int]]:
    """Return whose next draft, and whose verified draft, is a copy; raise StoreError for anything but a packed blob."""
    kinds = unpack_lengths(blob)
    copied, verified = ([handle for handle, kind in kinds.items() if kind & which] for which in (1, 2))
    return copied, verified


def step_copies(blob: bytes | None) -> StepCopies:
    """Return the same as sets, of a cell that may be empty."""
    return StepCopies() if blob is None else StepCopies(*map(frozenset, unpack_copies(blob)))


def unpack_lengths(blob: bytes) -> dict[int, int]:
    """Return draft lengths by request handle; raise StoreError for anything but a packed blob."""
    try:
        if _version(blob) < 4:
            handles, lengths = _pair_decoder.decode(_open(blob)[0])
            handles = _sums(handles)
        else:
            _, n = _HEAD_LENGTHS.unpack_from(blob)
            (handles, lengths), behind = _unpack_columns(memoryview(blob)[_HEAD_LENGTHS.size :], 2, n)
            if len(behind):
                raise ValueError(f"{len(behind)} bytes too many")
        return dict(zip(handles, lengths, strict=True))
    except (msgspec.MsgspecError, zlib.error, ValueError, struct.error) as error:
        raise StoreError(f"packed lengths cannot be read: {error}", remedy="the file may be damaged") from None


def pack_draws(draws: Draws) -> bytes:
    """Return the blob of a canary decision's draws."""
    stream = zlib.compress(_encoder.encode((draws.handles, draws.lengths, draws.preferred, draws.propensities)), 1)
    return bytes((PACKING_VERSION,)) + stream


def unpack_draws(blob: bytes) -> Draws:
    """Return the draws of a blob; raise StoreError for anything else."""
    try:
        return Draws(*_draws_decoder.decode(_open(blob)[0]))
    except (msgspec.MsgspecError, zlib.error, ValueError) as error:
        raise StoreError(f"packed draws cannot be read: {error}", remedy="the file may be damaged") from None


def _version(blob: object) -> int:
    """Return a blob's version; the cell of a damaged file can hold anything."""
    if not isinstance(blob, bytes):
        raise ValueError(f"a {type(blob).__name__} instead of bytes")
    if not blob or blob[0] not in _READABLE:
        raise StoreError(
            f"packing version {blob[:1].hex() or 'none'}",
            f"{PACKING_VERSION:02x} or older",
            "read it with the FASER that wrote it",
        )
    return blob[0]


def _open(blob: bytes) -> tuple[bytes, bytes]:
    """Return the content of a zlib stream behind a version byte, and what follows it."""
    _version(blob)
    stream = zlib.decompressobj()
    content = stream.decompress(memoryview(blob)[1:])
    if not stream.eof:
        raise ValueError("it ends too early")
    return content, stream.unused_data


def _sums(differences: Sequence[int]) -> list[int]:
    total, sums = 0, []
    for difference in differences:
        total += difference
        sums.append(total)
    return sums
