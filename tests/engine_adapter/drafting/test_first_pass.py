"""Which first passes of the drafter are vLLM's own, and which are cut: by what would be cut off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from faser.engine_adapter.drafting.catch_up import (
    REJECTED_ROWS,
    WHOLE_ROWS,
    CacheShape,
    CatchUp,
    Limits,
    _read_step,
)

BLOCK_TOKENS = 16


def step_of(scheduled: list[int], known: list[int], rejected: list[int]) -> Any:
    """Return a step: rows of each request, tokens before them, and how many of its rows were rejected drafts."""
    bounds = torch.tensor([0, *scheduled]).cumsum(0).int()
    positions = torch.cat([torch.arange(first, first + rows) for first, rows in zip(known, scheduled, strict=True)])
    table = torch.arange(2 * len(scheduled), dtype=torch.int32).reshape(-1, 2)
    return _read_step({
        "common_attn_metadata": SimpleNamespace(query_start_loc_cpu=bounds, block_table_tensor=table),
        "target_positions": positions,
        "target_token_ids": torch.zeros(len(positions), dtype=torch.int32),
        "num_rejected_tokens_gpu": torch.tensor(rejected),
    })  # fmt: skip


def takes_whole(scheduled: list[int], known: list[int], rejected: list[int], lengths: list[int]) -> bool:
    catch_up = CatchUp(CacheShape(2 * len(scheduled), BLOCK_TOKENS), Limits(64, 64, 1), is_shifted=True)
    catch_up._held[:] = True
    return catch_up._takes_whole(step_of(scheduled, known, rejected), lengths)


@pytest.mark.parametrize(
    ("scheduled", "known", "rejected", "is_whole"),
    [
        pytest.param([20, 3], [0, 8], [0, 2], True, id="beside a prompt, few rejected"),
        pytest.param([20, 3, 3, 3], [0, 8, 8, 8], [0, 2, 2, 2], False, id="beside a prompt, many rejected"),
        pytest.param([3, 3], [8, 8], [2, 2], True, id="few rows"),
        pytest.param([4, 4], [8, 8], [3, 3], True, id="few rows, most of them rejected"),
        pytest.param([3] * 4, [8] * 4, [1] * 4, True, id="twelve rows, four rejected"),
        pytest.param([3] * 4, [8] * 4, [2] * 4, False, id="twelve rows, eight rejected"),
    ],
)
def test_a_pass_is_cut_where_enough_is_cut_off(
    scheduled: list[int], known: list[int], rejected: list[int], is_whole: bool
) -> None:
    assert (sum(scheduled) <= WHOLE_ROWS or sum(rejected) <= REJECTED_ROWS) is is_whole, "the case says what it tests"
    assert takes_whole(scheduled, known, rejected, [2] * len(scheduled)) is is_whole


def test_a_pass_is_cut_where_somebody_drafts_nothing() -> None:
    assert not takes_whole([20, 3], [0, 8], [0, 1], [2, 0])


def test_a_pass_is_cut_where_somebody_missed_a_token() -> None:
    catch_up = CatchUp(CacheShape(4, BLOCK_TOKENS), Limits(64, 64, 1), is_shifted=True)
    step = step_of([20, 3], [0, 8], [0, 1])
    assert not catch_up._takes_whole(step, [2, 2]), "nothing is held yet"
    catch_up._held[:] = True
    assert catch_up._takes_whole(step, [2, 2])
