"""Outputs with frontiers forced on equal those without speculation, whatever the drafter's process does."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from faser.models.embedded.pair import ensure_embedded_drafter, ensure_embedded_target

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LONGEST = 3
NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1, "num_speculative_tokens": LONGEST}
BLOCKS = 8  # of 128 tokens: the five requests start with eight and grow
GREEDY = {"temperature": 0.0, "max_tokens": 60}


def prompts(seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(1000, 9000) for _ in range(n)] for n in (5, 80, 130, 300)]


PROMPTS = prompts(2)


def batch(control: str = "", **named: Any) -> dict[str, Any]:
    common = {"prompts": PROMPTS, "sampling": GREEDY, "rule": {"cycle": [LONGEST]}, "frontier": LONGEST}
    return {**common, "control": control, **named}


@pytest.fixture(scope="module")
def reference(engine: Callable[..., Any], scenario: Callable[..., Any]) -> Any:
    return engine(scenario(BLOCKS, None, batch())).batches[0].tokens


BATCHES = {
    "no drafts": batch(rule={"cycle": [0]}, frontier=0),
    "right": batch(known={}),
    "misses": batch(known={"wrong": 0.25}),
    "killed": batch(known={}, kill_at=[6, 9], is_back_at=12),
    "of another request": batch(known={"fault": "neighbour"}),
    "accept all": batch(known={"wrong": 0.25}, control="acceptance"),
}


@pytest.fixture(scope="module")
def done(
    engine: Callable[..., Any], scenario: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Every batch on one engine, whose own drafter is ngram: what it takes over is seen by its being mostly wrong."""
    file = tmp_path_factory.mktemp("texts") / "known.json"
    file.write_text(json.dumps({"texts": [], "wrong": 0.0}))
    run = engine(scenario(BLOCKS, {"texts": str(file)}, *BATCHES.values(), **NGRAM))
    assert run.faults == {}
    return dict(zip(BATCHES, run.batches, strict=True))


def frontiers(run: Any) -> tuple[int, int]:
    hits, misses = zip(*(step.frontiers for step in run.steps), strict=True)
    return sum(hits), sum(misses)


@pytest.mark.parametrize("name", [name for name in BATCHES if name not in ("no drafts", "accept all")])
def test_outputs_are_those_without_speculation(name: str, done: dict[str, Any]) -> None:
    assert done[name].tokens == done["no drafts"].tokens


def test_control_the_comparison_fails_without_verification(done: dict[str, Any]) -> None:
    assert done["accept all"].tokens != done["no drafts"].tokens


def preemptions(run: Any) -> int:
    return sum(
        scheduled > verified + 1
        for number, step in enumerate(run.steps)
        for handle, scheduled, verified in zip(step.handles, step.scheduled, step.verified, strict=True)
        if any(
            handle in earlier.handles and earlier.sampled[earlier.handles.index(handle)]
            for earlier in run.steps[:number]
        )
    )


def test_some_requests_were_preempted(done: dict[str, Any]) -> None:
    assert sum(preemptions(run) for run in done.values()) >= 1


def test_frontiers_that_hold_are_used_chunk_after_chunk(done: dict[str, Any]) -> None:
    accepted, verified = done["right"].acceptance()
    hits, misses = frontiers(done["right"])
    assert accepted == verified > 120
    assert hits > 35
    assert misses <= len(PROMPTS) + 2, "where a request is preempted, and at its end, where nothing was recorded"


def test_requests_hit_and_miss_in_the_same_steps(done: dict[str, Any]) -> None:
    steps = done["misses"].steps
    hits, misses = frontiers(done["misses"])
    assert hits > 10
    assert misses > 10
    assert sum(min(step.frontiers) > 0 for step in steps) > 3


def test_a_killed_process_costs_drafts_until_it_is_back(done: dict[str, Any]) -> None:
    steps = done["killed"].steps
    assert sum(step.frontiers[0] for step in steps[:6]) > 0
    assert sum(step.frontiers[0] for step in steps[14:]) > 5
    accepted, verified = done["killed"].acceptance()
    assert accepted < verified, "what was drafted meanwhile is the engine's own drafter's"


def test_control_a_frontier_of_another_request_is_seen(done: dict[str, Any]) -> None:
    accepted, verified = done["of another request"].acceptance()
    assert verified > 60
    assert accepted < verified / 2
    assert frontiers(done["of another request"])[0] < 10


HEAD_SHORT = {
    "prompts": [PROMPTS[0], PROMPTS[2][:110], *PROMPTS[2:]],
    "sampling": {"temperature": 0.0, "max_tokens": 60},
}
HEAD_BATCHES = {
    "no drafts": batch(rule={"cycle": [0]}, frontier=0, **HEAD_SHORT),
    "in turn": batch(both=True, **HEAD_SHORT),
    "ahead": batch(kill_at=[10], is_back_at=14, **HEAD_SHORT),
    "wrong states": batch(control="shifted target", both=True, **HEAD_SHORT),
}


@pytest.fixture(scope="module")
def head(engine: Callable[..., Any], scenario: Callable[..., Any]) -> dict[str, Any]:
    """Every batch on one engine with the shipped EAGLE-3 head; from the second on prompts are in the prefix cache."""
    method = {"method": "eagle3", "model": str(ensure_embedded_drafter()), "num_speculative_tokens": LONGEST}
    run = engine(scenario(BLOCKS, {}, *HEAD_BATCHES.values(), **method))
    assert run.faults == {}
    return dict(zip(HEAD_BATCHES, run.batches, strict=True))


def test_a_heads_drafts_in_the_process_are_vllms_own(head: dict[str, Any]) -> None:
    compared = head["in turn"].compared
    assert len(compared) > 30
    assert sum(len(both["vllm"]) for both in compared) > 90
    assert [both for both in compared if both["process"] != both["vllm"]] == []


def test_control_states_of_the_row_before_draft_something_else(head: dict[str, Any]) -> None:
    compared = head["wrong states"].compared
    assert sum(both["process"] != both["vllm"] for both in compared) > len(compared) / 2


@pytest.mark.parametrize("name", [name for name in HEAD_BATCHES if name != "no drafts"])
def test_outputs_with_a_head_are_those_without_speculation(name: str, head: dict[str, Any]) -> None:
    assert head[name].tokens == head["no drafts"].tokens


def test_a_head_drafts_ahead_from_its_own_states(head: dict[str, Any]) -> None:
    hits, misses = frontiers(head["ahead"])
    accepted, verified = head["ahead"].acceptance()
    assert preemptions(head["ahead"]) >= 1
    assert hits > 4
    assert misses > 10
    assert accepted > 0.3 * verified > 20


@pytest.mark.slow  # `make proof`: two more engines
@pytest.mark.parametrize("control", ["", "no catch-up"])
def test_a_draft_model_in_a_process_drafts_as_well_as_in_the_engine(
    control: str, engine: Callable[..., Any], scenario: Callable[..., Any], reference: Any
) -> None:
    """The target as its own drafter: a wrong entry of either KV cache costs acceptance; the process is killed once."""
    method = {"method": "draft_model", "model": str(ensure_embedded_target()), "num_speculative_tokens": LONGEST}
    killed = batch(control, kill_at=[8], is_back_at=16)
    run = engine(scenario(BLOCKS, {}, killed, **method)).batches[0]
    accepted, verified = run.acceptance()
    assert run.tokens == reference
    assert frontiers(run)[0] > 15
    assert verified > 100
    assert accepted == verified if not control else accepted < 0.99 * verified
