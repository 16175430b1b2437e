"""The stop rule by itself: where a draft ends, and what a change of its numbers may change."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine_adapter.protocol import StopRule
from faser.engine_adapter.steering.stop_rule import LEAST, advance, fitted, kept_tokens, logit, sigmoid

NEVER = 1.5  # no survival is this large
ALWAYS = -1.0

numbers = st.floats(-20, 20)
thresholds = st.floats(-0.1, 1.1)


def lists(values: st.SearchStrategy[float]) -> st.SearchStrategy[list[float]]:
    return st.lists(values, min_size=1, max_size=8)


rules = st.builds(StopRule, lists(numbers), lists(numbers), lists(thresholds), lists(thresholds))
drafts = st.lists(st.floats(0, 1), max_size=10)


def identity(keep: list[float], go_on: list[float]) -> StopRule:
    """Return a rule whose p_j is c_j itself."""
    return StopRule([1.0], [0.0], keep, go_on)


@pytest.mark.parametrize(
    ("keep", "go_on", "kept"),
    [
        ([ALWAYS], [ALWAYS], 4),
        ([0.5], [ALWAYS], 1),  # survival is 0.8, 0.4, 0.36, 0.09: token 2 is drafted and dropped
        ([ALWAYS], [0.5], 2),  # token 2 is kept, token 3 is not drafted
        ([0.1], [0.36], 3),
        ([0.4, 0.4, 0.0], [0.1], 4),  # the last entry holds from its position on
        ([NEVER], [ALWAYS], 0),
        ([ALWAYS], [NEVER], 1),
        ([ALWAYS, NEVER], [0.0], 1),
    ],
)
def test_the_first_position_that_fails_ends_the_draft(keep: list[float], go_on: list[float], kept: int) -> None:
    assert kept_tokens(identity(keep, go_on), [0.8, 0.5, 0.9, 0.25]) == kept


def test_survival_is_the_product_of_the_calibrated_confidences() -> None:
    rule = StopRule([2.0, 0.5], [0.1, -0.3], [0.0], [0.0])
    first, _, _ = advance(rule, 1, 1.0, 0.7)
    second, _, _ = advance(rule, 2, first, 0.9)
    by_hand = 1 / (1 + math.exp(-(0.1 + 2.0 * math.log(0.7 / 0.3))))
    assert first == pytest.approx(by_hand)
    assert second == pytest.approx(by_hand / (1 + math.exp(-(-0.3 + 0.5 * math.log(0.9 / 0.1)))))


@given(rules, drafts)
def test_what_follows_the_end_changes_nothing(rule: StopRule, confidences: list[float]) -> None:
    kept = kept_tokens(rule, confidences)
    assert 0 <= kept <= len(confidences)
    assert kept_tokens(rule, confidences[: kept + 1]) == kept
    assert kept_tokens(rule, [*confidences[: kept + 1], 0.5, 0.99][: len(confidences)]) == kept


@given(rules, drafts, st.floats(0, 1))
def test_higher_thresholds_never_keep_more(rule: StopRule, confidences: list[float], more: float) -> None:
    raised = [value + more for value in rule.keep]
    assert kept_tokens(StopRule(rule.slopes, rule.intercepts, raised, rule.go_on), confidences) <= kept_tokens(
        rule, confidences
    )
    raised = [value + more for value in rule.go_on]
    assert kept_tokens(StopRule(rule.slopes, rule.intercepts, rule.keep, raised), confidences) <= kept_tokens(
        rule, confidences
    )


@given(rules, drafts, st.integers(0, 20))
def test_a_fitted_rule_says_the_same_within_its_length(rule: StopRule, confidences: list[float], size: int) -> None:
    same = fitted(rule, size)
    assert len(same.numbers()) == 4 * max(size, 1)
    assert kept_tokens(same, confidences[:size]) == kept_tokens(rule, confidences[:size])


def test_no_number_overflows() -> None:
    huge = 1e308
    for slope in (huge, -huge):
        for intercept in (huge, -huge):
            for confidence in (0.0, LEAST, 0.5, 1.0):
                survival, _, _ = advance(StopRule([slope], [intercept], [0.5], [0.5]), 1, 1.0, confidence)
                assert 0.0 <= survival <= 1.0
    assert sigmoid(logit(1.0)) == pytest.approx(1 - LEAST)
    assert sigmoid(logit(0.0)) == pytest.approx(LEAST)


def test_a_rule_travels_to_the_workers() -> None:
    rule = StopRule([1.0], [0.0], [0.1], [0.2])
    assert pickle.loads(pickle.dumps(rule)) == rule
