"""CUDA graphs of both phases, one per partition and shape: what a graph runs on is settled when it is captured.

A graph captured on a green context's stream stays on that context's SMs wherever it is replayed. The graphs of one
phase share a memory pool, since one phase never runs beside itself; the two phases never share any. Results must
therefore be written to static buffers before the next graph of the same phase runs. PyTorch reuses the pool's memory on
the same stream only, so it still grows with every partition.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final

from .cuda import CudaPartition
from .shares import PartitionError, Phase

WARM_UPS: Final = 3  # runs on the very stream: libraries make their handles and workspaces per stream


class PartitionGraphs:
    """Capture and replay; `cuda` is torch.cuda, or a fake of it."""

    def __init__(self, cuda: Any = None) -> None:
        if cuda is None:
            from torch import cuda
        self._cuda = cuda
        self._graphs: dict[tuple[str, Phase, Hashable], Any] = {}
        self._pools: dict[Phase, Any] = {}
        self._unsplit: dict[Phase, Any] = {}  # streams to capture on: the default one cannot be

    def capture(self, partition: CudaPartition, phase: Phase, shape: Hashable, work: Callable[[], None]) -> None:
        """Capture `work` for one partition and shape; a second capture takes the place of the first."""
        stream = self._capture_stream(partition, phase)
        stream.wait_stream(self._cuda.current_stream(partition.device))
        with self._cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        self._cuda.synchronize(partition.device)
        graph = self._cuda.CUDAGraph()
        if phase not in self._pools:
            self._pools[phase] = self._cuda.graph_pool_handle()
        with self._cuda.graph(graph, pool=self._pools[phase], stream=stream):
            work()
        self._graphs[partition.name, phase, shape] = graph

    def replay(self, partition: CudaPartition, phase: Phase, shape: Hashable) -> None:
        """Launch the graph on the phase's stream."""
        graph = self._graphs.get((partition.name, phase, shape))
        if graph is None:
            raise PartitionError(f"no graph of {phase} for shape {shape!r} was captured for {partition.name}")
        with partition.on(phase):
            graph.replay()

    def _capture_stream(self, partition: CudaPartition, phase: Phase) -> Any:
        if partition.streams:
            return partition.stream(phase)
        if phase not in self._unsplit:  # one for all: libraries keep a workspace for every stream they see
            self._unsplit[phase] = self._cuda.Stream(partition.device)
        return self._unsplit[phase]

    def clear(self) -> None:
        """Forget all graphs; before their partitions are closed."""
        self._graphs.clear()
        self._pools.clear()
