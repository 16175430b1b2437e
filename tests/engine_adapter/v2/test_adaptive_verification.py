"""FASER's numbers in vLLM's own adaptive verification: by them it admits other drafts, never other tokens."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.engine

LONG = {"fixed": 4}
DEAR = {"rows": [1, 4, 8, 64], "seconds": [0.005, 0.005, 0.02, 0.3], "weights": [1.0]}  # beyond four rows all is dear
CHEAP = {"rows": [1, 64], "seconds": [0.005, 0.0051], "weights": [1.0]}


@pytest.fixture(scope="module")
def plain(forks: Any, tiny: Any) -> Any:
    """What the target says without speculation."""
    return forks("generate", **tiny.without("eagle3"))["tokens"]


@pytest.fixture(scope="module")
def adaptive(forks: Any, tiny: Any) -> Any:
    """Return `run(...)`: an engine that verifies adaptively, steered."""

    def run(**given: Any) -> Any:
        scenario = tiny.scenario("eagle3", enable_adaptive_verification=True)
        return forks("generate", **scenario, **({"is_async": True, "rule": LONG} | given))

    return run


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_vllms_own_manager_decides_without_numbers_and_what_it_admits_is_told(
    adaptive: Any, plain: Any, is_async: bool
) -> None:
    run = adaptive(is_async=is_async, rule={"random": 4, "seed": 1})
    check = run["check"]
    assert run["tokens"] == plain
    assert 0 < check["admitted"] < check["scheduled_drafts"]
    assert (check["over_admitted"], check["disobeyed"]) == (0, [])
    assert (run["faults"], run["miscounted"], run["is_steered"]) == ({}, 0, True)


def test_a_leases_costs_decide_how_much_is_verified(adaptive: Any, plain: Any) -> None:
    dear, cheap = adaptive(admission=DEAR), adaptive(admission=CHEAP)
    assert dear["is_steered"]
    assert cheap["is_steered"]
    assert dear["tokens"] == cheap["tokens"] == plain
    shares = [run["check"]["admitted"] / run["check"]["scheduled_drafts"] for run in (dear, cheap)]
    assert shares[0] < 0.4
    assert shares[1] > 0.9
    assert dear["miscounted"] == cheap["miscounted"] == 0


@pytest.mark.parametrize("control", ["failing numbers", pytest.param("failing copy", marks=pytest.mark.slow)])
def test_a_failure_of_fasers_own_leaves_vllms_manager(adaptive: Any, plain: Any, control: str) -> None:
    run = adaptive(admission=DEAR | {"weights": [1.0, 2.0]}, control=control)
    assert run["tokens"] == plain
    assert run["faults"]
    assert run["is_steered"]


def test_with_equal_costs_and_weights_the_admitted_drafts_are_those_of_vllms_own_manager(forks: Any) -> None:
    seen = forks("admissions", batches=10_000, slowness=1.0, weight=1.0)
    assert seen["same"] == 10_000
    assert seen["trimmed"] > 3_000


@pytest.mark.parametrize(("slowness", "weight"), [(3.0, 1.0), (1.0, 8.0)], ids=["costs", "weights"])
def test_other_numbers_admit_other_drafts(forks: Any, slowness: float, weight: float) -> None:
    seen = forks("admissions", batches=300, slowness=slowness, weight=weight)
    assert seen["same"] < 270
    assert seen["resized"] > 10  # the host chooses their number by them, the device whose they are
    if weight > 1.0:
        assert seen["gained"] > 100 > seen["lost"]


def test_price_governs_a_real_engine_that_verifies_adaptively(forks: Any, tiny: Any) -> None:
    many = {"sampling": {"max_tokens": 60}, "prompts": [5, 17, 40, 30, 9, 12, 22, 7]}
    whole = forks("generate", **tiny.without("eagle3"), **many)
    scenario = tiny.scenario("eagle3", enable_adaptive_verification=True)
    run = forks("generate", **scenario, is_async=True, policy="price", **many)
    governed = run["governed"]
    assert run["tokens"] == whole["tokens"]
    assert governed["is_adaptive"]
    assert governed["is_ready"]  # confidences of tokens that were not verified are known too
    assert governed["admissions"] > 10
    assert governed["under_lease"] > 0.9 * governed["records"]
    assert 0 < governed["accepted"] < governed["verified"] < governed["drafted"]
    assert (run["faults"], run["miscounted"], run["is_steered"]) == ({}, 0, True)
