"""The guard is pure: whatever is seen, in whatever order, its promises hold."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.controller.config import GuardConfig
from faser.controller.decision.guard import Breaker, Dwell, GuardState, Sight, judge

LIMITS = GuardConfig(stale_ms=500, gap_records=32, hold_records=4, recover_records=8, retry_records=16)
SOUND, STALE, GAP = Sight(), Sight(lag_s=0.6), Sight(lost=32)
sights = st.builds(
    Sight,
    lag_s=st.floats(allow_nan=True, allow_infinity=True),
    lost=st.integers(0, 1 << 40),
    trip=st.sampled_from(["", "", "", "circuit", "envelope"]),
)
limits = st.builds(
    GuardConfig,
    stale_ms=st.integers(1, 10_000),
    gap_records=st.integers(1, 1000),
    hold_records=st.integers(1, 20),
    recover_records=st.integers(1, 20),
    retry_records=st.integers(1, 20),
)


def after(sights: list[Sight], state: GuardState | None = None) -> GuardState:
    state = state or GuardState()
    for sight in sights:
        state = judge(state, sight, LIMITS)
    return state


def test_a_sound_record_leaves_the_guard_as_it_was() -> None:
    state = GuardState()
    assert judge(state, SOUND, LIMITS) is state


@pytest.mark.parametrize(("sight", "reason"), [(STALE, "stale"), (GAP, "gap"), (Sight(lag_s=math.nan), "stale")])
def test_one_fault_holds_and_many_fall_back(sight: Sight, reason: str) -> None:
    held = after([sight])
    assert (held.stance, held.reason) == ("hold", reason)
    assert after([sight] * 3).stance == "hold"
    assert after([sight] * 4).stance == "fallback"
    assert after([sight, SOUND]).stance == "steer"


def test_faults_that_come_back_too_often_fall_back_though_none_is_long() -> None:
    assert after([STALE, SOUND] * 3).stance == "steer"
    assert after([STALE, SOUND] * 8).stance == "fallback"


def test_a_small_gap_is_no_fault() -> None:
    assert after([Sight(lost=31)]).stance == "steer"


def test_steering_comes_back_after_sound_records_in_a_row_only() -> None:
    fallen = after([STALE] * 4)
    assert after([SOUND] * 7, fallen).stance == "fallback"
    assert after([SOUND] * 8, fallen).stance == "steer"
    assert after([SOUND] * 7 + [STALE] + [SOUND] * 7, fallen).stance == "fallback"


def test_each_trip_in_a_row_takes_twice_as_long_and_a_long_good_time_forgives() -> None:
    first = after([Sight(trip="circuit")])
    assert (first.stance, first.reason, first.remaining) == ("fallback", "circuit", 16)
    again = after([SOUND] * 16 + [Sight(trip="circuit")], first)
    assert again.remaining == 32
    forgiven = after([SOUND] * (32 + 2 * 16) + [Sight(trip="circuit")], again)
    assert forgiven.remaining == 16


@given(st.lists(sights, max_size=60), limits)
@settings(max_examples=300, deadline=None)
def test_whatever_is_seen_no_faulty_record_is_ever_steered_on(seen: list[Sight], terms: GuardConfig) -> None:
    state = GuardState()
    for sight in seen:
        before, state = state, judge(state, sight, terms)
        is_faulty = sight.trip or not sight.lag_s <= terms.stale_ms / 1e3 or sight.lost >= terms.gap_records
        assert not (is_faulty and state.stance == "steer")
        assert (state.reason == "") == (state.stance == "steer")
        assert (state.remaining > 0) == (state.stance == "fallback")
        assert 0 <= state.weight <= 2 * terms.hold_records
        if sight.trip:
            assert (state.stance, state.reason) == ("fallback", sight.trip)
        if before.stance == "fallback" and state.stance == "steer":
            assert before.remaining == 1


@given(st.lists(sights, max_size=30), limits)
@settings(max_examples=200, deadline=None)
def test_from_any_state_enough_sound_records_lead_back(seen: list[Sight], terms: GuardConfig) -> None:
    state = GuardState()
    for sight in seen:
        state = judge(state, sight, terms)
    for _ in range((terms.retry_records << 6) + terms.recover_records):
        if state.stance == "steer":
            break
        state = judge(state, SOUND, terms)
    assert state.stance == "steer"


@given(st.lists(sights, max_size=20))
@settings(max_examples=100, deadline=None)
def test_the_same_sights_give_the_same_states(seen: list[Sight]) -> None:
    assert after(seen) == after([Sight(*sight) for sight in seen])


def test_a_policy_that_fails_often_enough_in_a_row_trips_and_gets_one_trial() -> None:
    breaker, terms = Breaker(), replace(LIMITS, breaker_failures=3)
    assert [breaker.fail(terms) for _ in range(3)] == ["", "", "circuit"]
    assert breaker.fail(terms) == "circuit"
    breaker.succeed()
    assert breaker.fail(terms) == ""


lengths_of = st.lists(st.lists(st.integers(0, 8), min_size=4, max_size=4), min_size=1, max_size=30)


@given(lengths_of, st.integers(1, 6), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_lengths_fall_at_once_and_rise_only_after_they_stood(wanted: list[list[int]], dwell: int, mix: object) -> None:
    settled_of, changed_at = dict[int, int](), dict[int, int]()
    hysteresis = Dwell()
    for record, row in enumerate(wanted):
        handles = [1, 2, 3, 4]
        mix.shuffle(handles)  # type: ignore[attr-defined]
        if record % 3 == 2:
            handles, row = handles[:2], row[:2]
        settled = hysteresis.settle(np.array(handles), np.array(row), record, dwell).tolist()
        for handle, want, has in zip(handles, row, settled, strict=True):
            before = settled_of.get(handle)
            assert has == want if before is None or want <= before else has in (want, before)
            if before is not None and has > before:
                assert record - changed_at.get(handle, -dwell) >= dwell
            if before is not None and has != before:
                changed_at[handle] = record
            settled_of[handle] = has
        for gone in settled_of.keys() - set(handles):
            del settled_of[gone]
            changed_at.pop(gone, None)
