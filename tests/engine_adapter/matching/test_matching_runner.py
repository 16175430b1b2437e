"""Whose draft is copied, and what is left to the drafter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from faser.engine_adapter.matching.choice import match_refusal
from faser.engine_adapter.matching.matching_runner import MatchingRunner, fresh_tokens
from faser.engine_adapter.matching.texts import Texts
from faser.engine_adapter.patches.v1 import put_certain_drafts
from faser.engine_adapter.protocol import MatchRule
from faser.engine_adapter.settings import load_settings
from faser.engine_adapter.steering.orders import StepOrder, StepReport

REPEATING, PLAIN = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
SURE = MatchRule([1.0], [3.0], [0.1], 4)


def runner(*said: list[int], inside: tuple[int, ...] = ()) -> Any:
    """Return as much of a runner as is read; the last token of each request was just sampled."""
    tokens = np.zeros((len(said), 32), np.int32)
    for row, text in enumerate(said):
        tokens[row, : len(text) - 1] = text[:-1]
    made: Any = MatchingRunner()
    made.texts = Texts(1 << 20)
    made.input_batch = SimpleNamespace(
        num_prompt_tokens=np.array([2] * len(said)),
        req_ids=[f"r{row}" for row in range(len(said))], token_ids_cpu=tokens,
        num_tokens_no_spec=np.array([len(text) - 1 for text in said]),
    )  # fmt: skip
    made.discard_request_mask = SimpleNamespace(np=np.array([row in inside for row in range(len(said))]))
    made.sampled = torch.tensor([[text[-1], -1] for text in said])
    made._draft_probs = None
    return made


def order(rule: MatchRule | None, *lengths: int) -> StepOrder:
    names = [f"r{row}" for row in range(len(lengths))]
    caps = {} if rule is None else dict.fromkeys(names, rule.most)
    return StepOrder(dict(zip(names, lengths, strict=True)), match=rule, match_lengths=caps)


def test_a_row_with_a_match_leaves_the_drafters_batch() -> None:
    made, lengths = runner(REPEATING, PLAIN), [3, 3]
    made.copy_drafts(order(SURE, 3, 3), made.sampled, lengths)
    assert lengths == [0, 3]
    handed = [0, 3]
    joined = made.with_copies(torch.tensor([[0, 0, 0], [7, 8, 9]]), handed)
    assert joined.tolist() == [[3, 4, 1, 2], [7, 8, 9, 0]]
    assert handed == [4, 3]
    report = StepReport(drafted=handed, confidences=[(), (0.5, 0.4, 0.3)])
    made.report_copies(report)
    assert report.copied == [0]
    assert len(report.confidences[0]) == 4
    assert report.confidences[1] == (0.5, 0.4, 0.3)


def test_a_match_that_promises_less_than_the_drafter_is_left() -> None:
    made, lengths = runner(REPEATING), [3]
    made.copy_drafts(order(MatchRule([1.0], [3.0], [0.1], 4, worth=3.7), 3), made.sampled, lengths)
    assert lengths == [3]
    assert not made.matches.tokens
    made.copy_drafts(order(MatchRule([1.0], [3.0], [0.1], 4, worth=3.7), 0), made.sampled, lengths := [0])
    assert made.matches.tokens == {0: (3, 4, 1, 2)}, "whoever gets no draft else takes what there is"


def test_whose_tokens_are_worth_more_gets_copies_that_others_do_not() -> None:
    made, lengths = runner(REPEATING, REPEATING, REPEATING), [3, 3, 3]
    asked = order(MatchRule([1.0], [3.0], [2.0], 4, 0.0, 1, (1,), (8.0,)), 3, 3, 3)
    asked.match_weights = {"r1": 8.0, "r2": 0.5}
    made.copy_drafts(asked, made.sampled, lengths)
    assert made.matches.tokens == {1: (3, 4, 1, 2)}
    assert lengths == [3, 0, 3]


def test_the_drafter_does_not_run_for_fewer_than_pay_its_rounds() -> None:
    made, lengths = runner(REPEATING, PLAIN), [3, 3]
    made.copy_drafts(order(MatchRule([1.0], [3.0], [0.1], 4, 0.0, 2), 3, 3), made.sampled, lengths)
    assert lengths == [0, 0]


@pytest.mark.parametrize(
    ("least", "lengths", "is_copied"), [(3.0, (0, 0), True), (3.7, (0, 0), False), (3.7, (0, 3), True)]
)
def test_copies_that_together_bring_too_little_are_left_unless_the_drafter_drafts_anyway(
    least: float, lengths: tuple[int, ...], is_copied: bool
) -> None:
    made = runner(REPEATING, PLAIN)
    made.copy_drafts(order(MatchRule([1.0], [3.0], [0.1], 4, least=least), *lengths), made.sampled, list(lengths))
    assert bool(made.matches.tokens) == is_copied


def test_what_copies_bring_together_counts_all_requests_by_their_weights() -> None:
    for weights, is_copied in (((1.0, 1.0), True), ((0.3, 0.3), False)):
        made = runner(REPEATING, REPEATING)
        asked = order(MatchRule([1.0], [3.0], [0.01], 4, 0.0, 1, (1, 2), weights, 5.0), 0, 0)
        asked.match_weights = dict(zip(("r0", "r1"), weights, strict=True))
        made.copy_drafts(asked, made.sampled, [0, 0])
        assert bool(made.matches.tokens) == is_copied


@pytest.mark.parametrize("rule", [None, MatchRule([1.0], [3.0], [0.1], 0)])
def test_nothing_is_copied_unasked(rule: MatchRule | None) -> None:
    made, lengths = runner(REPEATING), [2]
    made.copy_drafts(order(rule, 2), made.sampled, lengths)
    assert lengths == [2]
    assert made.with_copies([[1, 2]], [2]) == [[1, 2]]


def test_who_is_inside_a_prompt_gets_no_copy() -> None:
    made, lengths = runner(REPEATING, inside=(0,)), [0]
    made.copy_drafts(order(SURE, 0), made.sampled, lengths)
    assert not made.matches.tokens


def test_tokens_that_vllm_has_booked_are_not_read_twice() -> None:
    made, lengths = runner(REPEATING), [0]
    made.input_batch.token_ids_cpu[0, len(REPEATING) - 1] = REPEATING[-1]
    made.input_batch.num_tokens_no_spec[0] += 1
    made.copy_drafts(order(SURE, 0), [[REPEATING[-1]]], lengths)
    assert made.matches.tokens == {0: (3, 4, 1, 2)}
    fresh, booked = fresh_tokens([[1, 2], []])
    assert fresh.tolist() == [[1, 2], [-1, -1]]
    assert booked == [2, 0]


def test_a_failure_ends_copying_and_nothing_else(vllm_log: Any) -> None:
    made, lengths = runner(REPEATING), [2]
    made.input_batch.token_ids_cpu = None
    for _ in range(2):
        made.copy_drafts(order(SURE, 2), made.sampled, lengths)
    assert lengths == [2]
    assert made.texts is None
    assert vllm_log.getvalue().count("copies no drafts any more") == 1


def test_copied_tokens_are_certain_among_drafts_drawn_at_random() -> None:
    owner = SimpleNamespace(_draft_probs=torch.full((2, 2, 5), 0.2))
    put_certain_drafts(owner, {0: (3, 1, 4)})
    told = owner._draft_probs
    assert told.shape == (2, 3, 5)
    assert told[0].argmax(-1).tolist() == [3, 1, 4]
    assert told[0].sum(-1).tolist() == [1.0, 1.0, 1.0]
    assert told[1, :2].eq(0.2).all()


@pytest.mark.parametrize(
    ("changes", "environment", "reason"),
    [
        ({}, {}, None),
        ({"speculative_config": None}, {}, "nothing is drafted"),
        ({"use_v2_model_runner": True}, {}, "V2"),
        ({"scheduler_config": SimpleNamespace(async_scheduling=True)}, {}, "async"),
        ({}, {"FASER_MATCH_MIB": "0"}, "FASER_MATCH_MIB=0"),
        ({}, {"FASER_DRAFTER_CORES": "1"}, "FASER_DRAFTER_CORES"),
    ],
)
def test_an_engine_says_whether_it_copies(
    changes: dict[str, Any], environment: dict[str, str], reason: str | None
) -> None:
    plain = {"speculative_config": object(), "use_v2_model_runner": False,
             "scheduler_config": SimpleNamespace(async_scheduling=False)}  # fmt: skip
    config: Any = SimpleNamespace(**(plain | changes))
    told = match_refusal(config, load_settings(environment))
    assert told is None if reason is None else reason in str(told)
