"""The table of a results file: its cells as rows, repeated measurements with their spread, a gate beside the better."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import faser

FOLDER = Path(faser.__file__).parent / "benchmarks"
# Benchmarks that are gone, and what `faser evaluate` writes, which prints its own.
OF_OTHERS = {"closed_loop", "swing", "policies", "pipeline", "pipeline_serial"}
FILES = sorted(
    path.stem
    for path in (FOLDER / "results").glob("*.json")
    if path.stem not in OF_OTHERS and not path.stem.startswith("bench_")
)


@pytest.fixture(scope="module")
def tables(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("tables")


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_a_gate_is_held_against_the_better_of_what_it_chooses_from(tables: ModuleType) -> None:
    def cell(batch: int, gate: float, **full: float) -> dict[str, Any]:
        rates = {**full, "confidence": 100.0, "gate": gate}
        turns = {arm: [rate * factor for factor in (1.0, 1.002, 0.998, 1.0)] for arm, rate in rates.items()}
        return {"batch": batch, "gain_seen_by_gate": None, "tokens_per_s": turns, "commit": "abc"}

    found = {"settings": {"turns": 4}, "cells": [cell(4, 99.0), cell(8, 100.0, full=125.0), cell(16, 101.0, full=80.0)]}
    names, _, *rows = cells(tables.table(found))
    told = [dict(zip(names, row, strict=True)) for row in rows]
    assert [row["batch"] for row in told] == ["4", "8", "16"]
    assert [row["gate over the better"][:7] for row in told] == ["0.990 (", "0.800 (", "1.010 ("]
    assert [row["which"] for row in told] == ["confidence", "full", "confidence"]
    assert [row["tokens_per_s: full"] for row in told] == ["", "125 (124.8 to 125.2)", "80 (79.84 to 80.16)"]
    assert {row["gain_seen_by_gate"] for row in told} == {""}


def test_rows_inside_a_cell_carry_the_cells_figures(tables: ModuleType) -> None:
    rows = [{"mode": "full", "step_ms": 10.0}, {"mode": "pruned", "step_ms": 8.12345}]
    names, _, *told = cells(tables.table({"cells": [{"batch": 8, "rows": rows}]}))
    assert names == ["batch", "mode", "step_ms"]
    assert told == [["8", "full", "10"], ["8", "pruned", "8.123"]]


def test_loads_by_name_have_it_in_front_and_words_choose_columns(tables: ModuleType) -> None:
    load = {"ratios": {"ahead": {"median": 1.5, "least": 1.25, "most": 2.0}}, "runs": [{"rate": 1.0}], "other": 3}
    text = tables.table({"loads": {"1": load, "2": load}}, ["ratios"])
    assert cells(text) == [["", "ratios: ahead"], ["---", "---"], *([n, "1.5 (1.25 to 2)"] for n in ("1", "2"))]


def test_a_file_without_cells_is_told_figure_by_figure(tables: ModuleType) -> None:
    text = tables.table({"machine": {"cpu": "x"}, "verify": {"cells": 7, "error": 0.25}, "drift": [-1.0, 1.0]})
    assert cells(text)[2:] == [["verify: cells", "7"], ["verify: error", "0.25"], ["drift", "0 (-1 to 1)"]]


@pytest.mark.parametrize("name", FILES)
def test_every_results_file_has_a_table(name: str, tables: ModuleType) -> None:
    found = cells(tables.table(json.loads((FOLDER / "results" / f"{name}.json").read_text())))
    assert len(found) > 2
    assert {len(row) for row in found} == {len(found[0])}


def test_every_results_file_is_named_where_its_figures_stand() -> None:
    root = FOLDER.parent
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *FOLDER.rglob("*.py"), *FOLDER.rglob("*.md")]
    told = "\n".join(path.read_text() for path in pages)
    assert [path.name for path in (FOLDER / "results").glob("*.json") if path.name not in told] == []


def test_the_command_prints_the_table_and_nothing_else() -> None:
    command = [
        sys.executable,
        str(FOLDER / "tables.py"),
        str(FOLDER / "results" / "pruning_gate.json"),
        "gate",
        "batch",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("| batch | gain_seen_by_gate | tokens_per_s: gate | gate over the better |\n")
