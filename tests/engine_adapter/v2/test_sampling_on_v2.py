"""At temperature > 0 the V2 runner's answers keep the target's distribution: chi-square over hundreds of answers.

Lengths are random, or what adaptive verification leaves of them by confidence, cost and weight. The test's own power
and its control, drafts that a neighbour's logits judge, are in the same place.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SIGNIFICANCE = 1e-4
RANDOM = {"random": 3, "seed": 1}
# Beyond two rows a request each one is dearer than the last, and some requests are worth four times as much.
ADMISSION = {
    "rows": [1, 64, 100, 128, 160, 192, 256],
    "seconds": [0.005, 0.005, 0.006, 0.008, 0.01, 0.013, 0.02],
    "weights": [1.0, 2.0, 0.5],
}


COMMON = {"is_async": True, "requests": 1000, "temperature": 1.0}


@pytest.fixture(scope="module")
def sampled(forks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return `run(...)`: what came of many answers to one prompt."""
    target, drafter = forks("save_sampled_models", folder=str(tmp_path_factory.mktemp("sampled")))

    def run(speculation: dict[str, Any] | None = None, function: str = "sampled", **given: Any) -> Any:
        method = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 3} | (speculation or {})
        common = COMMON | {"model": target, "speculation": method}
        return forks(function, **(common | given))

    return run


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_random_lengths_leave_the_distribution_alone(sampled: Any, temperature: float) -> None:
    run = sampled(rule=RANDOM, temperature=temperature)
    assert 0.1 < run["accepted"] < 0.9
    assert run["p_value"] > SIGNIFICANCE
    assert (run["faults"], run["is_steered"], run["check"]["disobeyed"]) == ({}, True, [])


@pytest.mark.parametrize("is_ragged", [False, True])
def test_drafts_drawn_at_random_leave_the_distribution_alone(
    forks: Any, tiny: Any, sampled: Any, is_ragged: bool
) -> None:
    """Proposals lie by request and round, so a request that leaves the draft batch finds its own."""
    drawn = {"draft_sample_method": "probabilistic"}
    if is_ragged:
        run = forks("sampled", **tiny.scenario("eagle3", 3, **drawn), **COMMON, rule=RANDOM)
        assert run["check"]["draft_rows"] < 0.8 * run["check"]["rows_if_uniform"]
    else:
        run = sampled(drawn, rule=RANDOM)
    assert 0.1 < run["accepted"] < 0.9
    assert run["p_value"] > SIGNIFICANCE
    assert (run["faults"], run["is_steered"], run["check"]["disobeyed"]) == ({}, True, [])


def test_what_adaptive_verification_leaves_of_drafts_leaves_the_distribution_alone(sampled: Any) -> None:
    run = sampled({"enable_adaptive_verification": True}, rule={"fixed": 3}, admission=ADMISSION)
    check = run["check"]
    assert 0.2 * check["scheduled_drafts"] < check["admitted"] < 0.9 * check["scheduled_drafts"]
    assert run["p_value"] > SIGNIFICANCE
    assert (run["faults"], run["is_steered"]) == ({}, True)


def test_two_groups_leave_the_distribution_alone(sampled: Any) -> None:
    run = sampled(function="sides:beside", job="sampled", rule=RANDOM, chance=0.1)
    assert max(run["lateness"]) > 4
    assert run["p_value"] > SIGNIFICANCE
    assert (run["faults"], run["is_late_on"], run["check"]["disobeyed"]) == ({}, True, [])


def test_the_controls_are_noticed(sampled: Any) -> None:
    assert sampled(rule=RANDOM, control="neighbour rows", requests=400)["p_value"] < 1e-6
    drawn = {"draft_sample_method": "probabilistic"}
    assert sampled(drawn, rule={"fixed": 3}, control="neighbour's proposals")["p_value"] < 1e-6


@pytest.mark.timeout(1200)
def test_vllms_block_verification_alone_is_biased(sampled: Any) -> None:
    """When it fails vLLM has mended this: the limit can go from v2_limits.py, and the refusal from hello.py."""
    run = sampled({"rejection_sample_method": "block"}, requests=2000)
    assert (run["runner"], run["is_steered"]) == ("CPUModelRunner", False)
    assert run["p_value"] < 1e-6
