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
========= RACECHECK SUMMARY: 1,002 hazards displayed (1,001 errors, 1 warning)
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
PROGRAM = """
import json, os, pathlib, sys
said = json.loads(pathlib.Path({said!r}).read_text())
asked = {{name: value for name, value in os.environ.items() if name.startswith("TRITON")}}
with open({calls!r}, "a") as calls:
    calls.write(json.dumps([said.get("check"), sys.argv[2:], asked]) + "\\n")
if (dumped := os.environ.get("TRITON_DUMP_DIR")) is not None:
    bar = "ld; \\n bar.sync \\t0;\\n st;"
    kernels = {{"1/_plan": bar, "2/_plan": "st;", "3/_gate": "st;", "4/_score": "@%p3 bar.sync 0;"}}
    for name, lines in kernels.items():
        path = pathlib.Path(dumped, name + ".ptx")
        path.parent.mkdir(parents=True)
        path.write_text(lines)
if (changed := os.environ.get("TRITON_OVERRIDE_DIR")) is not None:
    for path in pathlib.Path(changed).rglob("*.ptx"):
        assert "bar" not in path.read_text()
        print("Overriding kernel with file", path)
if said.get("hangs") in sys.argv:
    print(os.getpid(), flush=True)
    import time
    time.sleep(600)
if said.get("stops") not in sys.argv:
    pathlib.Path(sys.argv[1]).write_text(json.dumps({{"_plan": {{"runs": 3, "agreed": 3}}}}))
print("what the program prints")
"""
TOOL = """#!{python}
import json, os, pathlib, subprocess, sys
given = sys.argv[1:]
if given == ["--version"]:
    print("NVIDIA (R) Compute Sanitizer\\nVersion 2026.3.0.0")
    sys.exit()
at = given.index(sys.executable)
own, program = given[:at], given[at:]
check, log = own[own.index("--tool") + 1], own[own.index("--log-file") + 1]
with open({calls!r}, "a") as calls:
    calls.write(json.dumps([check, own, {{}}]) + "\\n")
subprocess.run(program)
is_control = "TRITON_OVERRIDE_DIR" in os.environ or "--short" in program
pathlib.Path(log).write_text(json.loads(pathlib.Path({said!r}).read_text())[check + ("!" if is_control else "")])
"""


@pytest.fixture
def part(gpu: Callable[[str], ModuleType]) -> ModuleType:
    return gpu("part_sanitizer")


class MadeUp:
    """A tool that says what it is told to, and a program for it to watch."""

    def __init__(self, part: ModuleType, folder: Path) -> None:
        self.part, self.folder, self.tool = part, folder / "scratch", folder / "compute-sanitizer"
        self.said = dict(CLEAN) | {"racecheck!": RACES, "memcheck!": TOO_SHORT}
        self.ends_s = time.monotonic() + 100.0
        self._calls, self._said = folder / "calls", folder / "said"
        given = {"python": sys.executable, "calls": str(self._calls), "said": str(self._said)}
        self.tool.write_text(TOOL.format(**given))
        self.tool.chmod(0o700)
        part.PROGRAM.write_text(PROGRAM.format(**given))

    def checks(self) -> dict[str, Any]:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self._said.write_text(json.dumps(self.said))
        found: dict[str, Any] = self.part.checks(self.part.Sanitizer(self.tool, self.folder, self.ends_s))
        return found

    def calls(self) -> list[Any]:
        return [json.loads(line) for line in self._calls.read_text().splitlines()]


@pytest.fixture
def made_up(part: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MadeUp:
    monkeypatch.setattr(part, "PROGRAM", tmp_path / "program.py")
    return MadeUp(part, tmp_path)


@pytest.fixture
def lines(gpu: Callable[[str], ModuleType]) -> Callable[[dict[str, Any]], list[str]]:
    def told(found: dict[str, Any]) -> list[str]:
        read: list[str] = gpu("summary").lines({"machine": {}, "parts": {"sanitizer": {"result": found}}})
        return read

    return told


def test_every_check_and_every_control_is_asked_of_all_kernels_behind_a_run_that_compiles_them(
    made_up: MadeUp, part: ModuleType
) -> None:
    made_up.checks()
    plain, *pairs = made_up.calls()
    assert plain[:2] == [None, []]
    tools, programs = pairs[::2], pairs[1::2]
    assert [check for check, *_ in tools] == ["racecheck", "memcheck", "memcheck", "synccheck", "racecheck"]
    assert [given for _, given, _ in programs] == [[], [], ["--short"], [], []]
    for _, own, _ in tools:
        assert {each.removeprefix("kns=") for each in own if each.startswith("kns=")} == set(part.KERNELS)
    caches = [environment["TRITON_CACHE_DIR"] for _, _, environment in (plain, *programs)]
    assert len(set(caches[:-1])) == 1
    assert caches[-1] != caches[0]  # kernels with barriers must not be found where those without are asked for
    overrides = [environment.get("TRITON_KERNEL_OVERRIDE") for _, _, environment in (plain, *programs)]
    assert overrides == [None, None, None, None, None, "1"]


def test_errors_and_the_kernels_they_are_in_are_read_and_the_controls_are_seen(
    made_up: MadeUp, lines: Callable[[dict[str, Any]], list[str]]
) -> None:
    found = made_up.checks()
    assert found["plain"]["tool"].endswith("Version 2026.3.0.0")
    assert {name: own["errors"] for name, own in found.items() if name != "plain"} == {
        "racecheck": 0, "memcheck": 0, "too short": 1, "synccheck": 0, "no barriers": 1002,
    }  # fmt: skip
    assert found["no barriers"]["in"] == found["no barriers"]["expected_in"] == ["_plan", "_score"]  # _gate has none
    assert found["no barriers"]["overridden"] == 4
    assert found["too short"]["in"] == found["too short"]["expected_in"] == ["_plan"]
    assert found["too short"]["log"][1].endswith("Invalid __global__ read of size 4 bytes")
    assert lines(found) == [
        "sanitizer, nobody watching: 3 of 3 runs of 1 kernels agreed",
        "sanitizer, racecheck: errors: 0; 3 of 3 runs agreed",
        "sanitizer, memcheck: errors: 0; 3 of 3 runs agreed",
        "sanitizer, too short: seen in 1 of 1 kernels, errors: 1",
        "sanitizer, synccheck: errors: 0; 3 of 3 runs agreed",
        "sanitizer, no barriers: seen in 2 of 2 kernels, errors: 1002",
    ]


def test_a_control_that_is_not_seen_is_told(made_up: MadeUp, lines: Callable[[dict[str, Any]], list[str]]) -> None:
    made_up.said["racecheck!"] = CLEAN["racecheck"]
    assert lines(made_up.checks())[-1] == "sanitizer, no barriers: seen in 0 of 2 kernels, errors: 0"


def test_a_race_in_a_kernel_as_it_is_is_told_with_its_place(
    made_up: MadeUp, lines: Callable[[dict[str, Any]], list[str]]
) -> None:
    made_up.said["racecheck"] = RACES
    assert lines(made_up.checks())[1] == "sanitizer, racecheck: errors: 1002 in _plan, _score; 3 of 3 runs agreed"


def test_a_control_for_which_triton_took_no_other_kernel_fails(made_up: MadeUp, part: ModuleType) -> None:
    part.PROGRAM.write_text(part.PROGRAM.read_text().replace('print("Overriding', 'print("Nothing for'))
    assert made_up.checks()["no barriers"] == {"failed": "Triton took no kernel without barriers"}


def test_a_check_that_fails_or_comes_too_late_says_why_and_leaves_the_others(
    made_up: MadeUp, part: ModuleType, lines: Callable[[dict[str, Any]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up.said["racecheck"] = "========= COMPUTE-SANITIZER\n========= Error: Target application terminated early\n"
    found = made_up.checks()
    assert found["racecheck"]["failed"].endswith("terminated early / what the program prints")
    assert [name for name, own in found.items() if "failed" in own] == ["racecheck"]
    assert lines(found)[1].startswith("sanitizer, racecheck: failed: ")
    made_up.said |= CLEAN | {"memcheck!": "========= Error: no device\n========= ERROR SUMMARY: 2 errors\n"}
    made_up.said["stops"] = "--short"
    found = made_up.checks()
    assert found["too short"]["failed"].startswith("========= Error: no device / ")  # errors, but in no kernel
    assert "failed" not in found["memcheck"]
    made_up.said["hangs"] = "--short"
    monkeypatch.setattr(part, "RUN_S", 3.0)
    found = made_up.checks()
    number, _, reason = found["too short"]["failed"].partition(" / ")
    assert (reason, "failed" in found["synccheck"]) == ("it had 3 s", False)
    assert not Path(f"/proc/{number}/cmdline").exists() or not Path(f"/proc/{number}/cmdline").read_bytes()


def test_no_run_begins_behind_the_parts_end(made_up: MadeUp, part: ModuleType, tmp_path: Path) -> None:
    made_up.checks()
    late = part.Sanitizer(made_up.tool, tmp_path, 0.0)
    assert late.run("late", "racecheck") == {"failed": "no time was left"}


def test_a_tool_that_can_do_nothing_fails_the_part(
    made_up: MadeUp, part: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up.checks()
    made_up.tool.write_text("#!/bin/sh\necho no driver\n")
    monkeypatch.setattr(part, "find", lambda: made_up.tool)
    with pytest.raises(RuntimeError, match=r"^no driver$"):
        part.measure(False)


def test_without_the_tool_the_part_is_skipped_and_says_where_to_get_it(
    part: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(part, "TOOLKIT", tmp_path / "nowhere")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(part.Missing, match="no compute-sanitizer; the CUDA toolkit has it, and pack_vllm"):
        part.measure(False)
    carried = tmp_path / part.CARRIED
    carried.parent.mkdir(parents=True)
    carried.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(part.Missing):  # a file that is no program
        part.find()
    carried.chmod(0o700)
    assert part.find() == carried
    own = tmp_path / "compute-sanitizer"
    own.write_text("")
    own.chmod(0o700)
    assert part.find() == own  # the machine's own goes first


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
