"""Outputs with frontiers forced on equal those without speculation, whatever the drafter's process does."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from faser.models.embedded import ensure_embedded_target

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LONGEST = 3
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,  # below the long prompts: they are prefilled in chunks
    "num_gpu_blocks_override": 9,  # of 128 tokens: the five requests start with eight and grow, some are preempted
}
GREEDY = {"temperature": 0.0, "max_tokens": 70}
NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def prompts(seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(1000, 9000) for _ in range(n)] for n in (5, 17, 50, 130, 300)]


PROMPTS = prompts(2)


def batch(**named: Any) -> dict[str, Any]:
    return {"prompts": PROMPTS, "sampling": GREEDY, "rule": {"cycle": [LONGEST]}, "frontier": LONGEST, **named}


def scenario(process: dict[str, Any] | None, *batches: dict[str, Any], **speculation: Any) -> dict[str, Any]:
    given = {} if process is None else {"process": process}
    drafting = {} if process is None else {"speculative_config": {"num_speculative_tokens": LONGEST, **speculation}}
    return {
        "model": str(ensure_embedded_target()),
        "is_steered": process is not None,
        "engine": ENGINE | drafting,
        "batches": list(batches),
        **given,
    }


@pytest.fixture(scope="module")
def reference(engine: Callable[..., Any]) -> Any:
    return engine(scenario(None, batch())).batches[0].tokens


@pytest.fixture(scope="module")
def texts(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Return the process of known_drafter.py with this share of wrong tokens and this fault."""

    def write(wrong: float = 0.0, fault: str = "") -> dict[str, Any]:
        file = tmp_path_factory.mktemp("texts") / "known.json"
        known = [prompt + said[0] for prompt, said in zip(PROMPTS, reference, strict=True)]
        file.write_text(json.dumps({"texts": known, "wrong": wrong, "fault": fault}))
        return {"texts": str(file)}

    return write


def frontiers(run: Any) -> tuple[int, int]:
    hits, misses = zip(*(step.frontiers for step in run.steps), strict=True)
    return sum(hits), sum(misses)


def test_frontiers_that_always_hold_change_nothing_but_the_number_of_steps(
    engine: Callable[..., Any], texts: Callable[..., Any], reference: Any
) -> None:
    done = engine(scenario(texts(), batch(), batch(frontier=0), **NGRAM))
    run, without = done.batches
    assert run.tokens == without.tokens == reference
    accepted, verified = run.acceptance()
    assert accepted == verified > 150
    hits, misses = frontiers(run)
    assert hits > 40
    assert misses == 0
    assert sum(step.overlap_s > 0 for step in run.steps) > 10
    assert frontiers(without) == (0, 0)
    assert without.acceptance()[1] < verified
    assert done.faults == {}
