"""A record's rows without an object each: the same as msgspec makes of them, and refused for the same reasons."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.engine_adapter.protocol import (
    HEADER,
    MAX_DRAFT_LENGTH,
    MAX_REQUESTS,
    ProtocolError,
    RequestRow,
    StepRecord,
    decode_from_engine,
)
from faser.env.estimate.requests_kernel import NUMBERS, read_rows
from faser.env.estimate.step_frame import decode
from faser.env.estimate.step_rows import StepRows

EDGES = [0, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32]
NUMBER = st.sampled_from([*EDGES, 1 << 62, -1, -32, -33, -128, -129, -32769, -(1 << 31) - 1]) | st.integers(0, 1 << 62)
ROW = st.builds(
    RequestRow, *[NUMBER] * (NUMBERS - 1), st.booleans(), st.lists(st.floats(0.0, 1.0), max_size=20).map(tuple)
)
VALUE = st.sampled_from(
    [*EDGES, -1, 63, 64, 65, 1 << 62, (1 << 62) + 1, (1 << 64) - 1, None, True, 1.0, 0.5, "x", [], [1]]
)


@settings(deadline=None, max_examples=50)
@given(st.lists(ROW, max_size=40))
def test_rows_are_unfolded_as_they_are(rows: list[RequestRow]) -> None:
    told = StepRows.of(rows)
    numbers = [[int(value) for value in msgspec.structs.astuple(each)[:NUMBERS]] for each in rows]
    assert told.told[:NUMBERS].T.tolist() == numbers
    assert told.is_prefill.tolist() == [each.is_prefill for each in rows]
    counts, values = told.confidences
    assert counts.tolist() == [len(each.confidences) for each in rows]
    assert values.tolist() == [value for each in rows for value in each.confidences]
    assert told.is_single == all(value == np.float32(value) for value in values)
    assert told.sums().longest == max([0, *(each.drafted for each in rows)])
    assert told.sums().emitted == pytest.approx(float(sum(each.emitted for each in rows)))


@settings(deadline=None, max_examples=50)
@given(st.lists(ROW, min_size=1, max_size=3), st.data())
def test_what_is_cut_short_or_no_row_ends_beyond_the_frame(rows: list[RequestRow], data: st.DataObject) -> None:
    frame = msgspec.msgpack.encode(rows)
    cut = data.draw(st.integers(0, len(frame) - 1))
    content = np.frombuffer(frame[:cut], np.uint8)
    assert read_rows(content, False, MAX_REQUESTS, MAX_DRAFT_LENGTH, 1 << 62)[-1] > cut
    with pytest.raises(AssertionError):
        StepRows.of([RequestRow(None, *[0] * 8, False)])  # type: ignore[arg-type]


def test_rows_are_a_sequence_of_rows() -> None:
    rows = [RequestRow(handle, 3, 2, 2, 2, 0, 1, 2, 50, False, (0.9, 0.5)) for handle in (4, 5, 6)]
    told = StepRows.read(msgspec.msgpack.encode(rows))
    assert told is not None
    assert (len(told), told[1], told[1:], list(told)) == (3, rows[1], rows[1:], rows)
    assert told == rows
    assert told != rows[:2]
    assert StepRows.of(told) is told


@pytest.mark.parametrize("odd", [(1,), ("x",), ([0.5],), None, (0.5, 1)])
def test_confidences_that_are_no_floats_are_refused(odd: Any) -> None:
    with pytest.raises(AssertionError):
        StepRows.of([RequestRow(1, 1, 0, 0, 0, 0, 0, 1, 9, False, odd)])


def test_a_frame_is_decoded_to_the_same_record() -> None:
    frame = _frame(ROWS)
    told, expected = decode(frame), decode_from_engine(frame)
    assert isinstance(told, StepRecord)
    assert isinstance(told.rows, StepRows)
    assert told == expected
    assert told.rows[0].confidences == (0.25, 0.3, 1.0)


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2), st.integers(0, NUMBERS), VALUE)
def test_what_one_decoder_refuses_the_other_does_for_the_same_reason(row: int, place: int, value: Any) -> None:
    assert _outcome(decode, row, place, value) == _outcome(decode_from_engine, row, place, value)


@pytest.mark.parametrize(
    "change", ["longer", "shorter", "too many rows", "too many confidences", "no rows", "a number"]
)
def test_rows_of_other_shapes_are_taken_or_refused_alike(change: str) -> None:
    changed = {
        "longer": [[*ROWS[0], 7]], "shorter": [ROWS[0][:-1]], "too many rows": [ROWS[0]] * (MAX_REQUESTS + 1),
        "too many confidences": [[*ROWS[0][:-1], [0.5] * (MAX_DRAFT_LENGTH + 1)]], "no rows": [], "a number": 3,
    }[change]  # fmt: skip
    outcomes = [_told(way, _frame(changed)) for way in (decode, decode_from_engine)]
    assert outcomes[0] == outcomes[1]
    assert isinstance(outcomes[0], str) == (change in ("too many rows", "too many confidences", "a number"))


ROWS = [[handle, 4, 3, 3, 3, 1, 2, 3, 70, False, [0.25, 0.3, 1.0]] for handle in (1, 2, 3)]


def _outcome(way: Any, row: int, place: int, value: Any) -> Any:
    rows = [list(each) for each in ROWS]
    rows[row][place] = value
    return _told(way, _frame(rows))


def _frame(rows: Any) -> bytes:
    numbers = [1, 1, *[0.5] * 8, 3, 0, 0, 3, 9, 0.5, None, None, *[0] * 4]
    content = ["step", "boot", *numbers, [], rows]
    return HEADER + msgspec.msgpack.encode(content)


def _told(way: Any, frame: bytes) -> Any:
    try:
        return way(frame)
    except ProtocolError as error:
        return error.reason
