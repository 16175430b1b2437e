"""The gate finds out where pruning pays, keeps it off elsewhere, and notices when that changes."""

from __future__ import annotations

import random

import pytest

from faser.engine_adapter.gate import REPROBE_STEPS, Gate


def serve(gate: Gate, steps: int, gain: float, requests: int = 16, noise: float = 0.1, seed: int = 1) -> list[bool]:
    """Run steps whose pruned time per token is `gain` shorter; return which were pruned."""
    chance = random.Random(seed)
    pruned = []
    for _ in range(steps):
        is_on = gate.ask(requests)
        tokens = sum(chance.randint(1, 4) for _ in range(requests))
        time_s = 0.1 * (1.0 - gain * is_on) * chance.uniform(1.0 - noise, 1.0 + noise)
        gate.note(requests, is_on, time_s, tokens)
        pruned.append(is_on)
    return pruned


@pytest.mark.parametrize(("gain", "expected"), [(0.2, True), (-0.2, False), (0.0, False)])
def test_pruning_stays_where_it_pays_and_nowhere_else(gain: float, expected: bool) -> None:
    gate = Gate()
    serve(gate, 400, gain)
    late = serve(gate, 3000, gain, seed=2)
    share = sum(late) / len(late)
    assert share > 0.97 if expected else share < 0.03


def test_a_gain_that_is_chance_turns_pruning_on_for_next_to_no_engine() -> None:
    """Looking costs a percent and finds nothing: of sixty engines hardly any takes its luck for a gain."""
    deceived = 0
    for seed in range(60):
        gate = Gate()
        serve(gate, 150, -0.01, noise=0.3, seed=seed)
        deceived += sum(serve(gate, 200, -0.01, noise=0.3, seed=1000 + seed)) > 100
    assert deceived <= 3


def moody(gate: Gate, cost: float, steps: int, seed: int) -> float:
    """Run steps on a machine with moods and texts that get easier, for tens of steps each; return the share with it."""
    chance, used, mood, ease = random.Random(seed), 0, 1.0, 2.5
    for _ in range(steps):
        mood = chance.choice((1.0, 1.0, 1.6)) if chance.random() < 0.02 else mood
        ease = chance.uniform(1.5, 3.5) if chance.random() < 0.02 else ease
        is_on = gate.ask(4)
        gate.note(4, is_on, 0.1 * mood * (cost if is_on else 1.0), round(4 * ease * chance.uniform(0.9, 1.1)))
        used += is_on
    return used / steps


def test_what_lasts_for_tens_of_steps_is_no_evidence() -> None:
    """A loss of 2 % deceives one engine in sixty at most; step after step taken as evidence deceived one in seven."""
    assert sum(moody(Gate(), 1.02, 1500, seed) > 0.3 for seed in range(60)) <= 1


def test_a_gain_is_found_all_the_same() -> None:
    found = 0
    for seed in range(30):
        gate = Gate()
        moody(gate, 0.8, 2000, seed)
        found += moody(gate, 0.8, 1000, 100 + seed) > 0.9
    assert found >= 24


def test_rows_of_too_few_steps_are_no_evidence() -> None:
    gate = Gate()
    for step in range(600):
        gate.note(4, step % 4 < 2, 0.1, 4)
    assert gate.gain(4) is None


def test_until_it_is_known_both_are_tried() -> None:
    first = serve(Gate(), 100, 0.3)
    assert 30 < sum(first) < 70


def test_a_change_is_noticed_within_a_few_probes() -> None:
    gate = Gate()
    serve(gate, 1000, -0.3)
    serve(gate, 12 * REPROBE_STEPS, 0.5, seed=3)
    assert sum(serve(gate, 1000, 0.5, seed=4)) > 900


def test_probes_get_rarer_while_they_change_nothing() -> None:
    """Where pruning costs a third, eight steps of 512 are half a percent for ever."""
    gate = Gate()
    early = sum(serve(gate, 2 * REPROBE_STEPS, -0.3))
    serve(gate, 16 * REPROBE_STEPS, -0.3, seed=2)
    late = sum(serve(gate, 16 * REPROBE_STEPS, -0.3, seed=3))
    assert early > 96
    assert 0 < late <= 24


def test_batch_sizes_are_judged_apart() -> None:
    gate = Gate()
    for _ in range(20):
        serve(gate, 40, 0.3, requests=32)
        serve(gate, 40, -0.3, requests=4)
    assert sum(serve(gate, 300, 0.3, requests=32)) > 250
    assert sum(serve(gate, 300, -0.3, requests=4)) < 50
    measured = gate.gain(32)
    assert measured is not None
    assert measured > 0.2
    assert gate.gain(1000) is None
