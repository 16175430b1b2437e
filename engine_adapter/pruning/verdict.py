"""What the exit heads decide in one step: how many rows of every request stay.

Made behind layer L by whatever predicts acceptance (`TokenHeads` from one answer per token, exit_kernel.py in one
launch on CUDA); used by `Pruning`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ..arrays import Bools, Ints
    from .cut import CutBatch


@dataclass(slots=True)
class Checks:
    """The draft tokens under verification and what is known of them, one row per token, request by request."""

    states: Tensor  # (tokens, hidden size) residual stream behind layer L, in the row that tests the token
    tokens: Tensor  # (tokens,) draft token ids
    candidates: Tensor | None  # (tokens, candidates) ids the drafter thought likeliest there; None: drafter tells none
    confidences: Tensor | None  # (tokens,) drafter's probability of its likeliest
    positions: Tensor  # (tokens,) 1 is a request's first draft token


@dataclass(frozen=True, slots=True)
class Verdict:
    """What stays."""

    kept: Ints  # (requests,) of the drafts + 1 rows of each, how many stay
    rows: Tensor | None = None  # (rows that stay,) int64 places in the batch, where they are known on a device already


class TokenHeads(ABC):
    """Heads that tell of each draft token by itself whether it may well be accepted."""

    layers: tuple[int, ...]
    candidates: int  # likely tokens that the drafter shall note at each position; 0: neither them nor confidences

    @abstractmethod
    def passes(self, layer: int, threshold: float, checks: Checks) -> Bools:
        """Return (draft tokens,) which of them pass; must not look at later rows."""

    def chances(self, layer: int, threshold: float, checks: Checks) -> Tensor:
        """Return (draft tokens,) the chance of each, where rows are ranked by it; must not look at later rows."""
        import torch

        return torch.from_numpy(self.passes(layer, threshold, checks)).float()

    def decide(self, layer: int, threshold: float, checks: Checks, batch: CutBatch) -> Verdict:
        """Cut each request behind its first token that does not pass."""
        return Verdict(batch.kept(self.passes(layer, threshold, checks)))
