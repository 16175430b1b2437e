"""The machine that is timed: a CUDA device with its graphs, or, for the dry run, the host with neither.

Both offer partitions, captured work and a stopwatch, so that the parts above are the same code on both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

import torch

from faser.engine_adapter.partition.shares import Grain, Partition, Partitions, Phase, Sizes, make_ready

Work = Callable[[], object]
WARM_UPS: Final = 2


class CudaMachine:
    """Device 0; work is captured into graphs, events tell its time."""

    is_dry = False
    dtype = torch.bfloat16

    def __init__(self) -> None:
        from faser.engine_adapter.partition.cuda import CudaDevice
        from faser.engine_adapter.partition.cuda_graphs import PartitionGraphs

        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        torch.zeros(1, device=self.device)
        self.partitions: Partitions = make_ready(CudaDevice(0))
        self._graphs: Any = PartitionGraphs()

    def capture(self, partition: Partition, phase: Phase, shape: Hashable, work: Work) -> None:
        """Make work ready to be launched again and again on the phase's share."""
        self._graphs.capture(partition, phase, shape, work)

    def launch(self, partition: Partition, phase: Phase, shape: Hashable) -> None:
        """Launch captured work."""
        self._graphs.replay(partition, phase, shape)

    def forget(self) -> None:
        """Drop all captured work."""
        torch.cuda.synchronize()
        self._graphs.clear()
        torch.cuda.empty_cache()

    def rounds(self, arms: Mapping[str, Work], count: int) -> dict[str, list[float]]:
        """Run the arms in turn, `count` rounds; return each arm's times in milliseconds, by the device's clock."""
        for work in arms.values():
            for _ in range(WARM_UPS):
                work()
        times: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(count):
            marks = []
            for name in rotated(list(arms), number):
                begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begun.record()
                arms[name]()
                ended.record()
                marks.append((name, begun, ended))
            torch.cuda.synchronize()
            for name, begun, ended in marks:
                times[name].append(begun.elapsed_time(ended))
        return times

    def wait(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize()

    def free_bytes(self) -> float:
        """Return what is free on the device."""
        torch.cuda.empty_cache()
        return float(torch.cuda.mem_get_info()[0])


class HostDevice:
    """As many units as a GPU might have, given to whoever asks."""

    grain = Grain("SMs", 132, 8, 8)

    def open(self, name: str, asked: Sizes) -> Partition:
        """Return a partition that shares out nothing."""
        return Partition(name=name, unit="SMs", asked=asked, allocated=asked)


class HostMachine:
    """The dry run: everything one after the other on the CPU, timed by its clock."""

    is_dry = True
    dtype = torch.float32

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.partitions = make_ready(HostDevice(), ["unsplit", "streams", "1:3"])
        self._work: dict[tuple[str, Phase, Hashable], Work] = {}

    def capture(self, partition: Partition, phase: Phase, shape: Hashable, work: Work) -> None:
        """Keep the work."""
        work()
        self._work[partition.name, phase, shape] = work

    def launch(self, partition: Partition, phase: Phase, shape: Hashable) -> None:
        """Do the work."""
        with partition.on(phase):
            self._work[partition.name, phase, shape]()

    def forget(self) -> None:
        """Drop the work."""
        self._work.clear()

    def rounds(self, arms: Mapping[str, Work], count: int) -> dict[str, list[float]]:
        """Run the arms in turn, `count` rounds; return each arm's times in milliseconds."""
        times: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(count):
            for name in rotated(list(arms), number):
                begun = time.perf_counter()
                arms[name]()
                times[name].append(1e3 * (time.perf_counter() - begun))
        return times

    def wait(self) -> None:
        """Nothing is in flight."""

    def free_bytes(self) -> float:
        """Return enough."""
        return 1e9


Machine = CudaMachine | HostMachine


def device_for(is_dry: bool) -> torch.device:
    """Return the device alone, without partitions."""
    return torch.device("cpu") if is_dry else torch.device("cuda", 0)


def machine_for(is_dry: bool) -> Machine:
    """Return the GPU, or the host for the dry run."""
    return HostMachine() if is_dry else CudaMachine()


def sizes(partition: Partition, is_allocated: bool = False) -> list[int]:
    """Return [draft, verify] units."""
    chosen = partition.allocated if is_allocated else partition.asked
    return [chosen.draft, chosen.verify]


def rotated(names: list[str], by: int) -> list[str]:
    """Return the names beginning `by` further on, so that no arm always follows the same one first."""
    at = by % len(names)
    return names[at:] + names[:at]


def told(times: list[float]) -> dict[str, float]:
    """Return median and quartiles, milliseconds."""
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return {"median": round(middle, 5), "q1": round(low, 5), "q3": round(high, 5), "count": len(times)}
