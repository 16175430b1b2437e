"""Splits: what steps cost under one is learnt, one that pays is found, one that does not is left alone."""

from __future__ import annotations

import pytest

from faser.engine_adapter.protocol import RequestRow, StepRecord
from faser.env.cost.cost_table import CostTable, StepCost
from faser.env.cost.split_cost import HIDDEN_GUESS, LEARNING_STEPS, SETTLE_STEPS, IdealSplit, SplitCost
from faser.env.estimate.engine_state import EngineState, observe
from faser.env.spaces import Capabilities
from faser.models.policies.split_choice import (
    FIRST_INTERVAL,
    LEAST_RECORDS,
    PATIENCE,
    TRIAL_RECORDS,
    RateEstimates,
    SplitChoice,
)


def step(rows: int, verify_s: float, draft_s: float = 0.0, overlap_s: float = 0.0, prefill_rows: int = 0) -> StepCost:
    """Return a step of rows // 3 requests with drafts of two tokens."""
    requests = rows // 3
    return StepCost(
        rows, prefill_rows, requests, 0, 2 if draft_s else 0, 2 * requests if draft_s else 0,
        verify_s + draft_s - overlap_s, draft_s, overlap_s,
    )  # fmt: skip


def unsplit_s(rows: int) -> float:
    """Return how long verifying takes on the whole device."""
    return 10e-3 + 1e-4 * rows


def learnt_unsplit() -> CostTable:
    """Return the costs of an engine whose verification takes 10 ms + 0.1 ms per row, and drafting 6 ms."""
    table = CostTable(device="cuda")
    for _ in range(60):
        for rows in (24, 48, 96, 192):
            table.learn(step(rows, unsplit_s(rows), 6e-3))
    return table


def settled(base: CostTable | None = None) -> SplitCost:
    """Return a split whose steps tell from now on."""
    split = SplitCost(learnt_unsplit() if base is None else base)
    for _ in range(SETTLE_STEPS):
        split.learn(step(24, 99.0))
    return split


def choose(
    choice: SplitChoice,
    rates: list[float | None],
    records: int,
    requests: int = 32,
    can_split: bool = True,
    best: float = 1e9,
) -> list[int]:
    """Return the splits that were planned for, one after the other, under these tokens per second."""
    planned = []
    for _ in range(records):
        planned.append(choice.at(requests, requests.bit_length()))
        is_shown = can_split or planned[-1] == 0
        choice.note(requests, requests.bit_length(), is_shown, RateEstimates(rates.__getitem__, lambda: best))
    return planned


def test_factors_and_hidden_share_are_those_of_the_steps() -> None:
    """Both phases a fifth and a tenth longer, half of the drafting hidden; the first steps tell nothing."""
    split = settled()
    for rows in (24, 96, 48, 192) * 4:
        draft_s = 1.1 * 6e-3
        split.learn(step(rows, 1.2 * unsplit_s(rows), draft_s, 0.5 * draft_s))
    assert split.verify_factor == pytest.approx(1.2, rel=0.02)
    assert split.draft_factor == pytest.approx(1.1, rel=0.05)
    assert split.hidden == pytest.approx(0.5, abs=0.01)
    whole_s = float(split.verify_time_s(96) + split.draft_time_s(96, 2, 64))
    assert whole_s == pytest.approx(1.2 * 19.6e-3 + 0.5 * 1.1 * 6e-3, rel=0.03)


def test_one_slow_step_is_not_the_splits() -> None:
    """Such as the capture of a graph."""
    split = settled()
    for verify_s in (2.0, *[1.2 * unsplit_s(96)] * 6):
        split.learn(step(96, verify_s))
    assert split.verify_factor == pytest.approx(1.2, rel=0.02)


def test_a_machine_that_gets_slower_is_not_taken_for_the_split() -> None:
    """Behind the first steps the common level follows, so unsplit steps are known to be slower too."""
    split = settled()
    for _ in range(LEARNING_STEPS):
        split.learn(step(96, 1.2 * unsplit_s(96)))
    for _ in range(200):
        split.learn(step(96, 1.5 * 1.2 * unsplit_s(96)))
    assert split.verify_factor == pytest.approx(1.2, rel=0.02)
    assert float(split.base.verify_time_s(96)) == pytest.approx(1.5 * unsplit_s(96), rel=0.03)


def test_prompts_behind_a_change_do_not_close_the_window() -> None:
    """Else what was not learnt would be taken for a slower machine."""
    split = settled()
    for _ in range(2 * LEARNING_STEPS):
        split.learn(step(96, 1.0, prefill_rows=90))
    for _ in range(LEARNING_STEPS):
        split.learn(step(96, 1.3 * unsplit_s(96)))
    assert split.verify_factor == pytest.approx(1.3, rel=0.02)
    assert float(split.base.verify_time_s(96)) == pytest.approx(unsplit_s(96), rel=0.02)


def test_what_is_hidden_is_seen_although_the_drafts_are_not() -> None:
    """Under a stop rule an engine may not say how much was drafted."""
    split = settled()
    for _ in range(6):
        cost = step(96, unsplit_s(96), 6e-3, 0.0)
        cost.is_draft_known = False
        split.learn(cost)
    assert split.hidden == 0.0


def test_what_is_longer_than_verifying_is_not_hidden() -> None:
    """Drafting far beyond verification hides that alone."""
    split = SplitCost(learnt_unsplit(), hidden=1.0, draft_factor=10.0)
    draft_s, verify_s = 10.0 * float(split.base.draft_time_s(24, 2, 16)), float(split.verify_time_s(24))
    assert draft_s > 2.0 * verify_s
    assert float(split.draft_time_s(24, 2, 16)) == pytest.approx(draft_s - verify_s)


@pytest.mark.parametrize("odd", [step(96, 1.0, prefill_rows=90), step(96, 0.0), step(0, 1.0)])
def test_steps_that_tell_nothing_teach_nothing(odd: StepCost) -> None:
    """Prompts, broken clocks and empty steps."""
    split = settled()
    for _ in range(8):
        split.learn(odd)
    assert (split.is_shown, split.verify_factor, split.hidden) == (False, 1.0, HIDDEN_GUESS)


def test_nothing_is_compared_with_a_guess() -> None:
    """A sidecar that has just begun may see the splits of the one before it."""
    split = settled(CostTable(device="cuda"))
    for _ in range(20):
        split.learn(step(96, unsplit_s(96)))
    assert (split.is_shown, split.verify_factor) == (False, 1.0)


def state_after(splits: list[int | None], running: int) -> EngineState:
    """Return what is known after steps of unsplit engines, then of these splits."""
    state = EngineState(Capabilities(k_max=4, splits=("unsplit", "1:3")))
    rows = [RequestRow(handle, 1, 2, 2, 2, 0, 1, 2, 50, False) for handle in range(running)]
    for counter, split in enumerate([None] * 60 + splits):
        verify_s = unsplit_s(3 * running) * (1.0 if not split else 1.3)
        record = StepRecord(
            "boot", counter, counter, 0.1 * counter, verify_s, 0.0, verify_s, 0.0, 0.0, 0.0, 0.0, running, 0, 0,
            running, 2 * running, 0.1, split, None, 1, counter, 0, 0, [], rows,
        )  # fmt: skip
        observe(state, record)
    return state


def test_a_record_teaches_the_split_that_it_shows() -> None:
    """And the unsplit costs stay; a split that was never offered counts as none."""
    state = state_after([1] * 12, 20)
    assert state.split == 1
    assert state.split_cost(1).verify_factor == pytest.approx(1.3, rel=0.02)
    assert float(state.unsplit_cost.verify_time_s(60)) == pytest.approx(unsplit_s(60), rel=0.02)
    assert state_after([7] * 12, 20).split_costs == {}


def test_a_batch_at_the_border_of_two_octaves_stays_in_its_own() -> None:
    """Else each request that ends would change the split."""
    state = state_after([1], 16)
    octaves = []
    for running in (15, 16, 13, 12, 11, 12, 15, 16, 19, 20):
        rows = [RequestRow(handle, 1, 0, 0, 0, 0, 0, 1, 50, False) for handle in range(running)]
        number = 100 + len(octaves)
        record = StepRecord(
            "boot", number, number, 0.1 * number, 0.01, 0.0, 0.01, 0.0, 0.0, 0.0, 0.0, running, 0, 0, running, 0, 0.1,
            None, None, 0, 0, 0, 0, [], rows,
        )  # fmt: skip
        octaves.append(observe(state, record).octave)
    assert octaves == [5, 5, 5, 5, 4, 4, 4, 4, 4, 4]
    assert octaves[-1] == 4  # up to a quarter above it


def test_a_view_under_a_split_leaves_the_state_and_the_view_before_alone() -> None:
    state = state_after([1], 16)
    view = state.view()
    planned = view.under(state.cost_under(1))
    assert planned.cost is state.split_cost(1)
    assert view.cost is state.view().cost is state.unsplit_cost
    assert planned.decoding is view.decoding


def test_a_split_that_promises_more_is_kept_after_its_trial() -> None:
    """Nothing else is tried before; now and then the whole device has its turn again, and the split beside it."""
    planned = choose(SplitChoice(2), [100.0, 110.0], 400)
    assert planned[:FIRST_INTERVAL] == [0] * FIRST_INTERVAL
    assert planned[FIRST_INTERVAL : FIRST_INTERVAL + TRIAL_RECORDS] == [1] * TRIAL_RECORDS
    assert planned.count(0) == FIRST_INTERVAL + TRIAL_RECORDS
    assert planned[-1] == 1


@pytest.mark.parametrize(
    ("rate", "length", "trials"), [(101.0, TRIAL_RECORDS, 4), (99.0, TRIAL_RECORDS, 4), (50.0, LEAST_RECORDS, 2)]
)
def test_a_split_that_does_not_pay_is_tried_ever_more_rarely(rate: float, length: int, trials: int) -> None:
    """A gain within noise is none; a hopeless one ends soon, and its next trial is later still."""
    planned = choose(SplitChoice(2), [100.0, rate], 1600)
    found = [len(trial) for trial in "".join(map(str, planned)).split("0") if trial]
    assert found == [length] * trials


def test_a_trial_that_told_nothing_is_repeated_sooner_than_one_that_told_of_a_loss() -> None:
    """But ever more rarely too: it may never tell."""
    planned = choose(SplitChoice(2), [100.0, None], 1600)
    waits = [len(wait) for wait in "".join(map(str, planned)).split("1") if wait]
    assert waits[:4] == [FIRST_INTERVAL, 144, 216, 324]


def test_a_split_that_pays_no_more_is_given_up() -> None:
    """The whole device's own trial tells."""
    choice = SplitChoice(2)
    assert choose(choice, [100.0, 110.0], 200)[-1] == 1
    planned = choose(choice, [100.0, 99.0], 400)
    assert planned[-1] == 0


@pytest.mark.parametrize("before", [0, 200])
def test_a_split_that_the_engine_does_not_show_is_not_kept(before: int) -> None:
    """Never, or not any more, whatever it promises."""
    choice = SplitChoice(2)
    choose(choice, [100.0, 110.0], before)
    planned = choose(choice, [100.0, 110.0], 4000, can_split=False)
    assert planned[-1] == 0
    assert sum(planned) <= 8 * (PATIENCE + 1)


def test_all_splits_have_their_turn_and_the_best_one_stays() -> None:
    """Also if a lesser one was kept before."""
    planned = choose(SplitChoice(4), [100.0, 90.1, 105.0, 120.0], 3000)
    assert set(planned) == {0, 1, 2, 3}
    assert planned[-1] == 3


def test_one_request_makes_no_two_groups() -> None:
    """However much a split promises."""
    assert not any(choose(SplitChoice(2), [1.0, 9.0], 500, requests=1))


def test_octaves_are_judged_apart_and_a_trial_ends_with_its_octave() -> None:
    """What pays at many requests is not believed at few."""
    choice = SplitChoice(2)
    assert choose(choice, [100.0, 110.0], 200, requests=64)[-1] == 1
    assert choose(choice, [100.0, 80.0], FIRST_INTERVAL + 1, requests=4)[-1] == 1
    assert choose(choice, [100.0, 110.0], 1, requests=64) == [1]
    assert choose(choice, [100.0, 80.0], 1, requests=4) == [0]


def test_nothing_is_tried_that_could_not_even_pay_at_best() -> None:
    """Where the weights are most of a step, reading them twice loses whatever is hidden."""
    assert not any(choose(SplitChoice(3), [100.0, 200.0, 200.0], 3000, best=102.0))
    assert any(choose(SplitChoice(3), [100.0, 101.0, 101.0], 3000, best=104.0))


def test_a_split_at_best_reads_the_weights_twice_and_hides_all_drafting() -> None:
    """The bound of docs/design/overlap.md, in seconds."""
    base = learnt_unsplit()
    ideal = IdealSplit(base)
    assert ideal.is_known(48)
    assert not IdealSplit(CostTable(device="cuda")).is_known(48)
    whole_s = float(ideal.verify_time_s(96) + ideal.draft_time_s(96, 2, 64))
    assert whole_s == pytest.approx(2.0 * unsplit_s(48), rel=0.03)


def test_a_promise_of_nothing_is_none() -> None:
    """A split of which nothing could be learnt, as beside prompts alone."""
    planned = choose(SplitChoice(2), [100.0, None], 500)
    assert sum(planned) == 2 * PATIENCE
    assert planned[-1] == 0
    assert choose(SplitChoice(2), [0.0, 0.0], 250)[-1] == 0
