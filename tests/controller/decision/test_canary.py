"""A canary's draws: the share it says, the probabilities it logs, the same again in replay."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from faser.controller.decision.canary import Canary, Draws, chance, default_length
from faser.engine_adapter.protocol import MatchRule, RequestEvent, RequestRow, StepRecord
from faser.env.estimate.engine_state import EngineState, observe
from faser.env.spaces import Action, Capabilities

CAPABILITIES = Capabilities(k_max=4, default_length=1)


def state_of(requests: int, capabilities: Capabilities = CAPABILITIES, counter: int = 1) -> EngineState:
    rows = [RequestRow(handle, 1, 0, 0, 0, 0, 0, 1, 50, False) for handle in range(1, requests + 1)]
    record = StepRecord(
        "boot", counter, counter, 1.0, 0.01, 0.0, 0.01, 0.0, 0.0, 0.0, 0.0, requests, 0, 0, requests, 0, 0.1,
        None, None, 0, 0, 0, 0, [], rows,
    )  # fmt: skip
    return observe(EngineState(capabilities), record)


def canary_of(requests: int, share: float = 1.0, epsilon: float = 0.1) -> Canary:
    canary = Canary(share, epsilon)
    canary.note([RequestEvent("arrival", handle, 0.0, 10, f"req-{handle}") for handle in range(1, requests + 1)])
    return canary


def wanted(requests: int, length: int = 3) -> Action:
    return Action(np.full(requests, length, np.int64), length, reason="test")


def test_the_share_of_requests_is_that_of_their_ids_whatever_their_number() -> None:
    canary = canary_of(4000, share=0.25)
    assert sum(map(canary.has, range(1, 4001))) == pytest.approx(1000, abs=110)  # four standard deviations
    other = Canary(0.25, 0.1)
    other.note([RequestEvent("arrival", 99_999, 0.0, 10, "req-7")])
    assert other.has(99_999) == canary.has(7)
    assert not canary.has(123_456)


def test_lengths_are_drawn_as_often_as_their_logged_probability_says() -> None:
    canary, counts, said = canary_of(100, epsilon=0.3), Counter[int](), dict[int, float]()
    for counter in range(1, 101):
        _, draws = canary.draw(wanted(100), state_of(100, counter=counter))
        assert isinstance(draws, Draws)
        counts.update(draws.lengths)
        said.update(zip(draws.lengths, draws.propensities, strict=True))
    assert said == pytest.approx({0: 0.06, 1: 0.06, 2: 0.06, 3: 0.76, 4: 0.06})
    for length, propensity in said.items():
        spread = (10_000 * propensity * (1 - propensity)) ** 0.5
        assert abs(counts[length] - 10_000 * propensity) < 4 * spread


def test_the_probabilities_of_all_lengths_add_up_to_one() -> None:
    canary = Canary(1.0, 0.17)
    for preferred in range(5):
        assert sum(canary.propensity(k, preferred, 4) for k in range(5)) == pytest.approx(1.0)


def test_the_same_record_draws_the_same_again() -> None:
    first, second = (canary_of(64, 0.5, 0.9).draw(wanted(64), state_of(64, counter=7)) for _ in range(2))
    assert first[1] == second[1]
    assert canary_of(64, 0.5, 0.9).draw(wanted(64), state_of(64, counter=8))[1] != first[1]


@pytest.mark.parametrize(("rows", "is_drawn"), [(5 * 64, True), (5 * 64 - 1, False), (70, False)])
def test_nothing_is_drawn_where_not_every_draw_would_fit_the_batch(rows: int, is_drawn: bool) -> None:
    tight = replace(CAPABILITIES, max_batched_tokens=rows)
    for counter in range(1, 20):
        action, draws = canary_of(64, epsilon=0.5).draw(wanted(64), state_of(64, tight, counter))
        assert (draws is not None) == is_drawn, "never by what was drawn"
        assert action.lengths.sum() + 64 <= rows
        assert is_drawn or set(action.lengths.tolist()) <= {0, 3}


def test_what_a_client_allows_at_most_is_the_longest_that_is_drawn() -> None:
    state = state_of(60)
    most = state.requests.column("most")
    most[:30] = 1
    counts: Counter[tuple[int, int]] = Counter()
    said: dict[tuple[int, int], float] = {}
    asked = wanted(60)
    asked.lengths[:30] = 1
    for counter in range(1, 101):
        state.counter = counter
        _, draws = canary_of(60, epsilon=0.5).draw(asked, state)
        assert draws is not None
        for handle, length, propensity in zip(draws.handles, draws.lengths, draws.propensities, strict=True):
            kind = (4 if handle > 30 else 1, length)
            counts[kind] += 1
            said[kind] = propensity
    assert said == pytest.approx({(1, 0): 0.25, (1, 1): 0.75, **{(4, k): 0.1 for k in (0, 1, 2, 4)}, (4, 3): 0.6})
    for kind, propensity in said.items():
        assert abs(counts[kind] - 3000 * propensity) < 4 * (3000 * propensity * (1 - propensity)) ** 0.5


def test_a_canary_asks_for_nothing_that_the_whole_batch_would_feel() -> None:
    whole = Action(np.full(4, 3, np.int64), 3, split=1, frontier=2, match=MatchRule([1.0], [0.0], [0.1], 3))
    action, _ = canary_of(4).draw(whole, state_of(4))
    assert (action.split, action.frontier, action.stop, action.prune, action.match) == (None,) * 5


def test_who_left_is_forgotten() -> None:
    canary = canary_of(3)
    canary.forget([RequestEvent("finish", 2, 1.0, 5), RequestEvent("preempt", 3, 1.0, 5)])
    assert [canary.has(handle) for handle in (1, 2, 3)] == [True, False, True]


def test_other_requests_get_the_engines_own_length_by_its_table() -> None:
    table = replace(CAPABILITIES, default_table=((1, 4, 3), (5, 16, 2)), default_length=0)
    assert [default_length(table, batch) for batch in (0, 1, 4, 5, 16, 99)] == [0, 3, 3, 2, 2, 2]
    action, _ = Canary(0.5, 0.1).draw(wanted(8, 4), state_of(8, table))
    assert (action.lengths.tolist(), action.default_length) == ([2] * 8, 2)


def test_chances_are_even() -> None:
    values = sorted(chance(f"x{number}".encode()) for number in range(2000))
    assert max(abs(value - place / 2000) for place, value in enumerate(values)) < 0.04
