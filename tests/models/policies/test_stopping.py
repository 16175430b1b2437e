"""What stop rules would give: the mean time of a few requests' steps, against every outcome counted."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from faser.models.policies.stop_rules import time_of_few

SHARES = np.array([[0.9, 0.5], [0.4, 0.1], [1.0, 1.0]])  # of drafts that keep the token at each position, by threshold
STEPS_S = np.array([10.0, 10.0, 10.0, 10.0, 15.0, 15.0, 21.0])  # by draft rows of three requests


def mean_rows(requests: int) -> np.ndarray:
    """Return (thresholds, 3) rows of a step by deepest round."""
    return requests * (1.0 + np.concatenate([np.zeros((3, 1)), SHARES.cumsum(axis=1)], axis=1))


def counted(requests: int, shares: np.ndarray, curve_s: np.ndarray) -> float:
    """Return the mean over all outcomes of every request."""
    chances = [*(1.0 - np.append(shares, 0.0))[:1], *(shares - np.append(shares, 0.0)[1:])]
    return float(
        sum(
            np.prod([chances[kept] for kept in outcome]) * curve_s[sum(outcome)]
            for outcome in product(range(len(chances)), repeat=requests)
        )
    )


@pytest.mark.parametrize("requests", [1, 2, 3])
def test_it_is_the_mean_over_all_outcomes(requests: int) -> None:
    curve_s, found = STEPS_S[: 2 * requests + 1], np.empty((3, 3))
    time_of_few(curve_s, mean_rows(requests), requests, found)
    for keep in range(3):
        for depth in range(3):
            assert found[keep, depth] == pytest.approx(counted(requests, SHARES[keep, :depth], curve_s))


def test_on_a_straight_curve_it_is_the_time_of_the_mean_rows_and_on_one_with_steps_it_is_not() -> None:
    found, rows = np.empty((3, 3)), mean_rows(3)
    straight_s = 10.0 + 2.0 * np.arange(7.0)
    time_of_few(straight_s, rows, 3, found)
    np.testing.assert_allclose(found, 10.0 + 2.0 * (rows - 3.0))
    time_of_few(STEPS_S, rows, 3, found)
    assert abs(found[0, 2] - np.interp(rows[0, 2] - 3.0, np.arange(7.0), STEPS_S)) > 0.5


def test_of_many_nothing_is_told() -> None:
    found = np.full((3, 3), -1.0)
    time_of_few(np.zeros(0), mean_rows(40), 40, found)
    assert (found == -1.0).all()
