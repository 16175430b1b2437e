"""FASER on vLLM's real V2 model runner: outputs are the target's, every length is obeyed, every report is right."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytestmark = pytest.mark.engine

RANDOM = {"random": 4, "seed": 1}
MODES = [False, True]


@pytest.fixture(scope="module")
def plain(forks: Any, tiny: Any) -> Any:
    """Return `tokens(method)`: what the same target says without speculation."""
    said: dict[str, Any] = {}

    def tokens(method: str) -> Any:
        scenario = tiny.without(method)
        if scenario["model"] not in said:
            said[scenario["model"]] = forks("generate", **scenario)["tokens"]
        return said[scenario["model"]]

    return tokens


@pytest.mark.parametrize(
    ("method", "is_async"),
    [
        ("near", False), ("near", True), ("ngram_gpu", True), ("eagle", True), ("eagle3", False), ("eagle3", True),
        pytest.param("ngram_gpu", False, marks=pytest.mark.slow), pytest.param("eagle", False, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_outputs_are_the_targets_and_every_length_is_obeyed(
    forks: Any, tiny: Any, plain: Any, method: str, is_async: bool
) -> None:
    run = forks("generate", **tiny.scenario(method), is_async=is_async, rule=RANDOM)
    assert run["home"] == "vllm.v1.worker.cpu.model_runner"
    assert run["runner"] == "FaserCPUModelRunner"
    assert run["is_async"] is is_async
    assert run["tokens"] == plain(method)
    assert run["check"]["disobeyed"] == run["check"]["misreported"] == []
    assert run["check"]["obeyed"] > 20
    assert set(run["check"]["lengths"]) == {"0", "1", "2", "3", "4"}
    assert run["check"]["without_report"] == 0
    assert (run["faults"], run["miscounted"], run["is_steered"]) == ({}, 0, True)
    has_logits = method != "ngram_gpu"
    assert run["check"]["confident"] == (run["check"]["drafting"] if has_logits else 0)
    assert run["hello_rounds"] == ("ragged" if method in ("eagle", "eagle3") else "longest")
    if method in ("eagle", "eagle3"):
        assert run["check"]["draft_rows"] < 0.8 * run["check"]["rows_if_uniform"]
    if has_logits:  # where nobody drafts, at most a first pass keeps the drafter's KV cache in step
        assert run["passes"] <= run["check"]["rounds"] + run["check"]["records"]


@pytest.mark.parametrize("is_async", MODES, ids=["sync", "async"])
def test_who_sits_out_steps_says_the_same_and_verifies_its_draft_later(
    forks: Any, tiny: Any, plain: Any, is_async: bool
) -> None:
    run = forks("generate", **tiny.scenario("eagle3"), is_async=is_async, rule=RANDOM, is_resting=True)
    assert run["tokens"] == plain("eagle3")
    assert run["check"]["rested"] > 10
    assert run["check"]["unheld"] == []
    assert run["check"]["disobeyed"] == run["check"]["misreported"] == []
    assert (run["faults"], run["miscounted"], run["is_steered"]) == ({}, 0, True)


@pytest.mark.parametrize("is_async", MODES, ids=["sync", "async"])
def test_rows_leave_in_those_steps_in_which_the_gate_lets_them(
    forks: Any, tiny: Any, plain: Any, is_async: bool
) -> None:
    measured = {"environment": {"FASER_RAGGED": "auto"}, "control": "overheard gate"}
    run = forks("generate", **tiny.scenario("eagle3"), is_async=is_async, rule=RANDOM, **measured)
    assert run["tokens"] == plain("eagle3")
    assert run["check"]["disobeyed"] == run["check"]["misreported"] == []
    answers = {each["step"]: each["answer"] for each in run["gate"] if "asked" in each}
    by_step = {entry["step"]: entry["rounds"] for entry in run["log"]}
    left = {step: len(set(by_step[step])) > 1 for step in answers if len(by_step[step]) > 1}
    assert left == {step: answers[step] for step in left}
    assert sum(left.values()) > 4
    assert len(left) - sum(left.values()) > 4


def test_the_gate_is_told_what_each_kind_of_rounds_took_once_that_is_known(forks: Any, tiny: Any) -> None:
    measured = {"environment": {"FASER_RAGGED": "auto"}, "control": "overheard gate"}
    run = forks("generate", **tiny.scenario("eagle3"), is_async=True, rule=RANDOM, **measured)
    asked = [[each["asked"], each["answer"]] for each in run["gate"] if "asked" in each]
    told = [each["told"] for each in run["gate"] if "told" in each]
    assert [each[:2] for each in told] == asked[: len(told)]
    assert len(asked) - len(told) == 1  # the last
    assert all(0.0 < time_s < 10.0 and 1 <= rounds <= 3 for _, _, time_s, rounds in told)


@pytest.mark.parametrize("method", ["near", "eagle3"])
def test_no_round_is_run_that_nobody_asked_for(forks: Any, tiny: Any, plain: Any, method: str) -> None:
    run = forks("generate", **tiny.scenario(method), is_async=True, rule={"cycle": [0, 1, 1, 0]})
    assert run["tokens"] == plain(method)
    drafting = sum(bool(entry["rounds"]) for entry in run["log"])
    assert drafting < run["check"]["records"]
    assert run["passes"] == drafting + 2  # the step that verifies the last drafts, and the one scheduled beside it


def test_confidences_are_the_drafters_probabilities_of_the_tokens_that_are_verified(forks: Any, tiny: Any) -> None:
    """The target drafts for itself, so its own logprobs are the drafter's."""
    run = forks(
        "generate", **tiny.scenario("itself"), is_async=True, rule=RANDOM, sampling={"logprobs": 0}, prompts=[5, 17, 40]
    )
    emitted: dict[str, int] = {}
    compared = 0
    names = sorted({name for entry in run["log"] for name in entry["rows"]}, key=lambda name: int(name.split("-")[0]))
    for entry in run["log"]:
        for name, row in entry["rows"].items():
            said = [next(iter(place.values())) for place in run["logprobs"][names.index(name)]]
            at = emitted.get(name, 0)
            emitted[name] = at + row["sampled"]
            for place in range(min(row["accepted"], len(said) - at)):
                assert row["confidences"][place] == pytest.approx(math.exp(said[at + place]), abs=2e-3)
                compared += 1
    assert compared > 20


@pytest.mark.parametrize(
    "control",
    [
        "failing rounds",
        "failing report",
        *(pytest.param(f"failing {part}", marks=pytest.mark.slow) for part in ("confidences", "look")),
    ],
)
def test_a_failing_hook_leaves_vllm_as_it_is(forks: Any, tiny: Any, plain: Any, control: str) -> None:
    run = forks("generate", **tiny.scenario("eagle3"), is_async=True, rule=RANDOM, control=control)
    assert run["tokens"] == plain("eagle3")
    assert run["check"]["disobeyed"] == []
    assert run["is_steered"]
    assert (run["faults"] == {}) == (control == "failing rounds")  # ragged drafting then ends, with a line in the log


@pytest.mark.parametrize("control", ["neighbour rows", "uncut placeholders", "neighbour's rounds"])
def test_controls_are_noticed(forks: Any, tiny: Any, plain: Any, control: str) -> None:
    run = forks("generate", **tiny.scenario("eagle3"), is_async=True, rule=RANDOM, control=control)
    assert (run["tokens"] != plain("eagle3")) == (control == "neighbour rows")
    assert bool(run["check"]["disobeyed"]) == (control == "uncut placeholders")
    if control == "neighbour's rounds":
        whole = forks("generate", **tiny.scenario("eagle3"), is_async=True, rule=RANDOM)
        assert accepted(run) < accepted(whole)


def accepted(run: Any) -> float:
    """Return the share of drafted tokens that were accepted."""
    rows = [row for entry in run["log"] for row in entry["rows"].values() if row["verified"] and row["sampled"]]
    return float(sum(row["accepted"] for row in rows) / sum(row["verified"] for row in rows))


def test_everything_that_vllm_does_in_a_batch_goes_on(forks: Any, tiny: Any) -> None:
    whole = forks("everything", **tiny.without("eagle3"))
    run = forks("everything", **tiny.scenario("eagle3"), is_async=True, rule=RANDOM)
    assert run["preemptions"] > 0
    assert run["cached"] > 0
    finished = {name: said for name, said in whole["outputs"].items() if name not in ("abort-1", "abort-4")}
    assert {name: run["outputs"].get(name) for name in finished} == finished
    assert run["check"]["disobeyed"] == run["check"]["misreported"] == []
    assert (run["faults"], run["miscounted"], run["is_steered"]) == ({}, 0, True)
