"""The packed per-request columns of the telemetry file: one blob per step, exact and versioned.

Called by the store's writer and by every reader of a telemetry file. A blob is one version byte and a zlib stream of
one msgpack array: columns over the step's requests, in the order of the engine's batch. In version 2 the confidences
follow behind the stream, as they are: they do not compress and made up half of the time. Version 1 held them within.
"""

from __future__ import annotations

import array
import sys
import zlib
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import msgspec
from msgspec.structs import astuple

from ..engine_adapter.protocol import RequestRow
from .canary import Draws
from .errors import StoreError

PACKING_VERSION: Final = 2
_READABLE: Final = (1, 2)
_LEVEL: Final = 1  # twice as fast as the default level, 5 % larger
# Tables of 2 KB instead of 256 KB, which would drive everything else out of the processor's cache at each step.
_WINDOW_BITS: Final = 10
_MEMORY: Final = 2

SUMMED: Final = ("drafted", "verified", "pruned", "accepted", "emitted")
_FIELDS: Final = RequestRow.__struct_fields__
_IS_SWAPPED: Final = sys.byteorder == "big"


class _Columns(msgspec.Struct, array_like=True, gc=False):
    """The request columns; meanings as in protocol.RequestRow.

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


def pack_rows(rows: Sequence[RequestRow]) -> tuple[bytes, dict[str, int]]:
    """Return the blob of a step's request rows, and the sums of their columns in SUMMED."""
    unfolded = zip(*map(astuple, rows), strict=True) if rows else ((),) * len(_FIELDS)
    columns: dict[str, Any] = dict(zip(_FIELDS, unfolded, strict=True))
    values = list(chain.from_iterable(columns["confidences"]))
    width, confidences = _pack_floats(values)
    counts = list(map(len, columns["confidences"])) if values else []
    handles = _differences(columns["handle"])
    stored = columns | {"handle": handles, "counts": counts, "width": width, "confidences": b""}
    packed = _seal(_encoder.encode([stored[name] for name in _Columns.__struct_fields__])) + confidences
    return packed, {name: sum(columns[name]) for name in SUMMED}


def unpack_rows(blob: bytes) -> list[RequestRow]:
    """Return the request rows of a blob, equal to what was packed; raise StoreError for anything else."""
    try:
        content, behind = _open(blob)
        columns = _columns_decoder.decode(content)
        values = _unpack_floats(columns.width, columns.confidences or behind)
    except (msgspec.MsgspecError, zlib.error, ValueError) as error:
        raise StoreError(f"a packed step cannot be read: {error}", remedy="the file may be damaged") from None
    rows, start = [], 0
    counts = columns.counts or [0] * len(columns.handle)
    columns_in_order = (
        _sums(columns.handle), columns.scheduled, columns.draft_limit, columns.drafted, columns.verified,
        columns.pruned, columns.accepted, columns.emitted, columns.context, columns.is_prefill, counts,
    )  # fmt: skip
    if sum(counts) != len(values):
        raise StoreError("a packed step is cut short or inconsistent", remedy="the file may be damaged")
    try:
        for *fields, count in zip(*columns_in_order, strict=True):
            rows.append(msgspec.convert((*fields, values[start : start + count]), RequestRow))
            start += count
    except (msgspec.MsgspecError, ValueError) as error:
        raise StoreError(f"a packed step is inconsistent: {error}", remedy="the file may be damaged") from None
    return rows


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


def _pack_floats(values: list[float]) -> tuple[int, bytes]:
    for width, code in ((4, "f"), (8, "d")):
        try:
            packed = array.array(code, values)
        except OverflowError:  # beyond single precision
            continue
        if width == 8 or packed.tolist() == values:
            return width, _little_endian(packed).tobytes()
    raise AssertionError("unreachable: doubles hold every float")


def _unpack_floats(width: int, content: bytes) -> list[float]:
    values = array.array("f" if width == 4 else "d")
    values.frombytes(content)
    return _little_endian(values).tolist()


def _little_endian(values: array.array[float]) -> array.array[float]:
    if _IS_SWAPPED:
        values.byteswap()
    return values
