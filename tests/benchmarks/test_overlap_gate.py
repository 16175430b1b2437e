"""The benchmark of overlap's gates: gates that are told what to say, and one real dry run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import faser

FOLDER = Path(faser.__file__).parent / "benchmarks"


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("overlap_gate")


def test_a_gate_says_what_it_is_told_and_learns_only_when_it_is_told_nothing(
    load_script: Callable[[str], ModuleType],
) -> None:
    gate = load_script("overlap_engine").Told()
    for says in (True, False):
        gate.says = says
        assert {gate.ask(4) for _ in range(100)} == {says}
        for has_used in (True, False) * 100:
            gate.note(4, has_used, 1.0, 1)
    assert gate.gain(4) is None
    gate.says = None
    for _ in range(400):
        has_used = gate.ask(4)
        gate.is_deaf = True
        gate.note(4, has_used, 99.0, 1)
        gate.is_deaf = False
        gate.note(4, has_used, 0.5 if has_used else 1.0, 1)
    assert gate.gain(4) == pytest.approx(0.5)


def test_every_set_has_other_prompts_and_as_many_as_asked(script: ModuleType) -> None:
    sets = script.prompt_sets(3, 4)
    assert [len(texts) for texts in sets] == [4, 4, 4]
    assert len({text for texts in sets for text in texts}) == 12


def test_few_requests_take_more_turns(script: ModuleType) -> None:
    assert [script.turns_of(4, requests) for requests in (1, 2, 4, 8, 16)] == [16, 13, 10, 6, 4]
    assert script.turns_of(1, 64) == 2


@pytest.mark.slow  # `make proof`: starts an engine and a drafter's process
@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each phase")
def test_a_dry_run_measures_every_arm_and_goes_on_behind_what_is_done(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, str(FOLDER / "overlap_gate.py"), "--quick", "--json", str(file)]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, timeout=800)
    loads = json.loads(file.read_text())["loads"]
    assert [load["requests"] for load in loads] == [1, 2]
    assert [set(load["tokens_per_s"]) for load in loads] == [
        {"in turn", "ahead", "gated"}, {"in turn", "ahead", "groups", "gated"},
    ]  # fmt: skip
    assert all(sum(load["kinds"]["gated"].values()) == pytest.approx(1.0) for load in loads)
    before = file.read_text()
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, timeout=800)
    assert file.read_text() == before
