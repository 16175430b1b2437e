"""Work beside the stream on which the engine launches its steps: CUDA streams of its own, ordered by events.

There is one for each split of the device, whose kernels have no more than the drafter's share of the SMs, and one that
may use all of them. Owned by late_drafting.py. Nothing here waits on the host, but after a failure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from ..partition.cuda import CudaPartition
from ..partition.shares import Partitions

WHOLE_DEVICE: Final = 0  # the index of the split that is none


class SideStream(Protocol):
    """Where work is launched that the engine's next step runs beside."""

    is_beside: bool  # whether it runs while the engine's stream goes on

    def launch(self, work: Callable[[], None], split: int = WHOLE_DEVICE) -> None:
        """Launch work behind all that the engine's stream was given so far; `split`: an index of HELLO's."""

    def wait(self) -> None:
        """Let what the engine's stream is given from here on come behind the newest work."""

    def finish(self) -> None:
        """Let the host wait until all work is done; after a failure alone."""


class CudaSideStream:
    """Streams of one CUDA device. `cuda` is torch.cuda; tests put a device there that is late."""

    is_beside = True

    def __init__(self, device: Any, splits: Partitions | None = None, cuda: Any = None) -> None:
        if cuda is None:
            from torch import cuda
        self._cuda, self._streams = cuda, [cuda.Stream(device)]
        if splits is not None:
            self._streams += [split.stream("draft") for split in splits.ready[1:] if isinstance(split, CudaPartition)]
        self._handed, self._done = cuda.Event(), cuda.Event()

    def launch(self, work: Callable[[], None], split: int = WHOLE_DEVICE) -> None:
        """Launch work behind all that the engine's stream was given so far."""
        stream = self._streams[split]
        self._handed.record()
        stream.wait_event(self._handed)
        with self._cuda.stream(stream):
            try:
                work()
            finally:
                self._done.record()

    def wait(self) -> None:
        """Let what the engine's stream is given from here on come behind the newest work."""
        self._cuda.current_stream().wait_event(self._done)

    def finish(self) -> None:
        """Let the host wait until all work is done."""
        self._cuda.synchronize()


class NoSideStream:
    """A device without streams: work is done when it is handed over."""

    is_beside = False

    def launch(self, work: Callable[[], None], split: int = WHOLE_DEVICE) -> None:
        """Do the work."""
        work()

    def wait(self) -> None:
        """Do nothing: it is done."""

    def finish(self) -> None:
        """Do nothing: it is done."""


def side_stream(device: Any, splits: Partitions) -> SideStream:
    """Return where work runs beside the steps of an engine on this device."""
    return CudaSideStream(device, splits) if device.type == "cuda" else NoSideStream()
