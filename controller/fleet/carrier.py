"""What carries engines, as the fleet sees it: somebody who holds one engine each, on whatever machine.

controller/fleet/ray_carrier.py is the one that `faser fleet` uses; tests have their own. Every call may block for a
second or so and is made from a thread, never from the entry point's loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..engine.running import Health


@dataclass(frozen=True, slots=True)
class EngineSight:
    """What was seen of an engine."""

    is_running: bool
    is_placed: bool = True  # False: waits for cores or GPUs
    url: str = ""
    health: Health = "silent"  # dead is normal until it has started
    reason: str = ""  # why it does not run, in one line
    where: str = ""  # node and cores, for people
    pid: int = 0  # root of its processes


class EngineHolder(Protocol):
    """Holds one engine, from its start to `stop`."""

    def look(self) -> EngineSight:
        """Return how the engine is; never raises."""
        ...

    def stop(self) -> None:
        """End the engine and every process of it; never raises. Stopping twice is allowed."""
        ...


class Carrier(Protocol):
    """Starts engines."""

    def hold(self, name: str) -> EngineHolder:
        """Begin to start an engine and return without waiting for it."""
        ...
