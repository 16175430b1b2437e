"""The gate of drafting rounds believes clocks, however late they come, and never waits for them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from faser.engine_adapter.drafting import rounds_gate as module
from faser.engine_adapter.drafting.rounds_gate import MOST_UNTOLD, RoundsGate, rounds_gate

REQUESTS, ROUNDS = 8, 3


class Clock:
    """A device that is past a step's rounds so many steps later."""

    def __init__(self, lateness: int = 0) -> None:
        self.step, self.lateness = 0, lateness


class FakeEvents:
    """The events of one step on such a device."""

    def __init__(self, clock: Clock, is_late: bool = False) -> None:
        self._clock, self._step, self.took_s, self.is_late = clock, clock.step, 0.0, is_late
        self.marked: list[str] = []

    def mark(self, moment: str) -> None:
        self.marked.append(moment)

    def seconds(self, first: str, last: str) -> float:
        assert (first, last) == ("rounds", "drafted")
        is_past = self._clock.step > self._step + self._clock.lateness
        return self.took_s if is_past and first in self.marked else 0.0


def serve(gate: RoundsGate, clock: Clock, steps: int, gain: float, is_late: bool = False) -> float:
    """Run steps whose ragged rounds are `gain` shorter; return the share of those that were ragged."""
    chance, ragged = random.Random(clock.step), 0
    for _ in range(steps):
        clock.step += 1
        events: Any = FakeEvents(clock, is_late)
        rounds = chance.randint(1, ROUNDS)
        is_ragged = gate.ask(REQUESTS, rounds, events)
        events.took_s = 0.001 * rounds * (1.0 - gain * is_ragged) * chance.uniform(0.9, 1.1)
        ragged += is_ragged
    return ragged / steps


@pytest.mark.parametrize("lateness", [0, 1, 2])
@pytest.mark.parametrize(("gain", "expected"), [(0.2, True), (0.0, False), (-0.2, False)])
def test_rows_leave_where_that_was_measured_to_be_faster(lateness: int, gain: float, expected: bool) -> None:
    gate, clock = RoundsGate(), Clock(lateness)
    serve(gate, clock, 400, gain)
    share = serve(gate, clock, 3000, gain)
    assert share > 0.97 if expected else share < 0.03


def test_rounds_beside_a_verification_are_not_compared_with_those_in_turn() -> None:
    """Each kind is believed for itself: here rows that leave are worth it in turn, and not beside a verification."""
    gate, clock = RoundsGate(), Clock(1)
    for _ in range(60):
        serve(gate, clock, 12, 0.2)
        serve(gate, clock, 12, -0.2, is_late=True)
    assert serve(gate, clock, 1000, 0.2) > 0.9
    assert serve(gate, clock, 1000, -0.2, is_late=True) < 0.1


def test_a_time_that_never_comes_is_forgotten() -> None:
    gate, clock = RoundsGate(), Clock()
    for _ in range(3):
        gate.ask(REQUESTS, ROUNDS, FakeEvents(clock))  # type: ignore[arg-type]  # took no time
    serve(gate, clock, 400, 0.2)
    assert serve(gate, clock, 1000, 0.2) > 0.97
    assert len(gate._untold) <= MOST_UNTOLD


def test_without_clocks_rows_leave() -> None:
    gate = RoundsGate()
    assert all(gate.ask(REQUESTS, ROUNDS, None) for _ in range(50))


@pytest.mark.parametrize(
    ("setting", "has_peers", "is_gated"), [("auto", False, True), ("always", False, False), ("auto", True, False)]
)
def test_ranks_that_would_choose_differently_do_not_choose(
    setting: str, has_peers: bool, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASER_RAGGED", setting)
    monkeypatch.setattr(module, "has_peers", lambda: has_peers)
    assert (rounds_gate() is not None) == is_gated
