"""Outputs with ping-pong groups forced on equal those without speculation, whatever becomes of requests and process."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from faser.models.embedded.pair import ensure_embedded_drafter, ensure_embedded_target

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SHORT: dict[str, Any] = {"temperature": 0.0, "max_tokens": 14}  # of controls
ALWAYS = {"FASER_PING_PONG": "always"}
LONGEST = 3
NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1, "num_speculative_tokens": LONGEST}
BLOCKS = 9  # of 128 tokens, one is vLLM's own: the five requests start with seven and grow


def prompts() -> list[list[int]]:
    chance = random.Random(4)
    return [[chance.randrange(1000, 9000) for _ in range(n)] for n in (5, 40, 110, 120, 300)]


PROMPTS = prompts()


def batch(control: str = "", **named: Any) -> dict[str, Any]:
    common = {
        "prompts": PROMPTS,
        "sampling": {"temperature": 0.0, "max_tokens": 32},
        "rule": {"cycle": [LONGEST, 2, LONGEST]},
    }
    return {**common, "control": control, **named}


TALL = {"type": "object", "properties": {"name": {"type": "string"}, "tall": {"type": "boolean"}}}
GRAMMARS = [{"json": TALL}, None, {"choice": ["blue whale", "red fox"]}, None, {"regex": "[a-f0-9]{40}"}]
BATCHES = {
    "no drafts": batch(rule={"cycle": [0]}),
    "no drafts, grammars": batch(rule={"cycle": [0]}, grammars=GRAMMARS),
    "grammars": batch(known={"said": 1, "wrong": 0.3}, grammars=GRAMMARS),
    "right": batch(known={}),
    "wrong and random lengths": batch(known={"wrong": 0.3}, rule={"random": LONGEST, "seed": 5}),
    "aborts": batch(known={}, abort_at={"12": [0], "15": [1, 2]}),
    "killed": batch(known={}, kill_at=[9, 10, 11, 12], is_back_at=14),
    "of another request": batch(known={"fault": "neighbour"}, sampling=SHORT),
    "accept all": batch(known={"wrong": 0.3}, control="acceptance", sampling=SHORT),
}
ABORTED = (0, 2, 3)  # what BATCHES["aborts"] comes to, in PROMPTS


@pytest.fixture(scope="module")
def done(
    engine: Callable[..., Any], scenario: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Every batch on one engine, whose own drafter is ngram: what it takes over is seen by its being mostly wrong."""
    file = tmp_path_factory.mktemp("texts") / "known.json"
    file.write_text(json.dumps({"texts": [], "wrong": 0.0}))
    run = engine(scenario(BLOCKS, {"texts": str(file)}, *BATCHES.values(), **NGRAM), ALWAYS)
    assert run.faults == {}
    return dict(zip(BATCHES, run.batches, strict=True))


def alternations(run: Any) -> int:
    """Count the pairs of steps that share no request."""
    return sum(not set(one.handles) & set(other.handles) for one, other in pairwise(run.steps))


@pytest.mark.parametrize("name", ["right", "wrong and random lengths", "killed"])
def test_outputs_are_those_without_speculation(name: str, done: dict[str, Any]) -> None:
    assert done[name].tokens == done["no drafts"].tokens
    # Beside other tests the killed process is back late: test_overlap_engine.py, alone, asks it for the same.
    assert name == "killed" or alternations(done[name]) > 5


def test_aborts_in_mid_flight_leave_the_others_alone(done: dict[str, Any]) -> None:
    whole = done["no drafts"].tokens
    assert done["aborts"].tokens == [tokens for index, tokens in enumerate(whole) if index not in ABORTED]


def test_groups_that_aborts_left_uneven_are_dealt_anew(done: dict[str, Any]) -> None:
    """Who changes groups sits out two steps of others in a row, once; everybody else one at a time."""
    assert changes_of_group(done["aborts"]) >= 1


def changes_of_group(run: Any) -> int:
    """Count the times that a request was left out of two steps in a row, and was in the one behind them."""
    handles = {handle for step in run.steps for handle in step.handles}
    seen = {handle: [at for at, step in enumerate(run.steps) if handle in step.handles] for handle in handles}
    return sum(later - earlier == 3 for places in seen.values() for earlier, later in pairwise(places))


def test_grammars_cut_what_was_drafted_for_a_later_turn(done: dict[str, Any]) -> None:
    """Three in ten tokens are drafted at random, mostly against the grammar: the scheduler cuts there."""
    assert done["grammars"].tokens == done["no drafts, grammars"].tokens
    assert done["grammars"].tokens != done["no drafts"].tokens, "the grammars bind nobody"
    assert alternations(done["grammars"]) > 5
    assert done["grammars"].acceptance()[0] > 20


def test_control_the_comparison_fails_without_verification(done: dict[str, Any]) -> None:
    assert shortened(done["of another request"]) == shortened(done["no drafts"])
    assert shortened(done["accept all"]) != shortened(done["no drafts"])


def shortened(run: Any) -> list[list[int]]:
    """Return what every request said, as far as controls go."""
    return [samples[0][: SHORT["max_tokens"]] for samples in run.tokens]


def test_two_groups_take_turns_and_every_draft_comes_back_to_its_request(done: dict[str, Any]) -> None:
    accepted, verified = done["right"].acceptance()
    assert accepted == verified > 80
    assert alternations(done["right"]) > 5


def test_control_a_draft_of_another_request_is_seen(done: dict[str, Any]) -> None:
    accepted, verified = done["of another request"].acceptance()
    assert verified > 20
    assert accepted < verified / 2


def test_records_count_what_was_handed_over_for_later_steps(done: dict[str, Any]) -> None:
    steps = done["right"].steps
    assert sum(sum(step.drafted) for step in steps) >= sum(sum(step.verified) for step in steps) > 80


def test_some_requests_were_preempted(done: dict[str, Any]) -> None:
    assert sum(map(preemptions, done.values())) >= 1


def preemptions(run: Any) -> int:
    """Count the rows that compute again what was computed before."""
    emitted: set[int] = set()
    found = 0
    for step in run.steps:
        for handle, scheduled, verified, sampled in zip(
            step.handles, step.scheduled, step.verified, step.sampled, strict=True
        ):
            found += handle in emitted and scheduled > verified + 1
            if sampled:
                emitted.add(handle)
    return found


def test_a_killed_process_ends_the_groups_until_it_is_back(done: dict[str, Any]) -> None:
    run = done["killed"]
    assert set(run.steps[10].handles) & set(run.steps[11].handles), "nobody takes turns"
    assert any(not set(one.handles) & set(other.handles) for one, other in pairwise(run.steps[:10]))


@pytest.mark.slow  # `make proof`: another engine
def test_a_head_drafts_in_turns_from_the_targets_states(
    engine: Callable[..., Any], scenario: Callable[..., Any]
) -> None:
    """The shipped EAGLE-3 head in its process: states shifted by a row, the control, cost acceptance and no token."""
    method = {"method": "eagle3", "model": str(ensure_embedded_drafter()), "num_speculative_tokens": LONGEST}
    longer = {"temperature": 0.0, "max_tokens": 40}
    batches = {
        "none": batch(rule={"cycle": [0]}, sampling=longer),
        "in turns": batch(sampling=longer),
        "killed": batch(sampling=longer, kill_at=[12], is_back_at=20),
        "wrong states": batch("shifted target", sampling=longer),
    }
    run = engine(scenario(BLOCKS, {}, *batches.values(), **method), ALWAYS)
    found = dict(zip(batches, run.batches, strict=True))
    assert run.faults == {}
    assert [found[name].tokens == found["none"].tokens for name in batches] == [True] * len(batches)
    assert alternations(found["in turns"]) > 10
    right, wrong = (accepted / verified for accepted, verified in (found[n].acceptance() for n in list(found)[1::2]))
    assert right > 1.2 * wrong


@pytest.mark.slow  # `make proof`: three more engines
@pytest.mark.parametrize("control", ["", "no catch-up"])
def test_a_draft_model_drafts_as_well_in_turns_as_in_the_engine(
    control: str, engine: Callable[..., Any], scenario: Callable[..., Any]
) -> None:
    """The target as its own drafter: a wrong entry of either KV cache costs acceptance; the process is killed once."""
    method = {"method": "draft_model", "model": str(ensure_embedded_target()), "num_speculative_tokens": LONGEST}
    longer = {"temperature": 0.0, "max_tokens": 48}
    killed = batch(control, kill_at=[12], is_back_at=20, sampling=longer)
    reference = engine(scenario(BLOCKS, None, batch(sampling=longer))).batches[0].tokens
    run = engine(scenario(BLOCKS, {}, killed, **method), ALWAYS).batches[0]
    accepted, verified = run.acceptance()
    assert run.tokens == reference
    assert alternations(run) > 10
    assert verified > 100
    assert accepted == verified if not control else accepted < 0.99 * verified
