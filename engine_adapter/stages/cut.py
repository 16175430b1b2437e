"""How a model's layers are dealt to the ranks of a pipeline; pure.

Everybody in this room counts in it. Rank r runs the layers from its lower to its upper bound, and a range may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import FaserError


class CutError(FaserError):
    """A cut that these layers and ranks do not allow."""


@dataclass(frozen=True, slots=True)
class StageCut:
    """`bounds[r]` is the first layer behind rank r; the last rank ends with the last layer."""

    bounds: tuple[int, ...]
    layers: int

    @classmethod
    def checked(cls, bounds: Sequence[int], layers: int, ranks: int) -> StageCut:
        """Return the cut; raise CutError unless `bounds` has one for each rank but the last, in order."""
        if len(bounds) != ranks - 1:
            raise CutError(f"stages: {len(bounds)} bounds for {ranks} ranks", f"{ranks - 1} bounds")
        edges = (0, *bounds, layers)
        if any(low > high for low, high in pairwise(edges)):
            raise CutError(f"stages: bounds {list(bounds)}", f"rising numbers from 0 to {layers}, the layers")
        return cls(tuple(map(int, bounds)), layers)

    @classmethod
    def even(cls, stages: int, layers: int, ranks: int) -> StageCut:
        """Return the cut into so many stages, on the last ranks: an empty range in front of them costs no hop."""
        most = min(layers, ranks)
        if not 1 <= stages <= most:
            raise CutError(f"stages: {stages} for {layers} layers on {ranks} ranks", f"1 to {most} stages")
        empty = ranks - stages
        inner = [round(layers * stage / stages) for stage in range(1, stages)]
        return cls((*[0] * empty, *inner), layers)

    @property
    def ranks(self) -> int:
        """Count the ranks, those with an empty range included."""
        return len(self.bounds) + 1

    def range_of(self, rank: int) -> range:
        """Return the layers of a rank."""
        edges = (0, *self.bounds, self.layers)
        return range(edges[rank], edges[rank + 1])

    def owners(self) -> list[int]:
        """Return for each layer the rank that runs it."""
        return [rank for rank in range(self.ranks) for _ in self.range_of(rank)]

    def path(self, can_start_anywhere: bool) -> tuple[int, ...]:
        """Return the ranks that a step visits: those with layers, and the last one, which samples.

        Where only rank 0 has the embedding, it is the first to be visited whatever it runs.
        """
        busy = {rank for rank in range(self.ranks) if self.range_of(rank)} | {self.ranks - 1}
        return tuple(sorted(busy if can_start_anywhere else busy | {0}))

    def gained(self, rank: int, later: StageCut) -> list[int]:
        """Return the layers that a rank runs under `later` and not yet."""
        present = self.range_of(rank)
        return [layer for layer in later.range_of(rank) if layer not in present]
