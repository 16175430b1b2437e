"""Splits: what steps cost under one is learnt, one that pays is found, one that does not is left alone."""

from __future__ import annotations

import pytest

from faser.env.cost_table import CostTable, StepCost
from faser.env.split_cost import HIDDEN_GUESS, SplitCost
from faser.models.split_choice import FIRST_INTERVAL, SETTLE_RECORDS, TRIAL_RECORDS, SplitChoice


def step(rows: int, verify_s: float, draft_s: float = 0.0, overlap_s: float = 0.0, prefill_rows: int = 0) -> StepCost:
    """Return a step of rows // 3 requests with drafts of two tokens."""
    requests = rows // 3
    return StepCost(
        rows, prefill_rows, requests, 0, 2 if draft_s else 0, 2 * requests if draft_s else 0,
        verify_s + draft_s - overlap_s, draft_s, overlap_s,
    )  # fmt: skip


def learnt_unsplit() -> CostTable:
    """Return the costs of an engine whose verification takes 10 ms + 0.1 ms per row, and drafting 6 ms."""
    table = CostTable(device="cuda")
    for _ in range(60):
        for rows in (24, 48, 96, 192):
            table.learn(step(rows, 10e-3 + 1e-4 * rows, 6e-3))
    return table


def choose(choice: SplitChoice, rates: list[float], records: int, requests: int = 32) -> list[int]:
    """Return the splits that were planned for, one after the other, under these tokens per second."""
    planned = []
    for _ in range(records):
        planned.append(choice.at(requests, size=requests))
        choice.note(requests, requests, rates.__getitem__)
    return planned


def test_factors_and_hidden_share_are_those_of_the_steps() -> None:
    """Both phases a fifth and a tenth longer, half of the drafting hidden."""
    split = SplitCost(learnt_unsplit())
    for rows in (24, 96, 48, 192) * 10:
        verify_s, draft_s = 1.2 * (10e-3 + 1e-4 * rows), 1.1 * 6e-3
        split.learn(step(rows, verify_s, draft_s, 0.5 * draft_s))
    assert split.verify_factor == pytest.approx(1.2, rel=0.02)
    assert split.draft_factor == pytest.approx(1.1, rel=0.05)
    assert split.hidden == pytest.approx(0.5, abs=0.01)
    whole_s = float(split.verify_time_s(96) + split.draft_time_s(96, 2, 64))
    assert whole_s == pytest.approx(1.2 * 19.6e-3 + 0.5 * 1.1 * 6e-3, rel=0.03)


def test_what_is_longer_than_verifying_is_not_hidden() -> None:
    """Drafting far beyond verification hides that alone."""
    split = SplitCost(learnt_unsplit(), hidden=1.0, draft_factor=10.0)
    draft_s, verify_s = 10.0 * float(split.base.draft_time_s(24, 2, 16)), float(split.verify_time_s(24))
    assert draft_s > 2.0 * verify_s
    assert float(split.draft_time_s(24, 2, 16)) == pytest.approx(draft_s - verify_s)


@pytest.mark.parametrize("odd", [step(96, 1.0, prefill_rows=90), step(96, 0.0), step(0, 1.0)])
def test_steps_that_tell_nothing_teach_nothing(odd: StepCost) -> None:
    """Prompts, broken clocks and empty steps."""
    split = SplitCost(learnt_unsplit())
    split.learn(odd)
    assert (split.measured_steps, split.verify_factor, split.hidden) == (0, 1.0, HIDDEN_GUESS)


def test_a_split_that_promises_more_is_kept_after_its_trial() -> None:
    """Nothing else is tried before."""
    planned = choose(SplitChoice(2), [100.0, 110.0], 400)
    assert planned[:FIRST_INTERVAL] == [0] * FIRST_INTERVAL
    assert planned[FIRST_INTERVAL : FIRST_INTERVAL + TRIAL_RECORDS] == [1] * TRIAL_RECORDS
    assert planned.count(0) < 2 * FIRST_INTERVAL  # and trials of the way back fail


@pytest.mark.parametrize(("rate", "length"), [(101.0, TRIAL_RECORDS), (99.0, TRIAL_RECORDS), (50.0, SETTLE_RECORDS)])
def test_a_split_that_does_not_pay_is_tried_ever_more_rarely(rate: float, length: int) -> None:
    """A gain within noise is none; a hopeless one ends at once."""
    planned = choose(SplitChoice(2), [100.0, rate], 2000)
    trials = "".join(map(str, planned)).split("0" * FIRST_INTERVAL)
    assert sum(planned) == length * len([trial for trial in trials if "1" in trial])
    assert 4 <= sum(planned) // length <= 5


def test_all_splits_have_their_turn_and_the_best_one_stays() -> None:
    """Also if a lesser one was kept before."""
    planned = choose(SplitChoice(4), [100.0, 90.1, 105.0, 120.0], 3000)
    assert set(planned) == {0, 1, 2, 3}
    assert planned[-1] == 3


def test_one_request_makes_no_two_groups() -> None:
    """However much a split promises."""
    assert not any(choose(SplitChoice(2), [1.0, 9.0], 500, requests=1))


def test_sizes_of_the_batch_are_judged_apart() -> None:
    """What pays at many requests is not believed at few."""
    choice = SplitChoice(2)
    assert choose(choice, [100.0, 110.0], 200, requests=64)[-1] == 1
    assert choose(choice, [100.0, 80.0], 20, requests=4)[0] == 0
    assert choose(choice, [100.0, 110.0], 1, requests=64) == [1]
