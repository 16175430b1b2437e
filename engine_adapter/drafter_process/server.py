"""The drafter's side of the mailbox: what runs in its process, around whatever draws the tokens.

A drafter's module calls `serve` from its own main. Ends when the engine's end of the bell is gone, whatever became
of the engine. It answers first and reads long prompts afterwards, in portions, while nobody waits.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from ..partition.core_shares import set_threads
from .drafted import Drafted
from .mailbox import READY, Ask, Job, Mailbox, MailboxError, Reply, StateRows, Tokens

NEAR_TOKENS: Final = 32  # up to here a sequence is caught up with before the answer; more is read when nobody waits
PORTION_TOKENS: Final = 64  # read between two looks at the bell


@dataclass(frozen=True, slots=True)
class DraftTask:
    """Go on from `sequence` by `count` tokens; only the first `certain` tokens are sure to stay."""

    key: int
    sequence: Tokens
    certain: int
    count: int


class Drafter(Protocol):
    """Draws tokens; keeps what it has computed by key."""

    def learn(self, key: int, sequence: Tokens, states: StateRows) -> bool:
        """Take in what the engine says of a sequence, while it says so; False if nobody can go on from that."""

    def behind(self, key: int, sequence: Tokens) -> int:
        """Return how many tokens of the sequence it has not computed."""

    def draft(self, tasks: list[DraftTask], is_cancelled: Callable[[], bool]) -> dict[int, Drafted]:
        """Go on from every task's sequence; what is cancelled is answered as far as it is."""

    def read(self, key: int, sequence: Tokens, count: int) -> None:
        """Compute the next `count` tokens of the sequence that are missing."""

    def forget(self, key: int) -> None:
        """Give a request's memory back; unknown keys are none."""


class JobServer:
    """Keeps every request's tokens and answers one job after the other."""

    def __init__(self, mailbox: Mailbox, drafter: Drafter) -> None:
        self._mailbox = mailbox
        self._drafter = drafter
        self._known: dict[int, Tokens] = {}
        self._threads = 0  # that were asked for; 0: none were
        self._unread: list[int] = []  # keys whose sequences are to be read when nobody waits

    def run(self) -> None:
        """Serve until the engine is gone."""
        try:
            self._mailbox.ring(READY)
            while True:
                number = self._mailbox.heard(0.0 if self._unread else None)
                if number is None:
                    self._read_on()
                else:
                    self._mailbox.answer(self._work(self._mailbox.read_job(number)))
        except MailboxError:
            pass

    def _work(self, job: Job) -> Reply:
        began_s = time.monotonic()
        if job.threads not in (0, self._threads):
            self._threads = job.threads
            set_threads(job.threads)
        for key in job.forget:
            self._known.pop(key, None)
            self._drafter.forget(key)
        tasks = [task for ask in job.asks if (task := self._task(ask)) is not None]
        self._unread = [key for key in self._unread if key in self._known]
        drafted = self._drafter.draft(tasks, lambda: self._mailbox.is_cancelled(job.number)) if tasks else {}
        return Reply(job.number, began_s, time.monotonic(), drafted)

    def _task(self, ask: Ask) -> DraftTask | None:
        known = self._known.get(ask.key, ask.tokens[:0])
        if ask.start > len(known):
            return None  # it came before this process did; the engine starts over when it asks again
        certain = np.concatenate((known[: ask.start], ask.tokens))
        self._known[ask.key] = certain
        sequence = np.concatenate((certain, ask.assumed))
        if not self._drafter.learn(ask.key, sequence, ask.states):
            return None
        if self._drafter.behind(ask.key, sequence) > NEAR_TOKENS:
            if ask.key not in self._unread:
                self._unread.append(ask.key)
            return None
        return DraftTask(ask.key, sequence, len(certain), ask.count)

    def _read_on(self) -> None:
        key = self._unread[0]
        known = self._known[key]
        if self._drafter.behind(key, known) == 0:
            self._unread.pop(0)
        else:
            self._drafter.read(key, known, PORTION_TOKENS)


def serve(memory_fd: int, bell_fd: int, make: Callable[[], Drafter]) -> None:
    """Serve the engine that started this process until it is gone."""
    mailbox = Mailbox(memory_fd, socket.socket(fileno=bell_fd))
    # The bell falls silent with its last holder, which may be another child of the engine that outlives it.
    engine = os.getppid()
    try:
        mailbox.watch(os.pidfd_open(engine))
    except OSError:
        return  # it died before we could look
    drafter = make()
    if os.getppid() == engine:
        JobServer(mailbox, drafter).run()
