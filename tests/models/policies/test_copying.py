"""When the price policy copies, and what it leaves to the drafter."""

from __future__ import annotations

import numpy as np
import pytest

from faser.engine_adapter.protocol import MatchRule, RequestRow, StepRecord
from faser.env.estimate.engine_state import EngineState, observe
from faser.env.estimate.matches import Matches
from faser.env.spaces import Action, Capabilities, clamp
from faser.models.policies.copying import with_copies
from faser.models.policies.price import PricePolicy
from faser.models.policies.step_grid import DRAFTED, ROUNDS, ROWS, TOKENS
from faser.models.registry import make_policy

K_MAX = 4
CAPABILITIES = Capabilities(k_max=K_MAX, copy_max=K_MAX)


def seen(
    requests: int, row_ms: float, round_ms: float, level: float = 0.6, share: float = 0.3, first_row_ms: float = 0.0
) -> EngineState:
    """Return a state of so many requests, on an engine of 10 ms and so many for each row and each drafting round.

    :param first_row_ms: what any step with a draft takes beside these
    """
    state, random = EngineState(CAPABILITIES), np.random.default_rng(0)
    verified: tuple[int, ...] = ()
    time_s = 0.0
    for counter in range(300):
        length = counter % (K_MAX + 1)
        copied = tuple(handle for handle in range(1, requests + 1) if random.random() < share)
        rows = []
        for handle in range(1, requests + 1):
            is_copy = handle in verified
            drafts = K_MAX if is_copy else length
            hits = int(np.cumprod(random.random(drafts) < (0.9 if is_copy else level)).sum())
            told = (0.8,) * drafts if is_copy else ()
            rows.append(RequestRow(handle, 1 + drafts, length, length, drafts, 0, hits, hits + 1, 50, False, told))
        drafts = sum(row.verified for row in rows)
        draft_s = round_ms * 1e-3 * length
        step_s = 0.01 + row_ms * 1e-3 * (requests + drafts) + draft_s + (first_row_ms * 1e-3 if drafts else 0.0)
        time_s += step_s
        observe(
            state,
            StepRecord(
                "boot", counter, counter, time_s, step_s, 0, step_s - draft_s, 0, draft_s, 0, 0, requests, 0, 0,
                requests, drafts, 0.1, None, None, 0, 0, 0, 0, [], rows, draft_rounds=length,
                drawn_tokens=length * (requests - len(copied)), copied=copied, verified_copies=verified,
            ),
        )  # fmt: skip
        verified = copied
    return state


def rule(state: EngineState) -> MatchRule:
    policy = PricePolicy(CAPABILITIES)
    for _ in range(20):
        match = policy.act(state).match
        if match is not None:
            return match
    raise AssertionError("it never copies")


def test_a_row_is_kept_while_its_chance_is_above_its_price() -> None:
    cheap, dear = rule(seen(2, 0.02, 1.0)), rule(seen(2, 5.0, 1.0))
    assert cheap.keep[0] < 0.1
    assert dear.keep[0] > 0.3
    assert cheap.most == dear.most == K_MAX


def test_a_copy_must_promise_more_where_the_drafter_is_good() -> None:
    assert rule(seen(2, 0.02, 0.1, level=0.9)).worth > rule(seen(2, 0.02, 0.1, level=0.5)).worth > 0.2


def test_where_nothing_is_to_be_drafted_any_copy_that_pays_its_rows_is_welcome() -> None:
    state = seen(8, 1.0, 30.0)
    action = PricePolicy(CAPABILITIES).act(state)
    assert not action.lengths.any()
    assert action.match is not None
    assert action.match.worth == 0.0


def test_the_first_row_beyond_a_plain_step_has_a_price_of_its_own() -> None:
    level = rule(seen(8, 1.0, 30.0))
    jumping = rule(seen(8, 1.0, 30.0, first_row_ms=5.0))
    assert level.least < 0.4
    assert jumping.least > level.least + 1.0
    assert rule(seen(8, 1.0, 30.0, first_row_ms=1.0)).least < jumping.least


def test_a_round_is_not_run_for_a_request_that_cannot_pay_it() -> None:
    assert rule(seen(8, 0.1, 4.0, share=0.0)).fewest > 1
    assert rule(seen(8, 0.1, 0.05, share=0.0)).fewest == 1


def test_a_step_with_copies_has_their_rows_and_tokens_and_fewer_of_the_drafters() -> None:
    table = np.zeros((4, 1, 3))
    table[DRAFTED, 0], table[TOKENS, 0] = [0, 4, 8], [4, 6, 7]
    table[ROWS, 0], table[ROUNDS, 0] = [4, 8, 12], [0, 1, 2]
    matches = Matches(K_MAX, steps=100.0, _copies=50.0, _verified=200.0, _accepted=150.0)
    mixed = with_copies(table, 4, matches)
    assert mixed[DRAFTED, 0].tolist() == [0, 2, 4]
    assert mixed[TOKENS, 0].tolist() == [10, 11, 11.5]
    assert mixed[ROWS, 0].tolist() == [12, 14, 16]
    assert mixed[ROUNDS, 0].tolist() == pytest.approx([0, 1 - 1 / 16, 2 - 2 / 16])


def test_price_without_copies_asks_for_none_and_an_engine_that_has_none_is_not_asked() -> None:
    state = seen(2, 0.1, 0.1)
    assert make_policy("price:drafter", CAPABILITIES).act(state).match is None
    plain = Capabilities(k_max=K_MAX)
    assert PricePolicy(plain).act(EngineState(plain)).match is None
    asked = Action(np.array([1]), 1, match=MatchRule([1.0], [0.0], [0.1], K_MAX))
    assert clamp(asked, plain).match is None
    assert clamp(asked, CAPABILITIES) is asked


@pytest.mark.parametrize(
    "bad",
    [
        MatchRule([], [0.0], [0.1], 2),
        MatchRule([1.0], [float("nan")], [0.1], 2),
        MatchRule([1.0], [0.0], [0.1], K_MAX + 1),
        MatchRule([1.0], [0.0], [0.1], 2, float("inf")),
        MatchRule([1.0], [0.0], [0.1], 2, 0.0, -1),
        MatchRule([1.0], [0.0], [0.1], 2, least=float("nan")),
        MatchRule([1.0], [0.0], [0.1], 2, handles=(1,)),
        MatchRule([1.0], [0.0], [0.1], 2, handles=(1,), weights=(float("nan"),)),
    ],
)
def test_a_rule_that_cannot_be_had_becomes_no_copies(bad: MatchRule) -> None:
    assert clamp(Action(np.array([1]), 1, match=bad), CAPABILITIES).match is None


def test_rivals_copy_first() -> None:
    state = seen(2, 0.1, 0.1)
    hybrid, arctic = (make_policy(f"{name}:3", CAPABILITIES).act(state) for name in ("hybrid", "arctic"))
    assert hybrid.lengths.tolist() == arctic.lengths.tolist() == [3, 3]
    assert hybrid.match is not None
    assert arctic.match is not None
    assert (hybrid.match.worth, arctic.match.worth) == (0.0, 3.0)


def test_beside_favoured_requests_rounds_are_made_for_however_few_and_copies_go_on() -> None:
    """Else the two that need drafts would wait for as many as make rounds pay when all count the same."""
    state = seen(8, 0.2, 2.0, level=0.7)
    values = np.ones(state.requests.size)
    values[2:] = 0.125
    policy = PricePolicy(CAPABILITIES)
    even, plan = policy._by_history(state.view()), policy._by_value(state.view(), values, None)
    assert even.action.match is not None
    assert plan.action.match is not None
    assert even.action.match.fewest > 1
    assert plan.action.match.fewest == 1
    named = state.requests.column("handle")[:2].tolist()
    assert list(plan.action.match.handles) == named
    (weight,) = set(plan.action.match.weights)
    dear, cheap = plan.action.match.keep[0] / weight, plan.action.match.keep[0]
    assert dear < even.action.match.keep[0] < cheap
    assert cheap / dear == pytest.approx(8.0, rel=0.2)


def test_beside_favoured_requests_the_first_row_is_priced_in_the_same_measure_as_the_others() -> None:
    state = seen(8, 1.0, 30.0, first_row_ms=5.0)
    values = np.ones(state.requests.size)
    values[2:] = 0.125
    policy = PricePolicy(CAPABILITIES)
    even, plan = (
        policy._by_history(state.view()).action.match,
        policy._by_value(state.view(), values, None).action.match,
    )
    assert even is not None
    assert plan is not None
    assert even.least > 1.0
    assert plan.least / even.least == pytest.approx(plan.keep[0] / even.keep[0])
