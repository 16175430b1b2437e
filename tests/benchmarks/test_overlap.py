"""The overlap benchmark: its arithmetic on steps made by hand, and one real dry run."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import faser

FOLDER = Path(faser.__file__).parent / "benchmarks"
VERIFY_S, DRAFT_S = 0.05, 0.04


@pytest.fixture(scope="module")
def overlap(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("overlap")


def steps(wait_s: float, count: int = 12) -> list[dict[str, Any]]:
    """Return steps that verify, then wait; the drafter works for DRAFT_S and is done when the waiting ends."""
    found = []
    for index in range(count):
        began = index * (VERIFY_S + wait_s)
        verified, ended = began + VERIFY_S, began + VERIFY_S + wait_s
        found.append(
            {
                "began_s": began,
                "verify": [began, verified],
                "draft": [verified, ended],
                "jobs": [[ended - DRAFT_S, ended]],
            }
        )
    return found


@pytest.fixture
def report(overlap: ModuleType) -> dict[str, Any]:
    """What is reported of frontiers that always hold and take shorter than a verification."""
    options = argparse.Namespace(length=4, acceptance=1.0, cores=[0, 1], tokens=60)
    runs = {
        "in turn": [{"steps": steps(DRAFT_S), "hits": 0, "misses": 0}] * 3,
        "ahead": [{"steps": steps(0.0), "hits": 11, "misses": 0}] * 3,
    }
    found: dict[str, Any] = overlap.summary(SimpleNamespace(options=options, pass_s=0.01), runs)
    return found


def test_everything_hidden_is_the_bound(report: dict[str, Any]) -> None:
    assert report["verify_ms"] == pytest.approx(50)
    assert report["draft_ms"] == pytest.approx(40)
    assert report["speedup"]["median"] == pytest.approx(1.8)
    assert report["bound"] == pytest.approx(1.8)
    assert report["bound_reached"] == pytest.approx(1.0)
    assert report["hidden_share"]["median"] == pytest.approx(1.0)
    assert all(report["holds"].values())


def test_the_trace_has_both_cores_of_both_arms(overlap: ModuleType, report: dict[str, Any], tmp_path: Path) -> None:
    trace = overlap.chrome_trace(report)
    drawn = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in drawn} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert all(event["dur"] >= 0 for event in drawn)
    worked = [event for event in drawn if event["pid"] == 1 and event["name"] != "wait for drafts"]
    in_turn = sorted((event["ts"], event["ts"] + event["dur"]) for event in worked)
    assert all(first[1] <= second[0] + 1e-6 for first, second in pairwise(in_turn)), "in turn"
    overlap.draw(report, tmp_path / "steps.svg")
    assert (tmp_path / "steps.svg").stat().st_size > 1000


def group_run(verify_s: float, wait_s: float, emitted: int) -> dict[str, Any]:
    """Return a run whose first step reads prompts and whose last one somebody ends in."""
    found = [step | {"emitted": emitted, "is_steady": True} for step in steps(wait_s, 10)]
    for step in found:
        step["began_s"] *= (verify_s + wait_s) / (VERIFY_S + wait_s)
    found[0]["is_steady"] = found[-1]["is_steady"] = False
    return {"steps": found}


def test_two_groups_that_hide_all_drafting_are_at_their_bound(load_script: Callable[[str], ModuleType]) -> None:
    groups = load_script("overlap_groups")
    runs = {
        "in turn": [group_run(0.10, 0.10, 40)] * 3,
        "half in turn": [group_run(0.06, 0.05, 20)] * 3,
        "ping-pong": [group_run(0.06, 0.0, 20)] * 3,
    }
    found = groups.summary(runs, 8, 0.01)
    assert found["draft_ms"] == {"all": pytest.approx(100), "half": pytest.approx(50)}
    assert found["verify_ms"] == {"all": pytest.approx(100), "half": pytest.approx(60)}
    assert found["bound"] == pytest.approx(0.2 / 0.12)
    assert found["speedup"]["median"] == pytest.approx(found["bound"])
    assert found["of_bound"] == pytest.approx(1.0)
    assert found["hidden_share"]["median"] == pytest.approx(1.0)
    assert all(found["holds"].values())
    late = groups.summary(runs | {"ping-pong": [group_run(0.06, 0.05, 20)] * 3}, 8, 0.01)
    assert late["hidden_share"]["median"] == pytest.approx(0.0)
    assert not late["holds"]["hidden >= 0.7"]


@pytest.mark.slow  # `make proof`: starts an engine
@pytest.mark.engine
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each phase")
def test_a_dry_run_reports_both_arms(tmp_path: Path) -> None:
    file, trace = tmp_path / "report.json", tmp_path / "trace.json"
    command = [sys.executable, str(FOLDER / "overlap.py"), "--quick", "--json", str(file), "--trace", str(trace)]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, timeout=600)
    report = json.loads(file.read_text())
    assert report["hits"] > 0
    assert report["step_ms"].keys() == {"in turn", "ahead"}
    assert report["ping_pong"]["speedup"]["median"] > 0
    assert json.loads(trace.read_text())["traceEvents"]
