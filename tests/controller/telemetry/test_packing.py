"""Packed request columns come back exactly, and anything else is refused with one line."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.controller.errors import StoreError
from faser.controller.telemetry.packing import (
    PACKING_VERSION,
    SUMMED,
    pack_copies,
    pack_lengths,
    pack_rows,
    unpack_copies,
    unpack_lengths,
    unpack_rows,
)
from faser.controller.telemetry.packing_kernel import LARGEST, pack_columns, unpack_columns
from faser.engine_adapter.protocol import RequestRow

VERSION_1 = "0178019b3b899911849818a0888161122390cd38499073d2a1c3404196231c0c0c0cf60c0c0d7600f8450a64"
VERSION_2 = "0228159b3b899911849818a0888161122390cd38499073d2a1c3404196230c00aa8c095f0000003f0000803e"
VERSION_3 = "03281563626060606261666064006126100f8a81145004c467641064e004f3407200052800380000003f0000803e"
LENGTHS_3 = "0328159b3489996d12130300095201c2"

counts = st.integers(0, 1 << 62)
lengths = st.integers(0, 64)
confidences = st.lists(st.floats(0, 1) | st.floats(0, 1, width=32), max_size=64).map(tuple)
rows = st.builds(
    RequestRow, handle=st.integers(1, 1 << 62), scheduled=counts, draft_limit=lengths, drafted=lengths,
    verified=lengths, pruned=lengths, accepted=lengths, emitted=counts, context=counts, is_prefill=st.booleans(),
    confidences=confidences,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    unpack_rows(pack_rows([]).blob)  # hypothesis has no patience with a compiler
    pack_columns(np.zeros((3, 0), np.int64), np.empty(33, np.uint8), np.zeros(3, np.int64))


@given(st.lists(rows, max_size=20))
def test_rows_survive_exactly(packed: list[RequestRow]) -> None:
    assert unpack_rows(pack_rows(packed).blob) == packed


@given(st.lists(rows, max_size=20))
def test_the_sums_are_those_of_the_rows(packed: list[RequestRow]) -> None:
    expected = {name: sum(getattr(row, name) for row in packed) for name in SUMMED}
    assert pack_rows(packed).sums == {name: min(total, LARGEST) for name, total in expected.items()}


def test_a_blob_of_version_1_is_read() -> None:
    """Made by version 1: one row with confidences 0.5, 0.25 and one without."""
    blob = bytes.fromhex(VERSION_1)
    drafted = RequestRow(3, 3, 2, 2, 2, 0, 1, 2, 17, False, (0.5, 0.25))
    assert unpack_rows(blob) == [drafted, RequestRow(4, 1, 0, 0, 0, 0, 0, 1, 9, True, ())]


def test_a_blob_of_version_2_is_read() -> None:
    """Made by version 2: the same rows, confidences behind the stream."""
    blob = bytes.fromhex(VERSION_2)
    drafted = RequestRow(3, 3, 2, 2, 2, 0, 1, 2, 17, False, (0.5, 0.25))
    assert unpack_rows(blob) == [drafted, RequestRow(4, 1, 0, 0, 0, 0, 0, 1, 9, True, ())]


def test_blobs_of_version_3_are_read() -> None:
    """Made by version 3: the same rows as columns, and lengths for requests 3 and 9."""
    drafted = RequestRow(3, 3, 2, 2, 2, 0, 1, 2, 17, False, (0.5, 0.25))
    assert unpack_rows(bytes.fromhex(VERSION_3)) == [drafted, RequestRow(4, 1, 0, 0, 0, 0, 0, 1, 9, True, ())]
    assert unpack_lengths(bytes.fromhex(LENGTHS_3)) == {3: 2, 9: 0}


@given(st.lists(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=3, max_size=3), max_size=30))
def test_columns_of_any_integers_survive(values: list[list[int]]) -> None:
    table = np.array(values, np.int64).reshape(-1, 3).T.copy()
    packed, found = np.empty(33 + 8 * table.size, np.uint8), np.empty_like(table)
    size = pack_columns(table, packed, np.zeros(3, np.int64))
    content = np.frombuffer(packed[:size].tobytes(), np.uint8)
    assert unpack_columns(content, found) == size
    assert found.tolist() == table.tolist()


def test_what_is_alike_takes_next_to_no_room() -> None:
    rows = [RequestRow(handle, 4, 3, 3, 3, 0, 2, 3, 1000 + handle, False) for handle in range(1, 65)]
    assert len(pack_rows(rows).blob) < 100


@pytest.mark.parametrize("handle", [1, (1 << 15) - 1, 1 << 15, (1 << 31) - 1, 1 << 31, 1 << 62])
def test_numbers_of_any_width_survive(handle: int) -> None:
    rows = [RequestRow(place, 1, 0, 0, 0, 0, 0, 1, place, False) for place in (handle, 1, handle)]
    assert unpack_rows(pack_rows(rows).blob) == rows


def test_a_blob_cut_short_is_refused() -> None:
    drafted = RequestRow(3, 3, 2, 2, 2, 0, 1, 2, 17, False, (0.5, 0.25))
    packed = pack_rows([drafted] * 8).blob
    for length in range(len(packed)):
        with pytest.raises(StoreError):
            unpack_rows(packed[:length])


@pytest.mark.parametrize("cell", [None, 7, "text", 1.5, b""])
def test_a_cell_that_is_no_blob_is_refused(cell: object) -> None:
    for unpack in (unpack_rows, unpack_lengths):
        with pytest.raises(StoreError):
            unpack(cell)  # type: ignore[arg-type]


@given(st.dictionaries(st.integers(1, 1 << 62), lengths, max_size=50))
def test_lengths_survive_exactly(decided: dict[int, int]) -> None:
    assert unpack_lengths(pack_lengths(list(decided), list(decided.values()))) == decided


def test_single_precision_confidences_take_four_bytes_each() -> None:
    def size(value: float) -> int:
        values = tuple(value * (1 + index / 64) for index in range(64))
        return len(pack_rows([RequestRow(1, 1, 0, 0, 0, 0, 0, 1, 1, False, values)]).blob)

    assert size(0.1) - size(0.125) == 64 * 4


@given(st.binary(max_size=200))
def test_any_other_bytes_are_refused_with_an_error_of_ours(blob: bytes) -> None:
    for content in (blob, bytes((PACKING_VERSION,)) + blob, bytes((PACKING_VERSION,)) + zlib.compress(blob)):
        for unpack in (unpack_rows, unpack_lengths):
            try:
                unpack(content)
            except StoreError:
                continue


def test_a_blob_of_another_version_names_both_versions() -> None:
    with pytest.raises(StoreError, match="packing version 07; expected 04 or older"):
        unpack_rows(b"\x07" + pack_rows([]).blob[1:])


@given(st.lists(st.tuples(st.integers(0, 1 << 62), st.booleans(), st.booleans()), unique_by=lambda each: each[0]))
def test_copies_come_back_in_the_order_of_the_batch(batch: list[tuple[int, bool, bool]]) -> None:
    copied, verified = ([handle for handle, *marks in batch if marks[which]] for which in (0, 1))
    assert unpack_copies(pack_copies(copied, verified)) == (copied, verified)


def test_a_handle_that_is_named_twice_is_kept_once() -> None:
    assert unpack_copies(pack_copies([4, 4, 7], [4, 7, 7])) == ([4, 7], [4, 7])
