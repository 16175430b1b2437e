"""Objectives per request: who is about to be late gets the drafts, and without objectives price is what it was."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from faser.engine_adapter.arrays import Bools
from faser.engine_adapter.protocol import RequestEvent, RequestRow, StepRecord
from faser.env.cost.cost_table import CostTable
from faser.env.cost.split_cost import IdealSplit
from faser.env.estimate.engine_state import EngineState, observe
from faser.env.estimate.planning_view import PlanningView
from faser.env.spaces import Action, Capabilities
from faser.models.policies.favouring import FavouredGroups, choose_favouring
from faser.models.policies.policy import PolicyError
from faser.models.policies.resting import expected
from faser.models.policies.token_values import (
    CROWD,
    GIVING_UP,
    LOOK_RECORDS,
    ShortestSteps,
    TokenValues,
    _fill,
    _hope,
    _lack,
    _shortest_s,
)
from faser.models.registry import make_policy

CAPABILITIES = Capabilities(k_max=4)
REQUESTS = 8  # every other one has an objective
POLICIES = ("price:even", "price", "adaserve", "urgent:3", "behind:3")


def steps_of(
    tpot_ms: float | None, row_s: float = 1e-3, steps: int = 120, others_ms: float | None = None
) -> Iterator[StepRecord]:
    """Give steps in which every request verifies two to four drafts and gets up to two of them.

    A step takes 10 ms, `row_s` per row and 1 ms per round.
    """
    everybody, now_s = range(1, REQUESTS + 1), 0.0
    arrivals = [
        RequestEvent("arrival", handle, 0.0, 40, f"r{handle}", tpot_ms=tpot_ms if handle % 2 else others_ms)
        for handle in everybody
    ]
    for counter in range(1, steps + 1):
        length = 2 + counter % 3
        accepted = [(handle + counter) % 3 for handle in everybody]
        rows = [
            RequestRow(handle, 1 + length, length, length, length, 0, taken, taken + 1, 50, False)
            for handle, taken in zip(everybody, accepted, strict=True)
        ]
        verify_s, draft_s = 10e-3 + row_s * REQUESTS * (1 + length), 1e-3 * length
        now_s += verify_s + draft_s
        yield StepRecord(
            "boot", counter, counter, now_s, verify_s + draft_s, 0.0, verify_s, 0.0, draft_s, 0.0, 0.0,
            REQUESTS, 0, 0, REQUESTS, REQUESTS * length, 0.1, None, None, 1, counter, 0, 0,
            arrivals if counter == 1 else [], rows,
        )  # fmt: skip


def asked(tpot_ms: float | None, row_s: float = 1e-3, steps: int = 120) -> tuple[dict[str, Action], Bools]:
    """Return what each policy asks for after such steps, and who has an objective."""
    state = EngineState(CAPABILITIES)
    policies = {name: make_policy(name, CAPABILITIES) for name in POLICIES}
    found: dict[str, Action] = {}
    for record in steps_of(tpot_ms, row_s, steps):
        observe(state, record)
        found = {name: policy.act(state) for name, policy in policies.items()}
    return found, state.requests.column("handle") % 2 == 1


@pytest.mark.parametrize("tpot_ms", [None, 1000.0], ids=["nobody has an objective", "all are far ahead"])
def test_where_nobody_could_be_late_the_answer_is_the_even_prices(tpot_ms: float | None) -> None:
    """To the bit, and nobody is told to be favoured."""
    found, _ = asked(tpot_ms)
    for name in ("price", "adaserve"):
        assert np.array_equal(found[name].lengths, found["price:even"].lengths)
        assert found[name].reason == found["price:even"].reason
        assert found[name].price == found["price:even"].price
        assert not found[name].favours


def test_where_rows_are_dear_the_late_get_the_drafts_and_the_others_none() -> None:
    """A row costs a fifth of a step: evenly nobody is worth much of a draft."""
    found, late = asked(36.0, row_s=2e-3)
    lengths = found["price"].lengths
    assert lengths[late].min() > found["price:even"].lengths[late].max()
    assert lengths[~late].max() < lengths[late].min()
    assert found["price"].favours
    assert "4 favoured for their objectives, first request 1 (-" in found["price"].reason


@pytest.mark.parametrize(("tpot_ms", "steps"), [(1.0, 400), (10.0, 8)], ids=["far behind", "hardly behind"])
def test_who_will_not_catch_up_is_given_up(tpot_ms: float, steps: int) -> None:
    """Ten milliseconds per token are beyond any draft here: a few steps behind they count like everybody."""
    found, _ = asked(tpot_ms, steps=steps)
    assert np.array_equal(found["price"].lengths, found["price:even"].lengths)
    assert not found["price"].favours
    assert asked(30.0, steps=8)[0]["price"].favours  # who can is not


def test_a_newcomer_is_drafted_for_as_one_without_an_objective() -> None:
    """Else every prompt that ends would draft the longest, whoever's it is."""
    found, late = asked(36.0, row_s=2e-3)
    assert found["price"].default_length <= found["price"].lengths[~late].min()


def test_rules_that_follow_objectives_favour_whom_they_name() -> None:
    """Who needs more than a token a step, and who is behind."""
    found, late = asked(36.0, row_s=2e-3)
    for name in ("urgent:3", "behind:3"):
        assert set(found[name].lengths[late]) == {3}
        assert set(found[name].lengths[~late]) == {0}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("urgency=0.5", "urgency 0.5; expected 1..10000"),
        ("haste=3", "expected NAME=NUMBER of urgency, horizon, reserve, width, patience"),
        ("urgency=2,urgency=3", "each once"),
        ("urgency", "expected NAME=NUMBER"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(text: str, told: str) -> None:
    """Seen, expected."""
    with pytest.raises(PolicyError, match=told) as caught:
        make_policy(f"price:values:{text}", CAPABILITIES)
    assert "\n" not in str(caught.value)


def test_settings_are_read() -> None:
    """What is not named stays."""
    assert TokenValues.parse("reserve=2.5") == TokenValues(reserve=2.5)


def test_the_fewer_lack_tokens_the_more_one_is_worth_to_them() -> None:
    """One of nine against eight of sixteen, equally late: eight to the power of CROWD times as much."""
    values = {}
    for some, others in ((1, 8), (8, 8)):
        late = np.arange(some + others) < some
        values[some] = np.empty(some + others)
        lacking, hopes = np.where(late, 50.0, -50.0), np.where(late, 1.0, 0.0)
        _fill(lacking, 2.0, hopes, np.ones(len(late), np.bool_), math.log(8.0), values[some])
    assert 1.0 / values[8][-1] == pytest.approx(8.0, rel=0.05)
    assert 1.0 / values[1][-1] == pytest.approx(8.0 * 8.0**CROWD, rel=0.05)


def test_a_width_of_lacking_tokens_makes_one_worth_e_times_as_much() -> None:
    values = np.empty(2)
    spread = _fill(np.array([3.0, -1.0]), 3.0, np.array([1.0, 0.0]), np.ones(2, np.bool_), math.log(100.0), values)
    assert values.tolist() == pytest.approx([1.0, 1.0 / math.e])
    assert spread == pytest.approx(1.0 - 1.0 / math.e)


def test_who_has_no_hope_makes_nobody_fewer() -> None:
    """The most that a token is worth follows from how many can still be in time, not from how many lack something."""
    most = []
    for hopeless in (0, 4):
        lacking, values = np.array([50.0] * (1 + hopeless) + [-50.0] * (8 - hopeless)), np.empty(9)
        _fill(lacking, 2.0, np.arange(9) < 1, np.ones(9, np.bool_), math.log(8.0), values)
        most.append(1.0 / values[-1])
    assert most[0] == pytest.approx(most[1])


PATIENCE = 60.0
EVEN_STEPS_S = (1.0, 1.0, 1.0, 1.0)  # drafts that cost nothing


def hope(
    slack: float, tpot_s: float, steps_s: tuple[float, ...] = EVEN_STEPS_S, patience: float = PATIENCE,
    delivery: float = 1.0,
) -> float:  # fmt: skip
    """Return the hope for one request, of whose drafts half are accepted at each place."""
    found, acceptance = np.zeros(1), np.full((1, len(steps_s) - 1), 0.5)
    own = np.array([slack]), np.array([tpot_s]), np.array(steps_s)
    _hope(acceptance, np.full(len(steps_s) - 1, delivery), *own, np.ones(1, np.bool_), patience, found)
    return float(found[0])


def test_who_cannot_catch_up_is_given_up_before_it_is_far_behind() -> None:
    """Three drafts bring 1.875 tokens a second: two are too many, and one and a half can be had."""
    assert hope(0.0, 1.0 / 2.2) < 0.1
    assert hope(0.0, 1.0 / 1.5) > 0.9
    assert hope(-40.0, 1.0 / 1.5) < 0.2
    assert hope(0.0, 1.0 / 1.5, delivery=0.2) < 0.1  # of a drafter that seldom gives any


def test_a_hope_is_even_where_a_request_would_be_just_in_time() -> None:
    """By its patience, at the depth at which it is the fastest: here that of one draft."""
    dear, tpot_s = (1.0, 1.1, 2.0, 3.0), 0.8
    gain = 1.5 - 1.1 / tpot_s
    assert gain > 1.0 - 1.0 / tpot_s
    assert gain > 1.75 - 2.0 / tpot_s
    assert hope(-PATIENCE * gain, tpot_s, dear) == pytest.approx(0.5)
    assert hope(-PATIENCE * gain + GIVING_UP, tpot_s, dear) == pytest.approx(1.0 / (1.0 + math.exp(-1.0)))
    assert hope(-PATIENCE * gain, tpot_s, dear, 2 * PATIENCE) == pytest.approx(
        1.0 / (1.0 + math.exp(-PATIENCE * gain / GIVING_UP))
    )


def test_who_has_no_objective_has_no_hope_of_keeping_one() -> None:
    """So nothing is worth more to it."""
    assert hope(math.inf, math.inf) == 0.0


def view_of(rest_steps: int, *, is_ragged: bool = True) -> PlanningView:
    """Return what a policy sees of an engine whose steps take 10 ms, 2 ms per row and 1 ms per round."""
    state = EngineState(Capabilities(k_max=4, rest_steps=rest_steps, is_ragged=is_ragged))
    for record in steps_of(30.0, row_s=2e-3):
        observe(state, record)
    return state.view()


def test_the_shortest_step_has_no_drafts_but_of_the_late_and_leaves_out_the_idle() -> None:
    """Three late of eight draft two each; where four may rest, three steps of four are without these."""
    late, depth = 3, 2
    plain_s = _shortest_s(view_of(0), late, 4)[depth]
    assert plain_s == pytest.approx(
        10e-3 + 2e-3 * (REQUESTS + late * depth) + depth * 1e-3, rel=0.15
    )  # so few rows were never seen
    resting = _shortest_s(view_of(3), late, 4)
    assert resting[depth] < plain_s - 2e-3
    assert np.all(np.diff(resting) > 0.0)
    assert _shortest_s(view_of(3), late, 0)[depth] == pytest.approx(plain_s)


def test_the_shortest_step_is_looked_at_again_after_a_few_records() -> None:
    """Not for every record, and never with those who were late long ago."""
    shortest, state = ShortestSteps(), EngineState(CAPABILITIES)
    records = list(steps_of(30.0))
    for record in records[:-LOOK_RECORDS]:
        observe(state, record)
    first = shortest.seconds(state.view(), 1, 0)
    for number, record in enumerate(records[-LOOK_RECORDS:], 1):
        observe(state, record)
        later = shortest.seconds(state.view(), REQUESTS, 0)
        assert (later is first) == (number < LOOK_RECORDS)
    assert later[-1] > first[-1]


def test_the_shortest_step_is_one_without_a_split() -> None:
    """Who has hope is served without one: a split's own costs would tell of steps that there will not be."""
    view = view_of(0)
    ideal = view.under(IdealSplit(view.unsplit_cost))
    assert np.all(np.abs(_shortest_s(ideal, 3, 0) - _shortest_s(view, 3, 0)) > 1e-3)
    assert np.array_equal(ShortestSteps().seconds(ideal, 3, 0), _shortest_s(view, 3, 0))


def test_where_all_draft_the_longest_the_shortest_step_drafts_for_all_who_are_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its seconds of drafting are those of the whole batch, less who rests; what a step costs is of who is in it."""
    monkeypatch.setattr(CostTable, "plain_factor", lambda _, requests: 0.8 if requests == REQUESTS else 1.0)
    late, idle, rounds = 2, 4, np.arange(5.0)
    for is_ragged, drafting in ((True, late), (False, REQUESTS - 0.75 * idle)):
        view = view_of(3, is_ragged=is_ragged)
        rows = REQUESTS + late * rounds
        awake = msgspec.structs.replace(view, requests=REQUESTS - idle)
        mixed_s = 0.25 * view.verify_s(rows) + 0.75 * awake.verify_s(rows - idle)
        draft_s = view.cost.draft_time_s(rows - 0.75 * idle, rounds, rounds * drafting)
        assert _shortest_s(view, late, idle) == pytest.approx(mixed_s + draft_s)


def test_where_all_draft_the_longest_a_step_without_some_drafts_for_the_others() -> None:
    """And not for who rests."""
    view, within = view_of(3, is_ragged=False), np.arange(REQUESTS) < 5
    step = expected(view, within, np.where(within, np.arange(REQUESTS) % 3, 0), np.ones((REQUESTS, 5)))
    own = msgspec.structs.replace(view, requests=5)
    rows, rounds, drafted = 5.0 + 4.0, 2.0, 2.0 * 5
    assert step.seconds == pytest.approx(float(own.verify_s(rows) + view.cost.draft_time_s(rows, rounds, drafted)))


def test_where_all_draft_the_longest_favouring_some_drafts_for_everybody() -> None:
    """Of one length for all half of the drafts are kept: they are made all the same."""
    view, depths = view_of(0, is_ragged=False), np.arange(5.0)
    drafted = 0.5 * REQUESTS * depths
    table = np.array([drafted, REQUESTS + 0.5 * drafted, REQUESTS + drafted, depths])[:, None, :]
    groups = FavouredGroups(np.arange(REQUESTS) < 3, (3, REQUESTS - 3), (1.0, 1.0))
    step_s = view.verify_s(table[2, 0]) + view.cost.draft_time_s(table[2, 0], depths, REQUESTS * depths)
    assert choose_favouring(table, view, groups, 0.0).even_rates == pytest.approx(table[1, 0] / step_s)


@pytest.mark.parametrize("most", [0, 3])
def test_who_is_late_has_more_hope_where_others_may_rest(most: int) -> None:
    """Steps of eight are too long for them, steps of four are not."""
    state, policy = EngineState(replace(CAPABILITIES, rest_steps=most)), TokenValues()
    for record in steps_of(24.0, row_s=2e-3, others_ms=300.0, steps=30):
        observe(state, record)
    values = policy.of(state.view(), ShortestSteps())
    assert values is not None
    assert (values.min() < 0.5) == (most == 3)


def test_those_for_whom_no_draft_could_do_take_no_hope_from_the_others() -> None:
    """Whoever asks for what cannot be does not count among the late."""
    lacking = np.empty(3)
    slack, tpot_s, decoding = np.zeros(3), np.array([1e-3, 20e-3, 300e-3]), np.ones(3, np.bool_)
    assert _lack(slack, tpot_s, decoding, 26e-3, 4, 10.0, 15.0, 120.0, lacking) == (1, 1)
    assert lacking.tolist() == pytest.approx([385.0, 14.5, -3.7])
    _lack(np.full(3, 13.0), tpot_s, decoding, 26e-3, 4, 10.0, 15.0, 120.0, lacking)
    assert 0.0 < lacking[1] < 5.0
    assert _lack(np.full(3, 13.0), tpot_s, decoding, 26e-3, 4, 10.0, 15.0, 120.0, lacking) == (1, 1)  # a little late
    assert _lack(slack, tpot_s, ~decoding, 26e-3, 4, 10.0, 15.0, 120.0, lacking) == (0, 0)


@pytest.mark.parametrize("name", ["price", "price:even", "price:history", "price:drafter", "price:pace=0:40"])
def test_a_policy_is_named_as_it_was_asked_for(name: str) -> None:
    """Status and replay tell it by that name."""
    assert make_policy(name, CAPABILITIES).name == name


def test_under_stop_rules_those_are_favoured_whose_tokens_are_nearer_to_the_dearest() -> None:
    """Who does not decode is in neither group."""
    values, decoding = np.array([1.0, 0.6, 0.1, 0.05, 1.0]), np.array([True, True, True, True, False])
    groups = FavouredGroups.of(values, decoding)
    assert groups.favoured.tolist() == [True, True, False, False, False]
    assert groups.sizes == (2, 2)
    assert groups.worths == pytest.approx((0.8, 0.075))
