"""Which rows of the target the drafter has not read yet on the V2 runner: whose they are, and where they lie.

Host arrays only: nothing here knows a device. A request that ended may have left blocks in the prefix cache: its rows
stay, under a name of their own, until its blocks are given to somebody else. Called by `CatchUpV2`, on every rank with
the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from .catch_up import spans

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..arrays import Ints

NOBODY: Final = -1


@dataclass(frozen=True, slots=True)
class CacheTables:
    """The block tables of the one KV cache group that the drafter's layers are in."""

    requests: int  # slots
    blocks: int  # per request
    block_tokens: int
    is_reused: bool  # blocks are found again by later requests (prefix caching)


@dataclass(frozen=True, slots=True)
class Missed:
    """A pass of the drafter over what it missed, sequence behind sequence, short ones first as vLLM sorts them."""

    places: Ints  # (rows,) where each row was kept
    positions: Ints  # (rows,)
    slots: Ints  # (rows,) in the KV cache
    starts: NDArray[np.int32]  # (sequences + 1,) first row of each
    lengths: NDArray[np.int32]  # (sequences,) tokens up to and with the last row
    blocks: NDArray[np.int32]  # (sequences, blocks)


class KeptRows:
    """Rows in the order in which they were kept; of each sequence they are consecutive positions."""

    def __init__(self, room: int, tables: CacheTables) -> None:
        self.room, self.used = room, 0
        self._shape = tables
        self._sequence, self._position = np.full(room, NOBODY), np.zeros(room, np.int64)
        self._table = np.zeros((tables.requests, tables.blocks), np.int32)  # of live requests, by slot
        self._counts = np.zeros(tables.requests, np.int64)
        self._next_ended = tables.requests  # sequences that ended are numbered on behind the slots
        self._ended: dict[int, NDArray[np.int32]] = {}  # their blocks
        self._owner: dict[int, int] = {}  # block -> the sequence that ended and has rows in it

    def add_blocks(self, request: int, blocks: Sequence[int], known_tokens: int | None) -> None:
        """Note blocks that a request is given.

        :param known_tokens: of a request that begins, tokens that the prefix cache had; None: it goes on
        """
        start = int(self._counts[request]) if known_tokens is None else 0
        end = start + len(blocks)
        self._table[request, start:end] = blocks
        self._counts[request] = end
        if self._owner:
            found = 0 if known_tokens is None else known_tokens // self._shape.block_tokens
            for block in blocks[found:]:
                self._lose(int(block))

    def _lose(self, block: int) -> None:
        """Drop the rows in a block that has a new owner, and those behind them, which nobody can find any more."""
        owner = self._owner.pop(block, NOBODY)
        if owner != NOBODY:
            first = int(np.argmax(self._ended[owner] == block)) * self._shape.block_tokens
            sequence, position = self._sequence[: self.used], self._position[: self.used]
            sequence[(sequence == owner) & (position >= first)] = NOBODY

    def end(self, request: int) -> None:
        """Keep of a request that ends, or is preempted, what others may find: its whole blocks."""
        sequence, position = self._sequence[: self.used], self._position[: self.used]
        mine = sequence == request
        if not mine.any():
            return
        sequence[mine] = NOBODY
        whole = (int(position[mine].max()) + 1) // self._shape.block_tokens
        left = mine & (position < whole * self._shape.block_tokens)
        if self._shape.is_reused and left.any():
            self._outlive(left, self._table[request, :whole].copy())

    def _outlive(self, rows: NDArray[np.bool_], blocks: NDArray[np.int32]) -> None:
        ended, self._next_ended = self._next_ended, self._next_ended + 1
        self._sequence[: self.used][rows] = ended
        self._ended[ended] = blocks
        first = int(self._position[: self.used][rows].min()) // self._shape.block_tokens
        self._owner.update(dict.fromkeys(blocks[first:].tolist(), ended))

    def keep(self, requests: Ints, firsts: Ints, counts: Ints) -> int:
        """Take in a step's rows; arrays by batch row: the request's slot, its first position, how many it has.

        :returns: the place of the first
        """
        which, positions = spans(firsts, firsts + counts)
        at, self.used = self.used, self.used + len(which)
        self._sequence[at : self.used], self._position[at : self.used] = requests[which], positions
        return at

    def take(self, most_sequences: int) -> list[Missed]:
        """Hand out all rows in passes of so many sequences each, those first that were kept first; nothing is left."""
        sequence, position = self._sequence[: self.used], self._position[: self.used]
        places = np.flatnonzero(sequence != NOBODY)
        places = places[np.lexsort((position[places], sequence[places]))]
        names, begins, counts = np.unique(sequence[places], return_index=True, return_counts=True)
        runs = [places[begin : begin + count] for begin, count in zip(begins, counts, strict=True)]
        found = [(run, self._blocks(int(name))) for name, run in zip(names, runs, strict=True) if self._is_whole(run)]
        found.sort(key=lambda each: int(each[0].min()))
        passes = [self._pass(found[at : at + most_sequences]) for at in range(0, len(found), most_sequences)]
        self.forget()
        return passes

    def forget(self) -> None:
        """Drop all rows."""
        self.used = 0
        self._ended.clear()
        self._owner.clear()

    def _is_whole(self, run: Ints) -> bool:
        return bool(self._position[run[-1]] - self._position[run[0]] == len(run) - 1)

    def _blocks(self, sequence: int) -> NDArray[np.int32]:
        return self._ended[sequence] if sequence in self._ended else self._table[sequence]

    def _pass(self, found: list[tuple[Ints, NDArray[np.int32]]]) -> Missed:
        found = sorted(found, key=lambda each: len(each[0]))
        places = np.concatenate([run for run, _ in found])
        counts = np.array([len(run) for run, _ in found])
        positions = self._position[places]
        ends = np.cumsum(counts)
        lengths = positions[ends - 1] + 1
        used = -(-lengths // self._shape.block_tokens)
        blocks = np.zeros((len(found), int(used.max())), np.int32)
        for row, ((_, own), count) in enumerate(zip(found, used, strict=True)):
            blocks[row, :count] = own[:count]
        which = np.repeat(np.arange(len(found)), counts)
        within = positions % self._shape.block_tokens
        slots = blocks[which, positions // self._shape.block_tokens].astype(np.int64) * self._shape.block_tokens
        starts = np.concatenate(([0], ends)).astype(np.int32)
        return Missed(places, positions, slots + within, starts, lengths.astype(np.int32), blocks)
