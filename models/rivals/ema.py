"""Draft lengths from a running mean of accepted tokens, as SGLang's adaptive mode sets them: one tier for the batch.

Source: SGLang's documentation of `--speculative-adaptive` (EAGLE, topk 1). It looks at acceptance alone, never at cost.
"""

from __future__ import annotations

from ...env.estimate.engine_state import EngineState
from ...env.spaces import Action, Capabilities
from ..policies.baselines import uniform
from .watch import StepWatch

TIERS = (1, 3, 7)  # draft tokens; the engine's longest draft stands in for those beyond it
GAIN = 0.2  # of the running mean
WARM_UP_STEPS, INTERVAL_STEPS = 10, 5
UP_SLACK, DOWN_SLACK = 0.0, -0.25  # accepted tokens


class AcceptanceEma:
    """A tier up where all but half a token of this one is accepted, a tier down where the lower one would do."""

    name = "ema"

    def __init__(self, capabilities: Capabilities) -> None:
        self.tiers = tuple(sorted({min(tier, capabilities.k_max) for tier in TIERS}))
        self._place = len(self.tiers) // 2
        self._mean: float | None = None
        self._steps = 0
        self._watch = StepWatch()

    def act(self, state: EngineState) -> Action:
        """Return the tier for all."""
        seen = self._watch.look(state)
        if seen is not None and (seen.drafted > 0).any():
            self.learn(float(seen.accepted[seen.drafted > 0].mean()))
        mean = 0.0 if self._mean is None else self._mean
        return uniform(
            state.requests.size, self.tiers[self._place], f"{mean:.2f} drafts accepted: tier {self.tiers[self._place]}"
        )

    def learn(self, accepted: float) -> None:
        """Take in one step's accepted tokens per request, and change the tier every few steps."""
        self._mean = accepted if self._mean is None else self._mean + GAIN * (accepted - self._mean)
        self._steps += 1
        if self._steps >= WARM_UP_STEPS and self._steps % INTERVAL_STEPS == 0:
            self._settle(self._mean)

    def _settle(self, mean: float) -> None:
        while self._place > 0 and mean <= self.tiers[self._place - 1] - 0.5 + DOWN_SLACK:
            self._place -= 1
        while self._place < len(self.tiers) - 1 and mean > self.tiers[self._place] - 0.5 + UP_SLACK:
            self._place += 1
