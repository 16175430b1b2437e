"""How likely the target accepts the draft token at each position: per request, shrunk towards the population.

Called by env/state.py on every record. Position j counts as tried when position j-1 was accepted and j was
tested. Counts are Beta counts with forgetting; nothing here reads a clock or a random source.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FIRST_GUESS = 0.6  # before any evidence; low enough not to speculate deep, high enough to try
GUESS_TRIALS = 4.0  # what the first guess, and the position before, count for
MEMORY_TRIALS = 2000.0  # the population forgets beyond this many trials per position
UNTRIED_RECORDS = 500.0  # evidence on a position that is not tried fades over this many records
REQUEST_MEMORY_STEPS = 60.0  # a request forgets over this many of its own speculative steps, slowly otherwise
POSITION_TRIALS = 40.0  # trials at which a request's own position counts as much as its level
LEVEL_VARIANCE = 0.04  # first guess of how much requests' levels differ (relative, squared)
LEVEL_MEMORY_RECORDS = 300.0


def count_trials(verified: Ints, pruned: Ints, accepted: Ints, k_max: int) -> tuple[Floats, Floats]:
    """Return (trials, successes), each (n, k_max) of 0 or 1, of one step's rows.

    The first pruned draft token is still tested by the row before it, the ones behind it are not.
    """
    tested = verified - np.maximum(pruned - 1, 0) if pruned.any() else verified
    hits = np.minimum(accepted, tested)
    first = _first_positions(k_max)
    return first.take(np.minimum(tested, hits + 1), axis=0, mode="clip"), first.take(hits, axis=0, mode="clip")


@cache
def _first_positions(k_max: int) -> Floats:
    """Return (k_max + 1, k_max): row m has 1 at the first m positions. Looking rows up beats comparing positions."""
    return np.tri(k_max + 1, k_max, -1)


@dataclass(slots=True)
class Population:
    """Acceptance over all requests, and how often the drafter delivers what it was allowed, per position."""

    k_max: int
    trials: Floats = field(init=False)  # (k_max,)
    successes: Floats = field(init=False)
    offered: Floats = field(init=False)  # times position j was allowed
    delivered: Floats = field(init=False)  # times it was drafted
    mean: Floats = field(init=False)  # (k_max,) conditional acceptance
    excess: float = LEVEL_VARIANCE * 100.0  # squared deviation of requests beyond chance, running sum
    leverage: float = 100.0  # ... over what it is measured with

    def __post_init__(self) -> None:
        self.trials, self.successes, self.offered, self.delivered = np.zeros((4, self.k_max))
        self.mean = np.full(self.k_max, FIRST_GUESS)

    def learn(self, trials: Floats, successes: Floats) -> None:
        """Add one step's trials, (n, k_max) each."""
        tried = trials.sum(axis=0)
        if not tried.any():
            self.trials *= 1.0 - 1.0 / UNTRIED_RECORDS
            self.successes *= 1.0 - 1.0 / UNTRIED_RECORDS
            self.mean = self._chain()
            return
        keep = np.where(tried > 0.0, 1.0, 1.0 - 1.0 / UNTRIED_RECORDS)
        keep = np.minimum(keep, MEMORY_TRIALS / (self.trials + tried + 1.0))
        self.trials = self.trials * keep + tried
        self.successes = self.successes * keep + successes.sum(axis=0)
        self.mean = self._chain()

    def learn_delivery(self, allowed: Ints, drafted: Ints) -> None:
        """Add what the drafter delivered, (n,) draft tokens each, of requests that were allowed any."""
        positions = np.arange(self.k_max)
        offered = positions < allowed[:, None]
        added = offered.sum(axis=0)
        keep = np.minimum(1.0, MEMORY_TRIALS / (self.offered + added + 1.0))
        self.offered = self.offered * keep + added
        self.delivered = self.delivered * keep + (offered & (positions < drafted[:, None])).sum(axis=0)

    @property
    def delivery(self) -> Floats:
        """(k_max,) share of allowed draft tokens that the drafter really proposes, e.g. low for n-grams."""
        return (self.delivered + GUESS_TRIALS) / (self.offered + GUESS_TRIALS)

    @property
    def deviation(self) -> Floats:
        """(k_max,) standard deviation of `mean`; large where little or only old evidence exists."""
        return np.sqrt(self.mean * (1.0 - self.mean) / (self.trials + GUESS_TRIALS))

    def learn_levels(self, trials: Floats, successes: Floats) -> None:
        """Measure how much requests differ beyond chance, from their counts, (n, k_max) each."""
        expected, chance = _expectation(trials, self.mean)
        surplus = float((np.square(successes.sum(axis=1) - expected) - chance).sum())
        keep = 1.0 - 1.0 / LEVEL_MEMORY_RECORDS
        self.excess = self.excess * keep + surplus
        self.leverage = self.leverage * keep + float(expected @ expected)

    @property
    def level_variance(self) -> float:
        """How much requests' levels differ (relative, squared); 0: all alike, their history is only noise."""
        return min(max(self.excess / max(self.leverage, 1e-9), 1e-4), 1.0)

    def _chain(self) -> Floats:
        """Each position's prior is the position before it: deeper positions are rarely reached."""
        guess, means = FIRST_GUESS, []
        for tried, hit in zip(self.trials.tolist(), self.successes.tolist(), strict=True):
            guess = (hit + GUESS_TRIALS * guess) / (tried + GUESS_TRIALS)
            means.append(min(max(guess, 0.005), 0.995))
        return np.array(means)


def shrink(successes: Floats, trials: Floats, population: Floats, level_variance: float) -> Floats:
    """Return (n, k_max) conditional acceptance of each request from its own counts, shrunk twice.

    First a level for the request: its successes over what the population would have had, trusted as far as
    levels are known to differ (empirical Bayes). Without that the longest drafts go to the luckiest requests.
    Then its own positions around that level.
    """
    expected, chance = _expectation(trials, population)
    evidence = level_variance * expected * expected + chance + 1e-9
    level = 1.0 + (successes.sum(axis=1) - expected) * (level_variance * expected / evidence)
    prior = _chances(level[:, None] * population)
    return _chances((successes + POSITION_TRIALS * prior) / (trials + POSITION_TRIALS))


def _chances(values: Floats) -> Floats:
    """Keep away from 0 and 1; np.clip takes several times as long."""
    kept: Floats = np.minimum(np.maximum(values, 0.005), 0.995)
    return kept


def _expectation(trials: Floats, population: Floats) -> tuple[Floats, Floats]:
    """Return (n,) successes that the population would have had in these trials, and their variance."""
    return trials @ population, trials @ (population * (1.0 - population))


def deviation(mean: Floats, trials: Floats) -> Floats:
    """Return the standard deviation of `shrink`'s estimates, same shape."""
    return np.sqrt(mean * (1.0 - mean) / (trials + POSITION_TRIALS))
