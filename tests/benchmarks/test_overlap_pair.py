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
    report = script.summary({arm: [run(rate) for rate in rates] for arm, rates in runs.items()})
    assert report["tokens_per_s"]["ahead"] == {"median": 22, "least": 12, "most": 33}
    assert report["ratios"]["ahead / own"] == pytest.approx({"median": 1.1, "least": 1.1, "most": 1.2})
    assert report["ahead"] == dict.fromkeys(COUNTS, 6)


def test_every_round_has_other_prompts_and_as_many_as_asked(script: ModuleType) -> None:
    sets = script.prompt_sets(argparse.Namespace(rounds=3), 4)
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
