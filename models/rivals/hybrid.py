"""Copied drafts first, the drafter where there are none: the two rules that others have for it.

Sources: vLLM's pull request 24344 (an n-gram match is taken wherever there is one, else EAGLE drafts) and Arctic
Inference (vllm/model_runner.py: a suffix match is taken if the sum of its tokens' chances is at least the number of
tokens that the drafter drafts). Here a row with a match leaves the drafter's batch, which both run in full.
"""

from __future__ import annotations

import msgspec

from ...engine_adapter.protocol import MatchRule
from ...env.estimate.engine_state import EngineState
from ...env.spaces import Action, Capabilities
from ..policies.baselines import FixedLength


class CopiesFirst:
    """One length for the drafter; a copy in its place wherever it promises at least so many tokens."""

    def __init__(self, name: str, fixed: FixedLength, longest: int, least: float) -> None:
        self.name = name
        self._fixed = fixed
        self._match = MatchRule([1.0], [0.0], [0.0], longest, least)

    @classmethod
    def parse(cls, name: str, text: str, capabilities: Capabilities) -> CopiesFirst:
        """Read the K of hybrid:K, or arctic:K, where a copy must promise as many."""
        fixed = FixedLength.parse(text, capabilities)
        return cls(f"{name}:{text}", fixed, capabilities.copy_max, float(fixed.length) if name == "arctic" else 0.0)

    def act(self, state: EngineState) -> Action:
        """Return the same rule at any load."""
        return msgspec.structs.replace(self._fixed.act(state), match=self._match, reason=f"policy {self.name}")
