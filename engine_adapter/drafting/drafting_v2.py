"""How FASER drafts with the speculator of vLLM's V2 runner: each request its own length, no round for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..hook_guard import HookGuard
from ..patches.speculators.rounds import bounded_rounds, cuts_rounds, keeps_its_own_rounds
from .catch_up_v2 import CatchUpV2
from .late_confidences import Drawn, LateConfidences
from .ragged_v2 import RaggedV2
from .rounds_gate import rounds_gate

if TYPE_CHECKING:
    from torch import Tensor

    from ..patches.v2 import Proposal


class DraftingV2:
    """FASER's hold on one runner's speculator; every failure of its own leaves vLLM's drafting."""

    rounds: tuple[int, ...] = ()  # rows in each round of the last drafting
    drawn: Drawn | None = None  # confidences of the last drafting

    def __init__(self, runner: Any, is_pinned: bool, guard: HookGuard, room: int) -> None:
        """`room`: rows of a drafter that is left out, at most."""
        speculator = runner.speculator
        self._speculator, self._guard = speculator, guard
        self._is_bounded = keeps_its_own_rounds(speculator)
        self._ragged = RaggedV2(runner, rounds_gate())
        self._confidences = LateConfidences(speculator, is_pinned)
        self.catch_up = CatchUpV2(runner, guard, room)

    @property
    def is_ragged(self) -> bool:
        """Whether rows may leave the draft batch; known once vLLM has set up attention."""
        return self._ragged.is_on and cuts_rounds(self._speculator)

    def draft(self, proposal: Proposal, lengths: list[int] | None, rounds: int) -> Tensor:
        """Draft for the next step.

        :param lengths: tokens for each row of the batch; None: not known, vLLM drafts by itself
        :param rounds: the longest of them, as the scheduler asks for it
        """
        self.drawn = None
        self.catch_up.begin(proposal.batch)
        if lengths is not None and self.catch_up.sits_out(proposal):
            self.rounds = ()
            none: Tensor = self._speculator.draft_tokens[: len(lengths)]  # all of which vLLM marks as missing
            return none
        self.catch_up.catch_up()
        if lengths is None:
            self.rounds = (proposal.batch.num_reqs,) * rounds
            drafts: Tensor = proposal.run()
            return drafts
        return self._draft(proposal, lengths, rounds)

    def _draft(self, proposal: Proposal, lengths: list[int], rounds: int) -> Tensor:
        self._ragged.begin(lengths)
        drafts = bounded_rounds(self._speculator, proposal.run, rounds) if self._is_bounded else proposal.run()
        self.rounds = self._ragged.rounds or (len(lengths),) * rounds
        if self._confidences.is_on and rounds:
            self._guard("confidences", lambda: self._take(proposal.batch, lengths))
        return drafts

    def _take(self, batch: Any, lengths: list[int]) -> None:
        self.drawn = self._confidences.take(batch.idx_mapping, list(batch.req_ids), lengths)
