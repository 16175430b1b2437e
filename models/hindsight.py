"""Upper bounds that no policy can reach: lengths chosen in the knowledge of what will be accepted. Simulation only.

Called by models/evaluate.py. Outside the Policy protocol on purpose: an EngineState does not hold what these need.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import numpy as np

from ..env.acceptance import Floats, Ints
from ..env.scenario import Scenario
from ..env.simulator import Simulator
from ..env.simulator_state import CONTEXT, DRAFTS, KEPT, LUCKY, PHASE, RUNNING, SCHEDULED
from ..env.spaces import Lengths
from ..env.world import NAMED
from .true_cost import TrueCost

MEMORY = 0.98  # share that is left of what was brought, a step later
Kind = Literal["request", "uniform"]


class CutAfterwards(ABC):
    """An engine whose longest drafts are cut once they are drawn, and whose time is set back accordingly."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.simulator = Simulator(scenario, 1, mode=NAMED, seed=seed)
        self.simulator.reset()
        self.k_max = scenario.positions
        self.cost = TrueCost(self.simulator)
        self._brought: dict[int, tuple[float, float]] = {}  # tokens and seconds by octave of running requests
        self._longest = np.full((1, scenario.slots), self.k_max, np.int8)

    def step(self) -> None:
        """Verify what was chosen, draft the longest, choose."""
        self.simulator.step(None, self._longest)
        state = self.simulator.state
        engine, ints = state.engines[0], state.ints[0]
        drafting = np.flatnonzero((ints[PHASE] == RUNNING) & (ints[SCHEDULED] > 0) & (ints[KEPT] > 0))
        if not len(drafting):
            return
        longest = ints[KEPT, drafting].astype(np.int64)
        kept, drawn = self.choose(drafting, longest)
        factor = float(engine["draft_s"]) / max(self._draft_s(longest), 1e-12)  # this step's noise
        spared_s = float(engine["draft_s"]) - self._draft_s(drawn) * factor
        for name in ("clock_s", "draft_s", "step_s", "elapsed_s"):
            engine[name] -= spared_s
        ints[KEPT, drafting] = ints[DRAFTS, drafting] = kept
        ints[LUCKY, drafting] = np.minimum(ints[LUCKY, drafting], kept)

    @abstractmethod
    def choose(self, drafting: Ints, longest: Ints) -> tuple[Lengths, Lengths]:
        """Return (n,) tokens to verify and (n,) tokens to draft.

        :param drafting: (n,) their slots
        :param longest: (n,) tokens that were drafted
        """

    def worth(self, running: int, gained: Floats, kept: Floats, draft_s: Floats) -> Floats:
        """Return tokens net of what the steps' seconds would bring otherwise, for steps in (...,) ways."""
        seconds = self.cost.verify_s(running, kept) + draft_s + self._beside_s(running)
        net: Floats = running + gained - self.rate(running) * seconds
        return net

    def rate(self, running: int) -> float:
        """Return the tokens per second that steps of about so many requests bring; before the first: undrafted."""
        tokens, seconds = self._brought.get(running.bit_length(), (0.0, 0.0))
        return (
            tokens / seconds if seconds else running / (float(self.cost.verify_s(running, 0)) + self._beside_s(running))
        )

    def note(self, running: int, gained: float, kept: Lengths, drawn: Lengths) -> None:
        """Remember what the chosen step brings."""
        tokens, seconds = self._brought.get(running.bit_length(), (0.0, 0.0))
        step_s = float(self.cost.verify_s(running, int(kept.sum()))) + self._draft_s(drawn) + self._beside_s(running)
        self._brought[running.bit_length()] = (tokens * MEMORY + running + gained, seconds * MEMORY + step_s)

    def _beside_s(self, running: int) -> float:
        return self.cost.beside_s(running, int(self.simulator.state.ints[0, CONTEXT].sum()))

    def _draft_s(self, drawn: Lengths) -> float:
        requests, rounds = int(np.count_nonzero(drawn)), int(drawn.max(initial=0))
        return float(self.cost.draft_s(requests, rounds, int(drawn.sum())))


class Hindsight(CutAfterwards):
    """Per request: of each draft no more than what will be accepted, and no deeper than what pays for the batch.

    Uniform: one length for all, the best for what will be accepted. Best is the most tokens per second of the coming
    step.
    """

    def __init__(self, scenario: Scenario, seed: int, kind: Kind) -> None:
        super().__init__(scenario, seed)
        self._kind = kind

    def choose(self, drafting: Ints, longest: Ints) -> tuple[Lengths, Lengths]:
        """Return the lengths of the best step, twice: what it would reject it does not draft."""
        lucky = self.simulator.state.ints[0, LUCKY, drafting].astype(np.int64)
        running = int(self.simulator.state.engines[0]["running"])
        best: tuple[float, Lengths] = (-math.inf, np.zeros_like(longest))
        for deepest in range(self.k_max + 1):
            lengths = np.minimum(longest if self._kind == "uniform" else lucky, deepest)
            gained = float(np.minimum(lengths, lucky).sum())
            rate = (running + gained) / (self.cost.verify_s(running, int(lengths.sum())) + self._draft_s(lengths))
            if rate > best[0]:
                best = (float(rate), lengths)
        return best[1], best[1]
