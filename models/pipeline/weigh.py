"""`weigh`: our rule. It changes the set of pipelines when what that surely saves is more than the change costs.

What flexpipe lacks: what every fixed set would have cost under the arrivals that came (models/pipeline/shadows.py), and
the price of a move: how long it loads, bytes on links, GPUs held twice, coming back. Seconds are remembered with the
rate before them, of another day and of this one; what a set will cost is the mean of what followed on the remembered
seconds that had about the present rate. So a load that swells is followed at once, and one that bursts at random is
left alone. What followed is 20 seconds, not the next one: who gives GPUs back in a calm meets the burst that ends it
with what is left, and sees and loads while it lasts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ...engine_adapter.arrays import Floats
from ...env.pipeline.cluster import STAY, PipelineMove
from ...env.pipeline.constants import STAGES, PipelineConstants
from ...env.pipeline.view import WINDOWS_S, ClusterView
from .pipeline_policy import LoadHint, toward
from .shadows import LATENCY_WEIGHT, SETS, Shadows, gpus_of

CONTEXT: Final = 1  # of WINDOWS_S: the rate that a second is remembered with
LEAST_RPS: Final = 0.1


@dataclass(frozen=True, slots=True)
class WeighSettings:
    """Chosen on seeds and loads that no table shows.

    The first four are chosen on the table's loads, at other seeds.
    """

    octaves: float = 0.3  # how like rates are: the width of the mean over remembered seconds
    ahead_s: int = 20  # how much of what followed on a second counts; a decision a second
    doubt: float = 1.0  # standard errors by which a saving must be above zero
    settling_s: float = 30.0  # at the beginning nothing moves: there is no rate yet to go by
    horizon_s: float = 120.0  # a saving is trusted to last so long
    margin: float = 1.5  # of the move's price, what it must save
    memory_s: float = 1800.0  # remembered seconds lose their weight
    burst_s: float = 10.0  # seconds that depend on each other, for the standard error
    return_s: float = 10.0  # what is released is paid for so many seconds more: it may have to come back
    patience_s: float = 30.0  # after a move that found no room
    latency_weight: float = LATENCY_WEIGHT  # missed requests that a second of one request is worth


@dataclass(slots=True)
class Memory:
    """Seconds that were: when, at which rate (log2), and what each set cost in them."""

    at_s: Floats = field(default_factory=lambda: np.zeros(0))
    octave: Floats = field(default_factory=lambda: np.zeros(0))
    cost: Floats = field(default_factory=lambda: np.zeros((0, len(SETS))))
    most: int = 3600

    def add(self, at_s: float, octave: float, cost: Floats) -> None:
        """Remember a second; the oldest goes."""
        self.at_s = np.append(self.at_s[-self.most :], at_s)
        self.octave = np.append(self.octave[-self.most :], octave)
        self.cost = np.concatenate((self.cost[-self.most :], cost[None]))

    def saving(self, now: int, at_s: float, octave: float, settings: WeighSettings) -> Floats:
        """Return (sets,) what each surely saves per second over the set `now` behind seconds at such a rate."""
        cost = self._ahead(settings.ahead_s)
        if not len(cost):
            return np.zeros(len(SETS))
        weight = np.exp(-0.5 * ((self.octave[: len(cost)] - octave) / settings.octaves) ** 2) + 1e-9
        weight *= np.exp(-(at_s - self.at_s[: len(cost)]) / settings.memory_s)
        weight /= weight.sum()
        difference = cost[:, now : now + 1] - cost
        mean = weight @ difference
        spread = weight @ (difference - mean) ** 2
        error = np.sqrt(spread * (settings.burst_s + settings.ahead_s) * float(weight @ weight))
        return np.asarray(mean - settings.doubt * error)

    def _ahead(self, ahead_s: int) -> Floats:
        """Return (seconds, sets) what each set cost per second in so many seconds from each remembered one on.

        The last of them are not known yet. Another day goes on with this one.
        """
        total = np.concatenate((np.zeros((1, len(SETS))), np.cumsum(self.cost, axis=0)))
        return np.asarray((total[ahead_s:] - total[:-ahead_s]) / ahead_s)


@dataclass(slots=True)
class Weigh:
    """Moves toward the set that saves most; see the module."""

    constants: PipelineConstants
    settings: WeighSettings = field(default_factory=WeighSettings)
    name: str = "weigh"
    keeps_idle: bool = True  # it releases what does not pay
    target: tuple[int, int] = SETS[0]
    shadows: Shadows | None = None
    memory: Memory = field(default_factory=Memory)
    octave: float | None = None  # the rate at the last decision
    seen_s: float = 0.0
    asked_s: float = -math.inf  # when the last move was asked for, and what there was then
    before: tuple[int, ...] = ()

    def start(self, hint: LoadHint) -> tuple[int, int]:
        """Remember another day, and begin with what was cheapest then."""
        for at_s, octave, cost in _day(hint.arrival_s, self._new_shadows()):
            self.memory.add(at_s, octave, cost)
        self.shadows = self._new_shadows()
        if len(self.memory.cost):
            self.target = SETS[int(self.memory.cost.mean(axis=0).argmin())]
        return self.target

    def decide(self, view: ClusterView) -> PipelineMove:
        """Learn what the last second would have cost, weigh every set; while a move is under way, wait."""
        self.learn(view)
        if view.now_s < self.settings.settling_s or any(view.coming) or self._is_refused(view):
            return STAY
        saving = self.savings(view)
        if saving.max() > 0.0:
            self.target = SETS[int(saving.argmax())]
        move = toward(view, *self.target)
        needs_room = move.count > 0 and not move.is_refactor
        if not move.count or (needs_room and view.room[STAGES.index(move.stages)] < move.stages):
            return STAY
        self.asked_s, self.before = view.now_s, view.settled()
        return move

    def _is_refused(self, view: ClusterView) -> bool:
        """Return whether the last move found no room, not long ago: what serves is then the target."""
        if view.now_s - self.asked_s >= self.settings.patience_s or view.settled() != self.before:
            return False
        self.target = self.present(view)
        return True

    def present(self, view: ClusterView) -> tuple[int, int]:
        """Return the set that is nearest to what serves: most of its stages, about its capacity."""
        counts = view.settled()
        stages = max(zip(STAGES, counts, strict=True), key=lambda each: each[0] * each[1])[0]
        capacity = sum(self._capacity((each, count)) for each, count in zip(STAGES, counts, strict=True))
        return min(SETS, key=lambda each: (each[0] != stages, abs(self._capacity(each) - capacity)))

    def learn(self, view: ClusterView) -> None:
        """Let the shadows serve what has come since the last decision, and remember it with the rate before."""
        span_s = view.now_s - self.seen_s
        if self.shadows is None or span_s <= 0.0:
            return
        self.seen_s = view.now_s
        cost = self.shadows.advance(view.now_s, span_s, view.arrived_s, view.rates[0], view.variations[CONTEXT])
        if self.octave is not None:
            self.memory.add(view.now_s, self.octave, cost)
        self.octave = math.log2(max(view.rates[CONTEXT], LEAST_RPS))

    def savings(self, view: ClusterView) -> Floats:
        """Return (sets,) what each saves within the horizon over the present one, less the margin of its price."""
        now, found = SETS.index(self.target), np.zeros(len(SETS))
        octave = math.log2(max(view.rates[CONTEXT], LEAST_RPS))
        surely = self.memory.saving(now, view.now_s, octave, self.settings)
        for k in np.flatnonzero(surely > 0.0).tolist():
            lead_s, price = self._price(view, self.target, SETS[k])
            found[k] = surely[k] * max(self.settings.horizon_s - lead_s, 0.0) - self.settings.margin * price
        found[now] = 0.0
        return found

    def _new_shadows(self) -> Shadows:
        return Shadows(self.constants, self.settings.latency_weight)

    def _capacity(self, pipelines: tuple[int, int]) -> float:
        return pipelines[1] / self.constants.of(pipelines[0]).compute_s

    def _price(self, view: ClusterView, now: tuple[int, int], then: tuple[int, int]) -> tuple[float, float]:
        """Return the seconds until a set serves, and what it costs to get there."""
        constants = self.constants
        lead_s, moved = 0.0, 0.0
        if then[0] != now[0]:
            share = 1.0 - min(now[0], then[0]) / max(now[0], then[0])
            each = (constants.weights_bytes + view.kv_bytes / max(sum(view.serving), 1)) * share
            moved = min(now[1], then[1]) * each
            lead_s = constants.start_s + each / min(now[0], then[0]) / constants.link_bytes_per_s
        if then[1] > now[1]:
            lead_s = max(lead_s, view.load_s[STAGES.index(then[0])])
        more = gpus_of(then) - gpus_of(now)
        gpu_s = more * min(lead_s, self.settings.horizon_s) if more > 0 else -more * self.settings.return_s
        return lead_s, constants.cost(0, gpu_s, moved)


def _day(arrival_s: Floats, shadows: Shadows) -> Iterator[tuple[float, float, Floats]]:
    """Yield every second of another day, which ends at 0: when, the rate before it (log2), what each set cost."""
    length = int(arrival_s[-1]) if len(arrival_s) else 0
    gaps, before = np.diff(arrival_s, prepend=0.0), None
    ends = np.searchsorted(arrival_s, np.arange(length + 1))
    for second in range(1, length + 1):
        short, context = (int(ends[max(second - int(window_s), 0)]) for window_s in WINDOWS_S[:2])
        recent = gaps[context + 1 : ends[second]]
        variation = float(recent.std() / max(recent.mean(), 1e-12)) if len(recent) > 2 else 1.0
        rate = float(ends[second] - short) / min(WINDOWS_S[0], second)
        cost = shadows.advance(float(second), 1.0, arrival_s[ends[second - 1] : ends[second]], rate, variation)
        if before is not None:
            yield float(second - length), before, cost
        before = math.log2(max(float(ends[second] - context) / min(WINDOWS_S[CONTEXT], second), LEAST_RPS))
