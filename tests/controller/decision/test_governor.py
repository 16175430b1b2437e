"""One engine's governor: lag between clocks, the envelope watchdog, the circuit breaker in a real session."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.controller.config import GuardConfig, LeaseConfig, ModeConfig
from faser.controller.decision.decide import LeaseTerms
from faser.controller.decision.governor import Governor, Lag
from faser.controller.decision.session import Session
from faser.engine_adapter.protocol import Hello, StepRecord
from faser.env.estimate.engine_state import EngineState, observe
from faser.env.spaces import Action, Capabilities

Make = Callable[..., Any]
EPOCH = 7


@pytest.fixture
def hello(make_engine: Make) -> Hello:
    return make_engine().hello()


@pytest.fixture
def record_of(make_record: Callable[..., StepRecord]) -> Callable[..., StepRecord]:
    def make(counter: int, **changes: object) -> StepRecord:
        return msgspec.structs.replace(make_record("boot-1", counter), **changes)

    return make


@given(st.floats(-1e6, 1e6), st.lists(st.floats(0.0, 10.0), min_size=2, max_size=50))
@settings(deadline=None)
def test_a_lag_is_measured_against_the_quickest_record_whatever_the_clocks_say(
    apart: float, delays: list[float]
) -> None:
    lag = Lag()
    seen = [lag.of(number * 0.01, number * 0.01 + apart + delay) for number, delay in enumerate(delays)]
    assert seen[0] == 0.0
    for number in range(1, len(delays)):
        assert seen[number] == pytest.approx(delays[number] - min(delays[: number + 1]), abs=1e-6)


def test_a_clock_that_jumped_is_believed_after_a_while() -> None:
    lag = Lag()
    for number in range(100):
        lag.of(number, number)
    seen = [lag.of(number, number + 5.0) for number in range(100, 3000)]
    assert (seen[0], seen[-1]) == (5.0, 0.0)


def test_late_records_hold_then_give_the_lease_back_and_steering_returns(hello: Hello, record_of: Any) -> None:
    governor = Governor(hello, LeaseTerms(), limits=GuardConfig(hold_records=2, recover_records=3))
    stances = []
    for counter, delay in enumerate([0.0, 0.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0], 1):
        record = record_of(counter)
        governor.hear(record, record.time_s + delay)
        if governor.may_decide(record):
            governor.succeed(is_sent=True)
        stances.append((governor.guard.stance, governor.owes_release()))
    assert stances == [
        ("steer", False), ("steer", False), ("hold", False), ("fallback", True), ("fallback", False),
        ("fallback", False), ("steer", False), ("steer", False),
    ]  # fmt: skip
    assert governor.counts == {"hold_stale": 1, "fallback_stale": 3}


def test_a_long_gap_holds_once_and_a_short_one_does_not(hello: Hello, record_of: Any) -> None:
    governor = Governor(hello, LeaseTerms())
    answers = []
    for counter in (1, 2, 10, 100, 101):
        governor.hear(record_of(counter), counter * 0.01)
        answers.append(governor.may_decide(record_of(counter)))
    assert answers == [True, True, True, False, True]


def plain_and_drafting(state: EngineState, governor: Governor, record_of: Any, emitted: int) -> str:
    """Teach plain steps of 10 ms, then steps of 30 ms that emit `emitted` tokens per request."""
    for counter in range(1, 200):
        record = record_of(counter, draft_tokens=0, draft_s=0.0, step_s=0.01)
        record.rows = [msgspec.structs.replace(r, drafted=0, verified=0, accepted=0, emitted=1) for r in record.rows]
        observe(state, record)
    for counter in range(200, 600):
        record = record_of(counter, draft_s=0.02, step_s=0.03)
        record.rows = [msgspec.structs.replace(row, emitted=emitted) for row in record.rows]
        observe(state, record)
        governor.measure(record, state, is_under_lease=True)
        governor.hear(record, record.time_s)
        if not governor.may_decide(record):
            return governor.reason
    return ""


def test_a_policy_slower_than_no_speculation_is_switched_off_with_the_reason(hello: Hello, record_of: Any) -> None:
    for emitted, reason in ((2, "fallback: envelope"), (4, "")):
        state = EngineState(Capabilities.from_hello(hello))
        governor = Governor(hello, LeaseTerms(), limits=GuardConfig(envelope_records=64))
        assert plain_and_drafting(state, governor, record_of, emitted) == reason
        assert governor.status().envelope_ratio is None if reason else governor.status().envelope_ratio > 1.0


def test_steps_that_follow_objectives_are_no_evidence_against_the_policy(hello: Hello, record_of: Any) -> None:
    """They are not to emit as many tokens as can be; the same steps trip where nobody is favoured (above)."""
    state = EngineState(Capabilities.from_hello(hello))
    governor = Governor(hello, LeaseTerms(), limits=GuardConfig(envelope_records=64))
    governor.amend(Action(np.zeros(0, np.int64), 0, favours=True), state)
    assert plain_and_drafting(state, governor, record_of, 2) == ""
    for _ in range(2):
        governor.amend(Action(np.zeros(0, np.int64), 0), state)
    assert plain_and_drafting(state, governor, record_of, 2) == "fallback: envelope"


class Explosive:
    name = "explosive"
    calls = 0

    def act(self, state: EngineState) -> Action:
        self.calls += 1
        raise ZeroDivisionError


def test_a_policy_that_keeps_failing_is_not_called_any_more_until_its_trial(hello: Hello, record_of: Any) -> None:
    session = Session(hello, "fixed:2", LeaseConfig(), EPOCH, 0.0)
    session.governor = Governor(hello, LeaseTerms(), limits=GuardConfig(breaker_failures=3, retry_records=10))
    session.policy = policy = Explosive()
    calls = []
    for counter in range(1, 40):
        record = record_of(counter)
        assert session.admit(record, counter * 0.01)
        assert session.decide(record) is None
        calls.append(policy.calls)
    # three failures, a time out of 10 records, one trial, a time out of 20, another trial
    assert [calls[index] for index in (1, 2, 12, 13, 33, 34, 38)] == [2, 3, 3, 4, 4, 5, 5]
    assert session.state.link.records == 39


def test_settings_can_be_changed_while_it_runs(hello: Hello) -> None:
    governor = Governor(hello, LeaseTerms())
    governor.configure(LeaseTerms(steps=5), ModeConfig(canary_share=0.7), replace(GuardConfig(), hold_records=1))
    assert (governor.terms.steps, governor.terms.mode, governor.canary.share) == (5, "active", 0.7)
