"""What the README shows of its two commands is what they printed, less the places of one machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType

import pytest

PROGRESS = "faser: starting\nnoise\nfaser: time 5 s, lengths 0..4   \nfaser: time 10 s\nfaser: stopping\n"
RESULT = {"engine": {"name": "vllm", "model": "/elsewhere/target", "drafter": "/elsewhere/drafter"}, "steps": 7,
          "telemetry_path": "/elsewhere/telemetry.sqlite", "report_path": "/elsewhere/report.html"}  # fmt: skip


@pytest.fixture(scope="module")
def readme(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("readme")


def test_a_demos_places_are_left_out(readme: ModuleType) -> None:
    told = readme.told_demo(("faser", "demo"), PROGRESS, f"table\n{json.dumps(RESULT)}\n")
    assert "/elsewhere" not in json.dumps(told)
    assert told["command"] == "faser demo"
    assert told["printed"] == [
        "faser: starting",
        "faser: time 5 s, lengths 0..4",
        "faser: time 10 s",
        "faser: stopping",
    ]
    assert told["result"]["steps"] == 7


def test_only_tests_that_all_passed_are_shown(readme: ModuleType) -> None:
    parts = ["==== 2037 passed in 765.15s (0:12:45) ====", "== 99 passed, 2083 deselected in 292.41s (0:04:52) =="]
    assert readme.told_tests("\n".join(["...", parts[0], "make: x", parts[1]])) == parts
    for log in (parts[0], "==== 1 failed, 2036 passed in 765.15s (0:12:45) ====\n" + parts[1]):
        with pytest.raises(SystemExit, match="1 parts of `make test` that passed; expected 2"):
            readme.told_tests(log)


def test_the_demo_is_shown_by_four_lines_of_progress_and_its_first_figures(
    readme: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = ["faser: starting", *(f"faser: time {second} s" for second in range(5, 55, 5)), "faser: stopping"]
    result = {key: {"p50": 1.25} for key in (*readme.DEMO_FIGURES, "policy")}
    told = {"demo": {"command": "faser demo", "printed": printed, "result": result}}
    monkeypatch.setattr(readme, "read", lambda: told)
    fence, command, *lines, end = readme.demo().splitlines()
    assert (fence, command, end) == ("```", "$ faser demo", "```")
    assert lines[:6] == ["faser: starting", *(f"faser: time {s} s" for s in (5, 20, 35, 50)), "faser: stopping"]
    assert json.loads("".join(lines[6:])) == {name: {"p50": 1.25} for name in readme.DEMO_FIGURES}
    assert max(map(len, lines)) <= readme.WIDTH
