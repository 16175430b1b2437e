"""The embedded pair's overlap benchmark: its arithmetic on runs made by hand, its prompts, and one real dry run."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import faser

FOLDER = Path(faser.__file__).parent / "benchmarks"
COUNTS = ("hits", "rejected", "other_bonus", "late", "handed_in_turn", "accepted_in_turn", "handed_ahead",
          "accepted_ahead")  # fmt: skip


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("overlap_pair")


def run(rate: float) -> dict[str, Any]:
    return {"rate": rate, "step_ms": 50.0, "tokens": 10} | dict.fromkeys(COUNTS, 2)


def test_ratios_are_of_runs_of_the_same_round(script: ModuleType) -> None:
    runs = {
        "own": [10, 20, 30], "in turn": [10, 10, 10], "ahead": [12, 22, 33], "unsplit": [20, 20, 20],
        "groups": [8, 9, 9], "gated": [12, 22, 30],
    }  # fmt: skip
    report = script.summary([{arm: run(rates[round_]) for arm, rates in runs.items()} for round_ in range(3)])
    assert report["rounds"] == 3
    assert report["tokens_per_s"]["ahead"] == {"median": 22, "least": 12, "most": 33}
    ratio = report["ratios"]["ahead / own"]
    assert (ratio["value"], ratio["pairs"]) == (pytest.approx((1.2 * 1.1 * 1.1) ** (1 / 3)), 3)
    assert ratio["low"] < 1.1 < ratio["high"]
    # On even rounds `ahead` is the best (12, 33), on the odd one too (22): each is compared with it.
    gated = report["gated_over_best"]
    assert (gated["best"], gated["pairs"]) == (["ahead"], 3)
    assert gated["value"] == pytest.approx((12 / 12 * 22 / 22 * 30 / 33) ** (1 / 3))
    assert report["ahead"] == dict.fromkeys(COUNTS, 6)


def test_arms_answer_the_same_prompts_slice_by_slice_in_rotating_order(script: ModuleType) -> None:
    asked: list[tuple[str, Any]] = []

    class Engine:
        def __init__(self, arm: str) -> None:
            self.arm = arm

        def ask(self, what: str, *order: Any) -> Any:
            asked.append((self.arm, (what, *order)))
            return {"seconds": 0.5, "tokens": 5, "steps": 2} if what == "go" else {"hits": 3}

    runs = script.take_turns({arm: Engine(arm) for arm in "abc"}, ["x"], [[5, 6]], [4, 8], 1)
    assert [name for name, order in asked if order == ("go", 4)] == ["b", "c", "a"]
    assert [name for name, order in asked if order == ("go", 8)] == ["c", "a", "b"]
    begun = {arm: order for arm, order in asked if order[0] == "begin"}
    assert begun == {arm: ("begin", ["x"], [[5, 6]], arm) for arm in "abc"}
    assert runs["a"] == {"rate": 10.0, "tokens": 10, "step_ms": 250.0, "slices": 2, "hits": 3}


def test_after_the_whole_rounds_only_what_may_be_the_best_goes_on(script: ModuleType) -> None:
    rates = {"own": 30, "in turn": 20, "ahead": 19, "unsplit": 30, "groups": 12, "gated": 10}
    rounds = [{arm: run(rate) for arm, rate in rates.items()} for _ in range(2)]
    assert script.contenders(rounds) == ("in turn", "ahead", "gated")
    rounds.append({arm: run(rates[arm]) for arm in ("in turn", "ahead", "gated")})
    report = script.summary(rounds)
    assert (report["ratios"]["groups / in turn"]["pairs"], report["ratios"]["ahead / in turn"]["pairs"]) == (2, 3)
    assert report["gated_over_best"]["value"] == pytest.approx(0.5)
    assert report["tokens_per_s"]["own"]["most"] == 30


def test_every_set_has_other_prompts_and_as_many_as_asked(script: ModuleType) -> None:
    sets = script.prompt_sets(argparse.Namespace(sets=3), 4)
    assert [len(texts) for texts in sets] == [4, 4, 4]
    assert len({text for texts in sets for text in texts}) == 12


@pytest.mark.slow  # `make proof`: starts two engines
@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each phase")
def test_a_dry_run_reports_every_arm_at_every_load(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, str(FOLDER / "overlap_pair.py"), "--quick", "--json", str(file)]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, timeout=800)
    loads = json.loads(file.read_text())["loads"]
    assert list(loads) == ["1", "2"]
    for load in loads.values():
        assert load["tokens_per_s"].keys() == {"own", "in turn", "ahead", "groups", "gated", "unsplit"}
        assert load["ahead"]["handed_in_turn"] > 0
