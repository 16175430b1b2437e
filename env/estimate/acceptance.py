"""How likely the target accepts the draft token at each position: per request, shrunk towards the population.

Called by env/estimate/engine_state.py on every record. Position j counts as tried when position j-1 was accepted and
j was tested. Counts are Beta counts with forgetting; nothing here reads a clock or a random source.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...engine_adapter.arrays import Bools, Floats, Ints
from ...engine_adapter.compiled import compiled

FIRST_GUESS = 0.6  # before any evidence; low enough not to speculate deep, high enough to try
GUESS_TRIALS = 4.0  # what the first guess, and the position before, count for
MEMORY_TRIALS = 2000.0  # the population forgets beyond this many trials per position
UNTRIED_RECORDS = 500.0  # evidence on a position that is not tried fades over this many records
REQUEST_MEMORY_STEPS = 60.0  # a request forgets over this many of its own speculative steps, slowly otherwise
POSITION_TRIALS = 40.0  # trials at which a request's own position counts as much as its level
LEVEL_VARIANCE = 0.04  # first guess of how much requests' levels differ (relative, squared)
LEVEL_TRIALS = 100.0  # what that guess counts for
LEVEL_MEMORY_RECORDS = 300.0  # ... and over how many records what was measured of it fades
LEAST_CHANCE, LARGEST_CHANCE = 0.005, 0.995  # no draft token is sure to be accepted, or to be rejected


_SUMS = 5
_TRIED, _HIT, _OFFERED, _DELIVERED, _MEAN = range(_SUMS)  # rows of Population's sums


@compiled
def count_trials(verified: Ints, pruned: Ints, accepted: Ints, k_max: int) -> tuple[Floats, Floats]:
    """Return (trials, successes), each (n, k_max) of 0 or 1, of one step's rows.

    The first pruned draft token is still tested by the row before it, the ones behind it are not.
    """
    n = len(verified)
    trials, successes = np.zeros((n, k_max)), np.zeros((n, k_max))
    for i in range(n):
        tested = verified[i] - max(pruned[i] - 1, 0)
        hits = min(accepted[i], tested)
        for j in range(min(tested, hits + 1, k_max)):
            trials[i, j] = 1.0
        for j in range(min(hits, k_max)):
            successes[i, j] = 1.0
    return trials, successes


@dataclass(slots=True)
class Population:
    """Acceptance over all requests, and how often the drafter delivers what it was allowed, per position."""

    k_max: int
    excess: float = LEVEL_VARIANCE * LEVEL_TRIALS  # squared deviation of requests beyond chance, running sum
    leverage: float = LEVEL_TRIALS  # ... over what it is measured with
    _sums: Floats = field(init=False)  # (_SUMS, k_max)

    def __post_init__(self) -> None:
        self._sums = np.zeros((_SUMS, self.k_max))
        self._sums[_MEAN] = FIRST_GUESS

    @property
    def trials(self) -> Floats:
        """(k_max,) how often each position was tried, with forgetting."""
        row: Floats = self._sums[_TRIED]
        return row

    @property
    def mean(self) -> Floats:
        """(k_max,) conditional acceptance; a view."""
        row: Floats = self._sums[_MEAN]
        return row

    def learn(
        self, trials: Floats, successes: Floats, known: tuple[Floats, Floats], allowed: Ints, drafted: Ints
    ) -> None:
        """Add one step.

        :param trials: ... and `successes`: of its rows, (n, k_max) each
        :param known: trials and successes of all live requests with these among them, (m, k_max) each
        :param allowed: ... and `drafted`: what the drafter was asked for and delivered, (n,) draft tokens each
        """
        surplus, leverage = _learn(self._sums, trials, successes, *known, allowed, drafted)
        keep = 1.0 - 1.0 / LEVEL_MEMORY_RECORDS
        self.excess = self.excess * keep + surplus
        self.leverage = self.leverage * keep + leverage

    @property
    def delivery(self) -> Floats:
        """(k_max,) share of allowed draft tokens that the drafter really proposes, e.g. low for n-grams."""
        share: Floats = (self._sums[_DELIVERED] + GUESS_TRIALS) / (self._sums[_OFFERED] + GUESS_TRIALS)
        return share

    @property
    def deviation(self) -> Floats:
        """(k_max,) standard deviation of `mean`; large where little or only old evidence exists."""
        return np.sqrt(self.mean * (1.0 - self.mean) / (self.trials + GUESS_TRIALS))

    @property
    def level_variance(self) -> float:
        """How much requests' levels differ (relative, squared); 0: all alike, their history is only noise."""
        return min(max(self.excess / max(self.leverage, 1e-9), 1e-4), 1.0)


@compiled
def _learn(
    sums: Floats, trials: Floats, successes: Floats, known_trials: Floats, known_successes: Floats, allowed: Ints,
    drafted: Ints,
) -> tuple[float, float]:  # fmt: skip
    """Add a step, and return how much requests differ beyond chance."""
    _add_trials(sums, trials, successes)
    _add_delivery(sums, allowed, drafted)
    return _level_sums(known_trials, known_successes, sums[_MEAN])


@compiled
def _add_trials(sums: Floats, trials: Floats, successes: Floats) -> None:
    """Forget, add, and chain the means: each position's prior is the one before it, deeper ones are rarely reached."""
    n, k_max = trials.shape
    is_tried = False
    for i in range(n):
        for j in range(k_max):
            is_tried = is_tried or trials[i, j] != 0.0
    guess = FIRST_GUESS
    for j in range(k_max):
        tried = hit = 0.0
        for i in range(n):
            tried += trials[i, j]
            hit += successes[i, j]
        keep = 1.0 if tried > 0.0 else 1.0 - 1.0 / UNTRIED_RECORDS
        if is_tried:
            keep = min(keep, MEMORY_TRIALS / (sums[_TRIED, j] + tried + 1.0))
        sums[_TRIED, j] = sums[_TRIED, j] * keep + tried
        sums[_HIT, j] = sums[_HIT, j] * keep + hit
        guess = (sums[_HIT, j] + GUESS_TRIALS * guess) / (sums[_TRIED, j] + GUESS_TRIALS)
        sums[_MEAN, j] = min(max(guess, LEAST_CHANCE), LARGEST_CHANCE)


@compiled
def _add_delivery(sums: Floats, allowed: Ints, drafted: Ints) -> None:
    most = 0
    for i in range(len(allowed)):
        most = max(most, allowed[i])
    if most <= 0:
        return
    for j in range(sums.shape[1]):
        offered = delivered = 0.0
        for i in range(len(allowed)):
            if j < allowed[i]:
                offered += 1.0
                delivered += 1.0 if j < drafted[i] else 0.0
        keep = min(1.0, MEMORY_TRIALS / (sums[_OFFERED, j] + offered + 1.0))
        sums[_OFFERED, j] = sums[_OFFERED, j] * keep + offered
        sums[_DELIVERED, j] = sums[_DELIVERED, j] * keep + delivered


@compiled
def _level_sums(trials: Floats, successes: Floats, population: Floats) -> tuple[float, float]:
    """Return how far requests are from the population, squared, beyond chance, and what that is measured with."""
    surplus = leverage = 0.0
    for i in range(len(trials)):
        expected, chance, had = _expectation(trials[i], successes[i], population)
        surplus += (had - expected) * (had - expected) - chance
        leverage += expected * expected
    return surplus, leverage


@compiled
def _expectation(trials: Floats, successes: Floats, population: Floats) -> tuple[float, float, float]:
    """Return the successes that the population would have had in a request's trials, their variance, and its own."""
    expected = chance = had = 0.0
    for j in range(len(trials)):
        expected += trials[j] * population[j]
        chance += trials[j] * (population[j] * (1.0 - population[j]))
        had += successes[j]
    return expected, chance, had


@compiled
def shrink(successes: Floats, trials: Floats, population: Floats, level_variance: float) -> Floats:
    """Return (n, k_max) conditional acceptance of each request from its own counts, shrunk twice.

    First a level for the request: its successes over what the population would have had, trusted as far as
    levels are known to differ (empirical Bayes). Without that the longest drafts go to the luckiest requests.
    Then its own positions around that level.
    """
    return shrink_some(successes, trials, population, level_variance, np.ones(len(trials), np.bool_))


@compiled
def shrink_some(successes: Floats, trials: Floats, population: Floats, level_variance: float, chosen: Bools) -> Floats:
    """Return the same of the chosen requests, (n,); the rows of others are 0. Most of a long queue only wait."""
    chances = np.zeros(trials.shape)
    for i in range(len(trials)):
        if not chosen[i]:
            continue
        tried = 0.0
        for j in range(len(population)):
            tried += trials[i, j]
            chances[i, j] = min(max(population[j], LEAST_CHANCE), LARGEST_CHANCE)
        if tried == 0.0:  # as all that only wait
            continue
        expected, chance, had = _expectation(trials[i], successes[i], population)
        evidence = level_variance * expected * expected + chance + 1e-9
        level = 1.0 + (had - expected) * (level_variance * expected / evidence)
        for j in range(len(population)):
            prior = min(max(level * population[j], LEAST_CHANCE), LARGEST_CHANCE)
            value = (successes[i, j] + POSITION_TRIALS * prior) / (trials[i, j] + POSITION_TRIALS)
            chances[i, j] = min(max(value, LEAST_CHANCE), LARGEST_CHANCE)
    return chances
