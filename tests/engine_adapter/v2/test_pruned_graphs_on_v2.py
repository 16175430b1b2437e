"""Pruned verification between two halves of CUDA graphs on vLLM's real V2 runner; a graph is a call that is made again.

What is compared: the target's tokens, and the same engine that cuts eager steps, in which the same rows leave.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .test_pruning_on_v2 import Deep, late, rows_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

GRAPHS: dict[str, Any] = {"mode": "FULL_DECODE_ONLY", "sizes": [6, 10, 15]}
SHORT: dict[str, Any] = {"prompts": [5, 17, 9], "sampling": {"max_tokens": 14}}  # a step takes three seconds here
EXITS = {"layers": [1], "thresholds": [0.2, 0.5, 0.9]}
RULE = {"random": 4, "seed": 1}


@pytest.fixture(scope="module")
def deep(forks: Any, tmp_path_factory: pytest.TempPathFactory) -> Deep:
    return Deep(tmp_path_factory.mktemp("deep"), forks)


@pytest.fixture(scope="module")
def alone(forks: Any, tiny: Any) -> Any:
    """Return the tokens of the target without speculation."""
    return forks("generate", **tiny.without("eagle3"), **SHORT)["tokens"]


def run_with_halves(forks: Any, tiny: Any, method: str = "eagle3", **changes: Any) -> Any:
    given = {"rule": RULE, "is_async": True, "exits": EXITS, "graphs": GRAPHS} | SHORT | changes
    return forks("prunings:pruned", **tiny.scenario(method), **given)


def told(run: Any) -> list[Any]:
    """Return what each step verified, accepted and dropped."""
    rows = (sorted(entry["rows"].items()) for entry in run["log"])
    steps = [[(name.split("-")[0], row["verified"], row["accepted"]) for name, row in each] for each in rows]
    return [steps, [(step["layer"], step["saved"], step["rows"]) for step in run["pruned"]]]


@pytest.mark.parametrize("method", ["eagle3", *late("eagle", "near", "ngram_gpu")])
@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["async", "sync"])
def test_rows_leave_between_two_replayed_halves_as_between_eager_ones(
    forks: Any, tiny: Any, method: str, is_async: bool
) -> None:
    """The tokens are the target's; EAGLE-3 reads states of layers in front of the cut and behind it."""
    eager = forks("prunings:pruned", **tiny.scenario(method), is_async=is_async, rule=RULE, exits=EXITS, **SHORT)
    run = run_with_halves(forks, tiny, method, is_async=is_async)
    assert run["tokens"] == forks("generate", **tiny.without(method), **SHORT)["tokens"]
    assert told(run) == told(eager)
    assert (run["is_pruning"], run["faults"], run["miscounted"]) == (True, {}, 0)
    assert run["check"]["disobeyed"] == run["check"]["misreported"] == []
    assert run["shared_builders"] == 0
    assert all(step["s"] > 0.0 for step in run["pruned"])
    # The comparison is worth something only if all of this happened.
    assert sum(left for _, left, *_ in rows_of(run)) > 20
    assert run["halves"]["all"] > run["halves"]["shorter"] > 3
    assert run["halves"]["padded"] > 5
    verification = run["seen"]["verification"]
    assert verification["FULL"] == verification["replay any"] > 2 * verification["NONE"]


@pytest.mark.slow  # `make proof`
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Qwen2"])
def test_behind_any_layer_of_any_family(forks: Any, deep: Deep, family: str) -> None:
    exits = EXITS | {"layers": [1, 2, 3, 4, 5]}
    eager = forks("prunings:pruned", **deep.scenario(family), is_async=True, exits=exits)
    run = forks("prunings:pruned", **deep.scenario(family), is_async=True, exits=exits, graphs=GRAPHS)
    assert run["tokens"] == deep.alone(family)
    assert told(run) == told(eager)
    assert {step["layer"] for step in run["pruned"] if step["saved"]} == {1, 2, 3, 4, 5}
    assert run["halves"]["all"] > 10


SLOW_CONTROLS = late("half's bonus", "half's slots", "half's positions", "half's outputs")


@pytest.mark.slow  # `make proof`
def test_control_what_was_not_written_behind_a_cut_is_noticed_where_enough_layers_read_it(
    forks: Any, deep: Deep
) -> None:
    exits = EXITS | {"layers": [1], "break": "half's seq_lens"}
    run = forks("prunings:pruned", **deep.scenario(), is_async=True, exits=exits, graphs=GRAPHS)
    assert run["tokens"] != deep.alone()
    assert run["is_pruning"]
    assert run["halves"]["all"] > 3


@pytest.mark.parametrize("control", ["half's states", *SLOW_CONTROLS])
def test_controls_of_halves_are_noticed(forks: Any, tiny: Any, alone: Any, control: str) -> None:
    run = run_with_halves(forks, tiny, exits=EXITS | {"break": control})
    assert run["tokens"] != alone
    assert run["is_pruning"]
    assert run["halves"]["all"] > 3


@pytest.mark.parametrize("control", ["failing half", *late("failing second half")])
def test_a_half_that_fails_leaves_the_step_to_the_whole_graph(forks: Any, tiny: Any, alone: Any, control: str) -> None:
    run = run_with_halves(forks, tiny, exits=EXITS | {"break": control})
    assert run["tokens"] == alone
    assert not run["is_pruning"]
    assert run["is_steered"]
    assert run["seen"]["verification"]["replay any"] > 4


@pytest.mark.slow  # `make proof`
@pytest.mark.parametrize(
    ("control", "environment"),
    [("failing capture", {}), ("", {"FASER_VARLEN_GRAPHS": "0"})],
    ids=["no memory", "graphs of one length"],
)
def test_without_halves_only_steps_that_run_the_model_are_pruned(
    forks: Any, tiny: Any, alone: Any, control: str, environment: dict[str, str]
) -> None:
    run = run_with_halves(forks, tiny, exits=EXITS | {"break": control}, environment=environment)
    assert run["tokens"] == alone
    assert run["halves"] == {}
    assert run["is_pruning"]
    assert (run["seen"]["verification"].get("FULL", 0) > 3) == bool(
        control
    )  # mixed lengths have no graph without FASER


@pytest.mark.slow  # `make proof`
def test_a_budget_lies_where_a_size_was_captured(forks: Any, tiny: Any, alone: Any) -> None:
    own = EXITS | {"is_own_budget": True, "thresholds": [0.5]}
    run = run_with_halves(forks, tiny, exits=own, sampling={"max_tokens": 30})
    assert [said[0][:14] for said in run["tokens"]] == [said[0] for said in alone]
    cut = [step for step in run["pruned"] if step["saved"]]
    assert len(cut) > 2
    stayed = {sum(scheduled - left for _, left, _, _, scheduled in step["rows"]) for step in cut}
    assert stayed <= set(GRAPHS["sizes"])


@pytest.mark.slow  # `make proof`: under eager cuts it is in test_pruning_on_v2.py
def test_everything_that_vllm_does_in_a_batch_goes_on_beside_halves(forks: Any, tiny: Any) -> None:
    """Prompts in chunks, prefix hits, preemption, several answers, penalties, logprobs, stop tokens, aborts."""
    whole = forks("everything", **tiny.without("eagle3"))
    run = run_with_halves(forks, tiny, exits=EXITS | {"job": "everything"})
    finished = {name: said for name, said in whole["outputs"].items() if name not in ("abort-1", "abort-4")}
    assert {name: run["outputs"].get(name) for name in finished} == finished
    assert run["preemptions"] > 0
    assert (run["is_pruning"], run["faults"], run["miscounted"]) == (True, {}, 0)
    assert run["halves"]["all"] > 10
    assert sum(left > 0 for _, left, *_ in rows_of(run)) > 30


@pytest.mark.slow  # `make proof`: the same rule under eager cuts is in test_pruning_on_v2.py
def test_rows_that_leave_between_halves_leave_the_distribution_alone(forks: Any, tmp_path: Path) -> None:
    target, drafter = forks("save_sampled_models", folder=str(tmp_path))
    chosen = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 3}
    exits = {"layers": [1], "thresholds": [0.5], "kind": "parity", "job": "sampled"}
    asked = {"model": target, "speculation": chosen | {"draft_sample_method": "probabilistic"}, "requests": 1000}
    given = {"temperature": 1.0, "is_async": True, "rule": {"fixed": 3}, "exits": exits, "graphs": GRAPHS}
    run = forks("prunings:pruned", **asked, **given)
    assert run["is_pruning"]
    assert run["halves"]["all"] > 100
    assert run["p_value"] > 1e-4
