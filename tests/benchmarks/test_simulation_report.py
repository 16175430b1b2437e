"""Tables and sentences of simulated worlds: from a made-up file, so that what is told can be reckoned by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("simulation_report")


@pytest.fixture
def report(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    cells = {"4": (0.98, 1.2), "drift": (1.0, 1.01), "swing": (1.1, 1.06)}
    worlds = {"one": _loads(cells, 0.0), "two": _loads(cells, 0.02)}
    policy = {
        "worlds": worlds, "envelope_ratio_mean": 1.02, "envelope_ratio_min": 0.98, "gap_closed": 0.2,
        "over_price": 0.9, "over_price_ci": [0.8, 1.0],
    }  # fmt: skip
    told = {"policies": dict.fromkeys((*script.SHOWN_CHANGING, *script.KNOWN), policy)}
    monkeypatch.setattr(script, "read", lambda name: told)
    return script


def _loads(cells: dict[str, tuple[float, float]], more: float) -> dict[str, Any]:
    return {
        load: {
            "envelope_ratio": envelope, "envelope_ci": [envelope - 0.05, envelope + 0.05],
            "over_best_fixed": fixed + more, "over_best_fixed_ci": [fixed - 0.01, fixed + 0.03],
        }
        for load, (envelope, fixed) in cells.items()
    }  # fmt: skip


def test_loads_that_change_are_told_by_world_and_on_average(report: ModuleType) -> None:
    lines = report.policies_changing().splitlines()
    assert lines[0] == "| load | policy | one | two | mean |"
    assert "| swing | `price` | 1.060 ± 0.020 | 1.080 ± 0.020 | 1.070 |" in lines
    assert "| drift | `price` | 1.010 ± 0.020 | 1.030 ± 0.020 | 1.020 |" in lines


def test_steady_loads_and_those_that_swing_and_drift_are_told_apart_in_words(report: ModuleType) -> None:
    told = report.policies_said()
    assert "below 0.99 at 2 of 6 points; the lowest is 0.980 ± 0.050 (one, 4 requests)." in told
    assert "is 1.070 times on average where the load swings (1.06 to 1.08), 1.020 times on average where the" in told
    assert "the load drifts (1.01 to 1.03)" in told
