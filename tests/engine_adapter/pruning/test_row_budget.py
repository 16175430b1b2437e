"""How many rows go on: by what passed lately, out of the sizes there are."""

from __future__ import annotations

from faser.engine_adapter.pruning.row_budget import LEAST_STEPS, MEMORY_STEPS, RowBudget


def told(shares: list[float], sizes: tuple[int, ...] = ()) -> RowBudget:
    budget = RowBudget(sizes)
    for share in shares:
        budget.note(100, round(100 * share))
    return budget


def test_nothing_is_cut_before_a_few_steps_were_seen() -> None:
    assert told([0.1] * (LEAST_STEPS - 1)).draft_rows(50, 40, 0.5) is None
    assert told([0.1] * LEAST_STEPS).draft_rows(50, 40, 0.5) == 4


def test_what_always_passes_stays() -> None:
    assert told([1.0] * 8).draft_rows(50, 40, 0.5) is None


def test_room_is_left_for_steps_in_which_more_passes_by_the_threshold() -> None:
    """Every tenth step passes twice as much: worth its room only where a row is cheap."""
    shares = [0.2, *([0.1] * 9)] * 2
    assert told(shares).draft_rows(110, 100, 0.05) == 20
    assert told(shares).draft_rows(110, 100, 0.3) == 10


def test_of_captured_sizes_the_one_that_saves_most_is_taken() -> None:
    budget = told([0.5] * 8, (16, 32, 48, 64))
    assert budget.draft_rows(60, 50, 0.1) == 48 - 10  # 25 pass: 32 rows would lose three of them
    assert budget.draft_rows(60, 50, 0.5) == 32 - 10
    assert budget.draft_rows(20, 10, 0.1) == 16 - 10
    assert budget.draft_rows(12, 5, 0.1) is None  # the smallest size has room for all
    assert told([0.5] * 8, (8, 60)).draft_rows(60, 50, 0.5) is None  # fewer than the rows without a draft, or all
    assert budget.draft_rows(110, 100, 0.5) == 50  # no graph has so many rows: any number will do


def test_old_steps_are_forgotten() -> None:
    budget = told([0.9] * MEMORY_STEPS)
    for _ in range(MEMORY_STEPS):
        budget.note(10, 2)
    assert budget.draft_rows(50, 40, 0.3) == 8


def test_steps_without_drafts_say_nothing() -> None:
    budget = RowBudget()
    for _ in range(LEAST_STEPS):
        budget.note(0, 0)
    assert budget.draft_rows(50, 40, 0.3) is None
