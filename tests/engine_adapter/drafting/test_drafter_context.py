"""Sequences longer than the drafter's context on a real vLLM: whoever it still reads is drafted for, nobody gets zeros.

vLLM's V1 runner runs no drafter in a step in which any sequence is too long for it, and hands out zeros as drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from faser.models.embedded.pair import ensure_embedded_target

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LONGEST = 4
CONTEXT = 100
LONG = [1000 + 7 * n % 8000 for n in range(130)]
# One is too long from the start, one gets too long on its way, the others never are.
PROMPTS = [LONG, LONG[:90], [1500, 1501, 1502] * 4, LONG[40:60], [2000, 2001] * 20]
WITHIN = (3, 4, 5)  # handles
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_batched_tokens": 64}
BATCH = {"prompts": PROMPTS, "sampling": {"temperature": 0.0, "max_tokens": 24}, "rule": {"cycle": [LONGEST]}}


def scenario(method: dict[str, Any] | None, **limits: int) -> dict[str, Any]:
    engine: dict[str, Any] = ENGINE | limits
    if method is not None:
        engine["speculative_config"] = {"num_speculative_tokens": LONGEST, **method}
    return {"model": str(ensure_embedded_target()), "is_steered": bool(method), "engine": engine, "batches": [BATCH]}


def itself() -> dict[str, Any]:
    """The target as its own drafter, of a smaller context: it must be right every time."""
    return {"method": "draft_model", "model": str(ensure_embedded_target()), "max_model_len": CONTEXT}


@pytest.fixture(scope="module")
def reference(engine: Callable[..., Any]) -> list[list[list[int]]]:
    tokens: list[list[list[int]]] = engine(scenario(None)).batches[0].tokens
    return tokens


def by_request(steps: list[Any], name: str) -> dict[int, list[int]]:
    """Return what each request did in its steps, in order."""
    told: dict[int, list[int]] = {}
    for step in steps:
        for handle, value in zip(step.handles, getattr(step, name), strict=True):
            told.setdefault(handle, []).append(value)
    return told


def check_that_only_drafts_are_verified(steps: list[Any]) -> None:
    """Every verified token was handed over by a drafter in the request's step before."""
    drafted, verified = by_request(steps, "drafted"), by_request(steps, "verified")
    for handle, told in verified.items():
        assert all(after <= before for before, after in zip(drafted[handle], told[1:], strict=False)), handle


def test_requests_within_the_drafters_context_are_drafted_for_beside_longer_ones(
    engine: Callable[..., Any], reference: list[list[list[int]]]
) -> None:
    run = engine(scenario(itself()))
    batch = run.batches[0]
    assert batch.tokens == reference
    check_that_only_drafts_are_verified(batch.steps)
    verified, sampled = by_request(batch.steps, "verified"), by_request(batch.steps, "sampled")
    assert not any(verified[1])
    assert any(verified[2])
    assert not any(verified[2][-3:])  # it got too long
    beside = [step for step in batch.steps if 1 in step.handles]
    assert all(sum(by_request(beside, "verified")[handle]) > LONGEST for handle in WITHIN)
    accepted = {handle: sum(max(count - 1, 0) for count in sampled[handle]) for handle in verified}
    assert accepted == {handle: sum(told) for handle, told in verified.items()}  # its KV is whole for all of them
    assert run.is_ragged is True
    assert run.faults == {}


def test_a_drafter_that_cannot_catch_up_sits_out_and_nothing_is_verified(
    engine: Callable[..., Any], reference: list[list[list[int]]]
) -> None:
    batch = engine(scenario(itself()), {"FASER_CATCH_UP_TOKENS": "0"}).batches[0]
    assert batch.tokens == reference
    check_that_only_drafts_are_verified(batch.steps)
    beside = [step for step in batch.steps if 1 in step.handles]
    assert len(beside) > 10
    assert not any(any(step.drafted) for step in beside)
    assert not any(any(step.verified) for step in beside[1:])  # in its first step it is a chunk that fits


def test_ngram_searches_each_request_by_itself_near_the_end_of_the_models_context(
    engine: Callable[..., Any], reference: list[list[list[int]]]
) -> None:
    """The longest request ends at the model's last token, within a draft's length of it from its first step on."""
    end = len(LONG) + 5
    ngram = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    batch = engine(scenario(ngram, max_model_len=end)).batches[0]
    assert [tokens[0][:5] for tokens in batch.tokens] == [tokens[0][:5] for tokens in reference]
    assert batch.tokens[1:] == reference[1:]
    check_that_only_drafts_are_verified(batch.steps)
    beside = [step for step in batch.steps if 1 in step.handles]
    assert sum(sum(by_request(beside, "verified")[handle]) for handle in WITHIN) > 0
