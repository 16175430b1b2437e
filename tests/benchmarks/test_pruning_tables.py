"""The tables of docs/pruning.md come from their files; the benchmarks behind them go on where they were stopped."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import faser

FOLDER = Path(faser.__file__).parent / "benchmarks"


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """Load the scripts as Python would, beside one another."""
    found = {}
    for name in ("pruning_report", "pruning_shape", "pruning_stages", "pruning", "held_text", "steady", "pruning_gate"):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        found[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    yield found
    for name in found:
        del sys.modules[name]


def test_the_document_is_what_the_files_say(modules: dict[str, ModuleType]) -> None:
    report = modules["pruning_report"]
    text = report.DOCUMENT.read_text()
    for name, path, lines in report.PARTS:
        if path.is_file():
            assert report.written(text, name, lines(json.loads(path.read_text()))) == text


def make_result(gate: float, pruned: float = 90.0) -> dict[str, Any]:
    rates = {"none": 50.0, "full": 80.0, "confidence": 100.0, "pruned": pruned, "both": 99.0, "gate": gate}
    rows = [
        {"mode": mode, "step_ms": 10.0, "tokens_per_s": rate, "dropped": 0.25, "prune_ms": 0.5,
         "turns_tokens_per_s": [rate * factor for factor in (1.0, 1.001, 0.999, 1.0)]}
        for mode, rate in rates.items()
    ]  # fmt: skip
    cell = {"batch": 8, "length": 3, "confidence": 0.4, "layer": 5, "threshold": 0.25, "oracle_layer": 15, "rows": rows}
    return {"settings": {"rounds": 4, "tokens": 48, "machine": {"cpu": "a processor"}}, "cells": [cell]}


def test_every_mode_is_held_against_the_better_of_full_and_ended(modules: dict[str, ModuleType]) -> None:
    report = modules["pruning_report"]
    lines = report.engine_lines(make_result(gate=98.0, pruned=110.0))
    rows = {line.split(" | ")[2]: line.split(" | ")[5] for line in lines if line.startswith("| 8 ")}
    assert rows["in full"] == rows["ended by confidence under 0.4"] == ""
    assert rows["pruned behind layer 5 at 0.25"].startswith("1.100 (")
    assert rows["both, gate on"].startswith("0.980 (")
    assert "wins at batch 8, k = 3 (pruned behind layer 5 at 0.25)." in lines[-1]
    assert "under 0.99 at batch 8, k = 3." in lines[-1]
    assert "Not measured with the gate yet (batch x k): 4 x 3, 4 x 7, 8 x 7, 16 x 3" in lines[-1]
    fine = report.engine_lines(make_result(gate=99.5))[-1]
    assert "wins nowhere" in fine
    assert "nowhere under 0.99." in fine
    two = make_result(gate=99.0)
    two["cells"].append({**make_result(gate=101.0)["cells"][0], "batch": 16})
    assert "together 1.000 (0.8" in report.engine_lines(two)[-1]


def test_the_gate_is_held_against_the_better_of_both(modules: dict[str, ModuleType]) -> None:
    def cell(batch: int, gate: float, **full: float) -> dict[str, Any]:
        rates = {**full, "confidence": 100.0, "gate": gate}
        turns = {arm: [rate * factor for factor in (1.0, 1.002, 0.998, 1.0)] for arm, rate in rates.items()}
        return {"batch": batch, "length": 3, "confidence": 0.4, "full_beforehand": 0.7, "gain_seen_by_gate": -0.05,
                "timed": 10 * batch, "looked": 0.016, "tokens_per_s": turns, "commit": "abc"}  # fmt: skip

    cells = [cell(4, 99.0), cell(8, 100.0, full=125.0), cell(16, 101.0, full=80.0)]
    lines = modules["pruning_report"].gate_lines({"settings": {"machine": {"cpu": "a processor"}}, "cells": cells})
    assert lines[0] == "Each cell from 40 to 160 timed steps; a processor, commit abc."
    assert "| 4 | 3 | 0.4 | 0.70 of the next column | 100 | 99 | 0.990 (0.990 to 0.990) | 1.6% | -5.0% |" in lines
    assert any(line.startswith("| 8 | 3 | 0.4 | 125 | 100 | 100 | 0.800 (") for line in lines)
    assert lines[-1].startswith("Lowest: 0.800, under 0.99; over the cells together 0.928 (")
    assert lines[-1].endswith("Beyond the interval it wins at batch 16, k = 3.")
    assert modules["pruning_report"].gate_lines({"settings": {}, "cells": []}) == ["Not measured yet."]


def test_a_cut_is_held_against_the_whole_step(modules: dict[str, ModuleType]) -> None:
    def row(arm: str, rejected: float, layer: int, step_ms: float) -> dict[str, Any]:
        return {"batch": 16, "arm": arm, "rejected": rejected, "layer": layer, "step_ms": step_ms, "prune_ms": 3.4,
                "score_ms": 3.0}  # fmt: skip

    rows = [row("none", 0.0, 0, 40.0), row("full", 0.0, 0, 200.0), row("ended", 0.6, 0, 90.0)]
    rows += [row("cut", 0.6, 3, 150.0), row("cut", 0.6, 5, 201.0)]
    options = {"layers": 6, "length": 7, "steps": 5}
    lines = modules["pruning_report"].shape_lines(
        {"options": options, "machine": {"cpu": "a processor"}, "rows": rows}
    )  # fmt: skip
    assert "| 16 | 60% | 3 of 6 | 40 | 200 | 150 | 25% | 90 | 3.0 | 0.40 |" in lines
    assert lines[-1] == (
        "Shorter by 20% or more: batch 16, 60% rejected, layer 3. Longer: batch 16, 60% rejected, layer 5."
    )


def test_cells_that_are_done_are_kept_unless_something_else_was_measured(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    begun, out = modules["pruning"].begun, tmp_path / "results" / "pruning.json"
    assert begun(out, {"rounds": 2}) == []
    whole = json.loads(out.read_text())
    whole["cells"] = [{"batch": 4, "length": 3}]
    out.write_text(json.dumps(whole))
    assert begun(out, {"rounds": 2}) == [(4, 3)]
    assert begun(out, {"rounds": 3}) == []
    assert json.loads(out.read_text()) == {"settings": {"rounds": 3}, "cells": []}


class KilledBench:
    """An engine that dies in its second cell."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.done = 0

    def cell(self, batch: int, length: int, rounds: int) -> dict[str, Any]:
        """Return a cell, once."""
        self.done += 1
        if self.done == 2:
            raise KeyboardInterrupt
        return {"batch": batch, "length": length, "rows": []}


def test_what_was_measured_before_a_kill_is_there_afterwards(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark, out, said = modules["pruning"], tmp_path / "pruning.json", {"rounds": 2}
    monkeypatch.setattr(benchmark, "Bench", KilledBench)
    wanted = [(8, 7), (4, 3), (4, 7)]
    for done in (0, 1, 2):
        missing = [cell for cell in wanted if cell not in benchmark.begun(out, said)]
        assert len(missing) == len(wanted) - done
        context = pytest.raises(KeyboardInterrupt) if len(missing) > 1 else nullcontext()
        with context:
            benchmark.child({"out": str(out), "cells": missing, "rounds": 2})
    assert benchmark.begun(out, said) == [(4, 3), (4, 7), (8, 7)]


def test_stages_are_told_beside_the_bar(modules: dict[str, ModuleType]) -> None:
    report = modules["pruning_report"]
    options = {"batches": [16], "length": 7, "rejected": [0.6], "layers": 4}
    spent = {"compaction": 90.4, report.SUM: 480.0, "spreading the output": 30.0}
    result = {"options": options, "machine": {"cpu": "a processor"}, "steps": 30, "stages_us": spent}
    lines = report.stages_lines(result)
    assert "| compaction | 90 |" in lines
    assert "0.48 ms, within the 0.5 ms" in lines[-1]
    assert "over the 0.5 ms" in report.stages_lines(result | {"stages_us": spent | {report.SUM: 501.0}})[-1]


def test_a_stage_is_counted_without_the_stages_inside_it(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = modules["pruning_stages"].Stopwatch()
    clock = iter(range(10))
    monkeypatch.setattr(modules["pruning_stages"].time, "perf_counter", lambda: float(next(clock)))
    work = SimpleNamespace(inner=lambda: None)
    work.outer = lambda: (work.inner(), work.inner())
    watch.wrap(work, "inner", "inner")
    watch.wrap(work, "outer", "outer")
    work.outer()
    assert not watch.spent_s  # off: no clock is read
    watch.is_on = True
    work.outer()  # from 0 to 5, inner ones from 1 to 2 and from 3 to 4
    assert dict(watch.spent_s) == {"inner": 2.0, "outer": 3.0}


@pytest.mark.parametrize("rejected", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_so_many_drafts_are_rejected_as_asked_and_drafts_differ(
    modules: dict[str, ModuleType], rejected: float
) -> None:
    kept = modules["pruning_shape"].surviving(16, 7, rejected)
    assert sum(kept) == round(16 * 7 * (1.0 - rejected))
    assert min(kept) >= 0
    assert max(kept) <= 7
    assert (len(set(kept)) > 1) is (0.0 < rejected < 1.0)


def test_the_shape_is_that_of_the_card_but_for_its_depth(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    modules["pruning_shape"].write_model(tmp_path, 8)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]) == (4096, 32, 14_336)
    assert (config["num_hidden_layers"], config["vocab_size"]) == (8, 128_256 // 4)
