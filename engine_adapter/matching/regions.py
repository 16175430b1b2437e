"""Memory for texts: parts of one range, each with a table beside it."""

from __future__ import annotations

from typing import Final

import numpy as np

from .text_kernel import COLUMNS, ENTRIES, Tokens

LEAST_TOKENS: Final = 256  # of a region; regions come in powers of two
BYTES_PER_TOKEN: Final = 4 * (1 + ENTRIES * COLUMNS)


class Regions:
    """Parts of a range whose sizes are powers of two (a buddy allocator)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: dict[int, set[int]] = {size: {0}}

    def take(self, size: int) -> int | None:
        """Return where a part of this size begins; None: there is none left."""
        larger = size
        while larger <= self.size and not self._free.get(larger):
            larger *= 2
        if larger > self.size:
            return None
        begin = self._free[larger].pop()
        while larger > size:
            larger //= 2
            self._free.setdefault(larger, set()).add(begin + larger)
        return begin

    def give_back(self, begin: int, size: int) -> None:
        """Free a part, and join it with its other half."""
        while size < self.size and (begin ^ size) in self._free.get(size, ()):
            self._free[size].remove(begin ^ size)
            begin &= ~size
            size *= 2
        self._free.setdefault(size, set()).add(begin)


class TextMemory:
    """Tokens and tables of all texts; the system commits what is written."""

    def __init__(self, limit_bytes: int) -> None:
        capacity = max(limit_bytes // BYTES_PER_TOKEN, 1)
        self._room = Regions(1 << (capacity.bit_length() - 1))
        self.tokens: Tokens = np.zeros(self._room.size, np.int32)
        self.table: Tokens = np.zeros((ENTRIES * self._room.size, COLUMNS), np.int32)

    def take(self, tokens: int) -> tuple[int, int] | None:
        """Return begin and capacity of an empty region for so many tokens; None: there is no room."""
        capacity = max(LEAST_TOKENS, 1 << (tokens - 1).bit_length())
        begin = self._room.take(capacity)
        if begin is None:
            return None
        self.table[ENTRIES * begin : ENTRIES * (begin + capacity)] = 0
        return begin, capacity

    def give_back(self, begin: int, capacity: int) -> None:
        """Free a region."""
        self._room.give_back(begin, capacity)
