"""Who sits out steps: those with time to spare, while others are late, and never who did not say what it wants."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from faser.controller.cli.evaluate import decided
from faser.engine_adapter.protocol import MOST_REST_STEPS, RequestEvent, RequestRow, Rest, StepRecord
from faser.env.estimate.engine_state import EngineState, observe
from faser.env.simulator.simulated_engine import SimulatedEngine
from faser.env.spaces import Action, Capabilities, clamp
from faser.models.evaluation.attainment import Attained, serve
from faser.models.evaluation.objective_worlds import knee_worlds
from faser.models.policies.price import PricePolicy

REQUESTS, LATE_MS = 8, 24.0  # every other one is late: its step takes 26 ms at least
FIRST, BEFORE = range(101, 105), 12  # requests that left before, and their steps
ROW_S = 2e-3
CAPABILITIES = Capabilities(k_max=4, rest_steps=MOST_REST_STEPS)


def asked(
    others_ms: float | None, capabilities: Capabilities = CAPABILITIES, steps: int = 60, late_ms: float = LATE_MS
) -> Action:
    """Return what price asks for after steps of dear rows, in which drafts are seldom accepted.

    Before them half as many requests ran, and left: so what a step costs in which the others rest is known.
    """
    state, policy, everybody = EngineState(capabilities), PricePolicy(capabilities), range(1, REQUESTS + 1)
    now_s, action = 0.0, None
    for counter in range(1, BEFORE + steps + 1):
        drafts, running = counter % 2, everybody if counter > BEFORE else FIRST
        rows = [
            RequestRow(
                handle, 1 + drafts, drafts, drafts, drafts, 0, taken := int((handle + counter) % 6 == 0) * drafts,
                1 + taken, 50, False,
            )
            for handle in running
        ]  # fmt: skip
        events = []
        if counter in {1, BEFORE + 1}:
            paces = {handle: late_ms if handle % 2 else others_ms for handle in everybody}
            events = [
                RequestEvent("arrival", handle, now_s, 40, f"r{handle}", tpot_ms=paces.get(handle))
                for handle in running
            ]
        if counter == BEFORE + 1:
            events += [RequestEvent("finish", handle, now_s, 50) for handle in FIRST]
        count = len(running)
        verify_s, draft_s = 10e-3 + ROW_S * count * (1 + drafts), 1e-3 * drafts
        now_s += verify_s + draft_s
        record = StepRecord(
            "boot", counter, counter, now_s, verify_s + draft_s, 0.0, verify_s, 0.0, draft_s, 0.0, 0.0,
            count, 0, 0, count, count * drafts, 0.1, None, None, 1, counter, 0, 0, events, rows,
        )  # fmt: skip
        observe(state, record)
        action = policy.act(state)
    assert action is not None
    return clamp(action, capabilities)


def test_who_has_time_to_spare_rests_while_others_are_late() -> None:
    action = asked(150.0)
    assert action.rest is not None
    assert action.rest.handles == (2, 4, 6, 8)
    assert 1 <= action.rest.steps <= MOST_REST_STEPS
    assert f"4 rest {action.rest.steps} steps in {action.rest.steps + 1}" in action.reason


def test_who_did_not_say_what_it_wants_never_rests() -> None:
    assert asked(None).rest is None


def test_who_would_be_late_itself_does_not_rest() -> None:
    assert asked(30.0).rest is None
    assert asked(40.0, steps=30).rest is None  # not late yet, nor far enough ahead


def test_the_further_ahead_they_are_the_longer_they_rest() -> None:
    rests = [asked(60.0, steps=steps).rest for steps in (8, 12, 16)]
    assert [rest and rest.steps for rest in rests] == [1, 2, 3]


def test_nobody_rests_for_those_who_are_in_time() -> None:
    action = asked(1000.0, late_ms=100.0)
    assert action.rest is None
    assert not action.favours


def test_an_engine_that_cannot_leave_anybody_out_is_not_asked_to() -> None:
    action = asked(150.0, replace(CAPABILITIES, rest_steps=0))
    assert action.rest is None
    assert action.favours


def test_an_engine_is_asked_for_no_more_than_it_offers() -> None:
    action = asked(1000.0, replace(CAPABILITIES, rest_steps=1))
    assert action.rest is not None
    assert action.rest.steps == 1


def test_a_policy_that_looks_at_nothing_else_is_clamped() -> None:
    wanted = Action(np.zeros(0, np.int64), 0, rest=Rest((1,), 3))
    for offered, granted in ((0, None), (1, Rest((1,), 1)), (3, Rest((1,), 3))):
        assert clamp(wanted, replace(CAPABILITIES, rest_steps=offered)).rest == granted
    assert clamp(msgspec.structs.replace(wanted, rest=Rest((), 1)), CAPABILITIES).rest is None


def attained(world: int, rest_steps: int, seed: int) -> Attained:
    engine = SimulatedEngine(knee_worlds()[world].scenario(), seed)
    engine.capabilities = replace(engine.capabilities, rest_steps=rest_steps)
    return serve(engine, PricePolicy(engine.capabilities), decided, 900)


@pytest.mark.parametrize("world", [2, 10], ids=["embedded, a quarter at 0.7", "small knee, half at 0.7"])
def test_more_of_the_urgent_are_in_time_where_others_rest(world: int) -> None:
    assert f"{knee_worlds()[world].name}".endswith("at 0.70")
    plain, resting = ([attained(world, steps, seed) for seed in range(3)] for steps in (0, MOST_REST_STEPS))
    before, after = (float(np.mean([run.in_time(0) for run in runs])) for runs in (plain, resting))
    assert after > before + 0.02
    assert min(run.in_time(1) for run in resting) > 0.97
