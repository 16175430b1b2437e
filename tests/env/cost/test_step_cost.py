"""What a record says of its drafting reaches the cost table, and what a stop rule chose does not count as history."""

from __future__ import annotations

import pytest

from faser.engine_adapter.protocol import MAX_DRAFT_LENGTH, RequestRow, StepRecord, StopRule
from faser.env.cost.cost_table import NO_PROMPTS, CostTable, StepCost
from faser.env.estimate.engine_state import EngineState, observe
from faser.env.spaces import Capabilities

RULE = StopRule([1.0], [0.0], [0.4], [0.5])


class Recorder(CostTable):
    """Keeps what it is taught."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[StepCost] = []

    def learn(self, cost: StepCost) -> None:
        self.seen.append(cost)


def cost_of(rule: StopRule | None, caught_up: int = 0, rounds: int | None = None, drawn: int | None = None) -> StepCost:
    """Return what is learnt from a step in which two requests may draft four tokens and hand over two and one."""
    state, learnt = EngineState(Capabilities(k_max=4)), Recorder()
    state.unsplit_cost = learnt
    state.ask(5, rule)
    rows = [RequestRow(handle, 1, 4, drafted, 0, 0, 0, 1, 50, False) for handle, drafted in ((1, 2), (2, 1))]
    record = StepRecord(
        "boot", 1, 1, 1.0, 0.02, 0.0, 0.015, 0.0, 0.004, 0.0, 0.0, 2, 0, 0, 2, 0, 0.1, None, None, 1, 5, 0, 0, [], rows,
        caught_up, rounds, drawn,
    )  # fmt: skip
    observe(state, record)
    (cost,) = learnt.seen
    return cost


@pytest.mark.parametrize("rule", [None, RULE])
def test_what_the_engine_says_of_its_drafting_is_believed(rule: StopRule | None) -> None:
    cost = cost_of(rule, 40, 3, 5)
    assert (cost.rounds, cost.drafted, cost.caught_up) == (3, 5, 40)
    assert cost.is_draft_known


def test_more_rounds_than_the_longest_draft_has_tokens_are_not_believed() -> None:
    assert cost_of(None, 0, 1 << 40, 5).rounds == MAX_DRAFT_LENGTH  # or memory would grow with every new number


def test_of_a_silent_engine_the_drafts_handed_over_count() -> None:
    cost = cost_of(None)
    assert (cost.rounds, cost.drafted, cost.caught_up) == (2, 3, 0)
    assert cost.is_draft_known


def test_of_a_silent_engine_under_a_stop_rule_nothing_is_known() -> None:
    assert not cost_of(RULE).is_draft_known


@pytest.mark.parametrize(("rule", "is_history"), [(None, True), (RULE, False)])
def test_tokens_that_a_stop_rule_chose_tell_nothing_about_drafts_without_one(
    rule: StopRule | None, is_history: bool
) -> None:
    state = EngineState(Capabilities(k_max=4))
    state.ask(5, rule)
    for counter, verified in ((1, 0), (2, 1)):
        rows = [RequestRow(1, 1 + verified, 4, 1, verified, 0, verified, 1 + verified, 50, False, (0.9,) * verified)]
        observe(
            state,
            StepRecord(
                "boot", counter, counter, float(counter), 0.02, 0.0, 0.015, 0.0, 0.004, 0.0, 0.0, 1, 0, 0, 1, verified,
                0.1, None, None, 1, 5, 0, 0, [], rows,
            ),
        )  # fmt: skip
    assert (state.requests.trials.sum() > 0.0) == is_history


@pytest.mark.parametrize(("rule", "delivery"), [(None, [1.0, 0.5, 0.0, 0.0]), (RULE, [1.0, 1.0, 1.0, 1.0])])
def test_what_a_rule_ended_says_nothing_of_what_the_drafter_delivers(
    rule: StopRule | None, delivery: list[float]
) -> None:
    state = EngineState(Capabilities(k_max=4))
    for counter in range(1, 2001):
        state.ask(counter, rule if counter % 2 else None)  # what a step verifies is free, or nothing would be learnt
        rows = [RequestRow(handle, 1, 4, drafted, 0, 0, 0, 1, 50, False) for handle, drafted in ((1, 2), (2, 1))]
        if counter % 2 == 0 and rule is not None:
            rows = [RequestRow(handle, 1, 4, 4, 0, 0, 0, 1, 50, False) for handle in (1, 2)]
        record = StepRecord(
            "boot", counter, counter, float(counter), 0.02, 0.0, 0.015, 0.0, 0.004, 0.0, 0.0, 2, 0, 0, 2, 0, 0.1, None,
            None, 1, counter, 0, 0, [], rows,
        )  # fmt: skip
        observe(state, record)
    assert state.population.delivery == pytest.approx(delivery, abs=0.01)


def test_prompts_are_told_by_the_steps_that_have_them() -> None:
    state = EngineState(Capabilities(k_max=4))
    assert state.view().prompts() == NO_PROMPTS
    for counter in range(1, 801):
        prompt = 160 if counter % 4 == 0 else 0
        record = StepRecord(
            "boot", counter, counter, float(counter), 0.02, 0.0, 0.015, 0.0, 0.004, 0.0, 0.0, 2, 0, prompt, 2, 0, 0.1,
            None, None, 0, 0, 0, 0, [], [RequestRow(1, 1, 0, 0, 0, 0, 0, 1, 50, False)],
        )  # fmt: skip
        observe(state, record)
    rows, share = state.view().prompts()
    assert share == pytest.approx(0.25, abs=0.07)
    assert rows == pytest.approx(160 * state.unsplit_cost.prompt_row)


@pytest.mark.parametrize(("rested", "is_fair"), [(0, True), (1, False)])
def test_what_a_rule_chose_before_its_request_was_left_out_is_no_history(rested: int, is_fair: bool) -> None:
    """The second step is under no rule, but request 2 verifies in the third what it drafted in the first."""
    state = EngineState(Capabilities(k_max=4))
    state.ask(1, RULE)
    for counter, handles in enumerate(([1, 2], [1], [1, 2]), start=1):
        state.ask(counter, RULE if counter == 1 else None)
        verified = 0 if counter == 1 else 1
        rows = [
            RequestRow(each, 1 + verified, 4, 1, verified, 0, verified, 1 + verified, 50, False) for each in handles
        ]
        record = StepRecord(
            "boot", counter, counter, 0.02 * counter, 0.02, 0.0, 0.015, 0.0, 0.004, 0.0, 0.0, 2, 0, 0, len(rows),
            verified * len(rows), 0.1, None, None, 1, counter, 0, 0, [], rows, rested=rested if counter == 2 else 0,
        )  # fmt: skip
        observe(state, record)
    tried = dict(zip(state.handles().tolist(), state.requests.trials[:, 0].tolist(), strict=True))
    assert (tried[2] > 0.0) is is_fair
