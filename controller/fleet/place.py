"""A request's place at a replica, and how the replica's loss reaches a request that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Place:
    """Taken from the fleet and given back to it.

    A machine that vanishes closes no connection: without `abandon` its requests would wait for bytes for ever.
    """

    name: str  # of the replica
    url: str
    body_bytes: int
    is_abandoned: bool = False
    _limit: asyncio.Timeout | None = field(default=None, repr=False)

    async def wait(self, reading: Awaitable[T]) -> T:
        """Return what is awaited; raise ConnectionError as soon as the replica is lost."""
        try:
            async with asyncio.timeout(0.0 if self.is_abandoned else None) as self._limit:
                return await reading
        except TimeoutError:
            if self.is_abandoned:
                raise ConnectionError("the replica is gone") from None
            raise
        finally:
            self._limit = None

    def abandon(self) -> None:
        """End whatever waits at this place."""
        self.is_abandoned = True
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())
