"""How the GPU day runs compute-sanitizer, with a made-up one: what it is asked, what is read of its log, its controls.

That a kernel without barriers really has none is seen in Hopper's machine code, which needs no GPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

COMPILE = Path(__file__).with_name("compile_kernels.py")
# In the shape of the manual's samples.
RACES = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _plan+0x3f0 in prefix_kernel.py:120
=========     and Read access at _plan+0x480 in prefix_kernel.py:120 [96 hazards]
=========
========= Warning: Race reported between Write access at _score(float *, int)+0xf0 in exit_kernel.py:93
=========     and Read access at _score(float *, int)+0x280 in exit_kernel.py:93 [4 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
TOO_SHORT = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at _plan+0x2b0 in prefix_kernel.py:93
=========     by thread (7,0,0) in block (0,0,0)
=========     Access to 0x7f3b62a0001c is out of bounds
=========
========= ERROR SUMMARY: 1 error
"""
CLEAN = {
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
    "memcheck": "========= ERROR SUMMARY: 0 errors\n",
    "synccheck": "========= ERROR SUMMARY: 0 errors\n",
}
TOOL = """#!{python}
import json, os, pathlib, sys
given = sys.argv[1:]
at = next(place for place, each in enumerate(given) if each == sys.executable)
own, program = given[:at], given[at:]
check, log = own[own.index("--tool") + 1], own[own.index("--log-file") + 1]
said = json.loads({said!r})
asked = {{name: value for name, value in os.environ.items() if name.startswith("TRITON")}}
with open({calls!r}, "a") as calls:
    calls.write(json.dumps([check, own, program[2:], asked]) + "\\n")
if (dumped := os.environ.get("TRITON_DUMP_DIR")) is not None:
    kernels = {{"_plan": "ld; \\n bar.sync \\t0;\\n st;", "_gate": "ld;\\n st;", "_score": "@%p3 bar.sync 0;"}}
    for name, lines in kernels.items():
        path = pathlib.Path(dumped, "HASH" + name, name + ".ptx")
        path.parent.mkdir(parents=True)
        path.write_text(lines)
if "stops" not in said:
    pathlib.Path(program[2]).write_text(json.dumps({{"_plan": {{"runs": 3, "agreed": 3}}}}))
is_control = "TRITON_OVERRIDE_DIR" in os.environ or "--short" in program
print("what the program prints")
pathlib.Path(log).write_text(said[check + ("!" if is_control else "")])
sys.exit(int(is_control))
"""


@pytest.fixture
def part(gpu: Callable[[str], ModuleType]) -> ModuleType:
    return gpu("part_sanitizer")


class MadeUp:
    """A folder with a tool in it that says what it is told to."""

    def __init__(self, part: ModuleType, folder: Path) -> None:
        self.part, self.folder, self.tool = part, folder, folder / "compute-sanitizer"
        self.said = dict(CLEAN) | {"racecheck!": RACES, "memcheck!": TOO_SHORT}
        self._calls = folder / "calls"
        self.ends_s = time.monotonic() + 100.0

    def checks(self) -> dict[str, Any]:
        self.tool.write_text(TOOL.format(python=sys.executable, calls=str(self._calls), said=json.dumps(self.said)))
        self.tool.chmod(0o700)
        found: dict[str, Any] = self.part.checks(self.part.Sanitizer(self.tool, self.folder, self.ends_s))
        return found

    def forget(self) -> None:
        shutil.rmtree(self.folder)
        self.folder.mkdir()

    def calls(self) -> list[Any]:
        return [json.loads(line) for line in self._calls.read_text().splitlines()]


@pytest.fixture
def made_up(part: ModuleType, tmp_path: Path) -> MadeUp:
    return MadeUp(part, tmp_path)


def test_each_check_and_each_control_is_asked_of_every_kernel(made_up: MadeUp, part: ModuleType) -> None:
    made_up.checks()
    calls = made_up.calls()
    asked = [(check, program[1:]) for check, _, program, _ in calls]
    assert asked == [
        ("racecheck", []),
        ("racecheck", []),
        ("memcheck", []),
        ("memcheck", ["--short"]),
        ("synccheck", []),
    ]
    for _, own, _, _ in calls:
        assert {each.removeprefix("kns=") for each in own if each.startswith("kns=")} == set(part.KERNELS)
    caches = {environment["TRITON_CACHE_DIR"] for _, _, _, environment in calls}
    assert len(caches) == len(calls)  # a kernel with barriers must not be found where one without is asked for
    assert [environment.get("TRITON_KERNEL_OVERRIDE") for *_, environment in calls] == [None, "1", None, None, None]


def test_errors_and_the_kernels_they_are_in_are_read_and_the_controls_are_seen(
    made_up: MadeUp, gpu: Callable[[str], ModuleType]
) -> None:
    found = made_up.checks()
    assert {name: own["errors"] for name, own in found.items()} == {
        "racecheck": 0, "no barriers": 2, "memcheck": 0, "too short": 1, "synccheck": 0,
    }  # fmt: skip
    assert found["no barriers"]["in"] == found["no barriers"]["expected_in"] == ["_plan", "_score"]  # _gate has none
    assert found["too short"]["in"] == found["too short"]["expected_in"] == ["_plan"]
    assert found["too short"]["log"][1].endswith("Invalid __global__ read of size 4 bytes")
    lines = gpu("summary").lines({"machine": {}, "parts": {"sanitizer": {"result": found}}})
    assert lines == [
        "sanitizer, racecheck: 0 errors; 3 of 3 runs agreed",
        "sanitizer, no barriers: 2 errors, seen in 2 of the 2 kernels with any",
        "sanitizer, memcheck: 0 errors; 3 of 3 runs agreed",
        "sanitizer, too short: 1 errors, seen in 1 of the 1 kernels with any",
        "sanitizer, synccheck: 0 errors; 3 of 3 runs agreed",
    ]


def test_a_control_that_is_not_seen_is_told(made_up: MadeUp, gpu: Callable[[str], ModuleType]) -> None:
    made_up.said["racecheck!"] = CLEAN["racecheck"]
    lines = gpu("summary").lines({"machine": {}, "parts": {"sanitizer": {"result": made_up.checks()}}})
    assert "sanitizer, no barriers: 0 errors, seen in 0 of the 2 kernels with any" in lines


def test_a_check_that_fails_or_comes_too_late_says_why_and_leaves_the_others(
    made_up: MadeUp, gpu: Callable[[str], ModuleType]
) -> None:
    made_up.said["racecheck"] = "========= COMPUTE-SANITIZER\n========= Error: Target application terminated early\n"
    found = made_up.checks()
    assert found["racecheck"]["failed"].endswith("terminated early / what the program prints")
    assert [name for name, own in found.items() if "failed" in own] == ["racecheck"]
    lines = gpu("summary").lines({"machine": {}, "parts": {"sanitizer": {"result": found}}})
    assert lines[0].startswith("sanitizer, racecheck: failed: ")
    made_up.forget()
    made_up.said["stops"] = ""
    assert made_up.checks()["memcheck"]["failed"].startswith("========= ERROR SUMMARY: 0 errors / what")
    made_up.forget()
    made_up.ends_s = 0.0
    assert {own["failed"] for own in made_up.checks().values()} == {"no time was left"}


def test_a_tool_that_can_do_nothing_fails_the_part(
    made_up: MadeUp, part: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up.tool.write_text("#!/bin/sh\necho no driver\n")
    made_up.tool.chmod(0o700)
    monkeypatch.setattr(part, "find", lambda: made_up.tool)
    with pytest.raises(RuntimeError, match=r"^no driver$"):
        part.measure(False)


def test_without_the_tool_the_part_is_skipped_and_says_where_to_get_it(
    part: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(part, "TOOLKIT", tmp_path / "nowhere")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(part.Missing, match="no compute-sanitizer; pack_vllm"):
        part.measure(False)
    carried = tmp_path / part.CARRIED
    carried.parent.mkdir(parents=True)
    carried.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(part.Missing):  # a file that is no program
        part.find()
    carried.chmod(0o700)
    assert part.find() == carried


def test_a_kernel_without_barriers_has_none_in_hoppers_machine_code(part: ModuleType, tmp_path: Path) -> None:
    def barriers(name: str, **environment: str) -> int:
        own = {
            "TRITON_KERNEL_DUMP": "1",
            "TRITON_DUMP_DIR": str(tmp_path / name),
            "TRITON_CACHE_DIR": str(tmp_path / f"{name}-cache"),
        }
        command = [sys.executable, "-W", "ignore", str(COMPILE), "_score"]
        done = subprocess.run(
            command, env=os.environ | own | environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr
        (code,) = (tmp_path / name).rglob("*.sass")
        return len(re.findall(r"\bBAR\.SYNC", code.read_text()))

    assert barriers("plain") > 0
    assert part.without_barriers(tmp_path / "plain", tmp_path / "changed") == ["_score"]
    assert barriers("bare", TRITON_KERNEL_OVERRIDE="1", TRITON_OVERRIDE_DIR=str(tmp_path / "changed")) == 0
