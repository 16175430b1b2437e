"""What a replica takes of a machine, and how many find room. Pure.

On a CPU a replica has cores of its own, and an engine of several ranks has them all on one machine. On GPUs it has one
for each rank. Several ranks go to vLLM's own Ray executor, which asks Ray for the GPUs itself, on whatever nodes: the
actor that owns such an engine then takes none, or they would be counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ..engine.serve import flag_value
from ..errors import UsageError

BACKEND: Final = "--distributed-executor-backend"
_SIZES: Final = (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp"))


@dataclass(frozen=True, slots=True)
class Placement:
    """What Ray is asked for, and what vLLM is told for it."""

    cores: int  # Ray's CPUs for the actor; on a CPU cores of the engine's own
    gpus: int = 0  # for the actor
    ranks: int = 1
    is_spread: bool = False  # the ranks are actors of vLLM's own
    arguments: tuple[str, ...] = ()  # beside the operator's

    def needs(self, is_cpu: bool) -> str:
        """Return what one replica takes, for people."""
        count, what = (self.cores, "core") if is_cpu else (self.ranks, "GPU")
        return f"{count} {what}{'' if count == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class Room:
    """One machine."""

    cores: int
    gpus: int = 0


def place(arguments: Sequence[str], is_cpu: bool, cores: int) -> Placement:
    """Return what an engine with these arguments takes.

    :param cores: that a replica is to have
    """
    ranks = 1
    for names in _SIZES:
        given = [value for name in names if (value := flag_value(arguments, name)) is not None]
        ranks *= int(given[0]) if given and given[0].isdecimal() else 1  # vLLM says what is wrong with anything else
    if is_cpu:
        return Placement(cores, ranks=ranks)
    backend = flag_value(arguments, BACKEND)
    if ranks == 1 or backend not in (None, "ray"):
        return Placement(cores, gpus=ranks, ranks=ranks)
    return Placement(cores, ranks=ranks, is_spread=True, arguments=() if backend else (BACKEND, "ray"))


def replicas_in(rooms: Iterable[Room], placement: Placement, is_cpu: bool) -> int:
    """Return how many replicas find room on these machines, empty."""
    rooms = list(rooms)
    if is_cpu:
        return sum(room.cores // placement.cores for room in rooms)
    if placement.is_spread:
        return sum(room.gpus for room in rooms) // placement.ranks
    return sum(min(room.gpus // placement.gpus, room.cores // placement.cores) for room in rooms)


def require_room(found: int, most: int, needs: str) -> None:
    """Raise UsageError where fewer replicas find room on this machine than there may be."""
    if found < most:
        raise UsageError(
            f"room for {found} replicas of {needs} each on this machine", f"room for {most}, as --replicas says",
            "pass fewer, or give each less",
        )  # fmt: skip
