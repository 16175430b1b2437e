"""Length 0 for the whole batch on vLLM's real V2 runner: a drafter that was left out drafts as if it was not."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.engine

JOB = "lulls:generate_with_lulls"
NEVER = {"environment": {"FASER_SKIPPED_TOKENS": "0"}}
WAVES = {"waves": [0, 0, 0, 0, 0, 3, 2]}
SMALL = {"prompts": [5, 17], "tokens": 16}
METHODS = [("eagle", True), ("eagle3", False), pytest.param("near", True, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def scenario(forks: Any, tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return `make(method)`: a scenario with lulls, of a head that attends to the target's states."""
    made: dict[str, Any] = {}

    def make(method: str) -> Any:
        if method not in made:
            made[method] = tiny.scenario(method) | {"rule": WAVES} | SMALL
            if method == "eagle3":
                drafting, folder = made[method]["speculation"], tmp_path_factory.mktemp("heads") / method
                drafting["model"] = forks("lulls:stir", head=drafting["model"], folder=str(folder))
        return made[method]

    return make


@pytest.fixture(scope="module")
def in_step(forks: Any, scenario: Any) -> Any:
    """Return `run(method, is_async)`: of an engine whose drafter runs in every step."""
    seen: dict[Any, Any] = {}

    def run(method: str, is_async: bool) -> Any:
        key = method, is_async
        if key not in seen:
            seen[key] = forks(JOB, **scenario(method), is_async=is_async, **NEVER)
        return seen[key]

    return run


def far(run: Any, whole: Any) -> float:
    """Return how far the drafters' probabilities of their tokens lie apart at most."""
    own, others = ([one for step in each["sure"] for _, told in step for one in told] for each in (run, whole))
    assert len(own) == len(others) > 10
    return max(abs(mine - theirs) for mine, theirs in zip(own, others, strict=True))


@pytest.mark.parametrize(("method", "is_async"), METHODS)
def test_a_drafter_that_was_left_out_drafts_the_same(
    forks: Any, scenario: Any, in_step: Any, method: str, is_async: bool
) -> None:
    run, whole = forks(JOB, **scenario(method), is_async=is_async), in_step(method, is_async)
    assert run["tokens"] == whole["tokens"]
    assert run["proposed"] == whole["proposed"]
    assert far(run, whole) < 1e-4
    made_up = sum(tokens > 0 for tokens in run["caught_up"])
    left_out = whole["passes"] - run["passes"] + made_up
    assert made_up > 0
    assert left_out >= 3 * made_up  # of five steps: one verifies drafts, one may be scheduled beside it
    assert sum(run["caught_up"]) > sum(whole["caught_up"]) == 0
    assert (run["faults"], run["check"]["disobeyed"], run["check"]["misreported"]) == ({}, [], [])


@pytest.mark.parametrize("control", ["no catch-up", "neighbour's states"])
def test_what_the_drafter_has_not_read_shows_in_its_drafts(
    forks: Any, scenario: Any, in_step: Any, control: str
) -> None:
    run = forks(JOB, **scenario("eagle3"), **{"break": control})
    assert run["tokens"] == in_step("eagle3", False)["tokens"]
    assert run["proposed"] != in_step("eagle3", False)["proposed"]


@pytest.mark.parametrize(
    "control", ["failing pass", *(pytest.param(f"failing {part}", marks=pytest.mark.slow) for part in ("room", "copy"))]
)
def test_a_failure_of_skipping_leaves_vllms_own_drafting(forks: Any, scenario: Any, in_step: Any, control: str) -> None:
    run, whole = forks(JOB, **scenario("eagle3"), **{"break": control}), in_step("eagle3", False)
    assert run["tokens"] == whole["tokens"]
    assert run["faults"] == {"skipping of the drafter": 1}
    assert run["check"]["disobeyed"] == run["check"]["misreported"] == []
    if control != "failing pass":  # until then steps had been skipped
        assert (run["passes"], run["proposed"]) == (whole["passes"], whole["proposed"])


def test_a_request_that_ended_unread_is_read_before_others_go_on_from_it(forks: Any, scenario: Any) -> None:
    given = scenario("eagle") | {"rule": {"waves": [0] * 10 + [3] * 60}}
    whole = forks("lulls:ask_again", **given, **NEVER)
    run = forks("lulls:ask_again", **given)
    unread = forks("lulls:ask_again", **given, **{"break": "no ends"})
    assert run["tokens"] == whole["tokens"] == unread["tokens"]
    assert run["proposed"] == whole["proposed"]
    assert (far(run, whole) < 1e-4) > (far(unread, whole) < 1e-3)
    assert (run["faults"], unread["faults"]) == ({}, {})
    assert min(run["cached"]) > 0


@pytest.mark.slow
def test_everything_that_vllm_does_in_a_batch_goes_on_over_lulls(forks: Any, tiny: Any, scenario: Any) -> None:
    plain = forks("everything", **tiny.without("eagle3"))
    given = scenario("eagle3") | {"is_async": True}
    run = forks("lulls:everything_with_lulls", **given)
    whole = forks("lulls:everything_with_lulls", **given, **NEVER)
    finished = {name: said for name, said in plain["outputs"].items() if name not in ("abort-1", "abort-4")}
    assert {name: run["outputs"].get(name) for name in finished} == finished
    assert run["preemptions"] > 0
    assert run["proposed"] == whole["proposed"]
    assert far(run, whole) < 1e-4
    assert run["passes"] < whole["passes"] * 0.9
    assert sum(run["caught_up"]) > 100
    assert (run["faults"], run["miscounted"], run["check"]["disobeyed"]) == ({}, 0, [])
