"""Who was in time: counted by class, for requests that finished and whose first token was seen."""

from __future__ import annotations

import pytest

from faser.controller.decision.attainment import MOST_KEPT, Attainment, added_up
from faser.controller.objectives import parse_objectives
from faser.controller.snapshot import AttainmentStatus
from faser.engine_adapter.protocol import EventKind, RequestEvent

CLASSES = parse_objectives("interactive:0:300:40, batch:1::400")


def arrival(handle: int, time_s: float = 10.0, priority: int = 0, **asked: float) -> RequestEvent:
    return RequestEvent("arrival", handle, time_s, 90, f"r{handle}", priority, **asked)


def life(
    attainment: Attainment, arrived: RequestEvent, first_s: float, end_s: float, tokens: int, kind: EventKind = "finish"
) -> dict[str, tuple[int, int]]:
    """Let one request live, and return what is counted then."""
    attainment.take([arrived])
    attainment.take([RequestEvent("first_token", arrived.handle, first_s, 1)])
    attainment.take([RequestEvent(kind, arrived.handle, end_s, tokens)])
    return counts(attainment)


def counts(attainment: Attainment) -> dict[str, tuple[int, int]]:
    return {name: (each.finished, each.in_time) for name, each in attainment.status().items()}


@pytest.mark.parametrize(
    ("first_s", "end_s", "tokens", "in_time"),
    [
        (10.29, 10.68, 11, 1),
        (10.31, 10.31, 11, 0),  # the first token was late
        (10.1, 10.51, 11, 0),  # 41 ms per further token
        (10.1, 10.1, 1, 1),
        (10.2, 10.19, 1, 1),  # an end is noted within the step that has the first token
    ],
)
def test_a_request_is_in_time_by_its_first_token_and_by_the_mean_of_the_others(
    first_s: float, end_s: float, tokens: int, in_time: int
) -> None:
    attainment = Attainment(CLASSES)
    assert life(attainment, arrival(1), first_s, end_s, tokens) == {"interactive": (1, in_time), "batch": (0, 0)}


def test_requests_that_speak_for_themselves_are_counted_as_such_and_by_their_own_word() -> None:
    attainment = Attainment(CLASSES)
    life(attainment, arrival(1, ttft_ms=2000.0), 11.9, 12.0, 2)
    life(attainment, arrival(2, tpot_ms=1.0), 10.1, 10.2, 2)
    life(attainment, arrival(3, priority=7, tpot_ms=500.0), 99.0, 99.4, 2)
    assert counts(attainment) == {"interactive": (0, 0), "batch": (0, 0), "own": (3, 1)}


def test_neither_aborted_requests_count_nor_those_without_objectives() -> None:
    attainment = Attainment(CLASSES)
    life(attainment, arrival(1), 10.1, 10.2, 3, kind="abort")
    life(attainment, arrival(2, priority=7), 10.1, 10.2, 3)
    assert counts(attainment) == {"interactive": (0, 0), "batch": (0, 0)}
    assert counts(Attainment()) == {}


def test_a_record_may_tell_of_the_end_before_it_tells_of_the_first_token() -> None:
    attainment = Attainment(CLASSES)
    attainment.take([arrival(1), RequestEvent("finish", 1, 10.2, 1), RequestEvent("first_token", 1, 10.21, 1)])
    assert counts(attainment)["interactive"] == (1, 1)


def test_whose_first_token_was_not_seen_is_not_judged() -> None:
    attainment = Attainment(CLASSES)
    attainment.take([arrival(1), arrival(2)])  # of a roster
    attainment.take([RequestEvent("first_token", 2, 10.2, 1)])
    attainment.take([RequestEvent("finish", handle, 10.3, 4) for handle in (1, 2, 77)])
    assert counts(attainment)["interactive"] == (1, 1)


def test_an_arrival_that_is_told_twice_is_one_request() -> None:
    attainment = Attainment(CLASSES)
    attainment.take([arrival(1)])
    attainment.take([RequestEvent("first_token", 1, 10.1, 1), arrival(1)])
    attainment.take([RequestEvent("finish", 1, 10.12, 2)])
    assert counts(attainment)["interactive"] == (1, 1)


def test_other_classes_hold_for_who_arrives_from_then_on_and_counts_stay() -> None:
    attainment = Attainment(CLASSES)
    life(attainment, arrival(1), 10.1, 10.11, 2)
    attainment.take([arrival(2)])
    attainment.follow(parse_objectives("slow:0:9000:"))
    attainment.take([RequestEvent("first_token", 2, 19.0, 1), RequestEvent("finish", 2, 19.0, 1)])
    life(attainment, arrival(3), 18.0, 18.0, 1)
    assert counts(attainment) == {"interactive": (2, 1), "batch": (0, 0), "slow": (1, 1)}


def test_requests_whose_end_is_never_told_are_forgotten() -> None:
    attainment = Attainment(CLASSES)
    attainment.take([arrival(handle) for handle in range(1, MOST_KEPT + 3)])
    assert len(attainment._live) == MOST_KEPT
    assert life(attainment, arrival(MOST_KEPT + 3), 10.1, 10.1, 1)["interactive"] == (1, 1)


def test_counts_of_several_engines_add_up_by_class() -> None:
    some, more = {"a": AttainmentStatus(3, 1)}, {"b": AttainmentStatus(1, 1), "a": AttainmentStatus(2, 2)}
    assert added_up([some, more]) == {"a": AttainmentStatus(5, 3), "b": AttainmentStatus(1, 1)}
    assert added_up([]) == {}
