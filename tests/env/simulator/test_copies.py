"""Copied drafts in the simulator: the rule is obeyed, luck is the request's, and who never copies is as before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from faser.engine_adapter.protocol import MatchRule, RequestRow, StepRecord
from faser.env.layout.action_vector import ACTION, outside
from faser.env.simulator.copies import LEAST_PRICE
from faser.env.simulator.simulated_record import hello
from faser.env.simulator.simulator import Simulator
from faser.env.simulator.state import COPIED, COPY_KEPT, WAS_COPY

from ..copying import LONGEST, match_model, match_rule, scenario, served, verified_copies


def survival(row: RequestRow, rule: MatchRule) -> list[float]:
    """Return what the rule makes of the chances that the engine told."""
    told = np.array(row.confidences)
    logits = rule.intercepts[0] + rule.slopes[0] * np.log(told / (1.0 - told))
    return np.cumprod(1.0 / (1.0 + np.exp(-logits))).tolist()


@pytest.mark.parametrize("rule", [match_rule(0.2), match_rule(0.5), match_rule(0.4, slope=0.7, intercept=-0.5)])
def test_a_copy_ends_before_the_first_token_whose_survival_does_not_pay_its_row(rule: MatchRule) -> None:
    rows = verified_copies(served(match_model(), rule)).values()
    ended = 0
    for row in rows:
        chances = survival(row, rule)
        assert min(chances[: row.verified]) > rule.keep[0] - 0.02
        if len(chances) > row.verified:
            assert chances[row.verified] < rule.keep[0] + 0.02
            ended += 1
    assert len(rows) > 200
    assert ended > 50


def test_whose_tokens_are_worth_more_pays_less_for_a_row() -> None:
    rule = replace(match_rule(0.6), handles=tuple(range(0, 4000, 2)), weights=(3.0,) * 2000)
    least = {False: 1.0, True: 1.0}
    for (handle, _), row in verified_copies(served(match_model(), rule)).items():
        is_named = handle % 2 == 0
        least[is_named] = min(least[is_named], *survival(row, rule)[: row.verified])
    assert least[False] > 0.58
    assert 0.18 < least[True] < 0.3


def test_a_copy_is_no_longer_than_was_asked_for_and_as_its_text_goes_on() -> None:
    lengths = [
        row.verified for row in verified_copies(served(match_model(mean=6.0), match_rule(0.01, most=5))).values()
    ]
    assert max(lengths) == 5
    assert np.mean(np.array(lengths) == 5) == pytest.approx(0.6, abs=0.05)  # of all matches so many go on so far


def test_a_copy_takes_the_place_of_a_draft_only_if_it_is_worth_more() -> None:
    rule, model = match_rule(0.2, worth=1.5), match_model()
    rows = verified_copies(served(model, rule, length=3)).values()
    worth = [sum(chance - 0.2 for chance in survival(row, rule)[: row.verified]) for row in rows]
    assert min(worth) > 1.45
    alone = verified_copies(served(model, rule, length=0)).values()  # without a draft to compare with any is welcome
    assert min(sum(chance - 0.2 for chance in survival(row, rule)[: row.verified]) for row in alone) < 0.5


def test_copies_that_together_bring_too_little_are_left_unless_the_drafter_drafts_anyway() -> None:
    model, rule = match_model(), replace(match_rule(0.2), least=3.0)
    alone, free = (np.array(_nets(served(model, by), by)) for by in (rule, match_rule(0.2)))
    assert np.mean(alone > 2.95) > 0.95  # requests end between a copy and its verification
    assert np.mean(free > 2.95) < 0.9
    assert np.mean(np.array(_nets(served(model, rule, length=2), rule)) > 2.95) < 0.9
    beside = served(model, rule, length=2)
    assert any(0 < len(record.copied) <= 2 for record in beside)


def _nets(records: Iterator[StepRecord], rule: MatchRule) -> list[float]:
    """Return what all copies that one step verified promised beyond their rows."""
    return [
        sum(
            chance - rule.keep[0]
            for row in record.rows if row.handle in record.verified_copies
            for chance in survival(row, rule)[: row.verified]
        )
        for record in records if record.verified_copies
    ]  # fmt: skip


@pytest.mark.parametrize("fewest", [1, 12])
def test_the_drafter_runs_only_if_enough_requests_are_left_to_it(fewest: int) -> None:
    left_alone = ran = 0
    for record in served(match_model(), match_rule(fewest=fewest), length=2):
        left = sum(row.emitted > 0 for row in record.rows) - len(record.copied)
        if left < fewest:
            assert record.drawn_tokens == record.draft_rounds == 0
            left_alone += 1
        else:
            ran += bool(record.drawn_tokens)
    assert ran > 50
    assert (left_alone > 50) == (fewest > 1)


def test_copies_are_not_drafted_but_verified_and_told_of() -> None:
    copied: tuple[int, ...] = ()
    drafts = dict[int, int]()
    for record in served(match_model(), match_rule()):
        assert not record.drawn_tokens
        assert set(record.verified_copies) <= set(copied)
        for row in record.rows:
            if row.verified:
                assert row.handle in record.verified_copies
                assert row.verified == drafts[row.handle]
                assert row.scheduled == row.verified + 1
        drafts = {row.handle: row.drafted for row in record.rows}
        copied = record.copied
    assert copied


def test_two_policies_meet_the_same_matches_and_the_same_luck() -> None:
    mild, strict = match_rule(0.1), match_rule(0.4)
    first, second = (verified_copies(served(match_model(), rule, length)) for rule, length in ((mild, 0), (strict, 3)))
    both = first.keys() & second.keys()
    assert len(both) > 100
    for place in both:
        one, other = first[place], second[place]
        shown = min(len(one.confidences), len(other.confidences))
        assert one.confidences[:shown] == other.confidences[:shown]
        assert min(one.accepted, other.verified) == min(other.accepted, one.verified)


def test_a_match_is_likelier_behind_a_copy_that_was_accepted_as_a_whole() -> None:
    counts = np.zeros((2, 2))
    for record in served(match_model(after_whole=1.0, after_other=-1.0, spread=0.0, mean=8.0), match_rule(0.01)):
        for row in record.rows:
            if row.emitted and not row.is_prefill:
                is_whole = row.handle in record.verified_copies and row.accepted == row.verified
                counts[int(is_whole), int(row.handle in record.copied)] += 1
    shares = counts[:, 1] / counts.sum(axis=1)
    assert shares == pytest.approx([1 / (1 + np.exp(1)), 1 / (1 + np.exp(-1))], abs=0.03)


def test_nothing_is_copied_without_a_model_or_without_a_rule() -> None:
    for model, rule in ((None, match_rule()), (match_model(), None)):
        records = list(served(model, rule, length=2, steps=100))
        assert sum(row.verified for record in records for row in record.rows) > 500
        assert not any(record.copied or record.verified_copies for record in records)


def test_an_engine_says_how_long_its_copies_may_be() -> None:
    assert [hello(Simulator(scenario(model), 1)).copy_max for model in (None, match_model())] == [0, LONGEST]


def test_who_never_copies_is_simulated_to_the_bit_as_without_a_model_of_matches() -> None:
    plain, able = (Simulator(scenario(model), 2, seed=1) for model in (None, match_model()))
    random = np.random.default_rng(1)
    for simulator in (plain, able):
        simulator.reset()
        simulator.warm()
    for _ in range(300):
        actions = random.uniform(-1.0, 1.0, (2, len(ACTION)))
        assert plain.step(actions).tobytes() == able.step(actions).tobytes()
    for name in ("ints", "evidence", "population", "globals", "shown", "times"):
        assert getattr(plain.state, name).tobytes() == getattr(able.state, name).tobytes()


def test_an_action_vector_copies_at_its_price() -> None:
    """The environment's actions name no rule; learned policies live in a world with copies all the same."""
    shares = []
    for price in (0.0, 0.9):
        simulator = Simulator(scenario(match_model()), 1, seed=1, copies=True)
        simulator.reset()
        copies = verified = kept = 0
        for _ in range(300):
            simulator.step(outside(threshold=price))
            assert simulator.state.copy_rules[0, 2, 0] == pytest.approx(max(price, LEAST_PRICE))
            state = simulator.state.copies[0]
            copies, verified = copies + int(state[COPIED].sum()), verified + int(state[WAS_COPY].sum())
            kept += int(state[COPY_KEPT][state[COPIED] != 0].sum())
        assert verified > 0.9 * copies
        shares.append((copies, kept / copies))
    assert shares[0][0] > 1.3 * shares[1][0]
    assert shares[0][1] > 1.5 * shares[1][1]
