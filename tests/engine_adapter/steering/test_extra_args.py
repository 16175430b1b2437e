"""What clients ask for in extra_args: numbers within bounds count, whatever else they write never fails a request."""

from __future__ import annotations

import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine_adapter import protocol as wire
from faser.engine_adapter.steering.extra_args import CLIENT_LIMIT, CLIENT_TPOT, CLIENT_TTFT, wishes_of

from .test_steering import LimitedRequest, Request, Sampling, steering

LOGGER = "vllm.faser.engine_adapter.steering.steering"


def asking(**extra: object) -> LimitedRequest:
    return LimitedRequest(sampling_params=Sampling(extra))


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("not to be shown")


@pytest.mark.parametrize(
    ("ttft", "tpot", "understood"),
    [
        (300, 40, (300.0, 40.0)),
        ("300", " 40.5 ", (300.0, 40.5)),
        (1, 0.1, (1.0, 0.1)),
        (600_000, 60_000.0, (600_000.0, 60_000.0)),
    ],
)
def test_numbers_within_bounds_are_objectives_also_as_text(
    ttft: object, tpot: object, understood: tuple[float, float]
) -> None:
    wishes = wishes_of(asking(**{CLIENT_TTFT: ttft, CLIENT_TPOT: tpot, "other": 1}))
    assert ((wishes.ttft_ms, wishes.tpot_ms), wishes.faults) == (understood, ())


def test_one_objective_may_be_left_out_and_so_may_both() -> None:
    assert wishes_of(asking(**{CLIENT_TPOT: 40})) == (wire.MAX_DRAFT_LENGTH, None, 40.0, ())
    for nobody in (Request(), LimitedRequest(), asking()):
        assert wishes_of(nobody) == (wire.MAX_DRAFT_LENGTH, None, None, ())


NONSENSE = [
    0, 0.99, 600_000.1, -5, "", "fast", "1e", "nan", "inf", math.nan, math.inf, -math.inf, True, False, None, [300],
    {"ms": 300}, b"300", 10**400, "9" * 10_000, Unprintable(), [Unprintable()], "\ud800", "3\n00",
]  # fmt: skip


@pytest.mark.parametrize("asked", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_is_ignored_counted_and_said_once(asked: object, caplog: pytest.LogCaptureFixture) -> None:
    adapter, link = steering()
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        for name in ("a", "b"):
            adapter.arrive(name, asking(**{CLIENT_TTFT: asked, CLIENT_TPOT: 40}))
    assert [(event.ttft_ms, event.tpot_ms) for event in adapter.events] == [(None, 40.0)] * 2
    assert link.refused == {"objective": 2}
    [line] = [record.getMessage() for record in caplog.records]
    assert "faser_ttft_ms" in line
    assert "expected a number from 1 to 600000; ignored" in line
    assert "\n" not in line
    assert len(line) < 300
    line.encode()


def test_a_fault_of_one_kind_does_not_hide_the_first_of_another(caplog: pytest.LogCaptureFixture) -> None:
    adapter, link = steering()
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        adapter.arrive("a", asking(**{CLIENT_LIMIT: "all", CLIENT_TPOT: 0.05}))
    assert link.refused == {"extra_args": 1, "objective": 1}
    assert len(caplog.records) == 2
    assert "expected a number from 0.1 to 60000" in caplog.records[1].getMessage()


@given(st.dictionaries(st.sampled_from((CLIENT_LIMIT, CLIENT_TTFT, CLIENT_TPOT)), st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.lists(st.floats(), max_size=2),
)))  # fmt: skip
def test_whatever_a_client_writes_the_arrival_is_one_that_the_wire_takes(extra: dict[str, object]) -> None:
    adapter, _ = steering()
    adapter.arrive("a", asking(**extra))
    adapter.introduce()
    [greeting] = adapter.link.sent  # type: ignore[attr-defined]
    assert wire.decode_from_engine(wire.encode(greeting)) == greeting


def test_objectives_stand_in_the_arrival_and_in_the_roster() -> None:
    adapter, link = steering()
    adapter.arrive("a", asking(**{CLIENT_TTFT: 300, CLIENT_TPOT: 40}))
    adapter.introduce()
    [greeting] = link.sent
    assert isinstance(greeting, wire.Hello)
    for arrival in (adapter.events[0], greeting.roster[0]):
        assert (arrival.kind, arrival.ttft_ms, arrival.tpot_ms) == ("arrival", 300.0, 40.0)
