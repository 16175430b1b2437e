"""Memory for rows that are picked out of the batch in every step: fresh memory of that size costs page faults.

Used by `Pruning`; what it returns is overwritten by the next call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class RowBuffer:
    """Grows to the largest batch seen."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def picked(self, states: Tensor, index: Tensor) -> Tensor:
        """Return the rows `index` of states (rows, width)."""
        import torch

        memory, count = self._memory, len(index)
        if memory is None or len(memory) < count or memory.shape[1:] != states.shape[1:]:
            memory = self._memory = torch.empty_like(states)
        return torch.index_select(states, 0, index, out=memory[:count])
