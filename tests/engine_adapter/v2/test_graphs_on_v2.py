"""Mixed lengths in CUDA graphs on vLLM's real V2 runner; a graph is a call that is made again (replayed_graphs.py)."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.engine

JOB = "replayed_graphs:generate_with_graphs"
GRAPHS: dict[str, Any] = {"mode": "FULL_DECODE_ONLY", "sizes": [4, 8, 20]}
RULE = {"random": 4, "seed": 1}


@pytest.fixture(scope="module")
def eager(forks: Any, tiny: Any) -> Any:
    """Return the same engine without graphs, whose outputs test_lengths_on_v2.py compares with the target's."""
    return forks("generate", **tiny.scenario("eagle3"), rule=RULE)


def drafts(run: Any) -> list[Any]:
    """Return what each step verified of each request and accepted."""
    rows = (sorted(entry["rows"].items()) for entry in run["log"])
    return [[(name.split("-")[0], row["verified"], row["accepted"]) for name, row in each] for each in rows]


def test_every_decode_replays_full_graphs_and_drafts_and_outputs_are_those_without(
    forks: Any, tiny: Any, eager: Any
) -> None:
    run = forks(JOB, **tiny.scenario("eagle3"), rule=RULE, **GRAPHS)
    assert run["tokens"] == eager["tokens"]
    assert drafts(run) == drafts(eager)
    assert (run["faults"], run["check"]["disobeyed"], run["check"]["misreported"]) == ({}, [], [])
    assert run["check"]["confident"] == run["check"]["drafting"] > 20
    verification, first_pass, rounds = (run["seen"][name] for name in ("verification", "first pass", "rounds"))
    # A step in which nobody drafts, and none did before, leaves the drafter out.
    left_out = verification["FULL"] - first_pass["FULL"]
    assert 0 <= left_out < 4
    assert verification == first_pass | {name: first_pass[name] + left_out for name in ("FULL", "replay any")}
    assert verification["replay any"] == verification["FULL"] > 4 * verification["NONE"]  # those have prompts in them
    assert set(rounds) == {"FULL", "replay 2", "replay 3", "replay 4"}
    assert run["graph_lengths"] == [0, 1, 2, 3, 4]


@pytest.mark.slow  # `make proof`: lengths under this scheduling are in test_lengths_on_v2.py, graphs above
def test_asynchronously_too(forks: Any, tiny: Any, eager: Any) -> None:
    run = forks(JOB, **tiny.scenario("eagle3"), rule=RULE, is_async=True, **GRAPHS)
    assert run["tokens"] == eager["tokens"]
    assert (run["faults"], run["check"]["disobeyed"], run["check"]["misreported"]) == ({}, [], [])
    assert run["seen"]["verification"]["FULL"] > 4 * run["seen"]["verification"]["NONE"]
    assert run["hello_rounds"] == "longest"  # since the rounds are fused


@pytest.mark.slow  # `make proof`: vLLM's own way, which FASER leaves as it is
def test_by_vllms_own_graphs_mixed_steps_run_eagerly_and_every_draft_runs_all_rounds(
    forks: Any, tiny: Any, eager: Any
) -> None:
    own = {"FASER_VARLEN_GRAPHS": "0", "FASER_DRAFT_GRAPHS": "0"}
    run = forks(JOB, **tiny.scenario("eagle3"), rule=RULE, environment=own, **GRAPHS)
    assert run["tokens"] == eager["tokens"]
    assert run["seen"]["verification"]["NONE"] > 2 * run["seen"]["verification"].get("FULL", 0)
    assert set(run["seen"]["rounds"]) == {"FULL", "replay any"}
    assert run["graph_lengths"] == [4]


@pytest.mark.slow
def test_a_drafter_that_was_left_out_catches_up_behind_graphs(forks: Any, tiny: Any) -> None:
    waves = {"waves": [0, 0, 0, 0, 3, 2]}
    plain = forks("generate", **tiny.scenario("eagle3"), rule=waves)
    run = forks(JOB, **tiny.scenario("eagle3"), rule=waves, **GRAPHS)
    assert run["tokens"] == plain["tokens"]
    assert drafts(run) == drafts(plain)
    assert sum(entry["caught_up"] for entry in run["log"]) > 20
    assert run["faults"] == {}
    first_pass, verification = run["seen"]["first pass"], run["seen"]["verification"]
    assert first_pass["FULL"] < verification["FULL"]


@pytest.mark.parametrize("control", ["neighbour's rows", pytest.param("blank states", marks=pytest.mark.slow)])
def test_controls_of_graphs_are_noticed(forks: Any, tiny: Any, control: str) -> None:
    eager = forks("generate", **tiny.scenario("eagle3"), rule=RULE, prompts=[5, 17, 9], sampling={"max_tokens": 12})
    short = {"prompts": [5, 17, 9], "tokens": 12, "break": control}
    run = forks(JOB, **tiny.scenario("eagle3"), rule=RULE, **short, **GRAPHS)
    assert (run["tokens"] != eager["tokens"]) == (control == "neighbour's rows")
    assert drafts(run) != drafts(eager)
