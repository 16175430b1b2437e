"""What a forced mechanism asks an engine for, what it leaves alone, and names that are none."""

from __future__ import annotations

import numpy as np
import pytest

from faser.engine_adapter.protocol import Prune, RequestRow, StepRecord
from faser.env.estimate.engine_state import EngineState, observe
from faser.env.spaces import Action, Capabilities, clamp
from faser.models.forced.forced_policy import MECHANISMS, TURN_RECORDS
from faser.models.policies.policy import PolicyError
from faser.models.registry import POLICIES, make_policy

K_MAX = 4
WHOLE = Capabilities(
    k_max=K_MAX, copy_max=8, splits=("unsplit", "1:1"), exit_layers=(5,), released_prune=Prune(5, 0.25), frontier=8
)
BARE = Capabilities(k_max=K_MAX)


def asked(names: str, capabilities: Capabilities = WHOLE, state: EngineState | None = None) -> Action:
    action = make_policy(f"force:{names}", capabilities).act(state or EngineState(capabilities))
    return clamp(action, capabilities)


def mechanisms_in(action: Action) -> set[str]:
    found = {"stops": action.stop, "copies": action.match, "pruning": action.prune, "ahead": action.frontier}
    return {name for name, value in found.items() if value} | ({"groups"} if action.split else set())


@pytest.mark.parametrize("name", ["stops", "copies", "pruning", "ahead", "groups"])
def test_one_mechanism_is_forced_and_no_other(name: str) -> None:
    assert mechanisms_in(asked(name)) == {name}
    assert mechanisms_in(asked("drafts")) == set()


@pytest.mark.parametrize("name", MECHANISMS)
def test_an_engine_without_it_is_asked_for_drafts_alone(name: str) -> None:
    assert mechanisms_in(asked(name, BARE)) <= {"stops"}


def test_what_is_forced_together_is_asked_for_together() -> None:
    action = asked("lengths+stops+copies+pruning+ahead+groups")
    assert mechanisms_in(action) == {"stops", "copies", "pruning", "ahead", "groups"}
    assert action.reason.endswith("lengths, stops, copies, pruning, ahead, groups")


def test_copies_alone_leave_the_drafter_out() -> None:
    assert asked("copies").default_length == 0
    assert asked("copies+stops").default_length == asked("drafts").default_length == K_MAX


def test_splits_take_turns() -> None:
    policy, state = make_policy("force:splits", WHOLE), EngineState(WHOLE)
    splits = [policy.act(state).split for _ in range(3 * TURN_RECORDS)]
    assert splits == [0] * TURN_RECORDS + [1] * TURN_RECORDS + [0] * TURN_RECORDS


def state_of(accepting: dict[int, int]) -> EngineState:
    """Return what is known when each handle had so many tokens of every draft of four accepted."""
    state = EngineState(WHOLE)
    for counter in range(40):
        rows = [RequestRow(n, 5, K_MAX, K_MAX, K_MAX, 0, hits, hits + 1, 50, False) for n, hits in accepting.items()]
        record = StepRecord(
            "b", counter, counter, float(counter), 0.02, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, len(rows), 0, 0, len(rows),
            K_MAX * len(rows), 0.1, None, None, 0, 0, 0, 0, [], rows,
        )  # fmt: skip
        observe(state, record)
    return state


def test_lengths_go_by_each_request_s_own_acceptance_and_nobody_is_left_out() -> None:
    action = asked("lengths", state=state_of({1: 4, 2: 0, 3: 2}))
    eager, shy, middling = action.lengths.tolist()
    assert eager == K_MAX
    assert shy == 1
    assert shy < middling < eager
    assert np.array_equal(asked("drafts", state=state_of({1: 4, 2: 0})).lengths, [K_MAX, K_MAX])


def test_names_that_are_none_are_one_line() -> None:
    with pytest.raises(PolicyError, match=r"force:stops\+luck': unknown mechanism 'luck', expected some of drafts"):
        make_policy("force:stops+luck", WHOLE)
    with pytest.raises(PolicyError, match="unknown mechanism ''"):
        make_policy("force:", WHOLE)


def test_operators_are_not_offered_it() -> None:
    assert not any(name.startswith("force") for name in POLICIES)
    assert make_policy("force:ahead", WHOLE).name == "force:ahead"
