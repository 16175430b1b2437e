"""`weigh`: our rule. It changes the set of pipelines when what that saves is more than the change costs.

What flexpipe lacks: what every set would have cost under the arrivals that came (models/pipeline/shadows.py), the price
of a move (how long it loads, bytes on links, GPUs held twice), and a longer memory for going down than for going up. It
begins with the set that would have been best on another day.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...engine_adapter.arrays import Floats
from ...env.pipeline.cluster import STAY, PipelineMove
from ...env.pipeline.constants import STAGES, PipelineConstants
from ...env.pipeline.view import ClusterView
from .pipeline_policy import LoadHint, toward
from .shadows import SETS, Shadows, day_costs, gpus_of


@dataclass(frozen=True, slots=True)
class WeighSettings:
    """Chosen on seeds and loads that no table shows."""

    short_s: float = 60.0  # memory that must promise a saving
    long_s: float = 600.0  # memory that must agree before anything is taken away
    horizon_s: float = 120.0  # a saving is trusted to last so long
    patience_s: float = 30.0  # after a move that found no room
    margin: float = 1.5  # of the move's price, what it must save


@dataclass(slots=True)
class Weigh:
    """Moves toward the set that saves most; see the module."""

    constants: PipelineConstants
    settings: WeighSettings = field(default_factory=WeighSettings)
    name: str = "weigh"
    keeps_idle: bool = True  # it releases what does not pay
    target: tuple[int, int] = SETS[0]
    shadows: Shadows | None = None
    short: Floats = field(default_factory=lambda: np.zeros(len(SETS)))  # (sets,) cost per second
    long: Floats = field(default_factory=lambda: np.zeros(len(SETS)))
    seen_s: float = 0.0
    asked: float = -np.inf  # when the last move was asked for, and what there was then
    before: tuple[int, ...] = ()

    def start(self, hint: LoadHint) -> tuple[int, int]:
        """Begin with what was cheapest on another day."""
        self.shadows = Shadows(self.constants)
        self.long = day_costs(hint.arrival_s, self.constants)
        self.short = self.long.copy()
        self.target = SETS[int(self.long.argmin())]
        return self.target

    def decide(self, view: ClusterView) -> PipelineMove:
        """Learn what the last second would have cost, weigh every set; while a move is under way, wait."""
        self.learn(view)
        if any(view.coming) or self._is_refused(view):
            return STAY
        saving = self.savings(view)
        if saving.max() > 0.0:
            self.target = SETS[int(saving.argmax())]
        move = toward(view, *self.target)
        needs_room = move.count > 0 and not move.is_refactor
        if not move.count or (needs_room and view.room[STAGES.index(move.stages)] < move.stages):
            return STAY
        self.asked, self.before = view.now_s, view.settled()
        return move

    def _is_refused(self, view: ClusterView) -> bool:
        """Return whether the last move found no room, a while ago: what serves is then the target."""
        if not 0.0 <= view.now_s - self.asked < self.settings.patience_s or view.settled() != self.before:
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
        """Let the shadows serve what has come since the last decision."""
        span_s = view.now_s - self.seen_s
        if self.shadows is None or span_s <= 0.0:
            return
        self.seen_s = view.now_s
        cost = self.shadows.advance(view.now_s, span_s, view.arrived_s, view.rates[0], view.variations[1])
        for memory, over_s in ((self.short, self.settings.short_s), (self.long, self.settings.long_s)):
            memory += (cost - memory) * (1.0 - np.exp(-span_s / over_s))

    def savings(self, view: ClusterView) -> Floats:
        """Return (sets,) what each saves within the horizon over the present one, less the margin of its price."""
        now = SETS.index(self.target)
        found = np.zeros(len(SETS))
        for k, each in enumerate(SETS):
            gain = self.short[now] - self.short[k]
            if self._capacity(each) < self._capacity(self.target):
                gain = min(gain, self.long[now] - self.long[k])
            if k != now and gain > 0.0:
                lead_s, price = self._price(view, self.target, each)
                found[k] = gain * max(self.settings.horizon_s - lead_s, 0.0) - self.settings.margin * price
        return found

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
        held = max(gpus_of(then) - gpus_of(now), 0)
        seconds = min(lead_s, self.settings.horizon_s)
        return lead_s, constants.cost(0, held * seconds, moved)
