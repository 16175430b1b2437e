"""Objectives of requests: whose word counts, and how far each request is ahead of its schedule."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine_adapter.protocol import RequestEvent, RequestRow, StepRecord
from faser.env.estimate.engine_state import EngineState, observe
from faser.env.estimate.objectives import OWN, ObjectiveClass, ObjectiveClasses, TimeObjective
from faser.env.spaces import Capabilities

INTERACTIVE = ObjectiveClass("interactive", 0, TimeObjective(0.3, 0.04))
BATCH = ObjectiveClass("batch", 1, TimeObjective(tpot_s=0.4))
CLASSES = ObjectiveClasses((INTERACTIVE, BATCH))


def arrival(handle: int = 1, time_s: float = 0.0, priority: int = 0, **asked: float) -> RequestEvent:
    return RequestEvent("arrival", handle, time_s, 90, f"r{handle}", priority, **asked)


def record(
    counter: int, time_s: float, emitted: dict[int, int], events: list[RequestEvent] | None = None, boot_id: str = "b"
) -> StepRecord:
    rows = [RequestRow(handle, 1, 0, 0, 0, 0, 0, tokens, 90, not tokens) for handle, tokens in emitted.items()]
    return StepRecord(
        boot_id, counter, counter, time_s, 0.02, 0.0, 0.02, 0.0, 0.0, 0.0, 0.0, len(rows), 0, 0, len(rows), 0, 0.2,
        None, None, 0, 0, 0, 0, events or [], rows,
    )  # fmt: skip


def state(classes: ObjectiveClasses = CLASSES) -> EngineState:
    return EngineState(Capabilities(k_max=3), classes)


@pytest.mark.parametrize(
    ("priority", "asked", "holds", "name"),
    [
        (0, {}, TimeObjective(0.3, 0.04), "interactive"),
        (1, {}, TimeObjective(math.inf, 0.4), "batch"),
        (0, {"ttft_ms": 900.0, "tpot_ms": 10.0}, TimeObjective(0.9, 0.01), OWN),
        (0, {"tpot_ms": 80.0}, TimeObjective(0.3, 0.08), OWN),  # of the rest its class decides
        (1, {"ttft_ms": 500.0}, TimeObjective(0.5, 0.4), OWN),
        (7, {"ttft_ms": 500.0}, TimeObjective(0.5), OWN),
    ],
)
def test_what_a_request_says_itself_wins_over_its_class(
    priority: int, asked: dict[str, float], holds: TimeObjective, name: str
) -> None:
    event = arrival(priority=priority, **asked)
    assert (CLASSES.objective(event), CLASSES.name(event)) == (holds, name)
    known = state()
    observe(known, record(1, 1.0, {}, [event]))
    told = [known.requests.column(column).tolist() for column in ("ttft_s", "tpot_s")]
    assert told == [[holds.ttft_s], [holds.tpot_s]]


def test_a_request_without_class_and_word_has_no_objective_and_is_never_behind() -> None:
    event = arrival(priority=7)
    assert not CLASSES.objective(event).is_given
    known = state()
    observe(known, record(1, 1.0, {1: 0, 2: 1}, [event]))  # of the second no arrival was heard of
    observe(known, record(2, 900.0, {1: 1, 2: 1}))
    slack = known.view().slack()
    assert np.isinf([*slack.seconds, *slack.tokens]).all()
    assert (slack.seconds > 0.0).all()


def test_before_the_first_token_slack_is_seconds_and_after_it_tokens() -> None:
    known = state()
    observe(known, record(1, 10.1, {1: 0}, [arrival(time_s=10.0)]))
    slack = known.view().slack()
    assert (slack.seconds.tolist(), slack.tokens.tolist()) == ([pytest.approx(0.2)], [math.inf])
    observe(known, record(2, 10.4, {1: 0}))
    assert known.view().slack().seconds.tolist() == [pytest.approx(-0.1)]
    observe(known, record(3, 10.5, {1: 1}))
    slack = known.view().slack()
    assert (slack.seconds.tolist(), slack.tokens.tolist()) == ([math.inf], [0.0])
    observe(known, record(4, 10.6, {1: 4}))  # 2.5 tokens were due since the first
    assert known.view().slack().tokens.tolist() == [pytest.approx(4 - 2.5)]


steps = st.lists(st.tuples(st.floats(0.001, 5.0), st.integers(0, 9)), min_size=1, max_size=12)


@given(steps, st.floats(0.1, 60_000.0), st.floats(1.0, 600_000.0), st.floats(-1e6, 1e6))
def test_slack_is_what_was_emitted_less_what_was_due(
    told: list[tuple[float, int]], tpot_ms: float, ttft_ms: float, start_s: float
) -> None:
    known, now_s, emitted, first_s = state(), start_s, 0, None
    event = arrival(time_s=start_s, ttft_ms=ttft_ms, tpot_ms=tpot_ms)
    for counter, (step_s, tokens) in enumerate(told, 1):
        now_s += step_s
        emitted += tokens
        first_s = now_s if first_s is None and tokens else first_s
        observe(known, record(counter, now_s, {1: tokens}, [event] if counter == 1 else []))
        slack = known.requests.slack(now_s)
        if first_s is None:
            assert slack.seconds[0] == pytest.approx(start_s + ttft_ms / 1e3 - now_s)
            assert slack.tokens[0] == math.inf
        else:
            assert slack.tokens[0] == pytest.approx(emitted - 1 - (now_s - first_s) / (tpot_ms / 1e3))
            assert slack.seconds[0] == math.inf


def test_slack_follows_its_request_while_others_leave_and_the_table_grows() -> None:
    known = state(ObjectiveClasses())
    events = [arrival(handle, float(handle), ttft_ms=1e3 * handle) for handle in range(1, 101)]
    observe(known, record(1, 50.0, dict.fromkeys(range(1, 101), 0), events))
    gone = [RequestEvent("finish", handle, 51.0, 0) for handle in range(1, 101) if handle % 3]
    observe(known, record(2, 60.0, dict.fromkeys(range(1, 101), 0), gone))
    left = list(range(3, 101, 3))
    assert known.handles().tolist() == left
    assert known.view().slack().seconds.tolist() == [2.0 * handle - 60.0 for handle in left]
    observe(known, record(3, 61.0, {200: 1}))  # in the place of one that had an objective
    assert known.view().slack().seconds[-1] == known.view().slack().tokens[-1] == math.inf


def test_who_was_alive_when_the_engine_was_met_keeps_its_objectives_and_its_schedule_begins_then() -> None:
    known = state()
    known.meet([arrival(1, 9.0), arrival(2, 9.5, priority=1)])
    assert known.requests.column("ttft_s").tolist() == [0.3, math.inf]
    observe(known, record(40, 10.0, {1: 2, 2: 0}))
    observe(known, record(41, 10.2, {1: 3, 2: 0}))
    slack = known.view().slack()
    assert slack.tokens.tolist() == [pytest.approx(5 - 1 - 5.0), math.inf]
    assert slack.seconds.tolist() == [math.inf, math.inf]


def test_other_classes_hold_for_who_arrives_from_then_on_also_behind_a_reboot() -> None:
    known = state()
    observe(known, record(1, 1.0, {}, [arrival(1)]))
    known.objectives = ObjectiveClasses((ObjectiveClass("slow", 0, TimeObjective(ttft_s=9.0)),))
    observe(known, record(2, 1.1, {}, [arrival(2)]))
    assert known.requests.column("ttft_s").tolist() == [0.3, 9.0]
    observe(known, record(1, 1.2, {}, [arrival(1)], boot_id="next"))
    assert known.requests.column("ttft_s").tolist() == [9.0]


@pytest.mark.parametrize(
    ("first_s", "rest_s", "tokens", "is_kept"),
    [(0.3, 0.04, 2, True), (0.31, 0.0, 2, False), (0.1, 0.41, 11, False), (0.1, 0.39, 11, True), (0.1, 99.0, 1, True)],
)
def test_an_objective_is_kept_by_both_of_its_times(first_s: float, rest_s: float, tokens: int, is_kept: bool) -> None:
    assert TimeObjective(0.3, 0.04).is_kept(first_s, rest_s, tokens) is is_kept
    assert TimeObjective().is_kept(first_s, rest_s, tokens)
