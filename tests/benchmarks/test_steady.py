"""Rates on a disturbed machine: bursts and the luck of the text are left out, an arm's own cost is not."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import faser

TURNS = 8


@pytest.fixture(scope="module")
def steady() -> Iterator[ModuleType]:
    path = Path(faser.__file__).parent / "benchmarks" / "steady.py"
    spec = importlib.util.spec_from_file_location("steady", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["steady"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["steady"]


def make_steps(steady: ModuleType, cost: float, chance: Random) -> list[Any]:
    """Two kinds in slices of seven steps, one dearer by `cost`; every third second or so the machine is slower."""
    steps, is_slow = [], False
    for number in range(TURNS * 140):
        kind = "gate" if number // 7 % 2 else "confidence"
        is_slow = chance.random() < (0.9 if is_slow else 0.05)
        rows = chance.randint(8, 32)
        noise = chance.gauss(0.0, 0.02) + (0.35 if is_slow else 0.0)
        took_s = 0.01 * rows**0.7 * math.exp(noise) * (cost if kind == "gate" else 1.0)
        steps.append(steady.Step(kind, number // 140, (math.log(rows),), took_s))
    return steps


def make_answers(steady: ModuleType, chance: Random, extra_steps: int = 0) -> dict[str, list[Any]]:
    """Both arms need the same steps, but that one needs some more of them."""
    found: dict[str, list[Any]] = {"confidence": [], "gate": []}
    for turn in range(TURNS):
        works = [(math.log(chance.randint(8, 32)),) for _ in range(100)]
        for arm, of_arm in found.items():
            more = works[:extra_steps] if arm == "gate" else []
            of_arm.append(steady.Answers(tuple(steady.Step(arm, turn, work) for work in works + more), 400))
    return found


def log_ratios(rates: dict[str, list[float]]) -> Any:
    return np.log(rates["gate"]) - np.log(rates["confidence"])


@pytest.mark.parametrize("cost", [0.97, 1.0, 1.02])
def test_a_small_difference_shows_through_bursts(steady: ModuleType, cost: float) -> None:
    chance = Random(5)
    found = log_ratios(steady.steady_rates(make_steps(steady, cost, chance), make_answers(steady, chance)))
    assert found.mean() == pytest.approx(-math.log(cost), abs=0.006)


def test_the_spread_is_the_error_of_the_mean(steady: ModuleType) -> None:
    means, said = [], []
    for seed in range(30):
        chance = Random(seed)
        found = log_ratios(steady.steady_rates(make_steps(steady, 1.0, chance), make_answers(steady, chance)))
        means.append(found.mean())
        said.append(found.std(ddof=1) / math.sqrt(TURNS))
    assert 0.6 < np.mean(said) / np.std(means) < 1.7


def test_means_of_the_same_steps_would_not_show_it(steady: ModuleType) -> None:
    means, sharp = [], []
    for seed in range(30):
        steps = make_steps(steady, 1.0, Random(seed))
        logs = {kind: np.mean([math.log(one.time_s) for one in steps if one.kind == kind]) for kind in ARMS}
        means.append(logs["gate"] - logs["confidence"])
        answers = make_answers(steady, Random(seed))
        sharp.append(log_ratios(steady.steady_rates(steps, answers)).mean())
    assert np.std(means) > 3.0 * np.std(sharp)


ARMS = ("confidence", "gate")


def test_more_steps_for_as_many_tokens_are_counted_exactly(steady: ModuleType) -> None:
    chance = Random(5)
    steps = make_steps(steady, 1.0, chance)
    few = log_ratios(steady.steady_rates(steps, make_answers(steady, Random(6)))).mean()
    many = log_ratios(steady.steady_rates(steps, make_answers(steady, Random(6), extra_steps=4))).mean()
    assert few - many == pytest.approx(math.log(1.04), abs=0.004)


def test_a_kind_that_was_not_timed_is_told(steady: ModuleType) -> None:
    answers = {"gate": [steady.Answers((steady.Step("gate, looking", 0, (2.0,)),), 4)]}
    with pytest.raises(ValueError, match="'gate, looking' was answered with, and none was timed"):
        steady.steady_rates([steady.Step("gate", -1, (2.0,), 0.1)], answers)
