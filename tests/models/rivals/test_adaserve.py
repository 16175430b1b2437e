"""AdaServe's order: each request gets the fewest drafts that keep it in time, and who cannot be kept is given up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from faser.engine_adapter.arrays import Floats, Ints
from faser.models.rivals.adaserve import SETTLE_STEPS, Needs, in_time


@dataclass
class Imagined:
    """A forecast: each draft token brings half a token and takes a fifth of a second, the step itself one."""

    requests: int
    longest: int = 4

    @property
    def tokens(self) -> Floats:
        """Return tokens by length."""
        return np.tile(1.0 + 0.5 * np.arange(self.longest + 1), (self.requests, 1))

    def step_s(self, lengths: Ints) -> float:
        """Return the seconds of a step."""
        return 1.0 + 0.2 * float(lengths.sum())


def found(wished: list[int], tpot_s: list[float], slack: list[float]) -> tuple[list[int], list[bool]]:
    """Return lengths, and who gets what it needs."""
    needs = Needs(np.array(tpot_s), np.array(slack))
    lengths, saved = in_time(Imagined(len(wished)), needs, np.array(wished))  # type: ignore[arg-type]
    return lengths.tolist(), saved.tolist()


def test_without_objectives_the_wish_stands() -> None:
    """And nobody is saved."""
    assert found([2, 0], [np.inf, np.inf], [np.inf, np.inf]) == ([2, 0], [False, False])


def test_each_gets_the_fewest_drafts_that_bring_what_the_longer_step_needs() -> None:
    """0.9 s a token: one draft token makes it 1.2 s for 1.5 tokens, enough. Beside two of another's it takes two."""
    assert found([0, 0], [0.9, np.inf], [0.0, np.inf]) == ([1, 0], [True, False])
    assert found([0, 2], [0.9, np.inf], [0.0, np.inf]) == ([2, 2], [True, False])


def test_who_is_ahead_needs_less_and_who_is_behind_more() -> None:
    """A token each SETTLE_STEPS."""
    assert found([0], [0.9], [SETTLE_STEPS]) == ([0], [True])
    assert found([0], [0.9], [-SETTLE_STEPS / 4.0]) == ([2], [True])


def test_who_cannot_be_in_time_is_given_up() -> None:
    """It keeps its wish."""
    assert found([1, 0], [0.1, np.inf], [0.0, np.inf]) == ([1, 0], [False, False])
