"""A real `faser sidecar` whose policy, `random:SEED`, decides at random whatever an engine can be asked for.

Run by killed_sidecar.py with the arguments of `faser`. Nothing it decides depends on what was drafted or sampled.
"""

from __future__ import annotations

import random
from importlib import import_module
from typing import Any

import numpy as np

from faser.env.estimate.engine_state import EngineState
from faser.env.spaces import Action, Capabilities
from faser.models import registry


class RandomPolicy:
    """Draws lengths, a stop rule, a cut and how far to draft ahead, anew for every record."""

    name = "random"

    def __init__(self, seed: str, capabilities: Capabilities) -> None:
        self._chance = random.Random(seed)
        self._draws: Any = import_module("gauntlet")
        self._longest, self._layers = capabilities.k_max, list(capabilities.exit_layers)

    def act(self, state: EngineState) -> Action:
        """Return an action that has nothing to do with the state but its size."""
        chance, longest = self._chance, self._longest
        return Action(
            np.array([chance.randint(0, longest) for _ in state.handles()], np.int64),
            chance.randint(0, longest),
            frontier=chance.choice([0, longest, longest]),
            prune=self._draws.random_prune(chance, self._layers),
            stop=self._draws.random_stop(chance),
            reason="a throw of the dice",
        )


if __name__ == "__main__":
    registry.make_policy = lambda spec, capabilities: RandomPolicy(spec, capabilities)
    import_module("faser.controller.cli.main").main()  # only now: some modules take the name as they are imported
