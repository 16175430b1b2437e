"""The drafter's process as its engine sees it: started, watched, asked, killed, and started again after a pause.

Owned by the runner's part (overlap/frontier_runner.py), on the engine thread only. Every call returns at once, or
within the limit it is given: a drafter that is starting, busy, hung or dead is one that answers nothing. It must never
raise for what happens to the process.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..operator_log import operator_log
from ..partition.cpu import CpuPartition
from ..partition.shares import PartitionError
from .mailbox import NO_STATES, READY, Ask, Job, Mailbox, MailboxError, Reply, StateRows, Tokens, fitting

logger = operator_log(__name__)

FIRST_PAUSE_S: Final = 1.0  # before a dead drafter is started again; doubled by each death without an answer between
LONGEST_PAUSE_S: Final = 60.0
HUNG_S: Final = 10.0  # a job without a reply for so long: the process is killed
START_LIMIT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Wish:
    """Go on from a request's tokens by `count`."""

    request: str
    tokens: Tokens  # before this step
    sampled: tuple[int, ...]  # in this step
    chunk: tuple[int, ...] = ()  # handed to verification behind them: may turn out to be wrong
    count: int = 1
    states: StateRows = NO_STATES


@dataclass(slots=True)
class _Told:
    key: int
    tokens: int  # how many the process knows


class _Life:
    """One process, from start to end."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        cores: CpuPartition | None,
        shared: Sequence[int],
        now_s: float,
    ) -> None:
        self.mailbox, memory, bell = Mailbox.pair()
        try:
            self.process = subprocess.Popen(
                [*command, str(memory), str(bell.fileno())],
                pass_fds=(memory, bell.fileno(), *shared),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the engine, which ends this process
            )
        except OSError:
            self.mailbox.close()
            raise
        finally:
            os.close(memory)
            bell.close()
        self.is_ready = False
        self.job = 0  # number of the newest job
        self.since_s: float | None = now_s  # since when it owes an answer; None: it owes none
        self.told: dict[str, _Told] = {}
        self.forget: list[int] = []
        self.next_key = 1
        try:
            if cores is not None:
                cores.confine("draft", self.process.pid)
        except PartitionError:
            self.end()
            raise

    def end(self) -> None:
        """Kill the process, which holds nothing of value, and wait for it."""
        self.process.kill()
        self.process.wait()
        self.mailbox.close()


class DrafterProcess:
    """A drafter in a process of its own; one job at a time.

    :param command: what to run; it gets two more arguments, the descriptors of memory and bell.
    :param cores: what the process is confined to; None: it may run wherever this one may.
    :param shared: further descriptors that it keeps.
    """

    def __init__(
        self,
        command: Sequence[str],
        cores: CpuPartition | None = None,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        shared: Sequence[int] = (),
    ) -> None:
        shares = {} if cores is None else cores.environment("draft")
        self._command, self._cores = list(command), cores
        self._environment = {**(os.environ if environment is None else environment), **shares}
        self._clock = clock
        self._shared = tuple(shared)
        self.threads = 0  # of the jobs that are sent from now on; 0: as many as it was started with
        self._life: _Life | None = None
        self._pause_s, self._start_at_s = FIRST_PAUSE_S, clock()
        self.deaths = 0
        self.look()

    @property
    def pid(self) -> int | None:
        """The process, None if there is none now."""
        return None if self._life is None else self._life.process.pid

    @property
    def is_ready(self) -> bool:
        """Whether it can take a job now."""
        return self._life is not None and self._life.is_ready and self._life.since_s is None

    def look(self) -> None:
        """Start what is due, take note of what became ready or died; called once per step, never waits."""
        if self._life is None:
            if self._clock() >= self._start_at_s:
                self._start()
            return
        if not self._life.is_ready:
            self.collect(0.0)
        elif (status := self._life.process.poll()) is not None:
            self._died(f"ended with {status}")
        life = self._life
        if life is None or life.since_s is None:
            return
        limit_s = HUNG_S if life.is_ready else START_LIMIT_S
        if self._clock() - life.since_s > limit_s:
            self._died(f"gave no answer for {limit_s:.0f} s")

    def _start(self) -> None:
        try:
            self._life = _Life(self._command, self._environment, self._cores, self._shared, self._clock())
        except (OSError, PartitionError) as error:
            self._died(str(error))

    def _died(self, reason: str) -> None:
        life, self._life = self._life, None
        self.deaths += 1
        if life is not None:
            life.end()
        self._start_at_s = self._clock() + self._pause_s
        logger.warning("FASER's drafter process %s; it is started again in %.0f s", reason, self._pause_s)
        self._pause_s = min(2.0 * self._pause_s, LONGEST_PAUSE_S)

    def send(self, wishes: Sequence[Wish]) -> bool:
        """Hand over a job; False if the process cannot take one now, or if nothing fits."""
        life = self._life
        if life is None or not self.is_ready:
            return False
        asks = fitting([self._ask(life, wish) for wish in wishes], len(life.forget))
        if not asks:
            return False
        life.job += 1
        try:
            life.mailbox.post(Job(life.job, life.forget, asks, self.threads))
        except MailboxError as error:
            self._died(f"ended ({error})")
            return False
        life.forget, life.since_s = [], self._clock()
        self._note(life, asks, wishes)
        return True

    def _ask(self, life: _Life, wish: Wish) -> Ask:
        told = life.told.get(wish.request)
        if told is None:
            told = life.told[wish.request] = _Told(life.next_key, 0)
            life.next_key += 1
        start = min(told.tokens, len(wish.tokens))
        assumed = np.array(wish.sampled + wish.chunk, dtype=np.int32)
        return Ask(told.key, start, wish.tokens[start:], assumed, wish.count, wish.states)

    @staticmethod
    def _note(life: _Life, asks: Sequence[Ask], wishes: Sequence[Wish]) -> None:
        sent = {ask.key for ask in asks}
        for wish in wishes:
            if (told := life.told[wish.request]).key in sent:
                told.tokens = len(wish.tokens)

    def collect(self, limit_s: float) -> Reply | None:
        """Return the reply to the newest job as soon as it is there, None after `limit_s`."""
        life = self._life
        if life is None or life.since_s is None:
            return None
        try:
            number = life.mailbox.heard(limit_s)
            if number is None:
                return None
            if number == READY and not life.is_ready:
                life.is_ready, life.since_s = True, None
                logger.info("FASER's drafter process %d is ready", life.process.pid)
                return None
            if number != life.job:
                raise MailboxError(f"it answered job {number}, expected {life.job}")
            reply = life.mailbox.read_reply(number)
        except MailboxError as error:
            self._died(f"ended ({error})")
            return None
        life.since_s, self._pause_s = None, FIRST_PAUSE_S
        return reply

    def cancel(self) -> None:
        """Let the process leave the job it is at; it still replies, soon."""
        if self._life is not None and self._life.since_s is not None:
            self._life.mailbox.cancel(self._life.job)

    def requests_of(self, reply: Reply) -> dict[str, int]:
        """Return the keys by request, of those that the reply has something for."""
        if self._life is None:
            return {}
        return {name: told.key for name, told in self._life.told.items() if told.key in reply.drafted}

    def forget(self, requests: Sequence[str] | set[str]) -> None:
        """Let the process give back what it keeps of requests that ended."""
        if self._life is None:
            return
        for request in requests:
            if (told := self._life.told.pop(request, None)) is not None:
                self._life.forget.append(told.key)

    def close(self) -> None:
        """End the process for good."""
        if self._life is not None:
            self._life.end()
            self._life = None
        self._start_at_s = float("inf")
