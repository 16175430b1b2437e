"""Ping-pong groups on vLLM's requests: who is left out of the next step, and whether two groups pay.

Owned by the scheduler mixin, on the engine thread only. Reads public attributes of vLLM's Request (0.32) and writes
one: `next_decode_eligible_step`, which keeps a request out of a step. Where groups are dealt no request rests
(steering/resting.py); vLLM's asynchronous scheduler writes it too, but only of those whom it has just scheduled. That
one schedules a step before the last one's tokens are known: so what a step was is kept until its report is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..gate import Gate
from ..operator_log import operator_log
from ..settings import ALWAYS, AUTO, NEVER, Settings
from ..steering.orders import StepReport
from .groups import Groups, GroupTurn, PhasePace
from .splits import are_offered, chosen_splits, no_groups_reason

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = operator_log(__name__)


def chosen_groups(settings: Settings, config: VllmConfig) -> PingPong | None:
    """Return what deals groups, None where nobody asked for them or nobody could draft beside the target."""
    if are_offered(chosen_splits(settings, config)):
        return PingPong(ALWAYS if settings.ping_pong == ALWAYS else AUTO, by_split=True)
    if settings.ping_pong == NEVER:
        return None
    reason = no_groups_reason(settings, config)
    if reason is None:
        return PingPong(settings.ping_pong)
    logger.warning("FASER deals no ping-pong groups: %s", reason)
    return None


@dataclass(frozen=True, slots=True)
class DealtStep:
    """How one step was dealt."""

    turn: GroupTurn
    split: int
    decoding: frozenset[str]
    could_part: bool  # two groups could have been had
    is_between: bool  # it begins or ends two groups


class PingPong:
    """One engine's groups.

    :param mode: "auto": two groups where they were measured to be faster; "always": wherever they can be
    :param by_split: only while a split of the cores is asked for
    """

    def __init__(self, mode: str, by_split: bool = False) -> None:
        self.mode = mode
        self.by_split = by_split
        self.pace = PhasePace()
        self._groups = Groups()
        self._gate = Gate()  # of groups that no split asks for
        self._gates: dict[int, Gate] = {}  # of each split
        self._asked = 0  # the split to deal groups for from the next step on; 0: none
        self._is_ready = False  # the drafter's process takes jobs
        self._latched: dict[str, int] = {}  # draft length of every request whose draft may still come
        self._newest = DealtStep(GroupTurn(), 0, frozenset(), False, False)
        self._dealt: dict[int, DealtStep] = {}  # steps whose report is still to come

    def deal(self, running: Iterable[Any], next_step: int) -> None:
        """Keep those out of the next step whose turn it is not; requests in the middle of a prompt have none."""
        decoding = {
            request.request_id: request
            for request in running
            if (request.num_output_tokens or request.num_output_placeholders) and not request.is_prefill_chunk
        }
        weights = {name: self._weight(name) for name in decoding}
        could_part, before = self._could_part(weights), self._newest
        turn, split = self._groups.turn(weights, could_part and self._is_wanted(len(weights))), before.split
        if turn.is_deferred:
            split = self._asked
        elif not turn.held:  # else the process is still at their drafts
            split = 0
        # The first step of two groups verifies drafts for which the step before it waited; the one behind the last
        # verifies a half, and waits for both halves' drafts. Neither tells what a step of its kind takes.
        is_between = turn.is_deferred != before.turn.is_deferred or (turn.is_deferred and split != before.split)
        self._newest = DealtStep(turn, split, frozenset(weights), could_part, is_between)
        for name in turn.held:
            decoding[name].next_decode_eligible_step = next_step + 1

    def _weight(self, name: str) -> float:
        """Return a request's phase time by its draft length; a draft under way is not there yet, and weighs as much."""
        length = self._latched.get(name, 0)
        return self.pace.weight(1 + length, length)

    def _could_part(self, weights: Mapping[str, float]) -> bool:
        return self._is_ready and len(weights) > 1 and any(self._latched.get(name) for name in weights)

    def _is_wanted(self, requests: int) -> bool:
        if self.by_split and not self._asked:
            return False
        return self.mode == ALWAYS or (self.pace.may_pay() and self._gate_of(self._asked).ask(requests))

    def _gate_of(self, split: int) -> Gate:
        return self._gates.setdefault(split, Gate()) if split else self._gate

    def in_force(self, asked: int | None) -> int | None:
        """Return the split of the step that was dealt last; take in which one is asked for from the next one on.

        :param asked: an index of HELLO's splits; None: none is offered
        """
        self._asked = asked or 0
        return None if asked is None else self.split

    @property
    def split(self) -> int:
        """The split that the step which was dealt last has the cores under; 0: none."""
        return self._newest.split

    @property
    def turn(self) -> GroupTurn:
        """Whose turn it is in the step that was dealt last."""
        return self._newest.turn

    @property
    def is_deferred(self) -> bool:
        """Whether nobody waits for the drafts of the step that was dealt last."""
        return self.turn.is_deferred

    def latch(self, step: int, lengths: dict[str, int]) -> dict[str, int]:
        """Take in the draft lengths of a step; return those of all requests whose drafts may come in it."""
        self._dealt[step] = self._newest
        self._latched = {name: self._latched.get(name, 0) for name in self._newest.turn.held} | lengths
        return self._latched

    def drop(self, name: str) -> None:
        """Refuse the draft that is under way for a request that ended or lost its KV cache."""
        self._latched.pop(name, None)

    def note(
        self, step: int, scheduled: Mapping[str, int], emitted: int, time_s: float, report: StepReport | None
    ) -> None:
        """Take in what became of a step.

        :param scheduled: rows of each request
        :param emitted: tokens that the step emitted
        """
        self._is_ready = report is not None and report.is_drafter_ready
        if self.is_deferred and not self._is_ready:
            self._groups.land()
        dealt = self._dealt.pop(step, None)
        for older in [each for each in self._dealt if each < step]:  # they had no tokens
            del self._dealt[older]
        if report is None or dealt is None or not scheduled.keys() <= dealt.decoding:
            return  # rows of prompts would count as decoding
        tokens = sum(report.rounds or ())
        self.pace.note(report.verify_s, sum(scheduled.values()), report.draft_s, tokens)
        is_deferred = dealt.turn.is_deferred
        if not is_deferred and not dealt.turn.held:
            self.pace.note_whole(report.verify_s, report.draft_s)
        # Behind a split vLLM's drafter reads what it sat out: a cost of the split that would speak for it.
        if dealt.could_part and not dealt.is_between and not (self.by_split and report.caught_up):
            for gate in self._told_gates(dealt):
                gate.note(len(dealt.decoding), is_deferred, time_s, emitted)

    def _told_gates(self, dealt: DealtStep) -> list[Gate]:
        """Return the gates that a step is evidence for: one without groups is for every split's."""
        if not self.by_split:
            return [self._gate]
        return [self._gate_of(dealt.split)] if dealt.turn.is_deferred else list(self._gates.values())
