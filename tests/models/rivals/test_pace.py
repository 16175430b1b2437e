"""Objectives for the pace of answers: the least urgent lose their drafts first, and nobody does without need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from faser.engine_adapter.arrays import Bools, Ints
from faser.engine_adapter.protocol import MatchRule, RequestEvent, RequestRow, StepRecord, StopRule
from faser.env.estimate.engine_state import EngineState, observe
from faser.env.spaces import Action, Capabilities
from faser.models.policies.policy import Policy, PolicyError
from faser.models.policies.price import Plan, PricePolicy
from faser.models.registry import make_policy
from faser.models.rivals.adaserve import StepForecast
from faser.models.rivals.pace import ClassForecast, Pace, PacedPolicy, _stripped

CAPABILITIES = Capabilities(k_max=4)
REQUESTS = 8  # every other one is of the less urgent class 5


def steps_of(steps: int = 120) -> Iterator[StepRecord]:
    """Give steps of an engine where drafts are good and a row costs a tenth of a step.

    Every step verifies two to four tokens of each request, takes 10 ms and 1 ms per row, and drafting 1 ms per round.
    """
    everybody = range(1, REQUESTS + 1)
    arrivals = [RequestEvent("arrival", handle, 0.0, 40, f"r{handle}", 5 * (handle % 2)) for handle in everybody]
    for counter in range(1, steps + 1):
        length = 2 + counter % 3
        accepted = [length - (handle + counter) % 2 for handle in everybody]
        rows = [
            RequestRow(handle, 1 + length, length, length, length, 0, taken, taken + 1, 50, False)
            for handle, taken in zip(everybody, accepted, strict=True)
        ]
        verify_s, draft_s = 10e-3 + 1e-3 * REQUESTS * (1 + length), 1e-3 * length
        yield StepRecord(
            "boot", counter, counter, 0.1 * counter, verify_s + draft_s, 0.0, verify_s, 0.0, draft_s, 0.0, 0.0,
            REQUESTS, 0, 0, REQUESTS, REQUESTS * length, 0.1, None, None, 1, counter, 0, 0,
            arrivals if counter == 1 else [], rows,
        )  # fmt: skip


def served(policies: dict[str, Policy]) -> tuple[dict[str, Action], Bools]:
    """Return what each policy asks for in such an engine, and who is urgent."""
    state, actions = EngineState(CAPABILITIES), dict[str, Action]()
    for record in steps_of():
        observe(state, record)
        actions = {name: policy.act(state) for name, policy in policies.items()}
    urgent: Bools = state.requests.column("priority") == 0
    assert urgent.sum() == REQUESTS // 2
    return actions, urgent


def policies(*limits: str) -> dict[str, Policy]:
    """Return price, and price within limits."""
    names = ("price", *(f"price:pace={limit}" for limit in limits))
    return {name: make_policy(name, CAPABILITIES) for name in names}


def test_within_its_objectives_nothing_changes() -> None:
    """However many classes have one."""
    found, _ = served(policies("0:1000", "0:1000,5:1000", "7:0.001"))
    price = found["price"].lengths
    assert price.any()
    for name in ("0:1000", "0:1000,5:1000", "7:0.001"):  # nobody is of class 7
        assert np.array_equal(found[f"price:pace={name}"].lengths, price)


def test_the_less_urgent_lose_their_drafts_first() -> None:
    """And the urgent keep theirs."""
    found, urgent = served(policies("0:11"))
    within = found["price:pace=0:11"].lengths
    assert not within[~urgent].any()
    assert np.array_equal(within[urgent], found["price"].lengths[urgent])
    assert "for the pace of priority 0" in found["price:pace=0:11"].reason


def test_of_what_nobody_can_keep_the_least_late_is_left() -> None:
    """An objective beyond reach ends no drafts that make its class faster."""
    found, urgent = served(policies("0:0.01"))
    within = found["price:pace=0:0.01"].lengths
    assert not within[~urgent].any()
    assert within[urgent].all()


def test_the_less_urgent_class_costs_the_urgent_one_nothing() -> None:
    """Its objective is kept with its own drafts and by shorter ones for all, not by taking those of the urgent."""
    found, urgent = served(policies("5:0.01"))
    assert found["price:pace=5:0.01"].lengths[urgent].all()


class Imagined:
    """A forecast in which class 0 is late, less so by `gain` if nobody of a class drafts."""

    def __init__(self, gain: float, of: int) -> None:
        self.priority = np.array([0, 0, 5, 5])
        self._gain, self._of = gain, of

    def lateness(self, lengths: Ints) -> tuple[float, int | None]:
        """Return how late it is."""
        return (2.0 if lengths[self.priority == self._of].any() else 2.0 - self._gain), 0


@pytest.mark.parametrize(
    ("gain", "of", "kept"), [(0.5, 5, [3, 3, 0, 0]), (0.0, 5, [3, 3, 3, 3]), (0.5, 0, [3, 3, 3, 3])]
)
def test_drafts_are_taken_only_of_the_less_urgent_and_only_where_it_helps(
    gain: float, of: int, kept: list[int]
) -> None:
    """What its own drafts cost the late class is for the cut of everybody's longest ones to say."""
    assert _stripped(Imagined(gain, of), np.array([3, 3, 3, 3]), 0).tolist() == kept  # type: ignore[arg-type]


class Fixed:
    """In the place of price: an action, and the plan that is told of it."""

    name = "fixed"

    def __init__(self, action: Action, plan: Plan) -> None:
        self.plan, self._action = plan, action

    def act(self, state: EngineState) -> Action:
        """Return the action."""
        return self._action


def kept(action: Action, plan: Plan, split_factor: float = 1.0) -> list[int]:
    """Return the lengths that 11 ms per token leave class 0, where a split takes `split_factor` times as long."""
    state = EngineState(replace(CAPABILITIES, splits=("unsplit", "1:1")))
    for record in steps_of():
        observe(state, record)
    state.split_cost(1).verify_factor = split_factor
    policy = PacedPolicy(Fixed(action, plan), Pace.parse("0:11"), "0:11")  # type: ignore[arg-type]
    paced = policy.act(state)
    assert (paced.match is action.match) is bool(np.array_equal(paced.lengths, action.lengths))
    return paced.lengths.tolist()


COPY = MatchRule([1.0], [0.0], [0.1], 4)
LONGEST = Action(np.full(REQUESTS, 4), 4, match=COPY)  # 54 ms for some 4 tokens of each, unsplit


def test_under_a_split_the_splits_own_costs_tell_who_is_late() -> None:
    """Not those of the whole device."""
    plan = Plan(LONGEST, 600.0, 0, 4, 32.0, np.zeros(0))
    assert kept(LONGEST, plan) != [4] * REQUESTS
    under = msgspec.structs.replace(LONGEST, split=1)
    assert kept(under, plan, split_factor=0.5) == [4] * REQUESTS
    assert kept(under, plan, split_factor=1.5) != [4] * REQUESTS


def test_a_probe_in_the_place_of_a_stop_rule_is_judged_as_what_it_drafts() -> None:
    """The rule's drafts end early: 4 tokens in all, 26 ms, 3 tokens of each; the probe's do not."""
    rule = StopRule([1.0] * 4, [0.0] * 4, [0.9] * 4, [0.9] * 4)
    planned = msgspec.structs.replace(LONGEST, stop=rule)
    plan = Plan(planned, 3 * REQUESTS / 26e-3, 0, 4, 4.0, np.zeros(0))
    assert kept(planned, plan) == [4] * REQUESTS
    assert kept(LONGEST, plan) != [4] * REQUESTS


@pytest.mark.parametrize("text", ["", "0", "0:", "0:0", "a:5", "0:5,0:6", "0:5;1:6", "0:-3", "0:nan"])
def test_limits_that_are_none_are_refused(text: str) -> None:
    """In one line, with an example."""
    with pytest.raises(
        PolicyError, match=r"expected milliseconds per token by priority.*such as price:pace=0:40,1:400"
    ):
        make_policy(f"price:pace={text}", CAPABILITIES)


def test_an_empty_batch_is_none_of_its_business() -> None:
    """Nobody is late."""
    action = make_policy("price:pace=0:1", CAPABILITIES).act(EngineState(CAPABILITIES))
    assert not action.lengths.any()


def test_where_all_draft_the_longest_one_draft_costs_what_all_would() -> None:
    """For AdaServe's forecast as for this one."""
    state = EngineState(CAPABILITIES)
    for record in steps_of():
        observe(state, record)
    one, pace, price = np.array([4] + [0] * (REQUESTS - 1)), Pace.parse("0:1,5:1"), PricePolicy(CAPABILITIES)
    price.act(state)
    plan = price.plan
    assert plan is not None
    own, longest = (
        msgspec.structs.replace(state.view(), capabilities=replace(CAPABILITIES, is_ragged=is_ragged))
        for is_ragged in (True, False)
    )
    assert StepForecast.of(longest).step_s(one) > StepForecast.of(own).step_s(one)
    late = [ClassForecast(pace, view, plan, is_ruled=False).lateness(one)[0] for view in (longest, own)]
    assert late[0] > late[1]
