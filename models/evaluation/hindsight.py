"""Upper bounds that no policy can reach: lengths chosen in the knowledge of what will be accepted. Simulation only.

Called by models/evaluation/evaluate.py. Outside the Policy protocol on purpose: an EngineState does not hold what
these need.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np

from ...engine_adapter.arrays import Floats, Ints
from ...env.profile.step_basis import DRAFT_BASIS, FIRST_EDGES, ROUND_EDGES, ROW_EDGES, VERIFY_BASIS
from ...env.simulator.constants import NAMED
from ...env.simulator.scenario import Scenario
from ...env.simulator.simulator import Simulator
from ...env.simulator.state import DRAFTS, KEPT, LUCKY, PHASE, RUNNING, SCHEDULED
from ...env.spaces import Lengths

_ROWS = 2  # place of the first segment of rows in VERIFY_BASIS
_SAMPLED = _ROWS + len(ROW_EDGES)
_FIRST_PASS = 2  # place in DRAFT_BASIS, before the segments of that pass's rows
_FIRST_ROWS = _FIRST_PASS + 1
_DRAFTING = DRAFT_BASIS.index("drafting requests")

Segments: TypeAlias = tuple[Floats, Floats]  # starts and widths
_ROW_SEGMENTS: Segments = (np.array(ROW_EDGES), np.append(np.diff(ROW_EDGES), np.inf))
_FIRST_SEGMENTS: Segments = (np.array(FIRST_EDGES), np.append(np.diff(FIRST_EDGES), np.inf))
_ROUND_SEGMENTS: Segments = (np.array(ROUND_EDGES), np.append(np.diff(ROUND_EDGES), np.inf))


class Hindsight:
    """An engine whose longest drafts are cut once they are drawn, and whose time is set back accordingly.

    Per request: of each draft no more than what will be accepted, and no deeper than what pays for the batch.
    Uniform: one length for all, the best for what will be accepted. Best is the most tokens per second of the coming
    step.
    """

    def __init__(self, scenario: Scenario, seed: int, *, is_uniform: bool = False) -> None:
        self._is_uniform = is_uniform
        self.simulator = Simulator(scenario, 1, mode=NAMED, seed=seed)
        self.simulator.reset()
        self.k_max = scenario.positions
        self._cost = TrueCost(self.simulator)
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
        lengths = self._best(drafting, longest)
        factor = float(engine["draft_s"]) / max(self._draft_s(longest), 1e-12)  # this step's noise
        spared_s = float(engine["draft_s"]) - self._draft_s(lengths) * factor
        for name in ("clock_s", "draft_s", "step_s", "elapsed_s"):
            engine[name] -= spared_s
        ints[KEPT, drafting] = ints[DRAFTS, drafting] = lengths
        ints[LUCKY, drafting] = np.minimum(ints[LUCKY, drafting], lengths)

    def _best(self, drafting: Ints, longest: Ints) -> Lengths:
        """Return (n,) tokens to draft and verify: what the best step would reject it does not draft.

        :param drafting: (n,) their slots
        :param longest: (n,) tokens that were drafted
        """
        lucky = self.simulator.state.ints[0, LUCKY, drafting].astype(np.int64)
        running = int(self.simulator.state.engines[0]["running"])
        values = self._values(drafting)
        base, best = running - len(values) + float(values.sum()), (-math.inf, np.zeros_like(longest))
        for least in np.unique(values):  # for whom a token is worth less is not drafted
            whole = np.where(values >= least, longest if self._is_uniform else lucky, 0)
            for deepest in range(self.k_max + 1):
                lengths = np.minimum(whole, deepest)
                gained = float((values * np.minimum(lengths, lucky)).sum())
                step_s = self._cost.verify_s(running, int(lengths.sum())) + self._draft_s(lengths)
                if (base + gained) / step_s > best[0]:
                    best = ((base + gained) / step_s, lengths)
        return best[1]

    def _values(self, drafting: Ints) -> Floats:
        """Return (n,) what a token of each of these is worth."""
        return np.ones(len(drafting))

    def _draft_s(self, lengths: Lengths) -> float:
        requests, rounds = int(np.count_nonzero(lengths)), int(lengths.max(initial=0))
        return self._cost.draft_s(requests, rounds, int(lengths.sum()))


class TrueCost:
    """The coefficients that the simulator draws its times from, without noise.

    Prompts are left out: they come whatever is drafted.
    """

    def __init__(self, simulator: Simulator) -> None:
        coefficients = simulator.state.coefficients[0]
        self._verify = coefficients[: len(VERIFY_BASIS)]
        self._draft = coefficients[len(VERIFY_BASIS) : len(VERIFY_BASIS) + len(DRAFT_BASIS)]
        profile = int(simulator.state.engines[0]["profile"])
        self._skips = int(simulator.world.profiles["catch_up"][profile]) > 0

    def verify_s(self, running: int, drafts: int) -> float:
        """Return seconds in the target for so many requests and draft tokens."""
        rows = float(running + drafts)
        terms = self._verify
        return float(
            terms[0]
            + terms[1] * running
            + _segments(rows, _ROW_SEGMENTS) @ terms[_ROWS:_SAMPLED]
            + terms[_SAMPLED] * rows
            + terms[_SAMPLED + 1] * max(rows - 16.0, 0.0)
            + terms[_SAMPLED + 2] * (drafts > 0)
            + terms[_SAMPLED + 3] * drafts
        )

    def draft_s(self, requests: int, rounds: int, drawn: int) -> float:
        """Return seconds of drafting.

        Of a drafter that skips who does not draft, the first pass is charged with one row for each request.

        :param requests: that draft at least one token
        :param rounds: of the longest draft
        :param drawn: tokens of all drafts
        """
        terms = self._draft
        further = max(rounds - 1, 0)
        mean = (drawn - requests) / further if further else 0.0
        # A drafter that leaves nothing out reads every new token, whether or not it then drafts.
        first_rows = terms[_FIRST_ROWS : _FIRST_ROWS + len(FIRST_EDGES)]
        own_pass = terms[_FIRST_PASS] * (requests > 0) + _segments(requests, _FIRST_SEGMENTS) @ first_rows
        return float(
            terms[0]
            + (own_pass if self._skips else terms[_FIRST_PASS])
            + terms[_DRAFTING] * requests
            + terms[_DRAFTING + 1] * further
            + further * (_segments(mean, _ROUND_SEGMENTS) @ terms[_DRAFTING + 2 : _DRAFTING + 2 + len(ROUND_EDGES)])
        )


def _segments(value: float, edges: Segments) -> Floats:
    """Return (segments,) the part of the value in each segment."""
    starts, widths = edges
    parts: Floats = np.minimum(np.maximum(value - starts, 0.0), widths)
    return parts
