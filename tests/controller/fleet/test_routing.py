"""Who gets the next request."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from faser.controller.fleet.routing import choose
from faser.controller.fleet.views import STATES, ReplicaView

REPLICAS = st.lists(
    st.builds(
        ReplicaView, st.sampled_from([f"replica-{number}" for number in range(8)]), st.sampled_from(STATES),
        st.integers(0, 9), st.integers(0, 9), st.floats(0.0, 9.0),
    ),
    unique_by=lambda each: each.name,
)  # fmt: skip


@given(REPLICAS, st.sets(st.sampled_from([f"replica-{number}" for number in range(8)])))
def test_a_request_goes_to_one_that_serves_and_has_fewest(replicas: list[ReplicaView], failed: set[str]) -> None:
    serving = {each.name: each for each in replicas if each.state == "serving"}
    name = choose(replicas, failed)
    assert (name is None) == (not serving)
    if name is not None:
        could = [each for each in serving.values() if each.name not in failed] or list(serving.values())
        assert serving[name] in could
        assert serving[name].requests == min(each.requests for each in could)


@given(REPLICAS)
def test_the_order_in_which_replicas_are_named_does_not_matter(replicas: list[ReplicaView]) -> None:
    assert choose(replicas) == choose(replicas[::-1])


def test_of_equal_ones_the_one_with_less_to_read_then_the_one_that_waited_longest() -> None:
    first, second = ReplicaView("a", "serving", 2, 900, 1.0), ReplicaView("b", "serving", 2, 100, 2.0)
    assert choose([first, second]) == "b"
    assert choose([first, replace(second, body_bytes=900)]) == "a"


def test_idle_replicas_take_turns() -> None:
    replicas = {name: ReplicaView(name, "serving") for name in "abc"}
    asked: Counter[str] = Counter()
    for second in range(1, 10):
        name = choose(replicas.values())
        assert name is not None
        asked[name] += 1
        replicas[name] = replace(replicas[name], chosen_s=float(second))
    assert asked == Counter(a=3, b=3, c=3)
