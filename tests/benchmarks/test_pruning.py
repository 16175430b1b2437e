"""The benchmark of pruned verification goes on where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def pruning(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("pruning")


def test_cells_that_are_done_are_kept_unless_something_else_was_measured(pruning: ModuleType, tmp_path: Path) -> None:
    begun, out = pruning.begun, tmp_path / "results" / "pruning.json"
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
    pruning: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark, out, said = pruning, tmp_path / "pruning.json", {"rounds": 2}
    monkeypatch.setattr(benchmark, "Bench", KilledBench)
    wanted = [(8, 7), (4, 3), (4, 7)]
    for done in (0, 1, 2):
        missing = [cell for cell in wanted if cell not in benchmark.begun(out, said)]
        assert len(missing) == len(wanted) - done
        context = pytest.raises(KeyboardInterrupt) if len(missing) > 1 else nullcontext()
        with context:
            benchmark.child({"out": str(out), "cells": missing, "rounds": 2})
    assert benchmark.begun(out, said) == [(4, 3), (4, 7), (8, 7)]
