"""Drafts that nobody waits for, on the V2 runner: they are made beside the next step's verification.

The scheduler's part (ping_pong.py) says in which steps, and leaves their requests out of the next one. The drafter runs
on a stream of its own, from copies of what that step overwrites. The engine's stream waits for it before the drafter
runs again, and before a step in which one of its requests is or has left: so one drafting is under way at most, and
nobody else touches what it reads and writes by request. Called by the runner mixin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..operator_log import operator_log
from ..patches.speculators.draft_inputs import DraftInputs, meets, waits_for_drafts
from ..patches.v2 import Proposal

if TYPE_CHECKING:
    from torch import Tensor

    from ..runner.step_events import StepEvents
    from .side_stream import SideStream

logger = operator_log(__name__)


@dataclass(slots=True)
class LateDraft:
    """One drafting that was put off."""

    taken: dict[str, Any]  # what `propose` reads, kept until the engine's stream has waited for it
    rounds: int
    propose: Callable[..., Any]
    events: StepEvents | None


class LateDrafting:
    """What drafts beside the next step; after a failure of its own vLLM drafts in turn again."""

    def __init__(self, runner: Any, side: SideStream) -> None:
        self.is_on = True
        self._inputs = DraftInputs(runner)
        self._side = side
        self._held: LateDraft | None = None  # put off in the step under way
        self._flying: LateDraft | None = None  # under way

    def hold(self, proposal: Proposal, rounds: int, events: StepEvents | None) -> Tensor | None:
        """Keep what a drafting reads; return what vLLM shall take for its drafts, None: draft at once."""
        try:
            self.settle()
            if not self.is_on:
                return None
            given = proposal.named()
            if waits_for_drafts(given):
                return None
            late = LateDraft(self._inputs.take(given), rounds, proposal.propose, events)
            stand_in = self._inputs.stand_in(proposal.batch)
        except Exception:
            self._give_up()
            return None
        self._held = late
        if events is not None:
            events.is_late = True
        return stand_in

    def launch(self, draft: Callable[[Proposal, int], Tensor], split: int) -> None:
        """Draft what was put off, beside all that the engine's stream is given from here on.

        :param draft: drafts so many rounds
        :param split: an index of HELLO's, on the drafter's share of which it runs
        """
        late, self._held = self._held, None
        if late is None:
            return
        self._flying = late
        try:
            self._side.launch(lambda: self._draft(late, draft), split)
        except Exception:
            self._end_beside()

    def _draft(self, late: LateDraft, draft: Callable[[Proposal, int], Tensor]) -> None:
        """Draft from the copies; what goes wrong leaves the stand-ins in the drafts' place."""
        try:
            self._draft_from_copies(late, draft)
        except Exception:
            self._give_up()

    def _draft_from_copies(self, late: LateDraft, draft: Callable[[Proposal, int], Tensor]) -> None:
        def draft_from(given: dict[str, Any]) -> Tensor:
            batch = given["input_batch"]
            again = Proposal(lambda: late.propose(**given), batch, late.rounds, lambda: given, late.propose)
            return draft(again, late.rounds)

        self._inputs.draft(late.taken, late.rounds, draft_from)

    def meet(self, scheduler_output: Any) -> None:
        """Wait for the drafting that is under way if the next step touches what it reads or writes."""
        if self._flying is not None and meets(scheduler_output, self._flying.taken["input_batch"].req_ids):
            self.settle()

    def settle(self) -> None:
        """Let the engine's stream wait for the drafting that is under way."""
        late, self._flying = self._flying, None
        if late is None:
            return
        try:
            if late.events is not None and self._side.is_beside:
                late.events.mark("met")
            self._side.wait()
        except Exception:
            self._end_beside()

    def _end_beside(self) -> None:
        """Let the host wait for what may be under way: nobody knows any more what comes behind what."""
        self._flying = None
        self._give_up()
        self._side.finish()

    def _give_up(self) -> None:
        self.is_on, self._held = False, None
        logger.exception("FASER drafts in turn from here on: drafting beside the next step failed")
