"""What scale costs: a small run, the arithmetic of what is extrapolated, and docs/scale.md as the file has it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

import faser
from faser.controller.bench_machine import Machine

ROOT = Path(faser.__file__).parent


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("scale")
    for name in ("scale", "recorded_engine"):
        sys.modules.pop(name, None)


def test_a_small_run_measures_every_cell(
    scale: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scale.json"
    flags = ["--requests", "2", "64", "--engines", "1", "3", "--steps", "60", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["scale.py", *flags])
    assert scale.main() == 0
    results = msgspec.json.decode(out.read_bytes(), type=scale.Results)
    few, many = results.by_requests
    assert (few.requests, many.requests) == (2, 64)
    for name in ("record_bytes", "telemetry_bytes"):
        assert 0 < getattr(few, name) < getattr(many, name)
    assert min(few.decide_us, few.store_us, few.action_bytes) > 0
    assert [each.engines for each in results.by_engines] == [1, 3]
    assert all(each.decide_us > 0 for each in results.by_engines)
    assert scale.tables(results) in capsys.readouterr().out


def test_what_is_extrapolated_is_multiplied(scale: ModuleType) -> None:
    one = scale.ByRequests(64, 300.0, 500.0, 100.0, 1500.0, 500.0, 1000.0)
    results = scale.Results(Machine("cpu", 2, 8.0, "Linux"), {}, "abc", "w", 10, by_requests=[one])
    lines = scale.tables(results).splitlines()
    assert lines[2] == "| 64 | 300 | 500 | 100 | 1500 | 500 | 1000 | 4.3 |"
    assert lines[-5] == "| 1 | 1 | 0.02 | 0.0 | 0.10 | 4 |"
    assert lines[-1] == "| 1000 | 125 | 0.16 | 20.0 | 0.80 | 4320 |"


def test_the_documented_tables_are_the_committed_files(scale: ModuleType) -> None:
    results = msgspec.json.decode(scale.RESULTS.read_bytes(), type=scale.Results)
    assert scale.told(results) in (ROOT / "docs" / "scale.md").read_text()
