"""The swinging load: a clock of emitted tokens, slices, the table that rivals get, and the figures from known rates."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def swing(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("swing")


@pytest.fixture(scope="module")
def report(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("swing_report")


@pytest.mark.parametrize("seed", range(5))
def test_the_load_rises_from_one_request_and_falls_to_one(swing: ModuleType, seed: int) -> None:
    arrivals = swing.arrivals_of(seed, 96)
    load = swing.running(arrivals)
    assert len(load) == sum(tokens for _, tokens in arrivals)
    assert load[0] == 1
    assert load[-1] <= 2
    assert 12 <= max(load) <= 40
    assert all(16 <= tokens <= 96 for _, tokens in arrivals)
    peak = int(np.argmax(load))
    assert 0.1 * len(load) < peak < 0.9 * len(load)


def test_a_request_comes_when_so_many_tokens_are_emitted_or_nobody_is_served(swing: ModuleType) -> None:
    # One alone for two tokens, then the second beside it; behind a gap the third comes at once.
    assert swing.running([(0.0, 4), (2.0, 2), (99.0, 2)]) == [1, 1, 2, 2, 2, 2, 1, 1]


class OneTokenEngine:
    """Gives every request a token in each step."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.loads: list[int] = []

    def add_request(self, name: str, _prompt: object, params: Any) -> None:
        """Take in a request."""
        self.left[name] = params.max_tokens

    def abort_request(self, names: list[str]) -> None:
        """Forget requests."""
        for name in names:
            del self.left[name]

    def has_unfinished_requests(self) -> bool:
        """Tell whether any is left."""
        return bool(self.left)

    def step(self) -> list[Any]:
        """Emit."""
        self.loads += [len(self.left)] * len(self.left)
        self.left = {name: left - 1 for name, left in self.left.items()}
        outputs = [
            SimpleNamespace(request_id=name, finished=not left, outputs=[SimpleNamespace(token_ids=[7])])
            for name, left in self.left.items()
        ]
        self.left = {name: left for name, left in self.left.items() if left}
        return outputs


def test_an_arm_serves_a_swing_slice_by_slice_at_the_load_that_was_meant(
    swing: ModuleType, load_script: Callable[[str], ModuleType]
) -> None:
    kind = load_script("closed_loop_arm").Engine
    arm = kind.__new__(kind)
    arm.engine, arm.held, arm.live = OneTokenEngine(), SimpleNamespace(texts={}), {}
    arm.prompts, arm.answers = [[1] * 5, [1] * 9], {0: [7] * 96, 1: [7] * 96}
    arm.sent = arm.read = 0
    arm.llm = SimpleNamespace(get_metrics=list)
    arrivals = swing.arrivals_of(3, 96)
    load = swing.running(arrivals)
    for _ in range(2):  # a second swing begins anew
        arm.engine.loads.clear()
        arm.replay([0, 1], arrivals)
        served = [arm.turn(goal) for goal in swing.slice_goals(load)]
        assert arm.engine.loads == load
        assert sum(turn["tokens"] for turn in served) == len(load)
        assert sum(turn["requests"] for turn in served) == len(arrivals) - 1  # the first is there before
        assert all(turn["steps"] for turn in served)
    arm.replay([0, 1], arrivals)
    arm.turn(swing.WHOLE)
    assert (arm.emitted, arm.live) == (len(load), {})


def test_slices_have_some_steps_each_and_end_with_the_swing(swing: ModuleType) -> None:
    load = swing.running(swing.arrivals_of(3, 96))
    goals = swing.slice_goals(load)
    assert goals[-1] == len(load)
    sizes = np.diff([0, *goals])
    for begin, size in zip([0, *goals], sizes[:-1], strict=False):
        assert size >= max(12, min(8 * load[begin], len(load) - begin))
    assert sizes[-1] >= 12
    assert swing.slice_goals([1] * 5) == [5]


def test_the_table_has_the_best_length_of_each_load(swing: ModuleType) -> None:
    rates = {
        1: {"none": [10.0, 20.0], "k1": [12.0, 24.0], "k2": [15.0, np.nan], "faser": [99.0, 99.0]},
        8: {"none": [30.0, 60.0], "k1": [33.0, 66.0], "k2": [15.0, np.nan], "faser": [99.0, 99.0]},
        32: {"none": [50.0, 60.0], "k1": [40.0, 50.0], "k2": [15.0, np.nan], "faser": [99.0, 99.0]},
    }
    measured = SimpleNamespace(
        arms=lambda: ["none", "k1", "k2", "faser"], loads=lambda: [1, 8, 32],
        rates=lambda load, is_even: {arm: np.array(values) for arm, values in rates[load].items()},
    )  # fmt: skip
    assert swing.tuned_table(measured) == [[1, 2, 2], [3, 16, 1], [17, 64, 0]]


def test_faser_is_held_against_each_rival_over_whole_swings(report: ModuleType) -> None:
    rates = {"none": [40.0, 50.0, 40.0, 9.0], "k1": [50.0, 60.0, 50.0, 90.0], "table": [52.0, 62.0, 53.0, 1.0],
             "faser": [55.0, 66.0, 55.0, 10.0]}  # fmt: skip
    turns = [
        report.Turn(
            round=round_, load=0, arm=arm, tokens_per_s=rate, seconds=50.0, slices=90, steps=900, tokens=2000,
            requests=30, draft_tokens=900, accepted_tokens=500, engine_cpu=1.0, own_cpu=1.1, other_cpu=0.0,
            steal_share=0.0, is_disturbed=round_ == 3 and arm == "none", at="",
        )
        for arm, values in rates.items() for round_, rate in enumerate(values)
    ]  # fmt: skip
    settings = report.Settings(0.0, 160, 96, 300, 1, 4, "price", "target", "ab" * 32)
    machine = report.Machine("cpu", 2, 23.5, "Linux")
    told = report.lines(report.Swings(machine, {}, ["abc"], settings, [[1, 5, 3], [6, 64, 0]], turns))
    assert "4 swings, 1 of them disturbed by other work or stolen time; cpu, commit abc." in told
    assert "| k = 1 | 50.0 | 0.60 | 1.100 (1.100 to 1.100) |" in told
    assert any(line.startswith("| best table (1-5=3,6-64=0) | 53.0 | 0.60 | 1.05") for line in told)
    assert any(line.startswith("| FASER | 55.0 | 0.60 |  |") for line in told)
    assert told[-1] == "The best of the measured lengths in hindsight: k = 1; FASER over it 1.100 (1.100 to 1.100)."
