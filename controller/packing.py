"""The packed per-request columns of the telemetry file: one blob per step, exact and versioned.

Called by the daemon, while what it packs is in the processor's cache, and by every reader of a telemetry file. A blob
of rows is one version byte and a zlib stream, and the confidences follow behind it as they are: they do not compress
and made up half of the time. In the stream, little-endian: the number of rows (uint32), the bytes of an integer (2, 4
or 8, as the largest needs) and of a confidence (4, or 8 where 4 would lose something), then the integer columns one by
one: those of protocol.RequestRow up to is_prefill, handles as differences to the one before, and how many confidences
each row has. Other blobs hold one msgpack value. Versions 1 and 2 held the rows in msgpack, too.
"""

from __future__ import annotations

import array
import struct
import sys
import zlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from ..engine_adapter.protocol import RequestRow
from ..env.step_rows import StepRows
from .canary import Draws
from .errors import StoreError

PACKING_VERSION: Final = 3
_READABLE: Final = (1, 2, 3)
_LEVEL: Final = 1  # twice as fast as the default level, 5 % larger
# Tables of 2 KB instead of 256 KB, which would drive everything else out of the processor's cache at each step.
_WINDOW_BITS: Final = 10
_MEMORY: Final = 2

SUMMED: Final = ("drafted", "verified", "pruned", "accepted", "emitted")
_HEAD: Final = struct.Struct("<IBB")  # rows, bytes of an integer, bytes of a confidence
_COLUMNS: Final = 11
_IS_SWAPPED: Final = sys.byteorder == "big"


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


class PackedRows(NamedTuple):
    """A step's request rows as they are stored, and the sums of their columns in SUMMED."""

    blob: bytes
    sums: dict[str, int]
    requests: int


def pack_rows(rows: Sequence[RequestRow]) -> PackedRows:
    """Return the blob of a step's request rows, and the sums of their columns in SUMMED."""
    rows = StepRows.of(rows)
    n, (counts, values) = len(rows), rows.confidences
    stored, bits, summed = rows.narrowed()
    width, confidence_width = (bits + 1) // 8, 4 if rows.is_single else 8
    if width < 8:
        content, sums = stored.astype(f"<i{width}", copy=False).tobytes(), summed.tolist()
    else:
        told = [_differences(rows.handle.tolist()), *rows.told[1:].tolist(), counts.tolist()]
        content, sums = np.array(told, "<i8").tobytes(), [sum(getattr(rows, name).tolist()) for name in SUMMED]
    confidences = values.astype(f"<f{confidence_width}", copy=False).tobytes()
    blob = _seal(_HEAD.pack(n, width, confidence_width) + content) + confidences
    return PackedRows(blob, dict(zip(SUMMED, sums, strict=True)), n)


def unpack_rows(blob: bytes) -> list[RequestRow]:
    """Return the request rows of a blob, equal to what was packed; raise StoreError for anything else."""
    try:
        content, behind = _open(blob)
        columns, values = (_older if blob[0] < 3 else _newer)(content, behind)
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


def _newer(content: bytes, behind: bytes) -> tuple[tuple[Sequence[Any], ...], list[float]]:
    """Return the columns of RequestRow with the counts of confidences as the last, and all confidences."""
    n, width, confidence_width = _HEAD.unpack_from(content)
    if width not in (2, 4, 8) or confidence_width not in (4, 8) or len(content) - _HEAD.size != width * _COLUMNS * n:
        raise ValueError(f"{len(content)} bytes for {n} rows of {width}-byte integers")
    table = np.frombuffer(content, f"<i{width}", offset=_HEAD.size).reshape(_COLUMNS, n).tolist()
    handles, *numbers, flags, counts = table
    if not {*flags} <= {0, 1} or min(counts, default=0) < 0:
        raise ValueError("a truth value is neither 0 nor 1, or a count is negative")
    values = np.frombuffer(behind, f"<f{confidence_width}").tolist()
    return (_sums(handles), *numbers, [flag == 1 for flag in flags], counts), values


def _older(content: bytes, behind: bytes) -> tuple[tuple[Sequence[Any], ...], list[float]]:
    """Return the same of a blob of version 1 or 2."""
    columns = _columns_decoder.decode(content)
    values = _unpack_floats(columns.width, columns.confidences or behind)
    return (
        _sums(columns.handle), columns.scheduled, columns.draft_limit, columns.drafted, columns.verified,
        columns.pruned, columns.accepted, columns.emitted, columns.context, columns.is_prefill,
        columns.counts or [0] * len(columns.handle),
    ), values  # fmt: skip


def pack_lengths(handles: Sequence[int], lengths: Sequence[int]) -> bytes:
    """Return the blob of a decision's draft lengths per request handle."""
    return _seal(_encoder.encode((_differences(handles), list(lengths))))


def unpack_lengths(blob: bytes) -> dict[int, int]:
    """Return draft lengths by request handle; raise StoreError for anything but a packed blob."""
    try:
        handles, lengths = _pair_decoder.decode(_open(blob)[0])
        return dict(zip(_sums(handles), lengths, strict=True))
    except (msgspec.MsgspecError, zlib.error, ValueError) as error:
        raise StoreError(f"packed lengths cannot be read: {error}", remedy="the file may be damaged") from None


def pack_draws(draws: Draws) -> bytes:
    """Return the blob of a canary decision's draws."""
    return _seal(_encoder.encode((draws.handles, draws.lengths, draws.preferred, draws.propensities)))


def unpack_draws(blob: bytes) -> Draws:
    """Return the draws of a blob; raise StoreError for anything else."""
    try:
        return Draws(*_draws_decoder.decode(_open(blob)[0]))
    except (msgspec.MsgspecError, zlib.error, ValueError) as error:
        raise StoreError(f"packed draws cannot be read: {error}", remedy="the file may be damaged") from None


def _seal(content: bytes) -> bytes:
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS, _MEMORY)
    return bytes((PACKING_VERSION,)) + stream.compress(content) + stream.flush()


def _open(blob: object) -> tuple[bytes, bytes]:
    """Return the content of a blob and what follows it; the cell of a damaged file can hold anything."""
    if not isinstance(blob, bytes):
        raise ValueError(f"a {type(blob).__name__} instead of bytes")
    if not blob or blob[0] not in _READABLE:
        raise StoreError(
            f"packing version {blob[:1].hex() or 'none'}",
            f"{PACKING_VERSION:02x} or older",
            "read it with the FASER that wrote it",
        )
    stream = zlib.decompressobj()
    content = stream.decompress(memoryview(blob)[1:])
    if not stream.eof:
        raise ValueError("it ends too early")
    return content, stream.unused_data


def _differences(values: Sequence[int]) -> list[int]:
    return [after - before for before, after in zip((0, *values), values, strict=False)]


def _sums(differences: Sequence[int]) -> list[int]:
    total, sums = 0, []
    for difference in differences:
        total += difference
        sums.append(total)
    return sums


def _unpack_floats(width: int, content: bytes) -> list[float]:
    values = array.array("f" if width == 4 else "d")
    values.frombytes(content)
    return _little_endian(values).tolist()


def _little_endian(values: array.array[float]) -> array.array[float]:
    if _IS_SWAPPED:
        values.byteswap()
    return values
