"""Third-party clients beside ours: what is read from them by hand, and all of them against a real `faser serve`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import faser
from faser.controller.bench.ratio import Ratio
from faser.controller.engine.machine import Machine

SCRIPT = Path(faser.__file__).parent / "benchmarks" / "clients.py"


@pytest.fixture(scope="module")
def clients(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("clients")


def test_what_vllms_benchmark_saves_is_read_by_its_own_definitions(clients: ModuleType) -> None:
    found = {
        "ttfts": [0.1, 0.3, 0.0], "itls": [[0.2, 0.2], [0.4], []], "output_lens": [5, 3, 0],
        "errors": ["", "", "refused"], "duration": 2.0,
    }  # fmt: skip
    run = clients.read_vllm(found)
    assert (run.requests, run.failed, run.tokens, run.tokens_per_s) == (2, 1, 8, 4.0)
    assert run.ttft_ms == pytest.approx(200.0)
    assert run.tpot_ms == pytest.approx(150.0)  # 0.4 s for 4 tokens, 0.4 s for 2


def test_prompts_are_held_out_and_alike_for_every_client(clients: ModuleType) -> None:
    requests = clients.make_requests(10, 32, 1)
    assert requests == clients.make_requests(10, 32, 1)
    assert requests != clients.make_requests(10, 32, 2)
    assert len({request.kind for request in requests}) == 5
    told = clients.conversations(requests)
    assert [each["conversations"][0]["value"] for each in told] == [request.prompt for request in requests]


@pytest.mark.parametrize(
    ("value", "low", "high", "does"),
    [(1.02, 1.01, 1.03, True), (0.8, 0.5, 1.1, True), (0.8, 0.7, 0.9, False), (1.2, float("nan"), float("nan"), False)],
)
def test_figures_agree_within_spread_or_five_percent(
    clients: ModuleType, value: float, low: float, high: float, does: bool
) -> None:
    assert clients.agrees(Ratio(value, low, high, 5)) is does


def test_the_table_compares_round_by_round(clients: ModuleType) -> None:
    runs = [
        clients.Run(client, round_, 4, 0, 400, factor * speed, 100.0, 10.0)
        for round_, speed in enumerate((50.0, 100.0, 70.0))
        for client, factor in (("faser", 1.0), ("openai", 0.5))
    ]
    results = clients.Results(Machine("cpu", 2, 8.0, "Linux"), {}, "abc", {}, runs=runs)
    assert clients.ratio(runs, "openai", "tokens_per_s").value == pytest.approx(0.5)
    lines = clients.table(results).splitlines()
    assert lines[2].startswith("| faser | 12, 0 | 70.0 |")
    assert lines[3].startswith("| openai | 12, 0 | 35.0, ratio 0.500 (0.500 to 0.500) differs | 100.0, ratio 1.000")


def test_impossible_settings_are_refused_before_anything_starts() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--rounds", "0"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 2
    assert "at least 1" in done.stderr


@pytest.mark.engine
@pytest.mark.slow
def test_vllms_benchmark_and_the_openai_package_work_unmodified(tmp_path: Path) -> None:
    flags = ["--rounds", "1", "--requests", "4", "--concurrency", "2", "--tokens", "16"]
    command = [sys.executable, str(SCRIPT), *flags, "--out", str(tmp_path / "clients.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads((tmp_path / "clients.json").read_text())["runs"]
    assert {run["client"] for run in runs} == {"faser", "openai", "vllm"}
    assert all((run["requests"], run["failed"], run["tokens"]) == (4, 0, 64) for run in runs)
    assert all(run["tokens_per_s"] > 0 and run["ttft_ms"] > 0 for run in runs)
