"""When a move of layers is ready, and what travels in each step until then; pure.

desk.py calls `step` once for every step that computes something. Full blocks go ahead of the switch, at most so many
bytes a step, since nobody writes into them any more; at the switch only the blocks travel that requests still fill.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .cut import StageCut
from .orders import BlockCopy, StageStep
from .validity import Validity, Write


@dataclass(frozen=True, slots=True)
class MovePace:
    """How much a step may carry for a move that is under way."""

    bytes_per_step: int = 4 << 20  # of KV, over all pairs of ranks; more where requests write faster than that
    layers_per_step: int = 1  # whose weights each rank loads


@dataclass(slots=True)
class Counts:
    """What became of the orders so far."""

    moves: int = 0
    refused: int = 0  # orders for other bounds while a move was under way
    ahead_blocks: int = 0  # blocks of one layer, copied before a switch
    tail_blocks: int = 0  # the same at a switch
    most_tail_blocks: int = 0  # of one layer and request at one switch
    thin_steps: int = 0  # in which prompts were held back to one token


@dataclass(slots=True)
class Move:
    """A move under way: where to, and whose weights are still to be loaded."""

    target: StageCut
    loads: dict[int, list[int]]  # by rank
    left: int | None = None  # blocks that were missing behind the last step's copies; None before the first step


@dataclass(slots=True)
class Missing:
    """What a move's receivers lack before a step."""

    copies: list[BlockCopy] = field(default_factory=list)

    def ahead(self, full: Iterable[int], most: int) -> list[BlockCopy]:
        """Return copies of at most `most` full blocks, one layer's after the other's."""
        is_full, found = set(full), []
        for copy in self.copies:
            blocks = tuple(block for block in copy.blocks if block in is_full)[: max(most, 0)]
            most -= len(blocks)
            if blocks:
                found.append(BlockCopy(copy.layer, copy.source, copy.target, blocks))
        return found

    def count(self) -> int:
        """Count blocks, each once for every layer."""
        return sum(len(copy.blocks) for copy in self.copies)


class StagePlan:
    """The stages of one engine: the cut in force, a move under way, and who holds what."""

    def __init__(self, cut: StageCut, validity: Validity, block_bytes: int, pace: MovePace | None = None) -> None:
        self.cut = cut
        self.move: Move | None = None
        self.counts = Counts()
        self.pace = pace or MovePace()
        self._validity = validity
        self._block_bytes = block_bytes

    def order(self, wanted: Sequence[int] | None) -> str | None:
        """Take an order; return why not, None if it was taken or there is nothing to do. Raises CutError."""
        if wanted is None:
            return None
        target = StageCut.checked(wanted, self.cut.layers, self.cut.ranks)
        if self.move is not None:
            if target == self.move.target:
                return None
            self.counts.refused += 1
            return f"stages: a move to {list(self.move.target.bounds)} is under way; order {list(wanted)} again later"
        if target != self.cut:
            loads = {rank: self.cut.gained(rank, target) for rank in range(self.cut.ranks)}
            self.move = Move(target, loads)
        return None

    def is_thin(self, held: Sequence[Sequence[int]]) -> bool:
        """Tell whether only what this step writes will be missing at the next one.

        A prompt's chunk would fill several blocks, which would all have to travel at the switch: one token does not.
        """
        if self.move is None:
            return False
        missing = self._missing(held)
        if self._is_ready(missing, held):
            return False
        is_loaded = all(len(layers) <= self.pace.layers_per_step for layers in self.move.loads.values())
        is_last = is_loaded and missing.count() <= self._allowance(missing)
        self.counts.thin_steps += is_last
        return is_last

    def step(
        self,
        writes: Sequence[Write],
        held: Sequence[Sequence[int]],
        clones: Iterable[tuple[int, int]] = (),
    ) -> StageStep:
        """Return what the ranks do before a step that makes these writes.

        `held`: the blocks of each request that has some; read only while a move is under way. `clones`: (source,
        target) of blocks that vLLM copies in the step before it computes.
        """
        order = self._order(held)
        for copy in (*order.ahead, *order.tail):
            self._validity.copy(copy.layer, copy.source, copy.target, copy.blocks)
        for source, target in clones:
            self._validity.clone(source, target)
        self._validity.write(self.cut.owners(), writes)
        return order

    def _order(self, held: Sequence[Sequence[int]]) -> StageStep:
        if self.move is None:
            return StageStep(self.cut.bounds)
        missing = self._missing(held)
        if not self._is_ready(missing, held):
            return self._prepare(missing)
        self.cut, self.move = self.move.target, None
        self._count(missing, held)
        return StageStep(self.cut.bounds, tail=tuple(missing.copies), is_switch=True)

    def _prepare(self, missing: Missing) -> StageStep:
        assert self.move is not None
        loads = []
        for rank, layers in self.move.loads.items():
            due, layers[:] = layers[: self.pace.layers_per_step], layers[self.pace.layers_per_step :]
            loads += [(rank, layer) for layer in due]
        ahead = tuple(missing.ahead(self._full(), self._allowance(missing)))
        sent = sum(len(copy.blocks) for copy in ahead)
        self.move.left = missing.count() - sent
        self.counts.ahead_blocks += sent
        return StageStep(self.cut.bounds, ahead=ahead, loads=tuple(loads))

    def _missing(self, held: Sequence[Sequence[int]]) -> Missing:
        assert self.move is not None
        live = np.zeros(self._validity.tokens.shape[2], np.bool_)
        for blocks in held:
            live[list(blocks)] = True
        found = Missing()
        for layer, source, target in self._travels():
            blocks = self._validity.missing(layer, source, target, live)
            if blocks:
                found.copies.append(BlockCopy(layer, source, target, tuple(blocks)))
        return found

    def _travels(self) -> Iterator[tuple[int, int, int]]:
        """Yield (layer, source, target) of the layers that change hands."""
        assert self.move is not None
        pairs = zip(self.cut.owners(), self.move.target.owners(), strict=True)
        return ((layer, source, target) for layer, (source, target) in enumerate(pairs) if source != target)

    def _is_ready(self, missing: Missing, held: Sequence[Sequence[int]]) -> bool:
        """Tell whether weights are there, and of each request at most one block per layer is missing."""
        assert self.move is not None
        if any(self.move.loads.values()):
            return False
        sets = [set(blocks) for blocks in held]
        everybodys: set[int] = set().union(*sets)
        for lacking in {copy.blocks for copy in missing.copies}:  # mostly the same for all layers
            if not everybodys.issuperset(lacking) or any(len(blocks.intersection(lacking)) > 1 for blocks in sets):
                return False
        return True

    def _full(self) -> list[int]:
        """Return the blocks that nobody writes into any more; all layers have been written alike."""
        owner = self.cut.owners()[0]
        full: list[int] = np.flatnonzero(self._validity.tokens[owner, 0] == self._validity.block_tokens).tolist()
        return full

    def _allowance(self, missing: Missing) -> int:
        """Return how many blocks may go ahead: at least twice what the last step added, else a move might never end."""
        assert self.move is not None
        count = missing.count()
        added = 0 if self.move.left is None else count - self.move.left
        return max(1, self.pace.bytes_per_step // self._block_bytes, 2 * added)

    def _count(self, missing: Missing, held: Sequence[Sequence[int]]) -> None:
        self.counts.moves += 1
        self.counts.tail_blocks += missing.count()
        most = [
            len(set(blocks).intersection(lacking))
            for lacking in {copy.blocks for copy in missing.copies}
            for blocks in held
        ]
        self.counts.most_tail_blocks = max(self.counts.most_tail_blocks, *most, 0)
