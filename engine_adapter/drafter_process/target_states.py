"""The target's hidden states in memory that its drafter's process maps too: one row for each slot of the KV cache.

The engine writes the rows of every step where their KV went, so what is known of a token follows its block: prefix
cache, preemption, aborts and another process after the first died need no bookkeeping. The process copies the rows it
needs while it takes a job, and asks `writes` afterwards: a row may have been written over meanwhile. The size is
settled at start; the system commits only pages that were written.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from .mailbox import StateRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MEMORY_LIMIT_BYTES: Final = 1 << 30
HEAD_BYTES: Final = 4096  # int64: blocks, tokens per block, width, writes


class StatesError(ValueError):
    """The states do not fit."""


class TargetStates:
    """One end; both ends map the same memory.

    :param descriptor: of the memory, kept open.
    :param dtype: name of torch's type of the states.
    """

    def __init__(self, descriptor: int, dtype: str) -> None:
        import torch

        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._head = np.frombuffer(self._memory, dtype=np.int64, count=4)
        blocks, self._block_tokens, self.width, _ = map(int, self._head)
        slots = blocks * self._block_tokens
        self._held = np.frombuffer(self._memory, dtype=np.bool_, offset=HEAD_BYTES, count=slots)
        rows = torch.frombuffer(
            self._memory, dtype=getattr(torch, dtype), offset=_rows_at(slots), count=slots * self.width
        )
        self._rows = rows.view(slots, self.width)

    @classmethod
    def create(cls, blocks: int, block_tokens: int, width: int, dtype: str) -> TargetStates:
        """Return the engine's end; StatesError if so many states are not to be kept."""
        import torch

        slots, row_bytes = blocks * block_tokens, width * getattr(torch, dtype).itemsize
        if slots * row_bytes > MEMORY_LIMIT_BYTES:
            raise StatesError(
                f"states of {slots} tokens, {row_bytes} bytes each, take {slots * row_bytes >> 20} MiB; expected "
                f"at most {MEMORY_LIMIT_BYTES >> 20}: give vLLM a smaller KV cache"
            )
        descriptor = os.memfd_create("faser-states")
        os.ftruncate(descriptor, _rows_at(slots) + slots * row_bytes)
        os.pwrite(descriptor, np.array([blocks, block_tokens, width, 0], dtype=np.int64).tobytes(), 0)
        return cls(descriptor, dtype)

    @property
    def writes(self) -> int:
        """How often rows were written, modulo 2^31."""
        return int(self._head[3])

    def blocks_of(self, tokens: int) -> int:
        """Return how many blocks so many tokens take."""
        return -(-tokens // self._block_tokens)

    def keep(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """Write rows: slots (rows,) int64, parts (rows, some) each, side by side as wide as a row."""
        import torch

        self._head[3] = (self.writes + 1) & 0x7FFFFFFF  # before the rows: who reads them meanwhile must see it
        self._rows[slots] = torch.cat(list(parts), dim=-1)
        self._held[slots.numpy()] = True

    def clear(self) -> None:
        """Forget every row."""
        self._head[3] = (self.writes + 1) & 0x7FFFFFFF
        self._held[:] = False

    def read(self, told: StateRows, start: int) -> Tensor | None:
        """Return copies of rows [start, told.count) of a sequence; None if one is not there any more."""
        import torch

        positions = np.arange(start, told.count)
        slots = told.blocks[positions // self._block_tokens].astype(np.int64) * self._block_tokens
        slots += positions % self._block_tokens
        if not self._held[slots].all():
            return None
        rows = self._rows[torch.from_numpy(slots)]
        return rows if self.writes == told.writes else None

    def close(self) -> None:
        """Give the memory back."""
        del self._head, self._held, self._rows
        with suppress(BufferError):  # somebody still looks at it: it goes with him
            self._memory.close()
        os.close(self.descriptor)


def _rows_at(slots: int) -> int:
    return HEAD_BYTES + -(-slots // HEAD_BYTES) * HEAD_BYTES
