"""The lease: what is in force, for how long, and who may set it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine_adapter.protocol import ActionSet, Admission, MatchRule, Prune, Release, StopRule
from faser.engine_adapter.steering.lease import Lease

BOOT = "boot"


def action(epoch: int = 1, sequence: int = 1, step: int = 32, time_s: float = 1.0, **fields: object) -> ActionSet:
    return ActionSet(
        boot_id=str(fields.get("boot_id", BOOT)),
        epoch=epoch,
        sequence=sequence,
        valid_until_step=step,
        valid_until_s=time_s,
        default_length=int(fields.get("default_length", 2)),  # type: ignore[call-overload]
        handles=[1],
        lengths=[int(fields.get("length", 3))],  # type: ignore[call-overload]
        mode=fields.get("mode", "active"),  # type: ignore[arg-type]
    )


def lease() -> Lease:
    return Lease(BOOT, k_max=6, max_steps=32, max_s=1.0)


def test_without_an_offer_the_default_holds() -> None:
    assert lease().in_force(0, 0.0) is None


def test_an_action_set_holds_until_its_step_and_not_longer() -> None:
    held = lease()
    assert held.offer(action(step=5), step=0, now_s=0.0) is None
    assert held.in_force(5, 0.5) is not None
    assert held.in_force(6, 0.5) is None


def test_an_action_set_holds_until_its_time_and_not_longer() -> None:
    held = lease()
    assert held.offer(action(time_s=0.5), step=0, now_s=0.0) is None
    assert held.in_force(1, 0.5) is not None
    assert held.in_force(1, 0.51) is None


def test_what_came_in_time_during_a_long_step_holds_for_the_next_step_and_not_longer() -> None:
    held = lease()
    assert held.offer(action(time_s=1.0), step=4, now_s=1.6, looked_s=0.0) is None
    assert held.in_force(4, 1.6) is not None
    assert held.in_force(5, 1.6) is None
    assert held.offer(action(sequence=9, time_s=1.0), step=6, now_s=3.0, looked_s=1.6) == "stale"  # on its way for long
    assert lease().offer(action(time_s=1.0), step=4, now_s=1.6) == "stale"  # nobody says when it came


def test_the_engine_shortens_a_lease_that_asks_for_more_than_it_grants() -> None:
    held = lease()
    assert held.offer(action(step=10**6, time_s=10**6), step=0, now_s=0.0) is None
    assert held.in_force(32, 1.0) is not None
    assert held.in_force(33, 0.5) is None


@pytest.mark.parametrize(
    ("offered", "reason"),
    [
        (action(boot_id="other", sequence=9), "foreign"),
        (action(step=3, sequence=9), "stale"),
        (action(time_s=0.05, sequence=9), "stale"),
        (action(epoch=2, sequence=9), "owned"),
        (action(epoch=1, sequence=1), "reordered"),
        (action(mode="advisory", sequence=9), "advisory"),
    ],
)
def test_an_offer_that_must_not_act_is_refused_with_its_reason(offered: ActionSet, reason: str) -> None:
    held = lease()
    assert held.offer(action(), step=0, now_s=0.0) is None
    assert held.offer(offered, step=4, now_s=0.1) == reason


def test_a_second_controller_is_taken_when_the_owner_is_silent_and_the_first_one_never_again() -> None:
    held = lease()
    held.offer(action(epoch=1), step=0, now_s=0.0)
    assert held.offer(action(epoch=2, step=80, time_s=9.0), step=40, now_s=2.0) is None
    assert held.in_force(72, 2.5) is not None
    assert held.offer(action(epoch=1, sequence=99, step=999, time_s=99.0), step=75, now_s=9.5) == "old_epoch"


def test_only_the_owner_releases() -> None:
    held = lease()
    held.offer(action(epoch=3), step=0, now_s=0.0)
    assert not held.release(Release(BOOT, 2))
    assert not held.release(Release("other", 3))
    assert held.in_force(1, 0.1) is not None
    assert held.release(Release(BOOT, 3))
    assert held.in_force(1, 0.1) is None


def test_lengths_are_clamped_to_what_the_buffers_hold() -> None:
    held = lease()
    held.offer(action(length=60, default_length=50), step=0, now_s=0.0)
    seen = held.in_force(1, 0.1)
    assert seen is not None
    assert seen.lengths == [6]
    assert seen.default_length == 6


offers = st.tuples(
    st.integers(1, 3), st.integers(0, 9), st.integers(-5, 60), st.floats(-1, 3), st.integers(0, 4), st.floats(0, 0.6)
)


@given(st.lists(offers, max_size=40))
def test_never_an_expired_action_never_two_owners_epochs_monotone(sequence: list[tuple[int, ...]]) -> None:
    held, step, now_s, owners = lease(), 0, 0.0, []
    for epoch, number, steps, valid_s, gap, wait_s in sequence:
        step, now_s = step + gap, now_s + wait_s
        before = held.in_force(step, now_s)
        taken = held.offer(action(epoch, number, step + steps, now_s + valid_s), step, now_s) is None
        if taken:
            assert before is None or before.epoch == epoch
            owners.append(epoch)
        after = held.in_force(step, now_s)
        if after is not None:
            assert after.valid_until_step >= step
            assert after.valid_until_s >= now_s
    assert owners == sorted(owners)


def test_a_stop_rule_is_fitted_to_the_longest_draft() -> None:
    held = lease()
    offered = action()
    offered.stop = StopRule([1.0] * 9, [0.1, 0.2], [0.3], [0.4])
    held.offer(offered, step=0, now_s=0.0)
    in_force = held.in_force(1, 0.1)
    assert in_force is not None
    assert in_force.stop == StopRule([1.0] * 6, [0.1] + [0.2] * 5, [0.3] * 6, [0.4] * 6)


@pytest.mark.parametrize(("layer", "expected"), [(10, Prune(10, 0.2)), (11, None)])
def test_pruning_is_dropped_where_there_is_no_exit_head(layer: int, expected: Prune | None) -> None:
    held = Lease(BOOT, k_max=6, max_steps=32, max_s=1.0, exit_layers=(5, 10))
    asked = action()
    asked.prune = Prune(layer, 0.2)
    assert held.offer(asked, step=0, now_s=0.0) is None
    granted = held.in_force(1, 0.1)
    assert granted is not None
    assert granted.prune == expected


@pytest.mark.parametrize(
    "unsound",
    [
        Admission([8, 4], [0.1, 0.2]),
        Admission([4, 4], [0.1, 0.2]),
        Admission([4, 8], [0.1]),
        Admission([4], [0.1], [1.0]),
    ],
    ids=["falling", "twice", "lengths", "weights"],
)
def test_numbers_that_adaptive_verification_could_not_use_are_left_out(unsound: Admission) -> None:
    granting = lease()
    offered = action()
    offered.handles, offered.lengths, offered.admission = [1, 2], [3, 3], unsound
    assert granting.offer(offered, 1, 0.0) is None
    held = granting.in_force(1, 0.0)
    assert held is not None
    assert held.admission is None


def test_a_copy_is_no_longer_than_the_engine_holds_and_has_a_price_at_every_position() -> None:
    held = Lease(BOOT, k_max=2, max_steps=32, max_s=1.0, copy_max=4)
    asked = action()
    asked.match = MatchRule([1.0, 2.0], [0.5], [0.1, 0.2, 0.3, 0.4, 0.5], 9, 0.7, 2)
    assert held.offer(asked, 0, 0.0) is None
    given = held.in_force(1, 0.1)
    assert given is not None
    assert given.match == MatchRule([1.0, 2.0, 2.0, 2.0], [0.5] * 4, [0.1, 0.2, 0.3, 0.4], 4, 0.7, 2)


def test_weights_that_are_not_one_for_each_named_request_copy_nothing() -> None:
    held = Lease(BOOT, k_max=2, max_steps=32, max_s=1.0, copy_max=4)
    asked = action()
    asked.match = MatchRule([1.0], [0.5], [0.1], 4, handles=(1, 2), weights=(8.0,))
    assert held.offer(asked, 0, 0.0) is None
    given = held.in_force(1, 0.1)
    assert given is not None
    assert given.match is None
