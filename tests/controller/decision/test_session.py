"""One engine's session counts what its policy should not have asked for, and what it left to another to decide on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from faser.controller.config import LeaseConfig
from faser.controller.daemon.metrics import exposition
from faser.controller.decision.session import Session
from faser.controller.link.ask import engine_lines
from faser.controller.objectives import parse_objectives
from faser.controller.snapshot import SNAPSHOT_VERSION, LinkStatus, Snapshot, StoreStatus
from faser.engine_adapter.protocol import RequestEvent, Stages, StepRecord
from faser.env.estimate.engine_state import EngineState
from faser.env.spaces import Action
from faser.models.registry import make_policy

Make = Callable[..., Any]


class Greedy:
    """Asks one request in two records for more than can be had."""

    name = "greedy"
    calls = 0

    def act(self, state: EngineState) -> Action:
        """Return a length that may be too long."""
        self.calls += 1
        return Action(np.full(state.requests.size, 99 if self.calls % 2 else 1, np.int64), 1, reason="greedy")


@pytest.fixture
def start(make_engine: Make, make_record: Callable[..., StepRecord]) -> Callable[..., Callable[..., Session]]:
    """Return a function that makes a session of a policy, and gives it a record each time that it is called."""

    def make(policy: str, **abilities: bool) -> Callable[..., Session]:
        session = Session(make_engine().hello(**abilities), policy, LeaseConfig(), 7, 0.0)

        def hear(**changes: object) -> Session:
            counter = session.state.counter + 1
            record = msgspec.structs.replace(make_record("boot-1", max(counter, 1)), **changes)
            assert session.admit(record, record.counter * 0.01)
            assert session.decide(record) is not None
            session.learn()
            return session

        return hear

    return make


def shown(session: Session) -> tuple[str, bytes]:
    """Return the line of `faser status`, and what /metrics says."""
    status = session.status(1.0)
    link, store = LinkStatus("", 0, 0, {}, 0), StoreStatus("", 0, 0, 0, "")
    snapshot = Snapshot(SNAPSHOT_VERSION, "", 1, 7, 1.0, "", link, store, [status])
    return dict(engine_lines(status))["decisions"], exposition(snapshot)


def test_what_had_to_be_clamped_is_counted_and_shown(start: Callable[..., Callable[..., Session]]) -> None:
    hear = start("fixed:2")
    session = hear()
    assert session.status(1.0).clamped == 0
    session.policy = Greedy()
    for _ in range(5):
        hear()
    line, metrics = shown(session)
    assert ", 3 clamped, 0 handed to price;" in line
    assert b'faser_engine_clamped_total{engine="boot-1"} 3.0' in metrics


def test_what_a_learned_policy_left_to_price_is_counted_also_when_another_policy_follows(
    start: Callable[..., Callable[..., Session]],
) -> None:
    hear = start("learned")
    wanted = RequestEvent("arrival", 1, 0.0, 40, "r1", tpot_ms=25.0)  # without objectives nothing is left to anybody
    broken: dict[str, Any] = {"kv_usage": math.nan, "events": [wanted]}
    for _ in range(3):
        session = hear(**broken)
    line, metrics = shown(session)
    assert ", 0 clamped, 3 handed to price;" in line
    assert b'faser_engine_handed_over_total{engine="boot-1"} 3.0' in metrics
    session.follow(session.policy)
    assert session.status(1.0).handed_over == 3
    session.follow(make_policy("learned", session.state.capabilities))
    hear(**broken)
    assert session.status(1.0).handed_over == 4
    session.follow(make_policy("off", session.state.capabilities))
    hear(**broken)
    assert session.status(1.0).handed_over == 4


@pytest.mark.parametrize(
    ("spec", "name", "said"),
    [
        ("fixed:2+stages:3", "fixed:2", "keeps its stages: 3 stages; this engine's pipeline has 1 to 2"),
        ("fixed:9+stages:3", None, "is not steered: policy 'fixed:9': length '9', expected 0..6"),
    ],
)
def test_an_engine_that_cannot_have_the_stages_is_steered_without_them(
    make_engine: Make, caplog: pytest.LogCaptureFixture, spec: str, name: str | None, said: str
) -> None:
    hello = msgspec.structs.replace(make_engine().hello(), stages=Stages(30, (15,)))
    session = Session(hello, spec, LeaseConfig(), 7, 0.0)
    assert (None if session.policy is None else session.policy.name) == name
    assert said in caplog.text
    assert len(caplog.records) == 1
    assert "\n" not in caplog.messages[0]


def test_who_was_in_time_is_shown_and_counted_by_class(
    make_engine: Make, make_record: Callable[..., StepRecord]
) -> None:
    waiting = RequestEvent("arrival", 9, 0.0, 90, "r9", 0)
    hello = msgspec.structs.replace(make_engine().hello(), roster=[waiting])
    session = Session(hello, "fixed:2", LeaseConfig(), 7, 0.0, parse_objectives("interactive:0:300:40"))
    assert session.state.requests.column("ttft_s").tolist() == [0.3]
    lives = [
        [RequestEvent("arrival", 1, 0.01, 90, "r1", 7, ttft_ms=5.0), RequestEvent("first_token", 9, 0.1, 1)],
        [RequestEvent("first_token", 1, 0.02, 1)],
        [RequestEvent("finish", handle, 0.13, 2) for handle in (1, 9)],
    ]
    for counter, events in enumerate(lives, 1):
        record = msgspec.structs.replace(make_record("boot-1", counter), events=events)
        assert session.admit(record, counter * 0.01)
        assert session.decide(record) is not None
        session.learn()
        session.measure(record)
    assert dict(engine_lines(session.status(1.0)))["in time"] == "interactive 1 of 1 (100.0%); own 0 of 1 (0.0%)"
    _, metrics = shown(session)
    for line in (
        b'objective_finished_total{class="interactive",engine="boot-1"} 1.0',
        b'objective_in_time_total{class="interactive",engine="boot-1"} 1.0',
        b'objective_finished_total{class="own",engine="boot-1"} 1.0',
        b'objective_in_time_total{class="own",engine="boot-1"} 0.0',
    ):
        assert b"faser_engine_" + line in metrics


def test_where_nobody_has_objectives_nothing_is_said_of_them(start: Callable[..., Callable[..., Session]]) -> None:
    session = start("fixed:2")()
    assert "in time" not in dict(engine_lines(session.status(1.0)))
    assert b"objective_finished_total{" not in shown(session)[1]


def test_counts_that_are_not_vllms_are_shown_and_counted(start: Callable[..., Callable[..., Session]]) -> None:
    hear = start("fixed:2")
    session = hear()
    assert "MISCOUNT" not in dict(engine_lines(session.status(1.0)))
    session = hear(miscounted=3, sat_out=2, rested=4)
    line = dict(engine_lines(session.status(1.0)))["MISCOUNT"]
    assert line.startswith("3 draft tokens counted otherwise than by vLLM")
    _, metrics = shown(session)
    assert b'faser_engine_miscounted_total{engine="boot-1"} 3.0' in metrics
    assert b'faser_engine_sat_out{engine="boot-1"} 2.0' in metrics
    assert b'faser_engine_rested{engine="boot-1"} 4.0' in metrics


def test_the_split_in_force_is_shown_where_the_engine_offers_any(
    start: Callable[..., Callable[..., Session]], make_engine: Make, make_record: Callable[..., StepRecord]
) -> None:
    assert "split" not in dict(engine_lines(start("fixed:2")().status(1.0)))
    session = Session(make_engine().hello(splits=["unsplit", "1:1"]), "fixed:2", LeaseConfig(), 7, 0.0)
    shown_splits = [session.status(0.0).split]
    for counter, split in enumerate([1, None, 9], 1):
        assert session.admit(msgspec.structs.replace(make_record("boot-1", counter), split=split), counter * 0.01)
        session.learn()
        shown_splits.append(session.status(1.0).split)
    assert shown_splits == ["unsplit", "1:1", "unsplit", ""]


def test_goodput_is_shown_beside_what_no_speculation_would_give(start: Callable[..., Callable[..., Session]]) -> None:
    hear = start("fixed:2")
    session = hear()
    status = session.status(1.0)
    assert "times" not in dict(engine_lines(status))["goodput"]
    known = msgspec.structs.replace(status.steering, envelope_ratio=1.234)
    line = dict(engine_lines(msgspec.structs.replace(status, steering=known, tokens_per_s=98.76)))["goodput"]
    assert line.startswith("98.8 tokens/s, 1.23 times those of no speculation; ")


def test_tokens_that_were_drawn_and_not_handed_over_are_counted(start: Callable[..., Callable[..., Session]]) -> None:
    hear = start("fixed:2")
    handed = sum(row.drafted for row in hear().newest.rows)  # type: ignore[union-attr]
    hear(drawn_tokens=handed + 5)
    session = hear(drawn_tokens=None)
    assert session.status(1.0).unverified_tokens == 5
    assert b'faser_engine_unverified_tokens_total{engine="boot-1"} 5.0' in shown(session)[1]


def test_copied_drafts_are_told_apart_from_the_drafters(start: Callable[..., Callable[..., Session]]) -> None:
    hear = start("fixed:2", copy_max=8)
    hear(copied=(2, 3))
    session = hear(verified_copies=(2, 3), drawn_tokens=10)  # of four requests, which verify 3 and accept handle % 4
    status = session.status(1.0)
    copies, drafter = status.sources["copies"], status.sources["drafter"]
    assert (copies.verified, copies.accepted, copies.acceptance_rate) == (6, 5, pytest.approx(5 / 6))
    assert (drafter.verified, drafter.accepted) == (12 + 6, 6 + 1)
    emitted, handed, wasted = 2 * (2 + 3 + 4 + 1), 4 * 3, 18 - 7
    assert drafter.waste == pytest.approx(wasted / emitted), f"no more were drawn than the {handed} handed over"
    assert copies.waste == pytest.approx(1 / emitted)
    assert (copies.share, drafter.share) == (0.25, 0.75)
    assert status.acceptance_rate == pytest.approx(12 / 24)
    assert status.mean_draft_length == 3.0
    lines = dict(engine_lines(status))
    assert lines["copies"] == "0.83 of 6 tokens accepted, 0.05 wasted per token; for 25% of the requests"
    assert lines["drafter"].startswith("0.39 of 18 tokens accepted, 0.55 wasted per token")
    _, metrics = shown(session)
    assert b'faser_engine_source_acceptance_ratio{engine="boot-1",source="copies"} 0.8333' in metrics
    assert b'faser_engine_source_waste_ratio{engine="boot-1",source="drafter"} 0.55' in metrics
    assert b'faser_engine_source_requests_ratio{engine="boot-1",source="copies"} 0.25' in metrics
    assert b'faser_engine_source_verified_tokens_total{engine="boot-1",source="copies"} 6.0' in metrics
    assert b'faser_engine_source_accepted_tokens_total{engine="boot-1",source="drafter"} 7.0' in metrics


def test_tokens_drawn_beside_copies_count_as_the_drafters_waste(start: Callable[..., Callable[..., Session]]) -> None:
    hear = start("fixed:2", copy_max=8)
    session = hear(copied=(2, 3), drawn_tokens=8)  # two requests got 3 each of the drafter's
    assert session.status(1.0).unverified_tokens == 2
    wasted = 12 - 6 + 2
    assert session.status(1.0).sources["drafter"].waste == pytest.approx(wasted / 10)


def test_an_engine_that_cannot_copy_has_no_copies_to_show(start: Callable[..., Callable[..., Session]]) -> None:
    session = start("fixed:2")()
    assert set(session.status(1.0).sources) == {"drafter"}
    assert "copies" not in dict(engine_lines(session.status(1.0)))
    assert b'source="copies"' not in shown(session)[1]
