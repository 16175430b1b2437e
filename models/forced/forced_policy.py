"""A policy that forces mechanisms on, whatever they cost: it serves `faser demo --tour`, no operator.

Made by models/registry.py from `force:MECHANISM[+MECHANISM...]`. What an engine does not offer it is not asked for, so
the same name goes with every engine; the engine's own gates are switched off by its settings. Deterministic, as every
policy.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...engine_adapter.protocol import MatchRule, StopRule
from ...env.estimate.engine_state import EngineState
from ...env.spaces import Action, Capabilities, Lengths
from ..policies.policy import PolicyError
from ..policies.step_grid import place

# In the order of a tour; "drafts" is the same length for all, beside which the others are seen.
MECHANISMS: Final = ("drafts", "lengths", "stops", "copies", "pruning", "ahead", "groups", "splits")
LEAST_SURVIVAL: Final = 0.25  # of a token that is drafted: so that requests differ, most of them from the longest
LEAST_SURE: Final = 0.2  # survival by the drafter's confidence of a token that is kept
LEAST_COPY: Final = 0.2  # survival of a copied token: it costs its row alone
COPIES_OVER_DRAFTS: Final = 1.0  # tokens that a copy must promise to take the place of a draft
TURN_RECORDS: Final = 12  # of a split, then it is the next one's turn


class ForcedPolicy:
    """The longest draft for everybody, and what is named besides; copies alone leave the drafter out."""

    def __init__(self, wanted: frozenset[str], capabilities: Capabilities, name: str = "force") -> None:
        """Take names of MECHANISMS."""
        self.name = name
        self._wanted, self._capabilities = wanted, capabilities
        self._longest = 0 if wanted == {"copies"} else capabilities.k_max
        self._records = 0

    @classmethod
    def parse(cls, text: str, capabilities: Capabilities) -> ForcedPolicy:
        """Read the names of force:NAMES; raise PolicyError for one that is none."""
        names = text.split("+")
        if unknown := [name for name in names if name not in MECHANISMS]:
            raise PolicyError(
                f"policy 'force:{text}': unknown mechanism {unknown[0]!r}, expected some of {', '.join(MECHANISMS)}, "
                "e.g. force:lengths+stops"
            )
        return cls(frozenset(names), capabilities, f"force:{text}")

    def act(self, state: EngineState) -> Action:
        """Return what forces them on; what the engine has not got stays "no opinion" or becomes it (`clamp`)."""
        wanted, capabilities = self._wanted, self._capabilities
        lengths, default = self._lengths(state)
        split, self._records = self._split(), self._records + 1
        return Action(
            lengths,
            default,
            split=split,
            frontier=capabilities.frontier if "ahead" in wanted else 0,
            prune=capabilities.released_prune if "pruning" in wanted else None,
            stop=StopRule([1.0], [0.0], [LEAST_SURE], [LEAST_SURE]) if "stops" in wanted else None,
            match=self._match(),
            reason=f"forced, whatever it costs: {', '.join(name for name in MECHANISMS if name in wanted)}",
        )

    def _lengths(self, state: EngineState) -> tuple[Lengths, int]:
        """Return (n,) lengths and that of who comes next: by each request's acceptance, else the longest."""
        lengths = np.full(state.requests.size, self._longest, np.int64)
        if "lengths" not in self._wanted or not self._longest:
            return lengths, self._longest
        mean, worths = state.population.mean, np.ones(len(lengths))
        default = place(state.acceptance(), state.decoding(), worths, mean, LEAST_SURVIVAL, self._longest, lengths)
        # Without a draft nobody would ever learn that a request has become easy to guess.
        return np.maximum(lengths, 1), max(int(default), 1)

    def _split(self) -> int:
        """Return the index of the split: the first one for two groups, each in turn for splits that change."""
        offered = len(self._capabilities.splits)
        if "splits" in self._wanted:
            return self._records // TURN_RECORDS % offered
        return int("groups" in self._wanted and offered > 1)

    def _match(self) -> MatchRule | None:
        if "copies" not in self._wanted:
            return None
        worth = COPIES_OVER_DRAFTS if self._longest else 0.0
        return MatchRule([1.0], [0.0], [LEAST_COPY], self._capabilities.copy_max, worth)
