"""Bounds of overlap, by hand and against a schedule played out event by event."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.env.cost.overlap_bound import (
    PhaseTimes,
    draft_ahead_bound,
    hidden_share,
    ping_pong_bound,
)

SECONDS = st.floats(1e-4, 1.0)


def played_ping_pong(half: PhaseTimes, rounds: int) -> float:
    """Return seconds per round of two groups on one drafter and one target, each busy with one group at a time."""
    ready = [0.0, 0.0]  # when the group's verification before has ended
    drafter = target = 0.0
    for _ in range(rounds):
        for group in (0, 1):
            drafted = max(drafter, ready[group]) + half.draft_s
            drafter = drafted
            ready[group] = target = max(target, drafted) + half.verify_s
    return target / rounds


def played_draft_ahead(times: PhaseTimes, hit_rate: float, steps: int) -> float:
    """Return seconds per step where a missed chunk is drafted again behind the verification; hits come evenly."""
    spent = 0.0
    for step in range(steps):
        is_hit = int((step + 1) * hit_rate) > int(step * hit_rate)
        spent += max(times.draft_s, times.verify_s) if is_hit else times.serial_s
    return spent / steps


def test_equal_phases_that_halve_perfectly_double_the_speed() -> None:
    assert ping_pong_bound(PhaseTimes(2.0, 2.0), PhaseTimes(1.0, 1.0)) == 2.0
    assert draft_ahead_bound(PhaseTimes(2.0, 2.0)) == 2.0


def test_halves_that_cost_as_much_as_the_whole_lose() -> None:
    whole = PhaseTimes(1.0, 3.0)
    assert ping_pong_bound(whole, whole) == pytest.approx(4.0 / 6.0)


@given(whole=st.tuples(SECONDS, SECONDS), half=st.tuples(SECONDS, SECONDS))
def test_what_ping_pong_hides_is_at_most_the_shorter_phase_of_a_half(
    whole: tuple[float, float], half: tuple[float, float]
) -> None:
    one, other = PhaseTimes(*whole), PhaseTimes(*half)
    without_overlap = sum(whole) / (2 * sum(half))
    own = ping_pong_bound(one, other) / without_overlap
    assert own == pytest.approx(draft_ahead_bound(other))


@given(draft=SECONDS, verify=SECONDS)
def test_ping_pong_is_what_two_groups_played_out_reach(draft: float, verify: float) -> None:
    half, whole = PhaseTimes(draft, verify), PhaseTimes(1.6 * draft, 1.3 * verify)
    played = whole.serial_s / played_ping_pong(half, 600)
    assert ping_pong_bound(whole, half) == pytest.approx(played, rel=5e-3)
    assert played <= ping_pong_bound(whole, half) * (1 + 1e-9)


@given(draft=SECONDS, verify=SECONDS, hit_rate=st.floats(0.0, 1.0))
def test_draft_ahead_is_what_steps_played_out_reach(draft: float, verify: float, hit_rate: float) -> None:
    times = PhaseTimes(draft, verify)
    played = times.serial_s / played_draft_ahead(times, hit_rate, 400)
    assert draft_ahead_bound(times, hit_rate) == pytest.approx(played, rel=0.01)


@given(draft=SECONDS, verify=SECONDS, hit_rate=st.floats(0.0, 1.0))
def test_draft_ahead_lies_between_one_and_its_bound_without_misses(
    draft: float, verify: float, hit_rate: float
) -> None:
    times = PhaseTimes(draft, verify)
    share = times.draft_share
    assert 1.0 <= draft_ahead_bound(times, hit_rate) <= draft_ahead_bound(times) <= 2.0 + 1e-9
    assert draft_ahead_bound(times) == pytest.approx(1.0 / max(share, 1.0 - share))
    assert draft_ahead_bound(times, 0.0) == 1.0


def test_hidden_time_is_counted_against_the_shorter_phase() -> None:
    times = PhaseTimes(2.0, 4.0)
    assert hidden_share(times, 4.0) == 1.0
    assert hidden_share(times, 5.0) == 0.5
    assert hidden_share(times, 7.0) == -0.5
    assert hidden_share(PhaseTimes(4.0, 2.0), 4.0) == 1.0


@pytest.mark.parametrize("times", [(-1.0, 1.0), (1.0, float("nan")), (float("inf"), 1.0), (0.0, 0.0)])
def test_times_that_cannot_be_are_refused(times: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="expected seconds of at least 0"):
        PhaseTimes(*times)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_hit_rates_that_cannot_be_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="expected 0 to 1"):
        draft_ahead_bound(PhaseTimes(1.0, 1.0), rate)
