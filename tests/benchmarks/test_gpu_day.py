"""The GPU day without a GPU: its dry run end to end, vLLM's V2 runner and all kernels in Triton's interpreter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import faser

FOLDER = Path(faser.__file__).parent / "benchmarks" / "gpu"
ENGINE_PARTS = [
    "exact/none", "exact/async", "exact/sync", "exact/adaptive", "exact/groups", "exact/splits",
    "exact/pruning", "serve/faser", "serve/none", "serve/lengths", "serve/adaptive", "serve/faser-adaptive",
    "exact/bfloat16/none", "exact/bfloat16/async", "exact/bfloat16/pruning",
]  # fmt: skip
PARTS = [*ENGINE_PARTS, "decoder", "kernel", "sanitizer", "splits", "pruning", "overlap"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu") / "gpu.json"


def day(output: Path, *options: str) -> str:
    command = [sys.executable, str(FOLDER / "day.py"), "--dry-run", "--output", str(output), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=output.parent, timeout=880, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def told(output: Path) -> str:
    return day(output)


@pytest.fixture(scope="module")
def content(told: str, output: Path) -> dict[str, Any]:
    assert told
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.fixture(scope="module")
def parts(content: dict[str, Any]) -> dict[str, Any]:
    return {name: part.get("result") for name, part in content["parts"].items()}


def test_every_part_is_in_the_file_with_its_commit_and_the_file_says_that_it_was_a_dry_run(
    content: dict[str, Any],
) -> None:
    assert list(content["parts"]) == PARTS
    assert content["machine"]["is_dry_run"] is True
    assert {len(part["commit"]) for part in content["parts"].values()} <= {0, 40}
    assert all(part["seconds"] > 0 for part in content["parts"].values())


def test_nothing_is_left_out_of_the_rehearsal(content: dict[str, Any]) -> None:
    assert {name: part["skipped"] for name, part in content["parts"].items() if "skipped" in part} == {}
    assert content["parts"]["exact/adaptive"]["result"]["tokens"] == content["parts"]["exact/none"]["result"]["tokens"]


def test_fasers_answers_are_the_targets_on_the_v2_runner_and_every_length_is_obeyed(
    parts: dict[str, Any], told: str
) -> None:
    arms = {"async": "FaserAsyncScheduler", "sync": "FaserScheduler", "groups": "FaserAsyncScheduler"}
    arms |= {"splits": "FaserAsyncScheduler", "pruning": "FaserAsyncScheduler"}  # a CPU has no splits: two groups
    for arm, scheduler in arms.items():
        found = parts[f"exact/{arm}"]
        assert found["tokens"] == parts["exact/none"]["tokens"]
        assert found["engine"]["runner"] == "faser.engine_adapter.runner.v2.FaserCPUModelRunner"
        assert (found["engine"]["scheduler"], found["engine"]["faults"]) == (scheduler, {})
        assert (found["disobeyed"], found["misreported"], found["without_report"]) == ([], [], 0)
        assert len(found["lengths"]) > 2
        assert (found["is_beside"], found["turns"] > 0) == (arm in ("groups", "splits"),) * 2
        cuts = found.get("cuts", {"cut": 0, "rows_left": 0})
        assert (cuts["cut"] > 0, cuts["rows_left"] > 0) == (arm == "pruning",) * 2
        assert f"exact/{arm}: equal, 0 of 2 answers apart; {found['obeyed']} lengths obeyed, 0 not" in told


def test_rows_leave_in_bfloat16_too_and_answers_are_compared_with_those_of_bfloat16(
    parts: dict[str, Any], told: str
) -> None:
    found, none = parts["exact/bfloat16/pruning"], parts["exact/bfloat16/none"]
    assert (found["dtype"], none["dtype"], parts["exact/none"]["dtype"]) == ("bfloat16", "bfloat16", "float32")
    assert none["gaps"] != parts["exact/none"]["gaps"]  # it is another type's arithmetic
    assert (found["disobeyed"], found["engine"]["faults"], found["cuts"]["cut"] > 0) == ([], {}, True)
    for arm in ("async", "pruning"):
        assert re.search(rf"^exact/bfloat16/{arm}: (equal|ties), ", told, re.MULTILINE)


def test_what_the_sanitizer_watches_runs_every_kernel_and_agrees_with_the_references(
    parts: dict[str, Any], told: str
) -> None:
    found = parts["sanitizer"]["plain"]["kernels"]
    assert set(found) == {"_add_norm", "_gate", "_rope_store", "_plan", "_score", "_decide"}
    assert all(own["agreed"] == own["runs"] > 0 for own in found.values())
    assert "sanitizer, nobody watching: 13 of 13 runs of 6 kernels agreed" in told


def test_every_arm_serves_every_load_and_fasers_steps_are_under_leases(parts: dict[str, Any], told: str) -> None:
    for arm, runs in (("faser", ["2"]), ("none", ["2"]), ("lengths", ["2/k1", "2/k2"])):
        found = parts[f"serve/{arm}"]
        assert list(found["loads"]) == runs
        for run in found["loads"].values():
            assert min(run["tokens_per_s"], run["tpot_ms"], run["seconds"]) > 0
            assert run["requests"] == 6
            assert (run["draft_tokens"] > 0) == (arm != "none")
    faser = parts["serve/faser"]["loads"]["2"]
    assert faser["steps_under_lease"] > 0.5 * faser["steps"] > 0
    one, two = parts["serve/lengths"]["loads"].values()
    assert two["draft_tokens"] > one["draft_tokens"]
    assert "2 requests, tokens/s: faser" in told


def test_the_decoders_fused_kernels_compute_what_plain_torch_does(parts: dict[str, Any]) -> None:
    assert set(parts["decoder"]) == {"add_norm", "residual", "gate", "queries", "keys", "values"}
    assert max(parts["decoder"].values()) < 1e-5


def test_the_exit_kernel_agrees_with_its_reference(parts: dict[str, Any]) -> None:
    agreement = parts["kernel"]["agreement"]["float32"]
    assert agreement["equal"] == agreement["steps"] > 0
    assert agreement["equal_requests"] == agreement["requests"]
    assert set(parts["kernel"]["times_ms"]) == {"1", "2"}


def test_drafting_beside_verifying_is_timed_on_every_partition_and_changes_no_token(parts: dict[str, Any]) -> None:
    tables = [parts["splits"]["requests"]["1"], *parts["overlap"]["requests"].values()]
    assert list(parts["overlap"]["requests"]) == ["1", "2"]
    for found in tables:
        assert list(found["partitions"]) == ["unsplit", "streams", "1:3"]
        assert 1.0 <= found["ahead_bound"] <= 2.0
        for own in found["partitions"].values():
            assert own["equal_tokens"] == 1.0
            assert min(own[name]["median"] for name in ("draft_ms", "verify_ms", "step_ms", "interference")) > 0
        assert found["partitions"]["1:3"]["allocated"] == [32, 100]
        assert found["partitions"]["unsplit"]["gain"] == {"median": 1.0, "q1": 1.0, "q3": 1.0, "count": 2}
    assert set(parts["overlap"]["ping_pong"]["2"]) == {"unsplit", "streams", "1:3", "bound"}


def test_rows_kept_behind_the_cut_come_out_as_in_the_whole_pass(parts: dict[str, Any]) -> None:
    found = parts["pruning"]["2"]
    assert found["equal_tokens"] == {"1": 1.0, "2": 1.0, "3": 1.0}
    assert set(found["ms"]) == {
        "whole",
        *(f"{kind} {kept}" for kind in ("free", "decided", "fixed") for kept in (1, 2, 3)),
    }


def test_a_second_run_runs_nothing_that_is_finished(told: str, output: Path) -> None:
    assert told.count(": done in") == len(PARTS)
    before = output.read_text()
    assert ": done in" not in day(output, "--only", "decoder")
    assert output.read_text() == before
