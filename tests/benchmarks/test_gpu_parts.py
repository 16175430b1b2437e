"""How the GPU day runs its parts: one after the other, in processes of their own, each told at once, none too long."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import faser

FOLDER = Path(faser.__file__).parent / "benchmarks" / "gpu"
WITHOUT = "import sys; sys.modules.update(dict.fromkeys(('msgspec', 'zmq', 'vllm', 'transformers', 'safetensors')));"
MACHINE = {"gpu": "H200", "torch": "2.11"}


@pytest.fixture
def day(gpu: Callable[[str], ModuleType]) -> ModuleType:
    return gpu("day")


class Runs:
    """Made-up parts, counted, with a file of their own."""

    def __init__(self, day: ModuleType, monkeypatch: pytest.MonkeyPatch, output: Path) -> None:
        self.day, self.output, self.calls, self.closed = day, output, list[str](), 0
        self.told: dict[str, dict[str, Any]] = {}
        self.seen: list[list[str]] = []  # of each part, what the file had when it began
        self.machine = dict(MACHINE)
        runs = self

        class Process:
            def __init__(self, kind: str, options: argparse.Namespace, folder: Path) -> None:
                pass

            def run(self, part: Any, limit_s: float) -> dict[str, Any]:
                runs.calls.append(part.name)
                runs.seen.append(list(runs.parts()) if output.exists() else [])
                return runs.told.get(part.name, {"result": {"answer": part.name}})

            def close(self) -> None:
                runs.closed += 1

        monkeypatch.setattr(day, "Process", Process)

    def __call__(self, **changed: Any) -> int:
        plain = {"output": self.output, "only": "", "seconds": 600.0, "logs": None, "commit": "c0ffee", "dry_run": True}
        parts = [self.day.Part(name, "torch", name) for name in "abc"]
        results = self.day.Results(self.output, self.machine)
        status: int = self.day.run(parts, results, argparse.Namespace(**(plain | changed)))
        return status

    def parts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.output.read_text())["parts"]
        return found


@pytest.fixture
def runs(day: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    return Runs(day, monkeypatch, tmp_path / "new" / "gpu.json")


def test_what_is_finished_is_not_run_again(runs: Runs) -> None:
    assert runs() == 0
    assert runs() == 0
    assert runs.calls == ["a", "b", "c"]
    assert {name: part["result"] for name, part in runs.parts().items()} == {name: {"answer": name} for name in "abc"}
    assert {part["commit"] for part in runs.parts().values()} == {"c0ffee"}


def test_each_part_is_written_before_the_next_begins(runs: Runs) -> None:
    assert runs() == 0
    assert runs.seen == [[], ["a"], ["a", "b"]]


def test_a_part_that_fails_is_told_does_not_stop_the_others_and_is_tried_again(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.told["b"] = {"error": "out of memory"}
    assert runs() == 1
    assert (runs.parts()["b"]["error"], runs.closed) == ("out of memory", 2)  # the next part gets a whole process
    assert "gpu: b: out of memory" in capsys.readouterr().out
    runs.told.clear()
    assert runs() == 0
    assert runs.calls == ["a", "b", "c", "b"]
    assert runs.parts()["b"]["result"] == {"answer": "b"}


def test_a_part_whose_needs_are_missing_is_no_failure_and_is_tried_again(runs: Runs) -> None:
    runs.told["a"] = {"skipped": "vLLM is not there"}
    assert runs() == 0
    assert runs.parts()["a"]["skipped"] == "vLLM is not there"
    assert runs() == 0
    assert runs.calls == ["a", "b", "c", "a"]


def test_no_part_begins_that_would_end_too_late_and_the_next_run_goes_on(
    runs: Runs, day: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 0.0, 0.0, 50.0, 50.0])  # begin; before a, its begin and its end; before b
    monkeypatch.setattr(day.time, "monotonic", lambda: next(now))
    assert runs(seconds=100.0) == 3
    assert runs.calls == ["a"]
    monkeypatch.setattr(day.time, "monotonic", time.perf_counter)
    assert runs() == 0
    assert runs.calls == ["a", "b", "c"]


def test_only_what_is_named_runs(runs: Runs) -> None:
    assert runs(only="b") == 0
    assert runs.calls == ["b"]


@pytest.mark.parametrize("changed", ["machine", "version"])
def test_results_of_other_machines_or_versions_are_not_mixed(
    runs: Runs, day: ModuleType, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    assert runs() == 0
    before = runs.output.read_text()
    if changed == "machine":
        runs.machine["gpu"] = "B200"
    else:
        monkeypatch.setattr(day, "VERSION", day.VERSION + 1)
    with pytest.raises(SystemExit, match=f"made with another {changed}"):
        runs()
    assert runs.output.read_text() == before


@pytest.mark.parametrize("content", ["{", "[]", "null", '{"version": 1}'])
def test_a_damaged_file_is_refused_in_one_line(runs: Runs, content: str) -> None:
    runs.output.parent.mkdir()
    runs.output.write_text(content)
    with pytest.raises(SystemExit, match=r"give another --output$"):
        runs()


@pytest.mark.parametrize(
    ("given", "told"), [(["--dry-run"], "give an --output"), (["--site", "/nowhere"], "no folder vllm in it")]
)
def test_bad_options_are_refused(
    day: ModuleType, given: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        day.arguments(given)
    assert told in capsys.readouterr().err


def test_without_a_gpu_it_says_so_and_ends_with_two(
    day: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["day.py", "--output", str(tmp_path / "gpu.json")])
    monkeypatch.setenv("PATH", "")
    assert day.main() == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_the_parts_of_most_worth_come_first_and_none_may_take_longer_than_two_and_a_half_minutes(
    day: ModuleType,
) -> None:
    parts = day.plan(is_dry=False)
    kinds = list(dict.fromkeys(part.name.split("/")[0] for part in parts))
    assert kinds == ["exact", "serve", "decoder", "kernel", "sanitizer", "splits", "pruning", "overlap"]
    assert len({part.name for part in parts}) == len(parts)
    assert day.LIMIT_S == 150.0
    assert sum(part.expected_s for part in parts) < 1000.0


ODD_PART = """
import os, subprocess, sys, time
from checkout import Missing, part_ends_s

def measure(is_dry, how):
    if how in ("sleeps", "leaves"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(os.path.join(os.environ["CHILDREN"], how), "w").write(str(child.pid))
    if how == "sleeps":
        time.sleep(600)
    if how == "asks":
        return {"left_s": part_ends_s() - time.monotonic()}
    if how == "lacks":
        raise Missing("no such thing")
    if how == "fails":
        raise ValueError("of no use")
    if how == "vanishes":
        os._exit(3)
    return {"how": how, "is_dry": is_dry}
"""


def test_a_part_answers_lacks_something_fails_vanishes_or_is_ended_in_time_with_all_that_it_started(
    day: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "odd_part.py").write_text(ODD_PART)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CHILDREN", str(tmp_path))
    process = day.Process("torch", day.arguments(["--dry-run", "--output", "x"]), tmp_path)
    try:
        told = {
            how: process.run(day.Part(how, "torch", "odd_part", {"how": how}), 8.0 if how == "sleeps" else 120.0)
            for how in ("answers", "asks", "lacks", "fails", "vanishes", "leaves", "sleeps", "answers again")
        }
    finally:
        process.close()
    assert told["answers"] == {"result": {"how": "answers", "is_dry": True}}
    assert 0.0 < told["asks"]["result"]["left_s"] < 120.0  # until it will be ended
    assert told["lacks"] == {"skipped": "no such thing"}
    assert told["fails"] == {"error": "ValueError: of no use"}
    assert told["vanishes"]["error"].startswith("it ended without a result")
    assert told["sleeps"]["error"].startswith("no answer within 8 s")
    assert told["answers again"] == {"result": {"how": "answers again", "is_dry": True}}
    for how in ("leaves", "sleeps"):
        assert ends(int((tmp_path / how).read_text())), f"what the part that {how} started goes on"


def ends(process: int) -> bool:
    """Wait for a process to end; it may stay dead in the table, as nobody's child."""
    command = Path(f"/proc/{process}/cmdline")
    for _ in range(100):  # the kernel takes a moment
        if not command.exists() or not command.read_bytes():
            return True
        time.sleep(0.05)
    return False


def test_the_parts_below_the_engine_need_neither_vllm_nor_fasers_own_dependencies() -> None:
    code = (
        f"{WITHOUT} sys.path.insert(0, {str(FOLDER)!r}); import checkout; checkout.make_importable(); "
        "import part_decoder, part_kernel, part_splits, part_pruning, part_overlap"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_every_kernel_compiles_for_hopper() -> None:
    """What the interpreter lets pass and the compiler does not: types that change within a branch, above all."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("compile_kernels.py"))],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = ["_add_norm", "_gate", "_rope_store", "_where_am_i", "_decide", "_score", "_plan", "_plan"]
    assert done.stdout.split() == expected
