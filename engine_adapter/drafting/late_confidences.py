"""The drafter's confidence in each token on the V2 runner: noted on the device, told with the next step's report.

Nothing waits: the probabilities are copied to the host behind the drafting, and read when the next step's tokens are
there, which come later on the same stream. A copy that is late all the same is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..host_copy import HostCopy
from ..operator_log import operator_log
from ..patches.speculators.rounds import watch_logits

if TYPE_CHECKING:
    from torch import Tensor

logger = operator_log(__name__)


class LateConfidences:
    """The highest probability of each round, by request slot and position."""

    def __init__(self, speculator: Any, is_pinned: bool) -> None:
        import torch

        self._is_pinned = is_pinned
        self.is_on = False  # until logits were seen: some drafters show none
        self._has_failed = False
        if watch_logits(speculator, self._note):
            # The last row takes what graphs pad with, whose slot is -1.
            shape = (speculator.max_num_reqs + 1, speculator.num_speculative_steps)
            self._values = torch.zeros(shape, device=speculator.device)

    def _note(self, logits: Tensor, slots: Tensor, step: Tensor) -> None:
        """Note one round, often while a graph is captured: an index of no dimension would be read back to the host."""
        if self._has_failed:
            return
        try:
            import torch

            highest = torch.softmax(logits, -1, dtype=torch.float32).amax(-1)
            self._values[slots, step.to(torch.int64).expand_as(slots)] = highest
            self.is_on = True
        except Exception:
            self.is_on, self._has_failed = False, True
            logger.exception("FASER sees no confidences of the drafter: looking at its logits failed")

    def take(self, slots: Tensor, names: list[str], lengths: list[int]) -> Drawn:
        """Start to copy what the drafting just noted, in batch order."""
        values = self._values[slots].nan_to_num(0.0)
        return Drawn(HostCopy(values, self._is_pinned), names, lengths)


@dataclass(slots=True, eq=False)
class Drawn:
    """Confidences of one step's drafts, on their way to the host."""

    copy: HostCopy
    names: list[str]
    lengths: list[int]  # tokens that each drafted

    def told(self) -> dict[str, tuple[float, ...]]:
        """Return them by request, as many as each drafted; nothing while they are under way."""
        rows = self.copy.values()
        if rows is None:
            return {}
        drafts = zip(self.names, self.lengths, rows, strict=True)
        return {name: tuple(row[:length]) for name, length, row in drafts if length}
