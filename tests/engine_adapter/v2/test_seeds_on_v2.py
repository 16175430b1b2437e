"""On V2 a request with a seed says under FASER, with drafts, what vLLM alone says without: token for token."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.engine

LENGTHS = [5, 17, 40, 90, 9, 30, 12, 6]
KINDS: list[dict[str, Any]] = [
    {"seed": 11},
    {"seed": -4, "temperature": 0.7, "logprobs": 1},
    {"seed": 12, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0.0, "seed": 1},
    {"seed": 2**62, "n": 2},
    {},  # no seed
]
HAS_SEED = [place for place in range(len(LENGTHS)) if KINDS[place % len(KINDS)]]
ASKED = {"prompts": LENGTHS, "samplings": KINDS, "sampling": {"temperature": 1.0, "max_tokens": 24}}
RANDOM = {"random": 4, "seed": 2}


@pytest.fixture(scope="module")
def alone(forks: Any, tiny: Any) -> Any:
    """Return what vLLM alone says without speculation, tokens and log probabilities."""
    said = forks("generate", **tiny.without("eagle3"), **ASKED)
    assert said["runner"] == "CPUModelRunner"
    return said


def different(run: Any, alone: Any) -> int:
    """Count the requests with a seed that do not say the same."""
    return sum(run["tokens"][place] != alone["tokens"][place] for place in HAS_SEED)


@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.slow), True], ids=["sync", "async"])
def test_a_seed_says_the_same_under_any_drafts(forks: Any, tiny: Any, alone: Any, is_async: bool) -> None:
    run = forks("generate", **tiny.scenario("eagle3"), **ASKED, is_async=is_async, rule=RANDOM)
    assert run["faults"] == {}
    assert run["check"]["drafting"] > 50
    assert set(run["check"]["lengths"]) == {"0", "1", "2", "3", "4"}
    assert different(run, alone) == 0
    told = [(mine, theirs) for mine, theirs in zip(run["logprobs"], alone["logprobs"], strict=True) if theirs]
    assert len(told) == 2
    for mine, theirs in told:
        for one, other in zip(mine, theirs, strict=True):
            assert one == pytest.approx(other, abs=2e-4)


@pytest.mark.slow  # `make proof`
@pytest.mark.parametrize("drafting", ["another head", "adaptive", "ngram_gpu", "near"])
def test_a_seed_says_the_same_whoever_drafts(forks: Any, tiny: Any, alone: Any, drafting: str) -> None:
    changes = {"adaptive": {"enable_adaptive_verification": True}}.get(drafting, {})
    method = {"another head": "eagle", "adaptive": "eagle3"}.get(drafting, drafting)
    scenario = tiny.scenario(method, **changes)
    wanted = alone if method == "eagle3" else forks("generate", **tiny.without(method), **ASKED)
    run = forks("generate", **scenario, **ASKED, is_async=True, rule=RANDOM)
    assert run["faults"] == {}
    assert run["check"]["drafting"] > 20
    assert different(run, wanted) == 0


@pytest.mark.parametrize("control", ["vLLM's rule", pytest.param("failing draws", marks=pytest.mark.slow)])
def test_without_faser_a_draft_changes_what_a_seed_says(forks: Any, tiny: Any, alone: Any, control: str) -> None:
    run = forks("generate", **tiny.scenario("eagle3"), **ASKED, is_async=True, rule=RANDOM, control=control)
    assert different(run, alone) > len(HAS_SEED) / 2
    assert (run["faults"] == {}) == (control == "vLLM's rule")
