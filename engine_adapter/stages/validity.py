"""Which tokens of which KV block each rank holds of each layer: equation (10) of FlexPipe, token by token; pure.

Only move.py asks. A rank's copy of a block is its first so many tokens: tokens are written in order, and whoever writes
one again, after a rejected draft or in a block that changed hands, makes every copy behind it worthless.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arrays import Bools


@dataclass(frozen=True, slots=True)
class Write:
    """Tokens `start` to `end` of a block, counted inside it, which a step computes."""

    block: int
    start: int
    end: int


def writes_of(blocks: Sequence[int], block_tokens: int, computed: int, scheduled: int) -> list[Write]:
    """Return what a request writes that has `computed` tokens in its `blocks` and gets `scheduled` more."""
    end, found = computed + scheduled, []
    for place in range(computed // block_tokens, -(-end // block_tokens)):
        first = place * block_tokens
        found.append(Write(blocks[place], max(computed - first, 0), min(end - first, block_tokens)))
    return found


class Validity:
    """`tokens[r, l, b]`: how many leading tokens of block b rank r holds of layer l, (ranks, layers, blocks) int16."""

    def __init__(self, ranks: int, layers: int, blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.tokens: npt.NDArray[np.int16] = np.zeros((ranks, layers, blocks), np.int16)
        self._layers = np.arange(layers)

    def write(self, owners: Sequence[int], writes: Iterable[Write]) -> None:
        """Book what the layers' owners compute; everybody else keeps what is in front of it."""
        for write in writes:
            column = self.tokens[:, :, write.block]
            np.minimum(column, write.start, out=column)
            column[owners, self._layers] = write.end

    def clone(self, source: int, target: int) -> None:
        """Book that every rank copied a block onto another (vLLM's copy on write)."""
        self.tokens[:, :, target] = self.tokens[:, :, source]

    def copy(self, layer: int, source: int, target: int, blocks: Sequence[int]) -> None:
        """Book that blocks of a layer travelled from rank to rank."""
        picked = list(blocks)
        self.tokens[target, layer, picked] = self.tokens[source, layer, picked]

    def missing(self, layer: int, source: int, target: int, live: Bools) -> list[int]:
        """Return the blocks of which `target` holds less than `source`.

        `live` (blocks,) bool: those of requests. Another block that is not full will never be read again.
        """
        held, wanted = self.tokens[target, layer], self.tokens[source, layer]
        is_read = live | (wanted == self.block_tokens)
        found: list[int] = np.flatnonzero((held < wanted) & is_read).tolist()
        return found
