"""How a demo with a load of its own runs: it ends what it started, and tells its figures, whatever happens.

Called by controller/demo/stages.py and controller/demo/tour/tour.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from ..config import Config
from ..engine.processes import ignored_interrupts, stopping_on_sigterm
from ..link.endpoint import socket_folder
from .configure import own_config
from .options import DemoOptions


class DemoRun(Protocol):
    """One run of such a demo."""

    def run(self, processes: ExitStack) -> None:
        """Serve; `processes` owns all that is started."""

    def conclude(self) -> int:
        """Tell what came of it; return the exit code."""


def run_to_its_end(options: DemoOptions, make: Callable[[Config], DemoRun]) -> int:
    """Run what `make` returns for the demo's own configuration; return its exit code."""
    with socket_folder("demo") as sockets, stopping_on_sigterm():
        demo, processes = make(own_config(options, sockets)), ExitStack()
        try:
            demo.run(processes)
        finally:
            with ignored_interrupts():
                processes.close()
                code = demo.conclude()
        return code
