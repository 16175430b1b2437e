"""What each request has said so far, and what followed the same words before: bounded memory for all of an engine.

Owned by the runner mixin, on the engine thread. Knows requests by name and nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..arrays import Floats, Ints
from . import text_kernel as kernel
from .text_kernel import COLUMNS, ENTRIES, Tokens

LEAST_TOKENS: Final = 256  # of a text's region; regions come in powers of two
BYTES_PER_TOKEN: Final = 4 * (1 + ENTRIES * COLUMNS)


@dataclass(slots=True)
class Text:
    """Where one request's text is."""

    begin: int
    capacity: int
    size: int = 0  # tokens
    was_read: int = 0  # of those, how many its table knows


class CopiedDrafts:
    """Copied drafts of n requests."""

    def __init__(self, requests: int, longest: int) -> None:
        self.tokens: Tokens = np.zeros((requests, longest), np.int32)
        self.logits: Floats = np.zeros((requests, longest))  # of each token's chance, given those before it
        self.lengths: Ints = np.zeros(requests, np.int64)


class Texts:
    """The texts of live requests."""

    def __init__(self, limit_bytes: int) -> None:
        """Reserve memory, of which the system commits what is written; a request that finds no room gets no drafts."""
        capacity = max(limit_bytes // BYTES_PER_TOKEN, 1)
        self._room = Regions(1 << (capacity.bit_length() - 1))
        self._tokens: Tokens = np.zeros(self._room.size, np.int32)
        self._table: Tokens = np.zeros((ENTRIES * self._room.size, COLUMNS), np.int32)
        self._texts: dict[str, Text] = {}

    def forget(self, names: Iterable[str]) -> None:
        """Let go of requests that ended."""
        for name in names:
            if (text := self._texts.pop(name, None)) is not None:
                self._room.give_back(text.begin, text.capacity)

    def find(self, names: Sequence[str], known: Sequence[Tokens], fresh: Tokens, most: Ints) -> CopiedDrafts:
        """Take in what was just sampled, and return what followed the same words before.

        :param known: of each request, its tokens without the fresh ones; read where they were not seen before
        :param fresh: (n, width) tokens just sampled; negative: none
        :param most: (n,) tokens to draft at most, 0: nothing is looked up, and nothing is read
        """
        texts = [self._text(name, tokens, fresh.shape[1]) if longest else None
                 for name, tokens, longest in zip(names, known, most.tolist(), strict=True)]  # fmt: skip
        rows = np.array([[0, 1, 0, 0] if text is None else [text.begin, text.capacity, text.size, text.was_read]
                         for text in texts], np.int64).T.copy()  # fmt: skip
        is_read = np.array([text is not None for text in texts])
        drafts = CopiedDrafts(len(names), int(most.max(initial=0)))
        if not len(names):
            return drafts
        begins, capacities, sizes, was_read = rows
        kernel.read_new(self._tokens, self._table, begins, capacities, sizes, was_read, fresh, is_read)
        for text, size, read in zip(texts, sizes.tolist(), was_read.tolist(), strict=True):
            if text is not None:
                text.size, text.was_read = size, read
        kernel.draft_all(
            self._tokens, self._table, begins, capacities, sizes, np.where(is_read, most, 0), drafts.tokens,
            drafts.logits, drafts.lengths,
        )  # fmt: skip
        return drafts

    def _text(self, name: str, known: Tokens, more: int) -> Text | None:
        """Return the text of a request as long as is known, with room for `more`; None where there is no memory."""
        text = self._texts.get(name)
        if text is None or len(known) + more > text.capacity or text.size > len(known):
            self.forget([name])
            text = self._begin(name, len(known) + more)
        if text is not None and text.size < len(known):
            self._tokens[text.begin + text.size : text.begin + len(known)] = known[text.size :]
            text.size = len(known)
        return text

    def _begin(self, name: str, tokens: int) -> Text | None:
        capacity = max(LEAST_TOKENS, 1 << (tokens + tokens // 2).bit_length())
        begin = self._room.take(capacity)
        if begin is None:
            return None
        self._table[ENTRIES * begin : ENTRIES * (begin + capacity)] = 0
        text = self._texts[name] = Text(begin, capacity)
        return text


def warm_up() -> None:
    """Compile all that is called while an engine serves."""
    words = np.array([1, 2, 1, 2, 1], np.int32)
    drafts = Texts(LEAST_TOKENS * BYTES_PER_TOKEN).find(["warm-up"], [words[:4]], words[None, 4:], np.array([1]))
    kept_of(drafts, np.ones(1), np.zeros(1), np.zeros(1))


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


def kept_of(drafts: CopiedDrafts, slopes: Floats, intercepts: Floats, keep: Floats) -> tuple[Ints, Floats]:
    """Return (n,) tokens of each draft that are worth their rows, and (n,) what they bring beyond these, in tokens.

    The rule's curves and prices have one entry per position.
    """
    assert min(map(len, (slopes, intercepts, keep))) >= drafts.tokens.shape[1]  # compiled loops do not look
    kept, net = np.zeros(len(drafts.lengths), np.int64), np.zeros(len(drafts.lengths))
    kernel.cut_all(drafts.logits, drafts.lengths, slopes, intercepts, keep, kept, net)
    return kept, net
