"""What copied drafts teach, and what they must not teach about the drafter."""

from __future__ import annotations

import numpy as np
import pytest

from faser.engine_adapter.protocol import RequestRow, StepRecord
from faser.env.estimate.engine_state import EngineState, observe
from faser.env.spaces import Capabilities

K_MAX = 4


def record(counter: int, rows: list[RequestRow], copied: tuple[int, ...], verified: tuple[int, ...]) -> StepRecord:
    drafts = sum(row.verified for row in rows)
    return StepRecord(
        "boot", counter, counter, 0.1 * counter, 0.1, 0, 0.1, 0, 0, 0, 0, len(rows), 0, 0, len(rows), drafts, 0.1, None,
        None, 0, 0, 0, 0, [], rows, copied=copied, verified_copies=verified,
    )  # fmt: skip


def served(chance: float, *, copy_max: int = K_MAX, steps: int = 400) -> EngineState:
    """Return what was seen of two requests: the drafter's four are half accepted, a copy is by `chance`."""
    state, random = EngineState(Capabilities(k_max=K_MAX, copy_max=copy_max)), np.random.default_rng(0)
    verified: tuple[int, ...] = ()
    for counter in range(steps):
        copied = (1,) if random.random() < 0.5 else ()
        rows = []
        for handle in (1, 2):
            is_copy = handle in verified
            hits = int(np.cumprod(random.random(K_MAX) < (chance if is_copy else 0.5)).sum())
            told = (0.7,) * K_MAX if is_copy else (0.5,) * K_MAX
            rows.append(RequestRow(handle, 5, 4, 4, K_MAX, 0, hits, hits + 1, 50, False, told))
        observe(state, record(counter, rows, copied, verified))
        verified = copied
    return state


def test_copies_are_counted_per_decoding_request() -> None:
    matches = served(1.0).matches
    assert matches.share == pytest.approx(0.25, abs=0.06)
    assert matches.rows == pytest.approx(4 * matches.share)
    assert matches.gain == pytest.approx(matches.rows)


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_copies_say_nothing_about_the_drafter(chance: float) -> None:
    state = served(chance)
    assert state.population.mean[0] == pytest.approx(0.5, abs=0.08)
    assert state.acceptance()[:, 0] == pytest.approx([0.5, 0.5], abs=0.15)
    assert state.population.delivery[0] > 0.95
    misled = served(chance, copy_max=0)  # the control: taken for the drafter's, they do
    assert abs(misled.population.mean[0] - 0.5) > 0.08


def test_an_engines_own_chances_are_calibrated() -> None:
    slopes, intercepts = served(0.95, steps=1500).matches.curve()
    chance = 1 / (1 + np.exp(-(intercepts + slopes * np.log(0.7 / 0.3))))
    assert chance == pytest.approx([0.95] * K_MAX, abs=0.04)


def test_where_nobody_copies_any_more_their_share_fades() -> None:
    state = served(1.0)
    for counter in range(400, 900):
        rows = [RequestRow(handle, 1, 0, 0, 0, 0, 0, 1, 50, False) for handle in (1, 2)]
        observe(state, record(counter, rows, (), ()))
    assert state.matches.share < 0.01
