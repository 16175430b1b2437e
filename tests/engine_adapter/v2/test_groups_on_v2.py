"""Two groups on vLLM's real V2 runner: drafts that are made beside the next step are those that vLLM makes in turn.

The drafter's stream is a model: its work runs at once, when the engine's stream waits for it, or at any moment between.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

RANDOM = {"random": 4, "seed": 1}
LATER = pytest.mark.slow  # `make proof` tries these and CI does not
DEEP = {"fixed": 4}


def taking_turns(run: Any) -> int:
    """Return in how many steps nobody was who was in the step before."""
    return sum(set(now).isdisjoint(before) for before, now in pairwise(run["steps"]))


def acceptance(run: Any) -> float:
    rows = [row for step in run["steps"] for row in step.values()]
    return sum(accepted for _, accepted in rows) / sum(verified for verified, _ in rows)


@pytest.mark.parametrize(
    ("method", "is_async"),
    [
        ("near", True), ("eagle3", False), pytest.param("near", False, marks=LATER),
        pytest.param("eagle3", True, marks=LATER), pytest.param("eagle", True, marks=LATER),
        pytest.param("eagle", False, marks=LATER),
    ],
)  # fmt: skip
def test_outputs_are_the_targets_and_groups_take_turns(forks: Any, tiny: Any, method: str, is_async: bool) -> None:
    alone = forks("generate", **tiny.without(method))
    run = forks("sides:beside", **tiny.scenario(method), is_async=is_async, rule=RANDOM)
    assert run["tokens"] == alone["tokens"]
    assert (run["faults"], run["miscounted"], run["is_steered"], run["is_late_on"]) == ({}, 0, True, True)
    assert run["check"]["disobeyed"] == run["check"]["misreported"] == []
    assert taking_turns(run) > 10
    assert max(run["lateness"]) > 4  # a whole step went by
    assert run["check"]["confident"] == run["check"]["drafting"]


CHANCES = {"at last": 0.0, "at any moment": 0.2}


@pytest.fixture(scope="module")
def at_once(forks: Any, tiny: Any) -> Any:
    """Return what each method's engine does where the drafter's stream is never late."""
    seen: dict[str, Any] = {}

    def run(method: str) -> Any:
        if method not in seen:
            seen[method] = forks("sides:beside", **tiny.scenario(method), rule=RANDOM, is_async=True, chance=1.0)
        return seen[method]

    return run


@pytest.mark.parametrize("chance", ["at any moment", pytest.param("at last", marks=LATER)])
@pytest.mark.parametrize("method", ["itself", pytest.param("eagle3", marks=LATER)])
def test_drafts_are_the_same_however_late_the_drafters_stream_is(
    forks: Any, tiny: Any, at_once: Any, method: str, chance: str
) -> None:
    now = at_once(method)
    run = forks("sides:beside", **tiny.scenario(method), rule=RANDOM, is_async=True, chance=CHANCES[chance], seed=3)
    assert run["steps"] == now["steps"]
    assert set(now["lateness"]) == {1}
    assert len(set(run["lateness"])) > 1
    assert len(run["lateness"]) == len(now["lateness"]) > 10
    if method == "itself":
        assert acceptance(run) > 0.95


@pytest.mark.parametrize(
    "control",
    ["shared seq_lens", *(pytest.param(f"shared {name}", marks=LATER) for name in ("input_ids", "positions"))],
)
def test_a_missing_copy_shows_in_the_drafts(forks: Any, tiny: Any, at_once: Any, control: str) -> None:
    """In the drafts alone: what is said is the target's all the same."""
    now = at_once("itself")
    run = forks("sides:beside", **tiny.scenario("itself"), rule=RANDOM, is_async=True, **{"break": control})
    assert run["tokens"] == now["tokens"]
    assert acceptance(run) < acceptance(now) - 0.02


def test_states_that_the_next_step_overwrites_show_in_the_drafts(forks: Any, tiny: Any, at_once: Any) -> None:
    now = at_once("eagle3")
    run = forks("sides:beside", **tiny.scenario("eagle3"), rule=RANDOM, is_async=True, **{"break": "shared states"})
    assert run["tokens"] == now["tokens"]
    assert run["steps"] != now["steps"]


@LATER
def test_block_tables_of_both_in_one_place_show_in_what_is_said(forks: Any, tiny: Any, at_once: Any) -> None:
    """The drafter's would take the place of those that the target is about to read."""
    asked = tiny.scenario("itself") | {"rule": RANDOM, "is_async": True, "chance": 0.3}
    whole, shared = (forks("sides:beside", **asked, **{"break": control}) for control in ("", "shared tables"))
    assert whole["tokens"] == at_once("itself")["tokens"]
    assert shared["tokens"] != whole["tokens"]


@pytest.mark.parametrize("is_async", [pytest.param(False, marks=LATER), True], ids=["sync", "async"])
def test_a_step_waits_for_the_drafts_that_it_verifies(forks: Any, tiny: Any, at_once: Any, is_async: bool) -> None:
    """Here those are in the next step whose drafts were put off."""
    asked = tiny.scenario("itself") | {"rule": RANDOM, "is_async": is_async, "is_together": True}
    waiting, hasty = (forks("sides:beside", **asked, **{"break": control}) for control in ("", "no wait"))
    assert waiting["tokens"] == hasty["tokens"] == at_once("itself")["tokens"]
    assert taking_turns(waiting) == 0
    assert acceptance(waiting) > 0.95
    assert acceptance(hasty) < 0.8


@pytest.mark.parametrize(
    "control", ["failing attention", *(pytest.param(f"failing {name}", marks=LATER) for name in ("copy", "set-up"))]
)
def test_a_failure_leaves_vllms_drafting_in_turn(forks: Any, tiny: Any, control: str) -> None:
    alone = forks("generate", **tiny.without("eagle3"))
    run = forks("sides:beside", **tiny.scenario("eagle3"), rule=DEEP, is_async=True, **{"break": control})
    assert run["tokens"] == alone["tokens"]
    assert (run["is_steered"], run["is_late_on"]) == (True, False)
    assert taking_turns(run) < 6
    assert sum(accepted for step in run["steps"][-10:] for _, accepted in step.values()) > 0


@pytest.mark.parametrize("is_async", [pytest.param(each, marks=LATER) for each in (False, True)], ids=["sync", "async"])
def test_everything_that_vllm_does_in_a_batch_goes_on_in_groups(forks: Any, tiny: Any, is_async: bool) -> None:
    alone = forks("everything", **tiny.without("near"))
    run = forks("sides:beside", **tiny.scenario("near"), job="everything", rule=RANDOM, is_async=is_async, chance=0.1)
    assert run["outputs"] == alone["outputs"]
    assert (run["faults"], run["miscounted"], run["is_steered"], run["is_late_on"]) == ({}, 0, True, True)
    assert taking_turns(run) > 5
    assert max(run["lateness"]) > 5
    assert run["preemptions"] > 0
    assert run["cached"] > 0


SPLITS = ["streams", "1:7", "1:3"]


@pytest.mark.parametrize("is_async", [pytest.param(False, marks=LATER), True], ids=["sync", "async"])
def test_splits_change_from_step_to_step_and_drafts_stay_what_they_are(
    forks: Any, tiny: Any, at_once: Any, is_async: bool
) -> None:
    """Each drafting runs on the share of the split that is in force, and records tell which one that was."""
    asked = tiny.scenario("itself") | {"rule": RANDOM, "splits": SPLITS, "chance": 0.2}
    run = forks("sides:beside", **asked, is_async=is_async)
    assert run["tokens"] == at_once("itself")["tokens"]
    assert (run["faults"], run["miscounted"], run["is_steered"], run["is_late_on"]) == ({}, 0, True, True)
    drafted_under = set(run["drafted_under"])
    assert drafted_under <= {1, 2, 3}, "without a split drafts are made in turn"
    assert len(drafted_under) > 1
    deferred = iter(run["deferred_under"])
    assert all(split in deferred for split in run["drafted_under"]), "in order, each under its own step's"
    assert all(ordered == told for ordered, told in run["splits"])
    assert {told for _, told in run["splits"]} == {0, *drafted_under}
    assert taking_turns(run) > 5
    assert acceptance(run) > 0.95


@LATER
def test_a_gate_that_is_not_convinced_leaves_the_device_whole(forks: Any, tiny: Any, at_once: Any) -> None:
    asked = tiny.scenario("itself") | {"rule": RANDOM, "splits": SPLITS, "mode": "auto", "chance": 1.0}
    run = forks("sides:beside", **asked, is_async=True)
    assert run["tokens"] == at_once("itself")["tokens"]
    assert len(run["drafted_under"]) < len(run["splits"]) / 4
