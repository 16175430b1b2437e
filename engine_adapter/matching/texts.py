"""What each request has said so far, and what followed the same words before: bounded memory for all of an engine.

Owned by the runner mixin, on the engine thread. Knows requests by name and nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Floats, Ints
from . import text_kernel as kernel
from .histories import NOTHING, Histories
from .regions import BYTES_PER_TOKEN, LEAST_TOKENS, TextMemory
from .text_kernel import Tokens

NO_SALTS: Mapping[str, str] = {}


@dataclass(slots=True)
class Text:
    """Where one request's text is."""

    begin: int
    capacity: int
    prompt: int  # tokens
    size: int = 0  # tokens, prompt and answer
    was_read: int = 0  # of those, how many its table knows


class CopiedDrafts:
    """Copied drafts of n requests."""

    def __init__(self, requests: int, longest: int) -> None:
        self.tokens: Tokens = np.zeros((requests, longest), np.int32)
        self.logits: Floats = np.zeros((requests, longest))  # of each token's chance, given those before it
        self.lengths: Ints = np.zeros(requests, np.int64)


class Texts:
    """The texts of live requests; and what ended ones answered, where memory is given for it.

    A request that finds no room gets no drafts.
    """

    def __init__(self, limit_bytes: int, shared_bytes: int = 0) -> None:
        self._memory = TextMemory(limit_bytes + shared_bytes)
        self._histories = Histories(self._memory, shared_bytes) if shared_bytes else None
        self._texts: dict[str, Text] = {}

    def forget(self, names: Iterable[str], salts: Mapping[str, str] = NO_SALTS) -> None:
        """Let go of requests that ended; others under the same salt, by name, may copy their answers."""
        for name in names:
            if (text := self._texts.pop(name, None)) is None:
                continue
            if self._histories is not None and name in salts and text.size > text.prompt:
                answer = self._memory.tokens[text.begin + text.prompt : text.begin + text.size].copy()
                self._memory.give_back(text.begin, text.capacity)
                self._histories.add(salts[name], answer)
            else:
                self._memory.give_back(text.begin, text.capacity)

    def find(
        self, names: Sequence[str], known: Sequence[Tokens], fresh: Tokens, most: Ints, prompts: Sequence[int] = (),
        salts: Mapping[str, str] = NO_SALTS,
    ) -> CopiedDrafts:  # fmt: skip
        """Take in what was just sampled, and return what followed the same words before.

        :param known: of each request, its tokens without the fresh ones; read where they were not seen before
        :param fresh: (n, width) tokens just sampled; negative: none
        :param most: (n,) tokens to draft at most, 0: nothing is looked up, and nothing is read
        :param prompts: tokens of each one's prompt; none: all that is known at first
        :param salts: of those that may look into what others answered, by name
        """
        drafts = CopiedDrafts(len(names), int(most.max(initial=0)))
        if not len(names):
            return drafts
        texts = [
            self._text(name, tokens, fresh.shape[1], prompt) if longest else None
            for name, tokens, longest, prompt in zip(
                names, known, most.tolist(), prompts or map(len, known), strict=True
            )
        ]
        places = np.array(
            [NOTHING if text is None else (text.begin, text.capacity, text.size) for text in texts], np.int64
        )
        was_read = np.array([0 if text is None else text.was_read for text in texts], np.int64)
        kernel.read_new(self._memory.tokens, self._memory.table, places, was_read, fresh)
        for text, size in zip(texts, was_read.tolist(), strict=True):
            if text is not None:
                text.size = text.was_read = size
        where = self._where(names, places, salts)
        kernel.draft_all(
            self._memory.tokens, self._memory.table, where, most, drafts.tokens, drafts.logits, drafts.lengths
        )
        return drafts

    def _where(self, names: Sequence[str], places: Ints, salts: Mapping[str, str]) -> Ints:
        """Return (n, where to look, 3): its own text, then what others under its salt answered."""
        if self._histories is None or not salts:
            return places[:, None]
        none = [NOTHING, NOTHING]
        others = [self._histories.where(salts[name]) if name in salts else none for name in names]
        return np.concatenate((places[:, None], np.array(others, np.int64)), axis=1)

    def _text(self, name: str, known: Tokens, more: int, prompt: int) -> Text | None:
        """Return the text of a request as long as is known, with room for `more`; None where there is no memory."""
        text = self._texts.get(name)
        if text is None or len(known) + more > text.capacity or text.size > len(known):
            self.forget([name])
            text = self._begin(name, len(known) + more, prompt if text is None else min(text.prompt, prompt))
        if text is not None and text.size < len(known):
            self._memory.tokens[text.begin + text.size : text.begin + len(known)] = known[text.size :]
            text.size = len(known)
        return text

    def _begin(self, name: str, tokens: int, prompt: int) -> Text | None:
        place = self._memory.take(tokens + tokens // 2)
        if place is None:
            return None
        text = self._texts[name] = Text(*place, prompt)
        return text


def warm_up() -> None:
    """Compile all that is called while an engine serves."""
    words = np.array([1, 2, 1, 2, 1], np.int32)
    texts, most, salts = Texts(LEAST_TOKENS * BYTES_PER_TOKEN, 1 << 23), np.array([1]), {"warm-up": ""}
    drafts = texts.find(["warm-up"], [words[:4]], words[None, 4:], most, [2], salts)
    kept_of(drafts, np.ones(1), np.zeros(1), np.zeros((1, 1)))
    texts.forget(["warm-up"], salts)


def kept_of(drafts: CopiedDrafts, slopes: Floats, intercepts: Floats, keep: Floats) -> tuple[Ints, Floats]:
    """Return (n,) tokens of each draft that are worth their rows, and (n,) what they bring beyond these, in tokens.

    The rule's curves have one entry per position, prices (n, positions) one for each row's.
    """
    assert min(len(slopes), len(intercepts), keep.shape[1]) >= drafts.tokens.shape[1]  # compiled loops do not look
    assert len(keep) == len(drafts.lengths)
    kept, net = np.zeros(len(drafts.lengths), np.int64), np.zeros(len(drafts.lengths))
    kernel.cut_all(drafts.logits, drafts.lengths, slopes, intercepts, keep, kept, net)
    return kept, net
