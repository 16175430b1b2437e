"""Asking the drafter's process: what is waited for and how long, what is thrown away, and what both cost.

Owned by the runner's part (overlap/frontier_runner.py), one per engine. It knows requests by name and nothing of vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from ..drafter_process.drafted import Drafted
from ..gate import Gate
from ..settings import ALWAYS
from .frontier import Frontiers, Tally

if TYPE_CHECKING:
    from ..drafter_process.mailbox import Reply
    from ..drafter_process.process import DrafterProcess, Wish
    from ..protocol import StopRule

FIRST_GUESS_S: Final = 0.05  # what drafting in turn takes, before the first was timed
PATIENCE: Final = 4.0  # times what drafting in turn usually takes, before vLLM's own drafter does it
SMOOTHING: Final = 0.1


class RemoteDrafting:
    """One engine's drafter process, its frontiers, and what both cost.

    :param mode: "auto": drafts ahead where steps were measured to be faster with it, since a busy process also slows
        the target down; "always": wherever a request's hits promise to pay
    """

    def __init__(self, process: DrafterProcess, mode: str) -> None:
        self.process = process
        self.mode = mode
        self.frontiers = Frontiers()
        self._gate = Gate()
        # Requests, and whether they might be drafted ahead: beside the step under way, and beside the next one.
        self._ahead_of: tuple[tuple[int, bool] | None, tuple[int, bool] | None] = (None, None)
        self.serial_s = FIRST_GUESS_S  # of drafting in turn, as the engine waits for it
        self.delay_s = 0.0  # until the process has left a frontier nobody wants any more
        self.overlap_s = 0.0  # of this step: the process drafted while the engine did something else
        self.hits = self.misses = 0  # of this step
        self.rounds: tuple[int, ...] = ()  # rows of each pass of the process in this step
        self.turns: dict[int, Wish] = {}  # by batch row, of this step: who drafts, and behind what
        self.drafted: dict[int, Drafted] = {}  # by batch row, of this step: what the process drafted
        self.late_drafts: dict[str, Drafted] = {}  # by request, of this step: what an earlier step asked for
        self.late_stop: StopRule | None = None  # ends them, as of that step
        # Behind its own states an EAGLE head is right less often than behind the target's.
        self.in_turn, self.ahead = Tally(), Tally()
        self._tallies: dict[str, Tally] = {}  # by request, of what the process drafted in this step
        self._handed: dict[str, tuple[tuple[int, ...], Tally]] = {}  # chunks under verification
        self._ahead_s: float | None = None  # when the newest job was sent, if nobody waits for it
        self._parted: set[str] = set()  # whose drafts that job is to bring, whenever they are met
        self._parted_stop: StopRule | None = None

    def begin_step(self) -> None:
        """Look at the process, forget what the last step did, and take the drafts that it left behind."""
        self.process.look()
        if self._ahead_s is None and (late := self.process.collect(0.0)) is not None:
            self._learn(late.ended_s - late.began_s)  # else a drafter that got slower would never be waited for again
        self.overlap_s, self.rounds, self.turns, self.drafted = 0.0, (), {}, {}
        self.hits = self.misses = 0
        self._ahead_of = self._ahead_of[1], None
        self.late_drafts = self._meet()

    @property
    def is_ready(self) -> bool:
        """Whether the process takes a job, or is at one that it was to do meanwhile."""
        return self.process.is_ready or self._ahead_s is not None

    @property
    def is_ahead(self) -> bool:
        """Whether the process is at a job that nobody waits for yet."""
        return self._ahead_s is not None

    @property
    def is_parted(self) -> bool:
        """Whether nobody waits for the drafts of this step."""
        return bool(self._parted)

    def part(self, wishes: Sequence[Wish], stop: StopRule | None) -> bool:
        """Let the process draft without waiting: a later step meets the drafts. False if it cannot take the job."""
        self._leave()
        self.frontiers.clear()
        self._handed = {}
        sent_s = time.monotonic()
        if not wishes or not self.process.send(wishes):
            return False
        self._ahead_s, self._parted_stop = sent_s, stop
        self._parted = {wish.request for wish in wishes}
        return True

    def drop(self, requests: Iterable[str]) -> None:
        """Refuse the drafts of requests that go on without them."""
        self._parted.difference_update(requests)

    def _meet(self) -> dict[str, Drafted]:
        """Return the drafts of the job that nobody waited for, and wait for them now."""
        parted, self._parted = self._parted, set()
        self.late_stop = self._parted_stop
        if not parted:
            return {}
        asked_s = time.monotonic()
        reply = self.process.collect(PATIENCE * self.serial_s)
        if reply is None:
            self.process.cancel()
            self._ahead_s = None
            return {}
        self._learn(reply.ended_s - reply.began_s)
        self._count(reply, asked_s)
        return {name: reply.drafted[key] for name, key in self.process.requests_of(reply).items() if name in parted}

    def take(self, sampled: dict[str, list[int]], lengths: dict[str, int]) -> dict[str, Drafted]:
        """Return the frontiers that are of use behind what was sampled; the other chains end as well."""
        if self._ahead_s is not None:
            is_awaited = any(self.frontiers.is_awaited(name, tokens) for name, tokens in sampled.items())
            self._fill(self.serial_s if is_awaited else 0.0)
        outcomes = self.frontiers.outcomes
        before = outcomes.hits, outcomes.misses
        found = {name: self.frontiers.take(name, tokens, lengths[name]) for name, tokens in sampled.items()}
        self.hits, self.misses = outcomes.hits - before[0], outcomes.misses - before[1]
        self.frontiers.clear()
        for name, tokens in sampled.items():
            if name in self._handed:
                chunk, tally = self._handed[name]
                tally.note(chunk, tokens)
        self._handed = {}
        self._tallies = {name: self.ahead for name, drafted in found.items() if drafted is not None}
        return {name: drafted for name, drafted in found.items() if drafted is not None}

    def _fill(self, limit_s: float) -> None:
        asked_s = time.monotonic()
        reply = self.process.collect(limit_s)
        if reply is None:
            return
        self._count(reply, asked_s)
        for name, key in self.process.requests_of(reply).items():
            self.frontiers.fill(name, reply.drafted[key])

    def _count(self, reply: Reply, until_s: float) -> None:
        if self._ahead_s is not None:
            self.overlap_s += max(min(reply.ended_s, until_s) - max(reply.began_s, self._ahead_s), 0.0)
            self._ahead_s = None
        depths = [len(drafted.tokens) for drafted in reply.drafted.values()]
        self.rounds += tuple(sum(depth > column for depth in depths) for column in range(max(depths, default=0)))

    def draft(self, wishes: Sequence[Wish]) -> dict[str, Drafted]:
        """Return drafts in turn, of those requests that the process has an answer for in time."""
        began_s = time.monotonic()
        self._leave()
        if not self.process.send(wishes):
            return {}
        reply = self.process.collect(PATIENCE * self.serial_s)
        if reply is None:
            self.process.cancel()
            return {}
        self._learn(time.monotonic() - began_s)
        self._count(reply, began_s)
        found = {name: reply.drafted[key] for name, key in self.process.requests_of(reply).items()}
        self._tallies |= dict.fromkeys(found, self.in_turn)
        return found

    def _leave(self) -> None:
        """Let the process leave a job that nobody wants any more."""
        if self._ahead_s is None:
            return
        began_s = time.monotonic()
        self.process.cancel()
        reply = self.process.collect(self.serial_s)
        if reply is not None:
            self.delay_s += SMOOTHING * (time.monotonic() - began_s - self.delay_s)
            self._count(reply, began_s)
        self._ahead_s = None

    def _learn(self, took_s: float) -> None:
        self.serial_s += SMOOTHING * (took_s - self.serial_s)

    def go_on(self, wishes: Sequence[Wish], requests: int) -> None:
        """Let the process draft ahead of the chunks that the target is about to verify, of a batch of `requests`."""
        self._handed = {
            wish.request: (wish.chunk, self._tallies[wish.request]) for wish in wishes if wish.request in self._tallies
        }
        if not wishes or not self._may_go_on(requests):
            return
        wanted = [wish for wish in wishes if self.frontiers.is_wanted(wish.request, self.serial_s, self.delay_s)]
        sent_s = time.monotonic()
        if wanted and self.process.send(wanted):
            self._ahead_s = sent_s
            for wish in wanted:
                self.frontiers.open(wish.request, wish.chunk)

    def _may_go_on(self, requests: int) -> bool:
        if self.mode == ALWAYS:
            return True
        may = self._gate.ask(requests)
        self._ahead_of = self._ahead_of[0], (requests, may)
        return may

    def note_step(self, requests: int, took_s: float, emitted: int) -> None:
        """Take in what a step took that read no prompt: target, sampler and drafting."""
        if (asked := self._ahead_of[0]) is not None and asked[0] == requests:
            self._gate.note(requests, asked[1], took_s, emitted)

    def forget(self, requests: set[str]) -> None:
        """Forget requests that ended."""
        self.frontiers.forget(requests)
        self.process.forget(requests)
