"""Rules that follow objectives with one length of draft: for who needs it, and for who is behind.

They stand beside the price policy's values in `faser evaluate --objectives`. AdaServe's rule, which weighs the step's
time, is in models/rivals/adaserve.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ...engine_adapter.arrays import Bools
from ...env.estimate.engine_state import EngineState
from ...env.spaces import Action, Capabilities
from ..policies.baselines import FixedLength, uniform

ALIKE: Final = 1.01  # objectives that differ by less are as tight


@dataclass(slots=True)
class ForSome:
    """The same length for some requests, and none for the others."""

    length: int
    name: str
    by_slack: bool  # True: for who is behind its schedule; False: for who needs more than a token a step

    @classmethod
    def parse(cls, name: str, text: str, capabilities: Capabilities) -> ForSome:
        """Read the K of urgent:K, or behind:K."""
        return cls(FixedLength.parse(text, capabilities).length, f"{name}:{text}", name == "behind")

    def act(self, state: EngineState) -> Action:
        """Return the length for those whom the rule names."""
        some = self._named(state)
        action = uniform(state.requests.size, 0, f"policy {self.name}: {np.count_nonzero(some)} named")
        action.lengths[some] = self.length
        return action

    def _named(self, state: EngineState) -> Bools:
        view = state.view()
        if self.by_slack:
            behind: Bools = view.slack().tokens < 0.0
            return behind
        tpot_s = view.table.column("tpot_s")
        # Of these the tightest alone: drafts make steps longer, by which at last everybody would need them.
        return np.asarray((tpot_s < state.load.step_s) & (tpot_s <= ALIKE * tpot_s.min(initial=np.inf)))
