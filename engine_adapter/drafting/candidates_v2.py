"""What the V2 runner's drafter thought likely at each draft position: ids and its confidence, for the exit heads.

Noted on the device in each round, by request slot, where vLLM keeps the drafts themselves; read when these are
verified. Nothing waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..operator_log import operator_log
from ..patches.speculators.rounds import watch_logits

if TYPE_CHECKING:
    from torch import Tensor

logger = operator_log(__name__)


class CandidatesV2:
    """The `count` likeliest tokens of each round."""

    def __init__(self, speculator: Any, count: int) -> None:
        import torch

        self.is_on = False  # until logits were seen: some drafters show none
        self._has_failed, self._count = False, count
        if watch_logits(speculator, self._note):
            # The last row takes what graphs pad with, whose slot is -1.
            shape = (speculator.max_num_reqs + 1, speculator.num_speculative_steps)
            self._tokens = torch.zeros((*shape, count), dtype=torch.int64, device=speculator.device)
            self._confidences = torch.zeros(shape, device=speculator.device)

    def _note(self, logits: Tensor, slots: Tensor, step: Tensor) -> None:
        """Note one round; an index of no dimension would be read back to the host."""
        if self._has_failed:
            return
        try:
            import torch

            at = slots, step.to(torch.int64).expand_as(slots)
            best = logits.float().topk(self._count, dim=-1)
            self._tokens[at] = best.indices
            self._confidences[at] = torch.exp(best.values[:, 0] - torch.logsumexp(logits.float(), dim=-1))
            self.is_on = True
        except Exception:
            self.is_on, self._has_failed = False, True
            logger.exception("FASER prunes no more: noting the drafter's likeliest tokens failed")

    def of(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids (draft tokens, count) and confidences (draft tokens,) at these slots and positions, from 0."""
        return self._tokens[slots, positions], self._confidences[slots, positions]
