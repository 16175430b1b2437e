"""What the scheduler tells the ranks about stages, and who tells the scheduler.

`StageStep` rides down on SchedulerOutput as attribute `faser_stages`, so that all ranks switch at the same step.
Plain and picklable: nothing here imports vLLM, numpy or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

ATTRIBUTE: Final = "faser_stages"


class StageOrders(Protocol):
    """Whoever decides where the pipeline is cut."""

    def wanted(self) -> tuple[int, ...] | None:
        """Return the bounds to move to; None: no opinion, the stages stay as they are.

        Asked before every step. An order that was taken is carried out even if nobody wants anything any more.
        """


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Blocks of one layer that travel from rank to rank."""

    layer: int
    source: int
    target: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageStep:
    """What the ranks do about stages before they compute this step, in this order."""

    bounds: tuple[int, ...]  # in force from this step on
    ahead: tuple[BlockCopy, ...] = ()  # full blocks; they have until the switch
    loads: tuple[tuple[int, int], ...] = ()  # (rank, layer): weights to load for the switch
    tail: tuple[BlockCopy, ...] = ()  # of a switch: what must be there before this step computes
    is_switch: bool = False
