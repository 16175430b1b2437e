"""The table of a replayed trace compares FASER with each arm alone, round by round."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from faser.controller.bench_machine import machine_facts
from faser.controller.bench_result import Results, Settings, Turn

SETTINGS = Settings("target", "ab" * 32, "price", 4, 1, 1.5, 96, 300, 0, 3, ())


@pytest.fixture(scope="module")
def trace(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("bench_trace")


def turn(arm: str, round_: int, rate: float, tpot_ms: float, good: float | None = 0.5, load: str = "azure") -> Turn:
    return Turn(
        phase="main", load=load, kinds="all", round=round_, arm=arm, rate=rate, tokens_per_s=2.0 * rate, seconds=60.0,
        tokens=400, requests=4, failed=0, draft_tokens=0, accepted_tokens=0, cpu_s=2.0, other_cpu=0.0, steal_share=0.0,
        load_average=1.0, disturbed="", at="", mean_tpot_ms=tpot_ms, good_share=good,
    )  # fmt: skip


def test_each_arm_has_its_own_ratio(trace: ModuleType) -> None:
    turns = [turn("none", at, 10.0 * level, 40.0) for at, level in enumerate((1.0, 2.0, 3.0))]
    turns += [turn("k1", at, 5.0 * level, 80.0, None) for at, level in enumerate((1.0, 2.0, 3.0))]
    turns += [turn("faser", at, 11.0 * level, 20.0) for at, level in enumerate((1.0, 2.0, 3.0))]
    results = Results(machine_facts(), {}, "abc1234", SETTINGS, turns=turns)
    said, _, _, _, none, fixed, ours = trace.lines(results, "azure")
    assert said.startswith("Rounds: 3, 0 of them disturbed")
    assert none.split(" | ") == [
        "| no speculation", "20.0", "50%", "40.0", "40.0", "1.100 (1.100 to 1.100)", "2.000 (2.000 to 2.000) |",
    ]  # fmt: skip
    assert fixed.split(" | ")[2] == ""
    assert fixed.split(" | ")[5].startswith("2.200 (")
    assert ours.split(" | ")[5:] == ["", " |"]
