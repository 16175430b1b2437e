"""Deliberate exploration for the price policy: when a length that is not chosen could be better, try it once.

Deterministic and paid from an account that grows by one percent of the step time at most, and by less with every probe
that changed nothing, and is topped up for batches of a new size; what cannot win even if everything unknown turned out
well is never probed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...engine_adapter.arrays import Floats
from ...engine_adapter.compiled import compiled
from ...env.estimate.planning_view import PlanningView

BUDGET_SHARE = 0.01  # of the time: what probing may cost
FIRST_CREDIT_STEPS = 10.0  # what a fresh controller may spend at once, in steps
# ... and on batches of a size that is new to it: what drafting costs there is a guess, a slow moment in its first steps
# is believed until it is measured again, and with every step without drafts that gets dearer. With ten, probes while a
# batch fills up made later ones rare.
NEW_SIZE_CREDIT_STEPS = 4.0
CREDIT_CAP_STEPS = 20.0  # is saved up at most
LONGEST_STEP = 10.0  # usual steps: time between two records earns up to that, an idle engine earns nothing
LARGEST_CHANCE = 0.99  # that is hoped for
MARGIN = 0.02  # a probe must promise this much more tokens/s
HALVING_PROBES = 4  # of batches of a size: after so many that changed nothing half as much is spent
LEAST_ZEAL = 1.0 / 16.0  # of the budget is spent at least: what is worth drafting for may change
LEAST_LOSS = 0.05  # what a probe is charged at least, in its own steps
SPACING_RECORDS = 4  # looked for this often; a probe's result comes back within as many records
IDLE_SPACING_RECORDS = 16  # ... where nothing promised enough the last time
# What steps without drafts cost shows only without drafts. With step times measured on vLLM 0.32 on a CPU, at 32
# requests, 23 of 100 starts without looks back lost a per cent and more to the best length, with them 13.
NEARLY_AS_GOOD = 0.1  # gain of drafts below which no drafts may be as good
LOOK_BACK_SHARE = 0.002  # of the tokens: what looking back may cost
LOOK_BACK_RECORDS = 16  # between two looks at least


class Chances(NamedTuple):
    """Acceptance of each position given that the one before was accepted, (k_max,) each."""

    mean: Floats
    deviation: Floats


class Tries(NamedTuple):
    """What probing has come to for batches of a size."""

    depth: int  # in force when last probed
    fruitless: int  # probes behind which the same depth stayed in force


class ProbeAccount:
    """Decides which length, if any, is probed in this step."""

    def __init__(self) -> None:
        self._credit_s = 0.0
        self._time_s: float | None = None
        self._next_record = SPACING_RECORDS
        self._next_look_back = 0
        self._met: set[int] = set()  # octaves of running requests
        self._tries: dict[int, Tries] = {}  # by octave
        self.probes = 0

    def choose(
        self,
        view: PlanningView,
        rate: float,
        depth: int,
        chances: Chances | None = None,
        begin_s: float = 0.0,
    ) -> int | None:
        """Return the length to probe for all who decode, or None; `rate` is what is had now.

        :param depth: the deepest draft in force: nothing new would be learnt from it.
        :param chances: what is known of the requests' acceptance; None: the population's.
        :param begin_s: what the drafter must make up for before anything is drafted, charged to a probe.
        """
        is_due = self.is_due(view)
        octave = view.requests.bit_length()
        tries = self._tries.get(octave, Tries(depth, 0))
        fruitless = tries.fruitless if tries.depth == depth else 0
        self._earn(view, octave, BUDGET_SHARE * max(0.5 ** (fruitless / HALVING_PROBES), LEAST_ZEAL))
        if not is_due:
            return None
        population = view.population
        mean, deviation = chances or (population.mean, population.deviation)
        outlook = np.empty((5, len(mean) + 1))
        _look_ahead(mean, deviation, population.delivery, view.requests, outlook)
        least_s, most_s = _time_range_s(view, *outlook[:3])
        # Amid prompts a probe teaches little of what drafting will cost without them: most of the credit waits.
        at_once_s = self._credit_s * (1.0 - view.load.prefill_share)
        is_promising, length, loss_s = _pick(outlook, least_s, most_s, rate, depth, begin_s, at_once_s)
        self._next_record = view.records + (SPACING_RECORDS if is_promising else IDLE_SPACING_RECORDS)
        if length < 0:
            return None
        self._credit_s -= loss_s
        self._tries[octave] = Tries(depth, fruitless + 1)
        self.probes += 1
        return length

    def looks_back(self, view: PlanningView, lead: float) -> bool:
        """Return whether nothing is to be drafted in this step, which drafts would promise `lead` more than (a share).

        Else a table that was wrong about it once is believed for as long as drafts are made.
        """
        if not 0.0 < lead < NEARLY_AS_GOOD or view.records < self._next_look_back:
            return False
        apart = max(LOOK_BACK_RECORDS, lead / LOOK_BACK_SHARE)
        self._next_look_back = view.records + int(apart)
        self.probes += 1
        return True

    def is_due(self, view: PlanningView) -> bool:
        """Return whether `choose` will look for a probe now."""
        return view.records >= self._next_record

    def _earn(self, view: PlanningView, octave: int, share: float) -> None:
        step_s = view.load.step_s
        if self._time_s is not None:
            self._credit_s += share * min(max(view.time_s - self._time_s, 0.0), LONGEST_STEP * step_s)
        if octave not in self._met:
            credit_steps = NEW_SIZE_CREDIT_STEPS if self._met else FIRST_CREDIT_STEPS
            self._met.add(octave)
            self._credit_s = max(self._credit_s, credit_steps * step_s)
        self._credit_s = min(self._credit_s, CREDIT_CAP_STEPS * step_s)
        self._time_s = view.time_s


def _time_range_s(view: PlanningView, lengths: Floats, drafted: Floats, rows: Floats) -> tuple[Floats, Floats]:
    """Return (least, most) plausible seconds of steps, (m,) each, new prompts' part in drafting among them."""
    least_s, most_s = view.cost.time_range_s(rows, lengths, drafted, view.prompts())
    keep_up_s = view.keep_up_s()  # what is found is to be drafted with for long, behind new prompts too
    least_s[1:] += keep_up_s
    most_s[1:] += keep_up_s
    return least_s, most_s


@compiled
def _look_ahead(mean: Floats, deviation: Floats, delivery: Floats, requests: int, outlook: Floats) -> None:
    """Fill in, for each length of the whole batch: length, draft tokens, rows, tokens expected, tokens hoped for."""
    drafted = expected = hoped = 0.0
    survival = hopeful = 1.0
    for length in range(len(mean) + 1):
        if length > 0:
            j = length - 1
            survival *= mean[j]
            hopeful *= min(mean[j] + deviation[j], LARGEST_CHANCE)
            drafted += delivery[j]
            expected += delivery[j] * survival
            hoped += delivery[j] * hopeful
        outlook[0, length], outlook[1, length] = length, requests * drafted
        outlook[2, length] = requests + requests * drafted
        outlook[3, length], outlook[4, length] = requests * (1.0 + expected), requests * (1.0 + hoped)


@compiled
def _pick(
    outlook: Floats, least_s: Floats, most_s: Floats, rate: float, depth: int, begin_s: float, credit_s: float
) -> tuple[bool, int, float]:  # fmt: skip
    """Return whether any length promises enough, the one to probe (-1: none can be paid), and what it may lose."""
    # Against what the same population is expected to give too: a batch of weak requests is no unknown.
    bar = rate
    for length in range(outlook.shape[1]):
        bar = max(bar, outlook[3, length] / (0.5 * (least_s[length] + most_s[length])))
    bar *= 1.0 + MARGIN
    is_promising, best, chosen, price_s = False, -np.inf, -1, 0.0
    for length in range(outlook.shape[1]):
        best_rate = outlook[4, length] / least_s[length]
        if length == depth or not best_rate > bar:
            continue
        is_promising = True
        slow_s = most_s[length]
        loss_s = max(slow_s - outlook[3, length] / rate, LEAST_LOSS * slow_s) + (begin_s if length > 0 else 0.0)
        # Not the cheapest: a shallow draft that is known to be nearly as good would keep the deep ones from their turn.
        worth = (best_rate / bar - 1.0) / loss_s
        if loss_s <= credit_s and worth > best:
            best, chosen, price_s = worth, length, loss_s
    return is_promising, chosen, price_s
