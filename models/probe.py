"""Deliberate exploration for the price policy: when a length that is not chosen could be better, try it once.

Deterministic and paid from an account that grows by one percent of the step time, so that probing costs at most
about that; what cannot win even if everything unknown turned out well is never probed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..env.acceptance import Floats
from ..env.state import EngineState

BUDGET_SHARE = 0.01  # of the time
FIRST_CREDIT_STEPS = 10.0  # what a fresh controller may spend at once, in steps
CREDIT_CAP_STEPS = 20.0
MARGIN = 0.02  # a probe must promise this much more tokens/s
LEAST_LOSS = 0.05  # what a probe is charged at least, in its own steps
SPACING_RECORDS = 4  # looked for this often; a probe's result comes back within as many records
IDLE_SPACING_RECORDS = 16  # ... where nothing promised enough the last time


@dataclass(frozen=True, slots=True)
class Outlook:
    """What one length for the whole batch would give, (k_max + 1,) each."""

    rate: Floats  # tokens/s expected
    best_rate: Floats  # tokens/s if all unknowns turn out well
    loss_s: Floats  # seconds lost by one such step, against the rate now, if they do not


@dataclass(frozen=True, slots=True)
class Chances:
    """Acceptance of each position given that the one before was accepted, (k_max,) each."""

    mean: Floats
    deviation: Floats


class ProbeAccount:
    """Decides which length, if any, is probed in this step."""

    def __init__(self) -> None:
        self._credit_s = 0.0
        self._time_s: float | None = None
        self._next_record = SPACING_RECORDS
        self.probes = 0

    def choose(
        self,
        state: EngineState,
        requests: int,
        rate: float,
        depth: int,
        people: Chances | None = None,
        begin_s: float = 0.0,
    ) -> int | None:
        """Return the length to probe for the whole batch of `requests`, or None; `rate` is what is had now.

        :param depth: the deepest draft in force: nothing new would be learnt from it.
        :param people: what is known of the requests' acceptance; None: the state's population.
        :param begin_s: what the drafter must make up for before anything is drafted, charged to a probe.
        """
        self._earn(state)
        if state.link.records < self._next_record:
            return None
        self._next_record = state.link.records + SPACING_RECORDS
        population = state.population
        view = outlook(state, requests, rate, people or Chances(population.mean, population.deviation))
        # Against what the same population is expected to give too: a batch of weak requests is no unknown.
        bar = max(rate, float(view.rate.max())) * (1.0 + MARGIN)
        promising = view.best_rate > bar
        promising[depth] = False
        if not promising.any():
            self._next_record = state.link.records + IDLE_SPACING_RECORDS
            return None
        loss_s = view.loss_s + begin_s * (np.arange(len(view.loss_s)) > 0)
        worth = promising & (loss_s <= self._credit_s)
        if not worth.any():
            return None
        # Not the cheapest: a shallow draft that is known to be nearly as good would keep the deep ones from their turn.
        length = int(np.argmax(np.where(worth, (view.best_rate / bar - 1.0) / loss_s, -np.inf)))
        self._credit_s -= float(loss_s[length])
        self.probes += 1
        return length

    def _earn(self, state: EngineState) -> None:
        step_s = state.load.step_s
        if self._time_s is None:
            self._credit_s = FIRST_CREDIT_STEPS * step_s
        else:
            self._credit_s += BUDGET_SHARE * min(max(state.time_s - self._time_s, 0.0), 10.0 * step_s)
        self._credit_s = min(self._credit_s, CREDIT_CAP_STEPS * step_s)
        self._time_s = state.time_s


def outlook(state: EngineState, requests: int, rate: float, people: Chances) -> Outlook:
    """Return what each uniform length would give a batch of `requests`."""
    delivery = state.population.delivery
    hopeful = np.minimum(people.mean + people.deviation, 0.99)
    lengths = np.arange(state.capabilities.k_max + 1)
    drafted = requests * _running_sum(delivery)
    rows = requests + state.prompt_rows() + drafted
    least_s, most_s = state.cost.time_range_s(rows, lengths.astype(np.float64), drafted)
    prefill_s = state.cost.prefill_time_s(requests, state.prompt_rows())
    least_s, most_s = least_s - prefill_s, most_s - prefill_s
    hoped = requests * (1.0 + _running_sum(delivery * np.cumprod(hopeful)))
    expected = requests * (1.0 + _running_sum(delivery * np.cumprod(people.mean)))
    step_s = 0.5 * (least_s + most_s)
    return Outlook(expected / step_s, hoped / least_s, np.maximum(most_s - expected / rate, LEAST_LOSS * most_s))


def _running_sum(values: Floats) -> Floats:
    sums = np.zeros(len(values) + 1)
    np.cumsum(values, out=sums[1:])
    return sums
