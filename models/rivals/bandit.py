"""A bandit over draft lengths, one for each octave of batch sizes: optimism about arms that were seldom tried (UCB1).

Sources: BanditSpec (arXiv 2505.15141) for the arms, Nightjar (arXiv 2512.22420) for one bandit per batch size. An arm
is held for a block of steps, since a decision takes a step or two to show. Deterministic.
"""

from __future__ import annotations

import math

import numpy as np

from ...engine_adapter.arrays import Floats
from ...env.estimate.engine_state import EngineState
from ...env.spaces import Action, Capabilities
from ..policies.baselines import uniform
from .watch import StepWatch

BLOCK_STEPS, SETTLING_STEPS = 8, 2
OPTIMISM = 0.15  # relative to the best mean
MEMORY_BLOCKS = 200.0


class ArmBlocks:
    """What each length gave, in blocks."""

    def __init__(self, lengths: int) -> None:
        self.rates: Floats = np.zeros(lengths)  # tokens/s, running means
        self.blocks: Floats = np.zeros(lengths)

    def choose(self) -> int:
        """Return the arm with the highest upper bound; each is tried once, the shortest first."""
        untried = np.flatnonzero(self.blocks == 0.0)
        if len(untried):
            return int(untried[0])
        bonus = OPTIMISM * float(self.rates.max()) * np.sqrt(2.0 * math.log(self.blocks.sum() + 1.0) / self.blocks)
        return int((self.rates + bonus).argmax())

    def learn(self, length: int, rate: float) -> None:
        """Take in a block's tokens per second."""
        self.blocks *= 1.0 - 1.0 / MEMORY_BLOCKS
        self.blocks[length] += 1.0
        self.rates[length] += (rate - self.rates[length]) / self.blocks[length]


class Bandit:
    """Holds the arm of the octave it is in; a change of octave ends the block."""

    name = "bandit"

    def __init__(self, capabilities: Capabilities) -> None:
        self._k_max = capabilities.k_max
        self.arms: dict[int, ArmBlocks] = {}
        self._octave, self._length, self._steps = -1, 0, 0
        self._tokens, self._elapsed_s = 0.0, 0.0
        self._watch = StepWatch()

    def act(self, state: EngineState) -> Action:
        """Return the arm's length for all."""
        seen = self._watch.look(state)
        requests = int(np.count_nonzero(state.decoding()))
        if self._k_max == 0:
            return uniform(state.requests.size, 0, "nothing to speculate on")
        if requests == 0:
            return uniform(state.requests.size, self._length, "nobody decodes: the arm in force")
        octave = round(math.log2(requests))  # powers of two, the usual limits, in the middle
        if octave != self._octave:
            self._begin(octave)
        elif seen is not None:
            self._steps += 1
            if self._steps > SETTLING_STEPS and seen.is_pure:
                self._tokens += seen.emitted
                self._elapsed_s += seen.elapsed_s
            if self._steps >= BLOCK_STEPS:
                if self._elapsed_s > 0.0:
                    self.arms[octave].learn(self._length, self._tokens / self._elapsed_s)
                self._begin(octave)
        tried = self.arms[octave].blocks[self._length]
        return uniform(
            state.requests.size,
            self._length,
            f"{requests} decoding: arm {self._length}, {tried:.0f} blocks of it known",
        )

    def _begin(self, octave: int) -> None:
        arms = self.arms.setdefault(octave, ArmBlocks(self._k_max + 1))
        self._octave, self._length, self._steps = octave, arms.choose(), 0
        self._tokens, self._elapsed_s = 0.0, 0.0
