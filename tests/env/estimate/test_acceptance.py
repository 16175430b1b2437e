"""Acceptance estimates: what counts as a trial, convergence, shrinkage and fading."""

from __future__ import annotations

import numpy as np
import pytest

from faser.engine_adapter.arrays import Floats
from faser.env.estimate.acceptance import FIRST_GUESS, Population, count_trials, shrink

TRUE = np.array([0.8, 0.6, 0.5, 0.4])


@pytest.mark.parametrize(
    ("verified", "pruned", "accepted", "trials", "successes"),
    [
        (0, 0, 0, [0, 0, 0, 0], [0, 0, 0, 0]),
        (3, 0, 3, [1, 1, 1, 0], [1, 1, 1, 0]),
        (3, 0, 1, [1, 1, 0, 0], [1, 0, 0, 0]),
        (3, 0, 0, [1, 0, 0, 0], [0, 0, 0, 0]),
        (4, 2, 3, [1, 1, 1, 0], [1, 1, 1, 0]),  # the fourth left untested
        (4, 4, 0, [1, 0, 0, 0], [0, 0, 0, 0]),  # the last token's row still tests the first
        (2, 9, 2, [0, 0, 0, 0], [0, 0, 0, 0]),  # nonsense counts for nothing
        (9, 0, 9, [1, 1, 1, 1], [1, 1, 1, 1]),
    ],
)
def test_a_position_is_tried_when_the_one_before_was_accepted(
    verified: int, pruned: int, accepted: int, trials: list[int], successes: list[int]
) -> None:
    tried, hit = count_trials(np.array([verified]), np.array([pruned]), np.array([accepted]), 4)
    assert tried[0].tolist() == trials
    assert hit[0].tolist() == successes


def draw(random: np.random.Generator, chance: Floats, requests: int) -> tuple[Floats, Floats]:
    accepted = np.cumprod(random.random((requests, len(TRUE))) < chance, axis=1).sum(axis=1)
    drafts = np.full(requests, len(TRUE))
    return count_trials(drafts, np.zeros(requests, np.int64), accepted, len(TRUE))


def learn(
    population: Population, trials: Floats, successes: Floats, known: tuple[Floats, Floats] | None = None
) -> None:
    nothing = np.zeros(len(trials), np.int64)
    population.learn(trials, successes, known or (trials, successes), nothing, nothing)


def test_the_population_converges_per_position() -> None:
    random, population = np.random.default_rng(0), Population(len(TRUE))
    for _ in range(200):
        learn(population, *draw(random, TRUE, 16))
    assert np.abs(population.mean - TRUE).max() < 0.06
    assert population.deviation.max() < 0.05


def test_before_evidence_the_first_guess_holds_with_wide_doubt() -> None:
    population = Population(4)
    assert population.mean.tolist() == [FIRST_GUESS] * 4
    assert population.deviation.min() > 0.2


def test_doubt_returns_while_nothing_is_tried() -> None:
    random, population = np.random.default_rng(0), Population(len(TRUE))
    for _ in range(100):
        learn(population, *draw(random, TRUE, 16))
    sure = population.deviation[0]
    for _ in range(3000):
        learn(population, np.zeros((1, 4)), np.zeros((1, 4)))
    assert population.deviation[0] > 4 * sure


def test_the_population_follows_a_change() -> None:
    random, population = np.random.default_rng(0), Population(len(TRUE))
    for chance in (TRUE, TRUE * 0.3):
        for _ in range(400):
            learn(population, *draw(random, chance, 16))
    assert abs(population.mean[0] - 0.24) < 0.06


def learn_levels(levels: Floats) -> tuple[Population, Floats, Floats]:
    random, population = np.random.default_rng(1), Population(len(TRUE))
    trials, successes = np.zeros((2, len(levels), len(TRUE)))
    for _ in range(60):
        tried, hit = draw(random, levels[:, None] * TRUE, len(levels))
        trials, successes = trials * 0.98 + tried, successes * 0.98 + hit
        learn(population, tried, hit, (trials, successes))
    return population, trials, successes


def test_alike_requests_are_shrunk_together_and_unlike_ones_are_not() -> None:
    alike, *counts = learn_levels(np.ones(32))
    spread_alike = shrink(counts[1], counts[0], alike.mean, alike.level_variance)[:, 0].std()
    unlike, *counts = learn_levels(np.repeat([0.4, 1.2], 16))
    estimates = shrink(counts[1], counts[0], unlike.mean, unlike.level_variance)[:, 0]
    assert unlike.level_variance > 5 * alike.level_variance
    assert spread_alike < 0.04
    assert abs(estimates[:16].mean() - 0.32) < 0.08
    assert abs(estimates[16:].mean() - 0.96) < 0.1


def test_delivery_is_the_share_of_allowed_drafts_that_come() -> None:
    population = Population(3)
    for _ in range(200):
        nothing = np.zeros((4, 3))
        population.learn(nothing, nothing, (nothing, nothing), np.array([3, 3, 3, 3]), np.array([3, 0, 0, 1]))
    assert population.delivery == pytest.approx([0.5, 0.25, 0.25], abs=0.02)
