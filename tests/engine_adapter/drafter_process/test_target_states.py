"""The target's states in shared memory: both ends see the same rows, and a reader never keeps one written over."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from faser.engine_adapter.drafter_process import target_states
from faser.engine_adapter.drafter_process.mailbox import StateRows
from faser.engine_adapter.drafter_process.target_states import StatesError, TargetStates

torch = pytest.importorskip("torch")

BLOCKS, BLOCK_TOKENS = 6, 4
TABLE = np.array([5, 0, 3], dtype=np.int32)
SLOTS = [20, 21, 22, 23, 0, 1, 2, 3, 12, 13]  # of the first ten tokens behind TABLE


@pytest.fixture(params=["float32", "bfloat16"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[TargetStates, TargetStates]]:
    ours = TargetStates.create(BLOCKS, BLOCK_TOKENS, 6, request.param)
    theirs = TargetStates(os.dup(ours.descriptor), request.param)
    yield ours, theirs
    ours.close()
    theirs.close()


def parts(first: int, rows: int, dtype: str = "float32") -> list[torch.Tensor]:
    whole = torch.arange(first, first + rows)[:, None] * 10.0 + torch.arange(6)
    return [part.to(getattr(torch, dtype)) for part in whole.split([2, 4], dim=1)]


def keep(states: TargetStates, first: int, rows: int) -> None:
    dtype = str(states._rows.dtype).removeprefix("torch.")
    states.keep(torch.tensor(SLOTS[first : first + rows]), parts(first, rows, dtype))


def test_rows_are_found_by_token_wherever_their_blocks_are(ends: tuple[TargetStates, TargetStates]) -> None:
    ours, theirs = ends
    keep(ours, 0, 6)
    keep(ours, 6, 4)
    rows = theirs.read(StateRows(9, ours.writes, TABLE), 3)
    assert rows is not None
    assert rows[:, 0].tolist() == [10.0 * token for token in range(3, 9)]
    assert rows[0].tolist() == [30.0 + column for column in range(6)]
    assert ours.blocks_of(8) == 2
    assert ours.blocks_of(9) == 3


def test_rows_that_were_never_kept_or_forgotten_are_not_there(ends: tuple[TargetStates, TargetStates]) -> None:
    ours, theirs = ends
    keep(ours, 0, 5)
    assert theirs.read(StateRows(6, ours.writes, TABLE), 0) is None
    assert theirs.read(StateRows(5, ours.writes, TABLE), 0) is not None
    ours.clear()
    assert theirs.read(StateRows(5, ours.writes, TABLE), 0) is None


def test_rows_that_may_have_been_written_over_are_not_there(ends: tuple[TargetStates, TargetStates]) -> None:
    ours, theirs = ends
    keep(ours, 0, 5)
    told = StateRows(5, ours.writes, TABLE)
    keep(ours, 5, 1)
    assert theirs.read(told, 0) is None


def test_more_than_may_be_kept_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_states, "MEMORY_LIMIT_BYTES", 100)
    with pytest.raises(StatesError, match="states of 24 tokens, 24 bytes each") as caught:
        TargetStates.create(BLOCKS, BLOCK_TOKENS, 6, "float32")
    assert "\n" not in str(caught.value)
