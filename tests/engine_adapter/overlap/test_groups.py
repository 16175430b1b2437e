"""Who sits out, when groups form, change and end: the pure core, played against requests that come and go."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine_adapter.overlap.groups import LEAST_GAIN, Groups, GroupTurn, PhasePace

NAMES = "abcdefgh"
Steps = list[tuple[dict[str, float], bool]]


@dataclass
class Play:
    """Takes turns as a scheduler does, and knows whose draft is where."""

    groups: Groups = field(default_factory=Groups)
    flying: set[str] = field(default_factory=set)  # verified last, their drafts are under way
    sat_out: Counter[str] = field(default_factory=Counter)
    last: GroupTurn = field(default_factory=GroupTurn)
    is_lost: bool = False  # the step verified somebody whose draft is under way
    is_alone: bool = False  # nobody else was there

    def step(self, weights: dict[str, float], is_wanted: bool) -> tuple[GroupTurn, set[str]]:
        if self.last.is_deferred:
            self.flying |= weights.keys() - self.sat_out.keys()  # their prompts ended in the last step
        turn = self.groups.turn(weights, is_wanted)
        verified = set(weights) - turn.held
        self.is_lost = bool(verified & self.flying)
        self.is_alone = weights.keys() <= self.flying
        self.flying = verified if turn.is_deferred else set()
        self.sat_out = Counter({name: self.sat_out[name] + 1 if name in turn.held else 0 for name in weights})
        self.last = turn
        return turn, verified


WEIGHTS = st.dictionaries(st.sampled_from(NAMES), st.sampled_from([0.5, 1.0, 1.0, 1.0, 3.0]))
STEPS = st.lists(st.tuples(WEIGHTS, st.booleans() | st.just(True)), max_size=30)


@given(steps=STEPS)
def test_somebody_is_verified_and_nobody_sits_out_three_steps_in_a_row(steps: Steps) -> None:
    play = Play()
    for weights, is_wanted in steps:
        turn, verified = play.step(weights, is_wanted)
        assert turn.held <= weights.keys()
        assert verified or not weights
        assert max(play.sat_out.values(), default=0) <= 2
        assert turn.is_deferred == (is_wanted and len(weights) > 1)


@given(steps=STEPS)
def test_no_draft_is_lost_unless_everybody_elses_is_under_way_too(steps: Steps) -> None:
    play = Play()
    for weights, is_wanted in steps:
        play.step(weights, is_wanted)
        assert play.is_alone or not play.is_lost


@given(weights=WEIGHTS, wanted=st.lists(st.booleans(), max_size=20))
def test_without_comings_and_goings_no_draft_is_ever_lost(weights: dict[str, float], wanted: list[bool]) -> None:
    play = Play()
    for is_wanted in wanted:
        play.step(weights, is_wanted)
        assert not play.is_lost


@given(steps=STEPS, weights=WEIGHTS)
def test_groups_even_out_within_two_turns_and_then_stay(steps: Steps, weights: dict[str, float]) -> None:
    play = Play()
    for earlier in steps:
        play.step(*earlier)
    for _ in range(4):
        play.step(weights, True)
    turns = [play.step(weights, True)[0] for _ in range(4)]
    assert turns[0] == turns[2]
    assert turns[1] == turns[3]
    if len(weights) < 2:
        return
    assert turns[0].held | turns[1].held == weights.keys()
    assert not turns[0].held & turns[1].held
    one, other = (sum(weights[name] for name in turn.held) for turn in turns[:2])
    assert abs(one - other) <= max(weights.values())


def turns(groups: Groups, weights: dict[str, float], count: int, is_wanted: bool = True) -> list[set[str]]:
    return [set(weights) - groups.turn(weights, is_wanted).held for _ in range(count)]


EVEN = dict.fromkeys("abcd", 1.0)


def test_four_equal_requests_take_turns_in_pairs() -> None:
    first, second, third = turns(Groups(), EVEN, 3)
    assert len(first) == len(second) == 2
    assert first | second == set(EVEN)
    assert third == first


def test_a_newcomer_joins_those_with_whom_it_was_prefilled() -> None:
    groups = Groups()
    first, second = turns(groups, EVEN, 2)
    grown = EVEN | {"e": 1.0}  # its prompt ended in the second step
    assert turns(groups, grown, 2) == [first, second | {"e"}]


def test_one_who_changes_groups_waits_with_its_draft_for_the_other_ones_turn() -> None:
    groups = Groups()
    first, _ = turns(groups, EVEN, 2)
    gone = min(first), max(first)
    left = {name: 1.0 for name in EVEN if name not in gone} | {"e": 1.0, "f": 1.0}  # e and f came in the second step
    one, other, again = turns(groups, left, 3)
    assert len(one) == len(other) == 2
    assert one | other == set(left)
    assert again == one


def test_one_who_changed_groups_is_verified_before_it_changes_again() -> None:
    groups = Groups()
    six = dict.fromkeys("abcdef", 1.0)
    assert turns(groups, six, 2) == [set("def"), set("abc")]
    assert turns(groups, dict.fromkeys("cdef", 1.0), 1) == [set("ef")]  # a and b ended, d changed
    assert turns(groups, dict.fromkeys("dc", 1.0), 1) == [{"d"}]  # e and f ended


def test_a_group_that_ends_leaves_the_other_one_split_without_losing_a_draft() -> None:
    groups = Groups()
    first, second = turns(groups, EVEN, 2)
    assert turns(groups, EVEN, 1) == [first]
    left = dict.fromkeys(second, 1.0)  # the first group ended in its step
    one, other = turns(groups, left, 2)
    assert len(one) == len(other) == 1
    assert one != other


def test_groups_end_with_one_step_that_leaves_out_those_whose_drafts_are_under_way() -> None:
    groups = Groups()
    first, _ = turns(groups, EVEN, 2)
    assert turns(groups, EVEN, 2, is_wanted=False) == [first, set(EVEN)]


def test_drafts_that_are_there_already_keep_nobody_waiting() -> None:
    groups = Groups()
    turns(groups, EVEN, 2)
    groups.land()
    assert turns(groups, EVEN, 1, is_wanted=False) == [set(EVEN)]


def test_one_request_is_no_group() -> None:
    assert Groups().turn({"a": 1.0}, is_wanted=True) == GroupTurn()


def test_weights_are_predicted_phase_times() -> None:
    pace = PhasePace()
    assert pace.weight(4, 3) == 7.0
    pace.note(verify_s=0.2, rows=10, draft_s=0.1, tokens=5)
    assert pace.weight(4, 3) == pytest.approx(4 * 0.02 + 3 * 0.02)


def test_a_phase_too_short_to_hide_is_not_worth_two_groups() -> None:
    pace = PhasePace()
    assert pace.may_pay()
    pace.note_whole(verify_s=1.0, draft_s=LEAST_GAIN - 1.0 - 0.01)
    assert not pace.may_pay()
    pace.note_whole(verify_s=1.0, draft_s=3.0)
    assert pace.may_pay()
