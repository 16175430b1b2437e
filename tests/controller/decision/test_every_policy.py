"""Every policy through the decision core: a crowd, an empty batch and NaN give actions that can be had."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from faser.controller.decision.decide import LeaseTerms, decide
from faser.engine_adapter.protocol import ActionSet, RequestRow, StepRecord, decode_from_controller, encode
from faser.env.estimate.engine_state import EngineState, learn
from faser.env.spaces import Capabilities
from faser.models.registry import POLICIES, make_policy

K_MAX, RECORDS = 5, 12
EXAMPLES = {"fixed:K": "fixed:3", "table:ROWS": "table:1-4=3,5-=1", "price:pace=LIMITS": "price:pace=0:40",
            "hybrid:K": "hybrid:3", "arctic:K": "arctic:3", "urgent:K": "urgent:3", "behind:K": "behind:2",
            "price:values:SETTINGS": "price:values:urgency=20", "turns:K": "turns:3",
            "POLICY+stages:CHOICE": "price+stages:turns:3"}  # fmt: skip
SURE = (0.9, 0.5, 0.25, 0.125)


def record_of(counter: int, requests: int, sure: tuple[float, ...] = SURE, step_s: float = 0.02) -> StepRecord:
    """Return a step of requests that verified three tokens each."""
    rows = [
        RequestRow(handle, 4, 3, 3, 3, 0, handle % 4, handle % 4 + 1, 100 + counter, False, sure)
        for handle in range(1, requests + 1)
    ]
    return StepRecord(
        "boot", counter, counter, 0.02 * counter, step_s, 0.0, 0.8 * step_s, 0.0, 0.2 * step_s, 0.0, 0.0, requests, 0,
        0, requests, 3 * requests, 0.0 * step_s, None, None, 1, counter, 0, 0, [], rows, copied=(1, 2),
        verified_copies=(1, 2),
    )  # fmt: skip


def crowded(counter: int) -> StepRecord:
    """Return a step of a thousand requests."""
    return record_of(counter, 1000)


def empty(counter: int) -> StepRecord:
    """Return a step of nobody."""
    return record_of(counter, 0)


def unreadable(counter: int) -> StepRecord:
    """Return a step whose confidences, times and use of memory are NaN, which the wire would have refused."""
    return record_of(counter, 6, (math.nan,) * 4, math.nan)


@pytest.mark.parametrize("make_record", [crowded, empty, unreadable])
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_an_action_that_can_be_had(name: str, make_record: Callable[[int], StepRecord]) -> None:
    """And none that has to be clamped for it; the records before are of a sound batch, so that there is an estimate."""
    if name == "gplcb":
        pytest.importorskip("sklearn")
    capabilities = Capabilities(k_max=K_MAX, copy_max=K_MAX)
    state, policy = EngineState(capabilities), make_policy(EXAMPLES.get(name, name), capabilities)
    for counter in range(1, 2 * RECORDS + 1):
        record = record_of(counter, 6) if counter <= RECORDS else make_record(counter)
        decision = decide(state, record, policy, LeaseTerms(), 1, counter)
        learn(state)
        lengths = decision.action.lengths
        assert lengths.shape == state.handles().shape
        assert ((lengths >= 0) & (lengths <= K_MAX)).all()
        assert 0 <= decision.action.default_length <= K_MAX
        assert decision.reason
        assert not decision.is_clamped
        assert isinstance(decode_from_controller(bytes(encode(decision.action_set))), ActionSet)
