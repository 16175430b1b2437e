"""The running figures of the last seconds equal what a recount gives."""

import msgspec
import numpy as np
import pytest

from faser.controller.decision.window import PruningTotals, Window
from faser.controller.snapshot import PruningStatus, SourceStatus
from faser.engine_adapter.protocol import RequestRow, StepRecord
from faser.env.estimate.step_rows import StepRows


def record(time_s: float, outcomes: list[tuple[int, int, int]]) -> StepRecord:
    """Return a step whose requests had (drafted, verified, accepted)."""
    rows = [
        RequestRow(handle, 1, 5, drafted, verified, 0, accepted, accepted + 1, 50, False)
        for handle, (drafted, verified, accepted) in enumerate(outcomes, 1)
    ]
    return StepRecord(
        "boot", 1, 1, time_s, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, len(rows), 0, 0, len(rows), 0, 0.0, None, None, 0, 0,
        0, 0, [], rows,
    )  # fmt: skip


def add(window: Window, step: StepRecord, is_under_lease: bool) -> None:
    window.add(step, StepRows.of(step.rows), is_under_lease)


def test_an_empty_window_has_no_figures() -> None:
    window = Window(2)
    assert (window.tokens_per_s(), window.steps_per_s(), window.mean_step_s(), window.lease_share()) == (0, 0, 0, 0)
    assert window.acceptance_rate() is None
    assert window.acceptance_by_position() == [None, None]
    assert window.length_histogram() == [0, 0, 0]
    assert window.mean_length() == 0.0


def test_figures_by_hand() -> None:
    window = Window(3)
    add(window, record(1.0, [(2, 2, 1), (0, 0, 0)]), is_under_lease=True)
    add(window, record(1.5, [(1, 2, 2), (3, 1, 0)]), is_under_lease=False)
    assert window.steps_per_s() == 2.0  # two steps of half a second
    assert window.tokens_per_s() == 7.0
    assert window.mean_step_s() == 0.5
    assert window.lease_share() == 0.5
    assert window.length_histogram() == [1, 1, 1, 1]
    assert window.mean_length() == 1.5
    assert window.acceptance_rate() == 3 / 5
    assert window.acceptance_by_position() == [2 / 3, 1 / 2, None]


def test_a_clock_that_goes_back_does_not_fill_the_window_for_ever() -> None:
    window, fresh = Window(4, span_s=5.0), Window(4, span_s=5.0)
    add(window, record(1e18, [(4, 4, 4)]), is_under_lease=True)
    for time_s in range(1000):
        for figures in (window, fresh):
            add(figures, record(float(time_s), [(1, 1, 0)]), is_under_lease=False)
    assert window.length_histogram() == fresh.length_histogram() == [0, 6, 0, 0, 0]


def test_steps_leave_the_window_with_all_they_brought() -> None:
    window, fresh = Window(4, span_s=5.0), Window(4, span_s=5.0)
    for time_s in (0.0, 1.0, 2.0):
        add(window, record(time_s, [(4, 4, 4)] * 3), is_under_lease=True)
    last = record(8.0, [(1, 1, 0)])
    add(window, last, is_under_lease=False)
    add(fresh, last, is_under_lease=False)
    for figures in (window, fresh):
        assert figures.length_histogram() == [0, 1, 0, 0, 0]
        assert figures.acceptance_by_position() == [0.0, None, None, None]
        assert (figures.tokens_per_s(), figures.lease_share()) == (2.0, 0.0)


def test_acceptance_and_waste_are_told_by_source() -> None:
    window = Window(4, span_s=5.0)
    assert window.copies() == window.drafter() == SourceStatus()
    step = record(1.0, [(4, 4, 3), (2, 2, 1), (0, 0, 0), (1, 3, 0)])
    step.rows[2].is_prefill = True
    window.add(step, StepRows.of(step.rows), True, np.array([True, False, False, True]), unverified=2)
    emitted = 4 + 2 + 1 + 1
    assert window.copies() == SourceStatus(pytest.approx(2 / 3), 7, 3, 3 / 7, 4 / emitted, 7, 3)
    assert window.drafter() == SourceStatus(pytest.approx(1 / 3), 2, 1, 1 / 2, 3 / emitted, 2, 1)
    assert window.acceptance_rate() == 4 / 9  # of all drafts, whoever made them
    assert window.length_histogram() == [1, 1, 1, 0, 1]


def test_totals_by_source_stay_when_their_steps_leave_the_window() -> None:
    window = Window(4, span_s=5.0)
    for time_s in (0.0, 8.0, 1.0):  # at last the clock goes back
        step = record(time_s, [(4, 4, 3), (2, 2, 1)])
        window.add(step, StepRows.of(step.rows), True, np.array([True, False]))
    copies, drafter = window.copies(), window.drafter()
    assert (copies.verified, copies.accepted, copies.verified_total, copies.accepted_total) == (4, 3, 12, 9)
    assert (drafter.verified, drafter.accepted, drafter.verified_total, drafter.accepted_total) == (2, 1, 6, 3)


def test_pruning_adds_up_over_the_steps_in_which_heads_looked() -> None:
    totals = PruningTotals()
    step = record(1.0, [(2, 2, 1), (3, 3, 0)])
    for row, gone in zip(step.rows, (1, 2), strict=True):
        row.pruned = gone
    totals.add(step)  # no heads looked
    for _ in range(2):
        totals.add(msgspec.structs.replace(step, prune_layer=5, prune_s=0.25, saved_rows=2.5, wrongly_pruned=1))
    assert totals.status() == PruningStatus(2, 6, 5.0, 2, 0.5)
    totals.add(msgspec.structs.replace(step, prune_layer=5, prune_s=float("inf")))  # JSON has no number for it
    assert totals.status().spent_s == 0.0


def test_a_request_in_its_prompt_counts_for_no_length() -> None:
    window = Window(1)
    step = record(1.0, [(0, 0, 0)])
    step.rows[0].emitted = 0
    add(window, step, is_under_lease=True)
    assert window.length_histogram() == [0, 0]
