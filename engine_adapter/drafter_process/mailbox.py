"""What an engine and its drafter's process share: one job and one reply in memory that both map, and a bell for each.

The engine writes a job and rings; the drafter copies it out, writes its reply and rings back. Never more than one job
is out, so neither side ever reads what the other one is writing. The memory is a memfd and the bells are a socket
pair: no name that could stay behind, and whoever dies is seen by the other side's next look. Nothing is pickled;
what is read is plain numbers. Neither side trusts the bell's number to be its own: a foreign one is an error.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .drafted import Drafted

Tokens = NDArray[np.int32]

HEAD_WORDS = 8  # int32: [cancelled job, threads, 2 x float64 of the reply's times]
JOB_WORDS = 1 << 21  # int32; pages that were never written cost nothing
REPLY_WORDS = 1 << 19
ASK_WORDS = 8  # of each ask, before its tokens
TOTAL_BYTES = 4 * (HEAD_WORDS + JOB_WORDS + REPLY_WORDS)
_BELL = struct.Struct("<q")
READY = 0  # the drafter's first ring; jobs count from 1


class MailboxError(RuntimeError):
    """The other side is gone, or speaks another language."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """Where the target's states of a sequence's first `count` tokens are (target_states.py)."""

    count: int
    writes: int  # of the states, when this was said
    blocks: Tokens  # of the KV cache


NO_STATES = StateRows(0, 0, np.empty(0, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class Ask:
    """Go on from a sequence by `count` tokens.

    The sequence is what is known of the request up to `start`, then `tokens`, which are certain, then `assumed`.
    """

    key: int
    start: int
    tokens: Tokens
    assumed: Tokens
    count: int
    states: StateRows = NO_STATES

    @property
    def words(self) -> int:
        """Words that it takes in a job."""
        return ASK_WORDS + len(self.tokens) + len(self.assumed) + len(self.states.blocks)


@dataclass(frozen=True, slots=True)
class Job:
    """Requests to forget, then requests to go on from."""

    number: int
    forget: list[int]
    asks: list[Ask]
    threads: int = 0  # to compute with; 0: as many as before


@dataclass(frozen=True, slots=True)
class Reply:
    """What was drafted, by key; times are CLOCK_MONOTONIC's, which all processes share."""

    number: int
    began_s: float
    ended_s: float
    drafted: dict[int, Drafted] = field(default_factory=dict)


class Mailbox:
    """One end; both ends map the same memory."""

    def __init__(self, memory_fd: int, bell: socket.socket) -> None:
        self._memory = mmap.mmap(memory_fd, TOTAL_BYTES)
        os.close(memory_fd)
        self.bell = bell
        self._poller = select.poll()  # not select(): an engine may have more descriptors open than that can count
        self._poller.register(bell, select.POLLIN)
        words: NDArray[np.int32] = np.frombuffer(self._memory, dtype=np.int32)
        self._head = words[:HEAD_WORDS]
        self._times = self._head[2:6].view(np.float64)
        self._job = words[HEAD_WORDS : HEAD_WORDS + JOB_WORDS]
        self._reply = words[HEAD_WORDS + JOB_WORDS :]

    @classmethod
    def pair(cls) -> tuple[Mailbox, int, socket.socket]:
        """Return the engine's end, and memory and bell to give to the drafter's process."""
        memory = os.memfd_create("faser-drafter")
        os.ftruncate(memory, TOTAL_BYTES)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(os.dup(memory), ours), memory, theirs

    def watch(self, descriptor: int) -> None:
        """Take a further descriptor that gets readable when the other side dies."""
        self._poller.register(descriptor, select.POLLIN)

    def ring(self, number: int) -> None:
        """Tell the other side; MailboxError if there is nobody."""
        try:
            self.bell.send(_BELL.pack(number), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as error:
            raise MailboxError(f"the other side is gone ({error.strerror})") from None

    def heard(self, limit_s: float | None) -> int | None:
        """Return the number the other side rang with, None if it did not within `limit_s` (None: wait)."""
        heard = [descriptor for descriptor, _ in self._poller.poll(None if limit_s is None else 1e3 * limit_s)]
        if not heard:
            return None
        if self.bell.fileno() not in heard:
            raise MailboxError("the other side is gone")
        try:
            message = self.bell.recv(_BELL.size)
        except OSError as error:
            raise MailboxError(f"the other side is gone ({error.strerror})") from None
        if len(message) != _BELL.size:
            raise MailboxError("the other side is gone")
        number: int = _BELL.unpack(message)[0]
        return number

    def cancel(self, number: int) -> None:
        """Ask the drafter to leave a job; it replies with what it has."""
        self._head[0] = number & 0x7FFFFFFF

    def is_cancelled(self, number: int) -> bool:
        """Tell whether the engine has given up on a job."""
        return int(self._head[0]) == number & 0x7FFFFFFF

    def post(self, job: Job) -> None:
        """Write a job and ring; it must fit (`fitting`)."""
        self._head[1] = job.threads
        self._job[: 2 + len(job.forget)] = [len(job.forget), len(job.asks), *job.forget]
        at = 2 + len(job.forget)
        for ask in job.asks:
            arrays = ask.tokens, ask.assumed, ask.states.blocks
            self._job[at : at + ASK_WORDS] = (
                ask.key, ask.start, ask.count, ask.states.count, ask.states.writes, *map(len, arrays)
            )  # fmt: skip
            at += ASK_WORDS
            for array in arrays:
                self._job[at : at + len(array)] = array
                at += len(array)
        self.ring(job.number)

    def read_job(self, number: int) -> Job:
        """Return the job that was rung for, with arrays of its own."""
        forgotten, asks = map(int, self._job[:2])
        at = 2 + forgotten
        found = []
        for _ in range(asks):
            key, start, count, rows, writes, *sizes = map(int, self._job[at : at + ASK_WORDS])
            at += ASK_WORDS
            copied = self._job[at : at + sum(sizes)].copy()
            tokens, assumed, blocks = np.split(copied, np.cumsum(sizes[:2]))
            found.append(Ask(key, start, tokens, assumed, count, StateRows(rows, writes, blocks)))
            at += sum(sizes)
        return Job(number, self._job[2 : 2 + forgotten].tolist(), found, int(self._head[1]))

    def answer(self, reply: Reply) -> None:
        """Write a reply and ring."""
        self._times[:] = reply.began_s, reply.ended_s
        self._reply[0] = len(reply.drafted)
        at = 1
        for key, drafted in reply.drafted.items():
            size = len(drafted.tokens)
            self._reply[at : at + 2] = key, size
            self._reply[at + 2 : at + 2 + size] = drafted.tokens
            self._reply[at + 2 + size : at + 2 + 2 * size].view(np.float32)[:] = drafted.confidences
            at += 2 + 2 * size
        self.ring(reply.number)

    def read_reply(self, number: int) -> Reply:
        """Return the reply that was rung for."""
        began_s, ended_s = self._times.tolist()
        return Reply(number, began_s, ended_s, dict(self._drafted()))

    def _drafted(self) -> Iterator[tuple[int, Drafted]]:
        at = 1
        for _ in range(int(self._reply[0])):
            key, size = map(int, self._reply[at : at + 2])
            confidences = self._reply[at + 2 + size : at + 2 + 2 * size].view(np.float32)
            yield key, Drafted(tuple(self._reply[at + 2 : at + 2 + size].tolist()), tuple(confidences.tolist()))
            at += 2 + 2 * size

    def close(self) -> None:
        """Give memory and bell back."""
        self.bell.close()
        del self._head, self._times, self._job, self._reply
        self._memory.close()


def fitting(asks: Sequence[Ask], forgotten: int) -> list[Ask]:
    """Return the asks, in their order, that a job has room for beside what it forgets; the others wait."""
    room, found = JOB_WORDS - 2 - forgotten, []
    for ask in asks:
        if ask.words <= room:
            found.append(ask)
            room -= ask.words
    return found
