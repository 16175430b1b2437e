"""Drafting and verification run at the same time, on a real engine with a drafter's process.

Alone: beside other tests the process gets a core only when the engine waits for it, and then nothing overlaps.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.timeout(600)]

LONGEST = 3
NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1, "num_speculative_tokens": LONGEST}
BLOCKS = 9  # of 128 tokens


def batch(prompts: list[list[int]], **named: Any) -> dict[str, Any]:
    greedy = {"temperature": 0.0, "max_tokens": 60}
    return {"prompts": prompts, "sampling": greedy, "rule": {"cycle": [LONGEST]}, "control": "", **named}


@pytest.fixture
def runs(
    engine: Callable[..., Any], scenario: Callable[..., Any], tmp_path: Path
) -> Callable[[dict[str, str], list[dict[str, Any]]], list[Any]]:
    """Return what runs batches on an engine whose process drafts what the first one, without drafts, said."""
    chance = random.Random(4)
    prompts = [[chance.randrange(1000, 9000) for _ in range(n)] for n in (5, 40, 110, 120, 300)]
    file = tmp_path / "known.json"
    file.write_text(json.dumps({"texts": [], "wrong": 0.0}))

    def run(environment: dict[str, str], asked: list[dict[str, Any]]) -> list[Any]:
        batches = [batch(prompts, rule={"cycle": [0]}), *(batch(prompts, known={}, **named) for named in asked)]
        done = engine(scenario(BLOCKS, {"texts": str(file)}, *batches, **NGRAM), environment)
        assert done.faults == {}
        return list(done.batches[1:])

    return run


def overlapping(steps: list[Any]) -> int:
    return sum(step.overlap_s > 0 for step in steps)


def alternations(run: Any) -> int:
    """Count the pairs of steps that share no request."""
    return sum(not set(one.handles) & set(other.handles) for one, other in pairwise(run.steps))


def test_drafts_are_made_ahead_while_the_target_verifies(runs: Callable[..., list[Any]]) -> None:
    ahead, in_turn = runs({}, [{"frontier": LONGEST}, {"frontier": 0}])
    assert overlapping(ahead.steps) > 10
    assert overlapping(in_turn.steps) == 0  # the control


def test_two_groups_overlap_until_the_process_is_killed_and_when_it_is_back(runs: Callable[..., list[Any]]) -> None:
    short = {"sampling": {"temperature": 0.0, "max_tokens": 32}, "rule": {"cycle": [LONGEST, 2, LONGEST]}}
    death = {"kill_at": [9, 10, 11, 12], "is_back_at": 14}
    whole, killed = runs({"FASER_PING_PONG": "always"}, [short, short | death])
    assert overlapping(whole.steps) > 10
    assert overlapping(killed.steps[:8]) > 0
    assert overlapping(killed.steps[10:12]) == 0
    assert overlapping(killed.steps[14:]) > 3
    assert alternations(killed) > 5
    assert killed.tokens == whole.tokens
