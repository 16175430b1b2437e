"""Work beside the stream on which the engine launches its steps: a CUDA stream of its own, ordered by events.

Owned by late_drafting.py. Nothing here waits on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class SideStream(Protocol):
    """Where work is launched that the engine's next step runs beside."""

    is_beside: bool  # whether it runs while the engine's stream goes on

    def launch(self, work: Callable[[], None]) -> None:
        """Launch work behind all that the engine's stream was given so far."""

    def wait(self) -> None:
        """Let what the engine's stream is given from here on come behind the newest work."""


class CudaSideStream:
    """A stream of one CUDA device. `cuda` is torch.cuda; tests put a device there that is late."""

    is_beside = True

    def __init__(self, device: Any, cuda: Any = None) -> None:
        if cuda is None:
            from torch import cuda
        self._cuda, self._stream = cuda, cuda.Stream(device)
        self._handed, self._done = cuda.Event(), cuda.Event()

    def launch(self, work: Callable[[], None]) -> None:
        """Launch work behind all that the engine's stream was given so far."""
        self._handed.record()
        self._stream.wait_event(self._handed)
        with self._cuda.stream(self._stream):
            try:
                work()
            finally:
                self._done.record()

    def wait(self) -> None:
        """Let what the engine's stream is given from here on come behind the newest work."""
        self._cuda.current_stream().wait_event(self._done)


class NoSideStream:
    """A device without streams: work is done when it is handed over."""

    is_beside = False

    def launch(self, work: Callable[[], None]) -> None:
        """Do the work."""
        work()

    def wait(self) -> None:
        """Do nothing: it is done."""


def side_stream(device: Any) -> SideStream:
    """Return where work runs beside the steps of an engine on this device."""
    return CudaSideStream(device) if device.type == "cuda" else NoSideStream()
