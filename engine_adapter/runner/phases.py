"""How long the phases of one runner step took: host clock on a CPU, events read one step later on a GPU.

Owned by the runner mixins. Must never wait for the device and never raise.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

UNREAD_LIMIT: Final = 8  # steps whose events may wait to be read; older ones are dropped

Spent = dict[str, float]  # phase -> seconds


class Phases(Protocol):
    """A stopwatch with named phases; a phase that runs twice in a step adds up."""

    def phase(self, name: str) -> Any:
        """Time the block."""

    def collect(self) -> Spent:
        """Close the step and return the newest complete times."""


class HostPhases:
    """Wall clock; right where the work is done when the call returns."""

    def __init__(self) -> None:
        self._spent: Spent = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - started

    def collect(self) -> Spent:
        """Return this step's times."""
        spent, self._spent = self._spent, {}
        return spent


class DevicePhases:
    """CUDA events on the current stream: `collect` returns the times of an earlier step, the newest that is done."""

    def __init__(self) -> None:
        from torch.cuda import Event

        self._event: Any = Event
        self._open: list[tuple[str, Any, Any]] = []
        self._unread: deque[list[tuple[str, Any, Any]]] = deque(maxlen=UNREAD_LIMIT)
        self._newest: Spent = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block between two events."""
        started, ended = self._event(enable_timing=True), self._event(enable_timing=True)
        started.record()
        try:
            yield
        finally:
            ended.record()
            self._open.append((name, started, ended))

    def collect(self) -> Spent:
        """Return the newest complete times without waiting; empty until a first step is done."""
        while self._unread and all(ended.query() for _, _, ended in self._unread[0]):
            self._newest = _elapsed(self._unread.popleft())
        if self._open:
            self._unread.append(self._open)
            self._open = []
        return self._newest


def _elapsed(step: list[tuple[str, Any, Any]]) -> Spent:
    spent: Spent = {}
    for name, started, ended in step:
        spent[name] = spent.get(name, 0.0) + started.elapsed_time(ended) / 1000.0
    return spent
