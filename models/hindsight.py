"""Upper bounds that no policy can reach: lengths chosen in the knowledge of what will be accepted. Simulation only.

Called by models/evaluate.py. Outside the Policy protocol on purpose: an EngineState does not hold what these need.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from ..env.scenario import Scenario
from ..env.simulator import Simulator
from ..env.simulator_state import DRAFTS, KEPT, LUCKY, PHASE, RUNNING, SCHEDULED
from ..env.spaces import Lengths
from ..env.step_basis import DRAFT_BASIS, VERIFY_BASIS, fill_draft_basis, fill_verify_basis
from ..env.world import NAMED

Kind = Literal["request", "uniform"]


class Hindsight:
    """An engine whose drafts are cut after the fact, each to the best length, and whose time is set back accordingly.

    Per request: of each draft no more than what will be accepted, and no deeper than what pays for the batch. Uniform:
    one length for all, the best for what will be accepted. Best is the most tokens per second of the coming step.
    """

    def __init__(self, scenario: Scenario, seed: int, kind: Kind) -> None:
        self.simulator = Simulator(scenario, 1, mode=NAMED, seed=seed)
        self.simulator.reset()
        self.k_max = scenario.positions
        self._kind = kind
        self._longest = np.full((1, scenario.slots), self.k_max, np.int8)
        self._verify, self._draft = np.zeros(len(VERIFY_BASIS)), np.zeros(len(DRAFT_BASIS))

    def step(self) -> None:
        """Verify what was chosen, draft the longest, choose."""
        self.simulator.step(None, self._longest)
        state = self.simulator.state
        engine, ints = state.engines[0], state.ints[0]
        drafting = np.flatnonzero((ints[PHASE] == RUNNING) & (ints[SCHEDULED] > 0) & (ints[KEPT] > 0))
        if not len(drafting):
            return
        kept, lucky = ints[KEPT, drafting].astype(np.int64), ints[LUCKY, drafting].astype(np.int64)
        lengths, draft_s = self._best(kept, lucky, int(engine["running"]), int(engine["prefill_tokens"]))
        factor = float(engine["draft_s"]) / max(self._draft_s(kept), 1e-12)  # this step's noise
        spared_s = float(engine["draft_s"]) - draft_s * factor
        for name, sign in (("clock_s", -1.0), ("draft_s", -1.0), ("step_s", -1.0), ("elapsed_s", -1.0)):
            engine[name] += sign * spared_s
        ints[KEPT, drafting] = ints[DRAFTS, drafting] = lengths
        ints[LUCKY, drafting] = np.minimum(lucky, lengths)

    def _best(self, kept: Lengths, lucky: Lengths, running: int, prompt_rows: int) -> tuple[Lengths, float]:
        best: tuple[float, Lengths, float] = (-math.inf, np.zeros_like(kept), 0.0)
        for deepest in range(self.k_max + 1):
            lengths = np.minimum(kept if self._kind == "uniform" else lucky, deepest)
            gained = float(np.minimum(lengths, lucky).sum())
            draft_s = self._draft_s(lengths)
            rate = (running + gained) / (self._verify_s(running, int(lengths.sum())) + draft_s)
            if rate > best[0]:
                best = (rate, lengths, draft_s)
        return best[1], best[2]

    def _verify_s(self, running: int, drafts: int) -> float:
        rows = running + drafts
        coefficients = self.simulator.state.coefficients[0]
        fill_verify_basis(self._verify, running, rows, drafts, 0, 0, rows, 0, 0, 0.0)
        return float(self._verify @ coefficients[: len(VERIFY_BASIS)])

    def _draft_s(self, lengths: Lengths) -> float:
        requests, rounds = int(np.count_nonzero(lengths)), int(lengths.max(initial=0))
        fill_draft_basis(self._draft, requests, rounds, int(lengths.sum()), requests, 0, 0)
        first = len(VERIFY_BASIS)
        return float(self._draft @ self.simulator.state.coefficients[0, first : first + len(DRAFT_BASIS)])
