"""What the exit heads decide in one step: the cut of every request, and the rows of the batch that stay.

Made behind layer L by whatever predicts acceptance (`TokenHeads` from one answer per token, exit_kernel.py in one
launch on CUDA); used by `Pruning`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from .cut import Batch, Bools, Cut
    from .pruning import Checks


@dataclass(frozen=True, slots=True)
class Decision:
    """What stays."""

    cut: Cut
    rows: Tensor  # (rows that stay,) int64 places in the batch, on the states' device


class TokenHeads(ABC):
    """Heads that tell of each draft token by itself whether it may well be accepted."""

    layers: tuple[int, ...]
    has_candidates: bool  # whether the drafter's candidates and confidences are needed

    @abstractmethod
    def passes(self, layer: int, threshold: float, checks: Checks) -> Bools:
        """Return (draft tokens,) which of them pass; must not look at later rows."""

    def decide(self, layer: int, threshold: float, checks: Checks, batch: Batch) -> Decision:
        """Cut each request behind its first token that does not pass."""
        import torch

        cut = batch.cut(self.passes(layer, threshold, checks))
        return Decision(cut, torch.from_numpy(batch.rows(cut)).to(checks.states.device))
