"""The table of what each mechanism gave: from the results that are kept, nothing measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

MECHANISMS = (
    "fixed length", "confidence", "pruned verification", "drafting ahead, forced", "drafting ahead, chosen",
    "two groups", "each under its gate", "split",
)  # fmt: skip


@pytest.fixture(scope="module")
def report(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("ablation_report")


def test_every_mechanism_has_its_line(report: ModuleType) -> None:
    lines = report.table().splitlines()[2:]
    named = "\n".join(line.split(" | ")[0] for line in lines)
    for mechanism in MECHANISMS:
        assert mechanism in named
    assert all(line.count(" | ") == 3 for line in lines)


def test_loads_that_change_are_not_among_steady_ones(report: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = {load: {"over_price": ratio} for load, ratio in (("1", 1.1), ("128", 1.2), ("drift", 9.0), ("swing", 8.0))}
    told = {"policies": {"price:history": {"worlds": {"world": loads}}}}
    monkeypatch.setattr(report, "read", lambda name: told)
    assert report.steady_over_price("price:history") == [1.1, 1.2]


def test_a_mechanism_that_loses_is_told_as_one(report: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def results(name: str) -> dict[str, Any]:
        cells = [
            {"tokens_per_s": {"full": [50.0, 50.0], "confidence": [100.0, 100.0], "gate": [90.0, 90.0]}},
            {"tokens_per_s": {"confidence": [100.0, 100.0], "gate": [80.0, 80.0]}},
        ]
        return json.loads(json.dumps({"cells": cells}))  # type: ignore[no-any-return]

    monkeypatch.setattr(report, "read", results)
    (_, _, where, ended), (_, _, everywhere, pruned) = report.pruning()
    assert (where, everywhere) == ("engine, 1 of 8 batches and lengths", "engine, 2 of 8 batches and lengths")
    assert ended == "2.000 (least 2.000, most 2.000)"
    assert pruned == "0.849 (least 0.800, most 0.900)"
