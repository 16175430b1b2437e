"""A turn is the sum of its slices, and what others did in any of them disturbs it."""

from __future__ import annotations

import pytest

from faser.controller.bench.arm import Drafting
from faser.controller.bench.clients import Served
from faser.controller.bench.ratio import Goodput
from faser.controller.bench.turn import Look, Slice, as_turn, compute_s, slice_ends, slice_tokens
from faser.controller.engine.machine import Processor

PLACE = ("main", 4, "all", 3)


def part(tokens: int, seconds: float, at: int, others_s: float = 0.0) -> Slice:
    """Return a slice that began after `at` others like it."""
    before = Look(10.0 * at, Processor(20.0 * at, 0.0), 20.0 * at, 5.0 * at, Drafting(40 * at, 30 * at), 2 * at)
    later = Look(
        10.0 * at + seconds, Processor(20.0 * at + seconds + others_s, 0.0), 20.0 * at + seconds, 5.0 * at + 1.0,
        Drafting(40 * (at + 1), 30 * (at + 1)), 2 * (at + 1),
    )  # fmt: skip
    return Slice(Served(tokens, seconds, prompt_tokens=100 + at), before, later)


def test_a_turn_sums_its_slices_and_nothing_of_the_time_between() -> None:
    turn = as_turn(PLACE, "k2", [part(30, 1.0, at=0), part(30, 3.0, at=5)], own_load=100.0)
    assert (turn.tokens, turn.seconds, turn.tokens_per_s, turn.rate) == (60, 4.0, 15.0, 15.0)
    assert (turn.requests, turn.draft_tokens, turn.accepted_tokens, turn.cpu_s, turn.slices) == (4, 80, 60, 2.0, 2)
    assert turn.prompt_tokens == 205
    assert (turn.phase, turn.load, turn.kinds, turn.round, turn.arm) == (*PLACE, "k2")
    assert (turn.other_cpu, turn.disturbed) == (0.0, "")


def test_the_threads_that_compute_are_the_busiest_of_the_whole_turn() -> None:
    server = [Served(30, 1.0, thread_s={1: 0.9, 2: 0.1, 3: 0.3}), Served(30, 1.0, thread_s={1: 0.8, 2: 0.6, 4: 0.2})]
    assert compute_s(server, threads=1) == pytest.approx(1.7)
    assert compute_s(server, threads=2) == pytest.approx(1.7 + 0.7)
    assert compute_s([Served(30, 1.0)], threads=1) is None


def test_work_of_others_in_one_slice_disturbs_the_turn() -> None:
    turn = as_turn(PLACE, "k2", [part(30, 1.0, at=0), part(30, 3.0, at=5, others_s=2.0)], own_load=100.0)
    assert turn.other_cpu == pytest.approx(0.5)
    assert "0.50 cores used by others" in turn.disturbed


def test_one_arm_without_a_good_request_is_counted_as_with_one() -> None:
    served = Slice(Served(1000, 10.0), part(1, 1.0, at=0).before, part(1, 1.0, at=9).after)
    rates = [
        as_turn(("main", "azure-conv", "all", 0), "none", [served], 100.0, goodput).rate
        for goodput in (Goodput(0.0, 0.0, 50.0), Goodput(30.0, 0.3, 50.0))
    ]
    assert rates == [1000 / 10.0 / 20, 30.0]


def test_slices_are_equal_parts_of_some_steps_at_least() -> None:
    assert slice_tokens(50.0, 1.5, load=2) == 75.0
    assert slice_tokens(50.0, 1.5, load=32) == 8 * 32
    assert slice_ends(192, 25.0) == [24, 48, 72, 96, 120, 144, 168, 192]
    assert slice_ends(100, 30.0) == [33, 66, 100]
    assert slice_ends(100, 400.0) == [100]
