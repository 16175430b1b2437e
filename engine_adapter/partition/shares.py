"""Which share of the machine drafting and verification get: the one interface, and the arithmetic of ready-made ratios.

A partition is *unsplit* (one phase after the other on everything), *streams* (side by side on everything) or a ratio
such as 1:3, drafter first, of which each phase has its own part. The back ends are cpu.py (cores) and
cuda.py (streams, green contexts); what runs above must not know which one it has. Pure: standard library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from ..operator_log import operator_log

logger = operator_log(__name__)

Phase = Literal["draft", "verify"]
PHASES: Final[tuple[Phase, ...]] = ("draft", "verify")
UNSPLIT: Final = "unsplit"
STREAMS: Final = "streams"
# Few, because on CUDA every graph is captured once per ratio: memory and start-up time grow with each.
READY_MADE: Final = (UNSPLIT, STREAMS, "1:15", "1:7", "1:3", "3:5", "1:1")
MAX_PART: Final = 64


class PartitionError(ValueError):
    """A partition that cannot be had here; one line: what was asked, what there is."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Cores or SMs of both phases."""

    draft: int
    verify: int

    def __str__(self) -> str:
        return f"{self.draft}+{self.verify}"


@dataclass(frozen=True, slots=True)
class Grain:
    """What a device can be cut into: so many units, the drafter's part a multiple of `step`, none below `least`."""

    unit: str  # "cores" or "SMs"
    total: int
    step: int = 1
    least: int = 1


@dataclass(frozen=True, slots=True)
class PartitionRatio:
    """The drafter's parts to the target's."""

    draft: int
    verify: int

    @classmethod
    def parse(cls, name: str) -> PartitionRatio:
        """Return the ratio of a name such as 1:3."""
        parts = name.split(":")
        if len(parts) == 2 and all(part.isascii() and part.isdigit() and len(part) <= 2 for part in parts):
            draft, verify = int(parts[0]), int(parts[1])
            if 1 <= draft <= MAX_PART and 1 <= verify <= MAX_PART:
                return cls(draft, verify)
        raise PartitionError(f"expected {UNSPLIT}, {STREAMS} or a ratio of numbers from 1 to {MAX_PART} such as 1:3")

    def sizes(self, grain: Grain) -> Sizes:
        """Return what to ask of the device: the drafter's share to the nearest step, the rest to the target."""
        parts = self.draft + self.verify
        for part, owner in ((self.draft, "drafter"), (self.verify, "target")):
            if part * grain.total < grain.least * parts:
                share = part * grain.total / parts
                raise PartitionError(
                    f"leaves the {owner} {share:.1f} of {grain.total} {grain.unit}; expected at least {grain.least}"
                )
        steps = (2 * self.draft * grain.total + parts * grain.step) // (2 * parts * grain.step)  # halves up
        draft = max(steps * grain.step, grain.least)
        if grain.total - draft < grain.least:
            draft -= grain.step
        if draft < grain.least:
            raise PartitionError(f"{grain.total} {grain.unit} cannot be cut in steps of {grain.step}")
        return Sizes(draft, grain.total - draft)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One way to share the machine, ready to be used; back ends add what holds the shares.

    :param asked: what was asked of the device.
    :param allocated: what it gave.
    """

    name: str
    unit: str
    asked: Sizes
    allocated: Sizes

    @property
    def is_concurrent(self) -> bool:
        """Whether both phases may run at the same time."""
        return self.name != UNSPLIT

    @property
    def is_disjoint(self) -> bool:
        """Whether each phase has units of its own."""
        return self.name not in (UNSPLIT, STREAMS)

    def __str__(self) -> str:
        return f"{self.name}: asked {self.asked}, allocated {self.allocated} {self.unit} (draft+verify)"

    @contextmanager
    def side_by_side(self) -> Iterator[None]:
        """Hold both phases of a step: what the block launches begins after all before and ends before all behind it."""
        yield

    @contextmanager
    def on(self, phase: Phase) -> Iterator[None]:
        """Run what the block launches on the phase's share; where a share belongs to a process, nothing changes."""
        yield

    def close(self) -> None:
        """Give the shares back; nothing may be running on them."""


class Device(Protocol):
    """A back end: what can be shared out, and who does it."""

    grain: Grain

    def open(self, name: str, asked: Sizes) -> Partition:
        """Return the partition; raise PartitionError if it cannot be had."""


@dataclass(frozen=True, slots=True)
class Partitions:
    """What is ready; index 0, and the answer to everything that is not there, is unsplit."""

    ready: tuple[Partition, ...]
    refused: tuple[str, ...] = ()  # a line for each name that cannot be had

    @property
    def names(self) -> list[str]:
        """The names, in the order of HELLO's `splits`."""
        return [partition.name for partition in self.ready]

    def at(self, index: int | None) -> Partition:
        """Return the partition of an action set; unsplit where the index means none."""
        return self.ready[index] if index is not None and 0 <= index < len(self.ready) else self.ready[0]

    def named(self, name: str) -> Partition:
        """Return the partition of that name, unsplit if it is not ready."""
        return next((partition for partition in self.ready if partition.name == name), self.ready[0])

    def close(self) -> None:
        """Give all shares back."""
        for partition in self.ready:
            partition.close()


def make_ready(device: Device, names: Sequence[str] = READY_MADE) -> Partitions:
    """Open every partition that can be had; a line is logged and kept for each that cannot. Raises nothing."""
    partitions = opened(device, names)
    for line in partitions.refused:
        logger.warning("FASER: %s", line)
    logger.info("FASER partitions: %s", "; ".join(str(partition) for partition in partitions.ready))
    return partitions


def opened(device: Device, names: Sequence[str]) -> Partitions:
    """Open every partition that can be had; a line is kept for each that cannot, and nothing is said."""
    whole = Sizes(device.grain.total, device.grain.total)
    ready, refused = [device.open(UNSPLIT, whole)], []
    for name in dict.fromkeys(names):
        if name == UNSPLIT:
            continue
        try:
            partition = device.open(name, whole if name == STREAMS else PartitionRatio.parse(name).sizes(device.grain))
        except PartitionError as error:
            refused.append(f"partition {name!r}: {error}; {UNSPLIT} instead")
            continue
        twin = next((each for each in ready if each.is_disjoint and each.allocated == partition.allocated), None)
        if twin is not None and partition.is_disjoint:
            partition.close()
            refused.append(f"partition {name!r}: comes out as {twin.name} does, {twin.allocated} {twin.unit}; left out")
            continue
        ready.append(partition)
    return Partitions(tuple(ready), tuple(refused))
