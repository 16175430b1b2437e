"""How benchmarks/stages.py counts a recovery, and that docs/results.md tells what its file has."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import faser

ROOT = Path(faser.__file__).parent


@pytest.fixture(scope="module")
def stages(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("stages")


def made(stages: ModuleType, *spans: tuple[int, float, tuple[int, ...], str]) -> list[Any]:
    """Return steps: so many, each of so many ms, under a cut, of a kind."""
    return [
        stages.TimedStep(ms, cut, kind == "moving", kind == "switch")
        for count, ms, cut, kind in spans
        for _ in range(count)
    ]


def test_a_recovery_is_the_steps_from_a_switch_on_that_are_slow_under_the_new_cut(stages: ModuleType) -> None:
    steps = made(
        stages,
        (40, 10.0, (15,), ""), (5, 14.0, (15,), "moving"), (1, 50.0, (0,), "switch"), (1, 30.0, (0,), ""),
        (40, 20.0, (0,), ""), (5, 25.0, (0,), "moving"), (1, 11.0, (15,), "switch"), (40, 10.0, (15,), ""),
    )  # fmt: skip
    assert stages.limits_ms(steps) == {(15,): 12.0, (0,): 24.0}
    assert list(stages.recoveries(steps)) == [(2, 80.0), (0, 0)]
    found = stages.recovery(steps, ranks=2)
    assert (found["moves"], found["within"], found["steps"], found["ms"]) == (2, 2, [2, 0], [80.0, 0])
    assert (found["slow_share"], found["steps_under_way"]) == (0.0, 5.0)
    assert found["under_way_over_p25"] == pytest.approx(1.325)


def test_a_recovery_that_is_late_is_not_within_its_bound(stages: ModuleType) -> None:
    steps = made(stages, (40, 10.0, (15,), ""), (1, 13.0, (0,), "switch"), (3, 13.0, (0,), ""), (40, 10.0, (0,), ""))
    assert list(stages.recoveries(steps)) == [(4, 52.0)]
    assert stages.recovery(steps, ranks=2)["within"] == 0
    assert stages.recovery(steps, ranks=4)["within"] == 1


def test_a_move_that_the_run_did_not_outlast_is_left_out(stages: ModuleType) -> None:
    steps = made(
        stages, (40, 10.0, (15,), ""), (1, 13.0, (0,), "switch"), (40, 10.0, (0,), ""), (1, 13.0, (15,), "switch")
    )
    assert list(stages.recoveries(steps)) == [(1, 13.0)]


def test_a_slow_step_that_no_move_is_near_is_counted_as_the_machines(stages: ModuleType) -> None:
    steps = made(stages, (60, 10.0, (15,), ""), (20, 30.0, (15,), ""), (1, 10.0, (0,), "switch"), (39, 10.0, (0,), ""))
    calm = 80 + 39 - stages.NEAR_STEPS + 1
    assert stages.recovery(steps, 2)["slow_share"] == pytest.approx(20 / calm)


def test_a_turn_beside_other_work_is_disturbed(stages: ModuleType) -> None:
    calm, busy = {"other_cores": 0.05}, {"other_cores": 0.5}
    assert [stages.is_disturbed({"throughput": calm, "recovery": each}) for each in (calm, busy)] == [False, True]
    assert [stages.is_disturbed({"throughput": each}) for each in (calm, busy)] == [False, True]


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    """What the benchmark measured."""
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / "stages.json").read_text())["runs"]
    return found


def tables_of(heading: str) -> list[list[list[str]]]:
    """Return the rows of each table of a section of docs/results.md, without their heads."""
    lines = (
        (ROOT / "docs" / "results.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0].splitlines()
    )
    starts = [at for at, line in enumerate(lines) if line.startswith("| ") and not lines[at - 1].startswith("|")]
    below = [takewhile(lambda line: line.startswith("|"), lines[at + 2 :]) for at in starts]
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in rows] for rows in below]


def test_the_page_has_the_files_figures(stages: ModuleType, runs: list[dict[str, Any]]) -> None:
    throughput, recovery = tables_of("Pipeline stages on an engine")
    assert throughput == list(stages.throughput_rows(runs))
    assert recovery == list(stages.recovery_rows(runs))


def test_the_file_has_thirty_moves_of_each_pipeline_and_one_answer_whoever_gave_it(
    stages: ModuleType, runs: list[dict[str, Any]]
) -> None:
    answers = defaultdict(set)
    for run in runs:
        for name, digest in run["answers"].items():
            answers[name.rpartition(", ")[2]].add(digest)
    assert {load: len(digests) for load, digests in answers.items()} == {"1": 1, "4": 1, "8": 1}
    assert {run["engine"] for run in runs} == set(stages.ENGINES)
    assert all(run["recovery"]["most_tail_blocks"] <= 1 for run in runs if "recovery" in run)
    assert all(int(moves) >= 30 for _, moves, *_ in stages.recovery_rows(runs))
