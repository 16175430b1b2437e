"""Cores of a machine that belong to one engine each: a lock on a file for every core, held by the engine's owner.

Called by controller/fleet/engine_actor.py on the machine that the engine runs on. Locks need nobody who hands cores
out, hold for several fleets on one machine, and are gone with the process that holds them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from ..errors import EngineError
from ..file_lock import FileLock


class CoreClaim:
    """So many cores, until closed; raises EngineError where fewer are free.

    :param count: how many
    :param among: numbers of the cores to choose from; the first free ones are taken
    :param folder: of the locks, which must exist
    """

    def __init__(self, count: int, among: Sequence[int], folder: Path) -> None:
        self.cores: list[int] = []
        self._locks: list[FileLock] = []
        for core in among:
            if len(self.cores) == count:
                break
            with contextlib.suppress(BlockingIOError):
                self._locks.append(FileLock(folder / f"core-{core}.lock"))
                self.cores.append(core)
        if (free := len(self.cores)) < count:
            self.close()
            raise EngineError(
                f"{free} of {len(among)} cores are free", f"{count} for an engine",
                "stop another fleet on this machine or give each replica fewer",
            )  # fmt: skip

    def close(self) -> None:
        """Give the cores back."""
        for lock in self._locks:
            lock.close()
        self._locks.clear()
