"""The loops behind controller/telemetry/packing.py, compiled: integer columns as their least value and the bits above
it.

Known as frame of reference with bit packing. For each column: how many bits a value needs (a byte); the least value,
zigzag, in seven bits a byte, the last one below 128; then the values above it, lowest bits first, up to a whole byte.
Column 0 is told as differences to the value before. Sums and differences wrap like 64-bit integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...engine_adapter.arrays import Ints
from ...engine_adapter.compiled import compiled

Bytes = npt.NDArray[np.uint8]

LARGEST_COLUMN_HEAD = 11  # bytes
LARGEST = (1 << 63) - 1  # what a sum stops at
FIRST_SUMMED = 3  # column of the rows: drafted; the four behind it are summed too


@compiled
def pack_columns(table: Ints, packed: Bytes, sums: Ints) -> int:
    """Write (columns, n) values into `packed`, return the bytes; add up what is not negative, (columns,), capped.

    `packed` must have room for LARGEST_COLUMN_HEAD bytes per column and 8 per value.
    """
    at = 0
    for j in range(table.shape[0]):
        least, most = _range(table[j], j == 0)
        bits = _bits(np.uint64(most) - np.uint64(least))
        packed[at] = bits
        at = _put_number(packed, at + 1, least)
        at = _put_values(packed, at, table[j], j == 0, least, bits)
        for i in range(table.shape[1]):
            value = max(table[j, i], 0)
            sums[j] = LARGEST if value > LARGEST - sums[j] else sums[j] + value
    return at


@compiled
def unpack_columns(packed: Bytes, table: Ints) -> int:
    """Fill in (columns, n) values; return where they end, beyond `packed` if it is cut short or damaged."""
    at, end = 0, len(packed)
    for j in range(table.shape[0]):
        bits = _signed(packed[at]) if at < end else 65
        least, at = _number(packed, at + 1)
        if bits > 64 or at + (bits * table.shape[1] + 7) // 8 > end:
            return end + 1
        at = _values(packed, at, table[j], j == 0, least, bits)
    return at


@compiled
def _range(values: Ints, is_difference: bool) -> tuple[int, int]:
    if len(values) == 0:
        return 0, 0
    least = most = values[0]
    for i in range(1, len(values)):
        value = values[i] - values[i - 1] if is_difference else values[i]
        least, most = min(least, value), max(most, value)
    return least, most


@compiled
def _bits(span: np.uint64) -> int:
    bits = 0
    while span > np.uint64(0):
        span >>= np.uint64(1)
        bits += 1
    return bits


@compiled
def _put_number(packed: Bytes, at: int, number: int) -> int:
    rest = np.uint64((number << 1) ^ (number >> 63))
    while rest >= np.uint64(128):
        packed[at] = np.uint8(rest & np.uint64(127)) | np.uint8(128)
        rest >>= np.uint64(7)
        at += 1
    packed[at] = np.uint8(rest)
    return at + 1


@compiled
def _number(packed: Bytes, at: int) -> tuple[int, int]:
    """Return the number that begins here and where the next thing does; beyond `packed` if it does not end."""
    rest, shift = np.uint64(0), np.uint64(0)
    while at < len(packed) and shift < np.uint64(70):
        rest |= np.uint64(packed[at] & np.uint8(127)) << shift
        shift += np.uint64(7)
        at += 1
        if packed[at - 1] < 128:
            return _signed(rest >> np.uint64(1)) ^ -_signed(rest & np.uint64(1)), at
    return 0, len(packed) + 1


@compiled
def _signed(value: np.unsignedinteger[Any]) -> int:
    return np.int64(value)  # type: ignore[return-value]  # numba's int of an unsigned one stays unsigned


@compiled
def _put_values(packed: Bytes, at: int, values: Ints, is_difference: bool, least: int, bits: int) -> int:
    byte, filled = np.uint64(0), 0
    before = np.int64(0)
    for i in range(len(values)):
        rest, left = np.uint64(values[i] - before - least), bits
        if is_difference:
            before = values[i]
        while left > 0:
            some = min(8 - filled, left)
            byte |= (rest & np.uint64((1 << some) - 1)) << np.uint64(filled)
            rest >>= np.uint64(some)
            filled, left = filled + some, left - some
            if filled == 8:
                packed[at] = np.uint8(byte)
                at, byte, filled = at + 1, np.uint64(0), 0
    if filled > 0:
        packed[at] = np.uint8(byte)
        at += 1
    return at


@compiled
def _values(packed: Bytes, at: int, values: Ints, is_difference: bool, least: int, bits: int) -> int:
    taken = 0  # bits of the byte at this place
    before = np.int64(0)
    for i in range(len(values)):
        value, had = np.uint64(0), 0
        while had < bits:
            some = min(8 - taken, bits - had)
            part = np.uint64(packed[at]) >> np.uint64(taken) & np.uint64((1 << some) - 1)
            value |= part << np.uint64(had)
            taken, had = taken + some, had + some
            if taken == 8:
                at, taken = at + 1, 0
        values[i] = before + least + _signed(value)
        if is_difference:
            before = values[i]
    return at + 1 if taken > 0 else at
