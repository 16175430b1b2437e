"""How FASER drafts with the speculator of vLLM's V2 runner: each request its own length, no round for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..hook_guard import HookGuard
from ..patches.v2_speculator import bounded_rounds, keeps_its_own_rounds
from .late_confidences import Drawn, LateConfidences
from .ragged_v2 import RaggedV2

if TYPE_CHECKING:
    from torch import Tensor


class DraftingV2:
    """FASER's hold on one runner's speculator; every failure of its own leaves vLLM's drafting."""

    rounds: tuple[int, ...] = ()  # rows in each round of the last drafting
    drawn: Drawn | None = None  # confidences of the last drafting

    def __init__(self, runner: Any, is_pinned: bool, guard: HookGuard) -> None:
        speculator = runner.speculator
        self._speculator, self._guard = speculator, guard
        self._is_bounded = keeps_its_own_rounds(speculator)
        self._ragged = RaggedV2(runner)
        self._confidences = LateConfidences(speculator, is_pinned)

    def draft(self, propose: Callable[[], Tensor], batch: Any, lengths: list[int], rounds: int) -> Tensor:
        """Draft for the next step.

        :param batch: vLLM's InputBatch
        :param lengths: tokens for each of its rows
        :param rounds: the longest of them, as the scheduler asks for it
        """
        self.drawn = None
        self._ragged.begin(lengths)
        drafts = bounded_rounds(self._speculator, propose, rounds) if self._is_bounded else propose()
        self.rounds = self._ragged.rounds or (len(lengths),) * rounds
        if self._confidences.is_on and rounds:
            self._guard("confidences", lambda: self._take(batch, lengths))
        return drafts

    def _take(self, batch: Any, lengths: list[int]) -> None:
        self.drawn = self._confidences.take(batch.idx_mapping, list(batch.req_ids), lengths)
