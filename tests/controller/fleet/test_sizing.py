"""How many replicas: up at once, down after the idle time, never beyond the bounds, and at rest under a steady load."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.controller.fleet.sizing import STAY, Resize, SizeMemory, SizeRule, resize
from faser.controller.fleet.views import STATES, FleetView, ReplicaView

TICK_S = 0.5
RULE = SizeRule(least=1, most=4, requests_each=8.0, idle_s=60.0)


@dataclass
class SimulatedFleet:
    """Replicas that start after `load_s` and drain at once, under a load that is shared out evenly."""

    rule: SizeRule
    load_s: float = 30.0
    now_s: float = 0.0
    memory: SizeMemory = field(default_factory=SizeMemory)
    replicas: dict[str, ReplicaView] = field(default_factory=dict)
    changes: list[tuple[float, Resize]] = field(default_factory=list)
    number: int = 0

    def run(self, seconds: float, ongoing: int) -> None:
        """Let so many requests be in flight for so long."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += TICK_S
            self._advance(ongoing)

    def _advance(self, ongoing: int) -> None:
        for each in list(self.replicas.values()):
            if each.state == "starting" and self.now_s - each.since_s >= self.load_s:
                self.replicas[each.name] = replace(each, state="serving", since_s=self.now_s)
            if each.state == "draining":
                del self.replicas[each.name]
        serving = [each for each in self.replicas.values() if each.state == "serving"]
        for place, each in enumerate(serving):
            share = ongoing // len(serving) + (place < ongoing % len(serving))
            self.replicas[each.name] = replace(each, requests=share)
        view = FleetView(self.now_s, tuple(self.replicas.values()), 0 if serving else ongoing)
        self.memory, change = resize(self.rule, self.memory, view)
        if change != STAY:
            self.changes.append((self.now_s, change))
        for name in change.drain:
            self.replicas[name] = replace(self.replicas[name], state="draining", since_s=self.now_s)
        for _ in range(change.add):
            self.number += 1
            name = f"replica-{self.number}"
            self.replicas[name] = ReplicaView(name, "starting", since_s=self.now_s)

    @property
    def count(self) -> int:
        return sum(each.state != "draining" for each in self.replicas.values())


def test_it_begins_with_the_least_and_follows_a_load_at_once() -> None:
    fleet = SimulatedFleet(RULE)
    fleet.run(1.0, 0)
    assert fleet.count == 1
    fleet.run(40.0, 8)
    assert fleet.count == 1, "eight are what one is to have"
    fleet.run(15.0, 20)
    assert fleet.count == 3
    asked_s, change = fleet.changes[1]
    assert change.add >= 1
    assert asked_s - 41.0 <= 2.0, "not a load time later"


def test_a_burst_of_a_second_adds_nothing() -> None:
    fleet = SimulatedFleet(RULE)
    fleet.run(60.0, 4)
    fleet.run(1.0, 20)
    fleet.run(60.0, 4)
    assert fleet.count == 1
    assert len(fleet.changes) == 1


def test_each_replica_goes_once_it_was_not_needed_for_the_idle_time() -> None:
    fleet = SimulatedFleet(RULE)
    fleet.run(100.0, 32)
    assert fleet.count == 4
    low_s = fleet.now_s
    fleet.run(59.0, 4)
    assert fleet.count == 4
    fleet.run(20.0, 4)
    drained = [(at_s - low_s, len(change.drain)) for at_s, change in fleet.changes if change.drain]
    assert sum(count for _, count in drained) == 3
    assert all(60.0 <= after_s <= 75.0 for after_s, _ in drained)
    assert fleet.count == 1


def test_a_peak_within_the_idle_time_keeps_what_it_needed() -> None:
    fleet = SimulatedFleet(RULE)
    fleet.run(100.0, 32)
    fleet.run(40.0, 2)
    fleet.run(20.0, 16)  # three with room
    fleet.run(35.0, 2)
    (drained,) = [change.drain for _, change in fleet.changes if change.drain]
    assert len(drained) == 1
    assert fleet.count == 3


@pytest.mark.parametrize("ongoing", range(40))
def test_a_steady_load_is_at_rest(ongoing: int) -> None:
    fleet = SimulatedFleet(RULE)
    fleet.run(400.0, ongoing)
    settled = len(fleet.changes)
    fleet.run(400.0, ongoing)
    assert len(fleet.changes) == settled


def test_a_load_that_wavers_around_a_bound_does_not_swing_the_fleet() -> None:
    fleet = SimulatedFleet(RULE)
    for _ in range(40):
        fleet.run(20.0, 9)
        fleet.run(20.0, 7)
    assert [change for _, change in fleet.changes] == [Resize(add=2)]


def test_a_fleet_of_none_starts_with_the_first_request_and_sleeps_again() -> None:
    fleet = SimulatedFleet(replace(RULE, least=0))
    fleet.run(100.0, 0)
    assert fleet.changes == []
    fleet.run(0.5, 1)
    assert fleet.count == 1
    fleet.run(50.0, 1)
    fleet.run(59.0, 0)
    assert fleet.count == 1
    fleet.run(60.0, 0)
    assert fleet.count == 0


def test_who_drains_is_taken_back_before_another_is_started_the_busiest_first() -> None:
    replicas = (
        ReplicaView("a", "serving", 20), ReplicaView("b", "draining", 1), ReplicaView("c", "draining", 3),
    )  # fmt: skip
    _, change = resize(RULE, SizeMemory(), FleetView(1.0, replicas))
    assert change == Resize(add=0, restore=("c", "b"))
    _, change = resize(RULE, SizeMemory(), FleetView(1.0, replicas, waiting=9))
    assert change == Resize(add=1, restore=("c", "b"))


def test_after_an_engine_that_did_not_start_none_is_added_for_a_while() -> None:
    view = FleetView(1.0, (ReplicaView("a", "serving", 20),), may_start=False)
    assert resize(RULE, SizeMemory(), view)[1] == STAY


def test_who_waits_for_room_goes_first_then_who_has_least_then_the_youngest() -> None:
    rule = replace(RULE, idle_s=0.0)
    replicas = (
        ReplicaView("a", "serving", 1, since_s=1.0), ReplicaView("b", "serving", 0, since_s=1.0),
        ReplicaView("c", "serving", 0, since_s=2.0), ReplicaView("d", "pending", since_s=3.0),
    )  # fmt: skip
    _, change = resize(rule, SizeMemory(), FleetView(9.0, replicas))
    assert change.drain == ("d", "c", "b")


VIEWS = st.builds(
    FleetView,
    st.floats(0.0, 1e3),
    st.lists(
        st.builds(
            ReplicaView, st.sampled_from("abcdefgh"), st.sampled_from(STATES), st.integers(0, 40), st.just(0),
            st.just(0.0), st.floats(0.0, 1e3),
        ),
        unique_by=lambda each: each.name,
    ).map(tuple),
    st.integers(0, 40),
    st.booleans(),
)  # fmt: skip


@given(st.integers(0, 3), st.integers(0, 5), st.lists(VIEWS, min_size=1, max_size=12), st.floats(0.0, 100.0))
def test_it_never_leaves_the_bounds_or_adds_and_drains_at_once(
    least: int, more: int, views: list[FleetView], idle_s: float
) -> None:
    rule, memory = SizeRule(least, max(least + more, 1), 8.0, idle_s), SizeMemory()
    for view in sorted(views, key=lambda each: each.now_s):
        memory, change = resize(rule, memory, view)
        here = len(view.of("pending", "starting", "serving"))
        after = here + change.add + len(change.restore) - len(change.drain)
        assert change.add >= 0
        assert not (change.drain and (change.add or change.restore))
        if change.add or change.restore:
            assert after <= rule.most
        if change.drain:
            assert rule.least <= after < here
        states = {each.name: each.state for each in view.replicas}
        assert {states[name] for name in change.drain} <= {"pending", "serving"}
        assert {states[name] for name in change.restore} <= {"draining"}
        assert view.may_start or not change.add
