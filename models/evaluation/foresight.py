"""A bound for policies that follow objectives: who is behind is favoured, knowing what will be accepted.

Called by models/evaluation/objective_table.py. Simulation only.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...engine_adapter.arrays import Floats, Ints
from ...env.simulator.scenario import Scenario
from ...env.simulator.state import BEGAN, EMITTED, FINISHED, FRESH, OUTPUT, SERVICE
from .attainment import WARM_SHARE, Attained
from .hindsight import Hindsight

AHEAD: Final = 4.0  # tokens ahead of its schedule up to which a request is favoured
PER_TOKEN: Final = 1  # place in World.objectives


class Foresight(Hindsight):
    """Drafts no token that will be rejected, first for those who need it and still can be in time."""

    def __init__(self, scenario: Scenario, seed: int, favoured: float) -> None:
        """Take what a token is worth to who is behind, or would be soon."""
        super().__init__(scenario, seed)
        self._favoured = favoured
        state, world = self.simulator.state, self.simulator.world
        self._tpot_s = world.objectives[int(state.engines[0]["profile"])].reshape(-1, 2)[:, PER_TOKEN]

    def _values(self, drafting: Ints) -> Floats:
        state = self.simulator.state
        ints, now_s = state.ints[0], float(state.engines[0]["clock_s"])
        tpot_s = self._tpot_s[ints[SERVICE, drafting]]
        emitted = ints[EMITTED, drafting]
        slack = emitted - 1 - (now_s - state.times[0, BEGAN, drafting]) / tpot_s
        # With every draft accepted whole, and steps as long as this one, it would still be late.
        step_s = float(state.engines[0]["step_s"])
        left = np.maximum(ints[OUTPUT, drafting] - emitted, 0)
        is_lost = slack + left * (1.0 - step_s / ((1 + self.k_max) * tpot_s)) < 0.0
        return np.where((slack < AHEAD) & ~is_lost, self._favoured, 1.0)

    def serve(self, steps: int) -> Attained:
        """Serve for so many steps, and return who was in time."""
        attained, warm, begin_s = Attained(), int(WARM_SHARE * steps), 0.0
        engine = self.simulator.state.engines[0]
        for number in range(1, steps + 1):
            self.step()
            if number == warm:
                begin_s = float(engine["clock_s"])
            elif number > warm:
                self._count(attained)
        attained.seconds = float(engine["clock_s"]) - begin_s
        return attained

    def _count(self, attained: Attained) -> None:
        state = self.simulator.state
        ints = state.ints[0]
        attained.tokens += int(ints[FRESH].sum())
        for slot in np.flatnonzero(ints[FINISHED]).tolist():
            emitted, priority = int(ints[EMITTED, slot]), int(ints[SERVICE, slot])
            rest_s = float(state.engines[0]["clock_s"]) - float(state.times[0, BEGAN, slot])
            is_kept = rest_s <= self._tpot_s[priority] * (emitted - 1)
            attained.ended[priority] += 1
            attained.kept[priority] += is_kept
            attained.good_tokens += emitted * is_kept
