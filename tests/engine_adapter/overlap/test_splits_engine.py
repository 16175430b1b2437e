"""The cores are split anew from step to step: outputs stay the target's, and each split is really in force."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from faser.models.embedded.pair import ensure_embedded_drafter

pytestmark = [
    pytest.mark.engine,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be split"),
]

LONGEST = 3
NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1, "num_speculative_tokens": LONGEST}
BLOCKS = 9  # of 128 tokens
CORES = len(os.sched_getaffinity(0))
# The ngram drafter's numba leaves as many threads to others as it has itself.
ASKED = {
    "FASER_SPLITS": "1:1", "FASER_PING_PONG": "always", "OMP_NUM_THREADS": str(CORES), "NUMBA_NUM_THREADS": str(CORES),
}  # fmt: skip
TURNS = {"seed": 3, "of": [0, 1], "longest": 6}  # each kept for one to six steps


def prompts() -> list[list[int]]:
    chance = random.Random(4)
    return [[chance.randrange(1000, 9000) for _ in range(n)] for n in (5, 40, 110, 120, 300)]


def batch(control: str = "", **named: Any) -> dict[str, Any]:
    common = {
        "prompts": prompts(),
        "sampling": {"temperature": 0.0, "max_tokens": 40},
        "rule": {"cycle": [LONGEST, 2, LONGEST]},
    }
    return {**common, "control": control, **named}


BATCHES = {
    "no drafts": batch(rule={"cycle": [0]}),
    "unsplit": batch(known={}, splits={"seed": 0, "of": [0], "longest": 1}),
    "split": batch(known={}, splits={"seed": 0, "of": [1], "longest": 1}),
    "in turns": batch(known={}, splits=TURNS),
    "wrong and random lengths": batch(known={"wrong": 0.3}, splits=TURNS, rule={"random": LONGEST, "seed": 5}),
    "killed": batch(known={}, splits={"seed": 0, "of": [1], "longest": 1}, kill_at=[9, 10, 11, 12], is_back_at=14),
    "accept all": batch(known={"wrong": 0.3}, splits=TURNS, control="acceptance"),
}


@pytest.fixture(scope="module")
def done(
    engine: Callable[..., Any], scenario: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Every batch on one engine, whose own drafter is ngram: what the process drafts is right."""
    file = tmp_path_factory.mktemp("texts") / "known.json"
    file.write_text(json.dumps({"texts": [], "wrong": 0.0}))
    run = engine(scenario(BLOCKS, {"texts": str(file)}, *BATCHES.values(), **NGRAM), ASKED)
    assert run.faults == {}
    return dict(zip(BATCHES, run.batches, strict=True))


def acceptance_rate(run: Any) -> float:
    accepted, verified = run.acceptance()
    return float(accepted / verified)


def switches(run: Any) -> int:
    return sum(one.split != other.split for one, other in pairwise(run.steps))


@pytest.mark.parametrize("name", ["unsplit", "split", "in turns", "wrong and random lengths", "killed"])
def test_outputs_are_those_without_speculation(name: str, done: dict[str, Any]) -> None:
    assert done[name].tokens == done["no drafts"].tokens


def test_control_the_comparison_fails_without_verification(done: dict[str, Any]) -> None:
    assert done["accept all"].tokens != done["no drafts"].tokens


def test_a_split_that_is_asked_for_comes_into_force_and_goes(done: dict[str, Any]) -> None:
    assert {step.split for step in done["unsplit"].steps} == {0}
    assert Counter(step.split for step in done["split"].steps)[1] > len(done["split"].steps) / 2
    assert switches(done["in turns"]) >= 4


def test_the_target_has_the_threads_that_the_split_leaves_it(done: dict[str, Any]) -> None:
    """A number of rows that is new has all of them once."""
    for split, threads in [(0, CORES), (1, CORES // 2)]:
        seen = Counter(step.threads for run in done.values() for step in run.steps if step.split == split)
        assert set(seen) <= {threads, CORES}
        assert seen[threads] > 0.7 * seen.total()


def test_phases_overlap_under_a_split_only(done: dict[str, Any]) -> None:
    """The first step under none still meets drafts that were asked for under the last split."""
    steps = done["in turns"].steps
    assert sum(step.overlap_s > 0 for step in steps if step.split) > 3
    is_behind = [not step.split and not before.split for before, step in pairwise(steps)]
    assert not any(step.overlap_s for step, behind in zip(steps[1:], is_behind, strict=True) if behind)


def test_drafts_of_the_process_are_used_under_a_split(done: dict[str, Any]) -> None:
    accepted, verified = done["split"].acceptance()
    assert accepted == verified > 60


def test_a_killed_process_gives_the_target_all_cores_until_it_is_back(done: dict[str, Any]) -> None:
    steps = done["killed"].steps
    assert (steps[11].split, steps[11].threads) == (0, CORES)
    assert any(step.split for step in steps[:8])


@pytest.mark.slow  # `make proof`: another engine
def test_a_head_goes_on_in_the_other_process_at_every_switch(
    engine: Callable[..., Any], scenario: Callable[..., Any]
) -> None:
    """The shipped EAGLE-3 head, in the engine while unsplit and in the process otherwise, drafts as well as in one."""
    method = {"method": "eagle3", "model": str(ensure_embedded_drafter()), "num_speculative_tokens": LONGEST}
    longer = {"temperature": 0.0, "max_tokens": 64}
    batches = {
        "none": batch(rule={"cycle": [0]}, sampling=longer),
        "unsplit": batch(sampling=longer, splits={"seed": 0, "of": [0], "longest": 1}),
        "in turns": batch(sampling=longer, splits={**TURNS, "longest": 12}),
        "wrong states": batch("shifted target", sampling=longer, splits={**TURNS, "longest": 12}),
    }
    run = engine(scenario(2 * BLOCKS, {}, *batches.values(), **method), ASKED)
    found = dict(zip(batches, run.batches, strict=True))
    assert run.faults == {}
    assert [found[name].tokens == found["none"].tokens for name in batches] == [True] * len(batches)
    assert switches(found["in turns"]) >= 4
    in_one, in_turns, wrong = (acceptance_rate(found[name]) for name in list(batches)[1:])
    assert in_turns > 0.9 * in_one
    assert in_turns > wrong
