"""What ended requests answered, for others that say the same: off unless the operator asks for it.

Requests share answers only under the same `cache_salt`, as vLLM shares its prefix cache, and the newest of them. What
is shared can change the speed of others, never what they say; but speed tells whether somebody said the same
(SECURITY.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from . import text_kernel as kernel
from .regions import BYTES_PER_TOKEN, TextMemory
from .text_kernel import Tokens

GENERATION_TOKENS: Final = 1 << 14  # of the newer and of the older half of a history
END: Final = -1  # behind every answer: no text has it
NOTHING: Final = (0, 0, 0)


@dataclass(slots=True)
class Generation:
    """One half of a history."""

    begin: int
    capacity: int
    size: int = 0


@dataclass(slots=True)
class History:
    """The newest answers under one salt; the older half goes when the newer one is full."""

    halves: list[Generation] = field(default_factory=list)  # newest first


class Histories:
    """The histories of all salts, of which the least used goes where there is no room."""

    def __init__(self, memory: TextMemory, limit_bytes: int) -> None:
        self._memory = memory
        self._spare = limit_bytes // (GENERATION_TOKENS * BYTES_PER_TOKEN)  # halves that may be taken
        self._histories: dict[str, History] = {}  # in order of use, the newest last

    def where(self, salt: str) -> list[tuple[int, int, int]]:
        """Return begin, capacity and size of the halves of a history; capacity 0: there is none."""
        history = self._histories.get(salt)
        halves = [] if history is None else [(half.begin, half.capacity, half.size) for half in history.halves]
        return [*halves, NOTHING, NOTHING][:2]

    def add(self, salt: str, answer: Tokens) -> None:
        """Take in what a request answered, (n,); of what is longer than a half, the end."""
        answer = answer[-(GENERATION_TOKENS - 1) :]
        history = self._histories.pop(salt, None) or History()
        self._histories[salt] = history
        half = self._half(salt, history, len(answer) + 1)
        if half is None:
            return
        start, half.size = half.size, half.size + len(answer) + 1
        place = half.begin + start
        self._memory.tokens[place : place + len(answer)] = answer
        self._memory.tokens[place + len(answer)] = END
        kernel.read_all(self._memory.tokens, self._memory.table, half.begin, half.capacity, start, half.size)

    def _half(self, salt: str, history: History, tokens: int) -> Generation | None:
        """Return the half that takes so many tokens; None where not even all memory is enough."""
        if history.halves and history.halves[0].size + tokens <= history.halves[0].capacity:
            return history.halves[0]
        if len(history.halves) == 2:
            self._free(history.halves.pop())
        while (place := self._take()) is None:
            if not self._histories:
                return None
            victim = next(iter(self._histories))
            if victim == salt and not history.halves:
                return None
            for half in self._histories[victim].halves:
                self._free(half)
            self._histories[victim].halves.clear()
            if victim != salt:
                del self._histories[victim]
        history.halves.insert(0, Generation(*place))
        return history.halves[0]

    def _take(self) -> tuple[int, int] | None:
        place = self._memory.take(GENERATION_TOKENS) if self._spare else None
        self._spare -= place is not None
        return place

    def _free(self, half: Generation) -> None:
        self._spare += 1
        self._memory.give_back(half.begin, half.capacity)
