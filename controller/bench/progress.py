"""What a benchmark shows on stderr while it runs: a bar in a terminal, elsewhere a line at least every half a minute.

Called by controller/bench/bench.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

SILENT_S: Final = 30.0  # at most, where there is no bar to look at


@dataclass(slots=True)
class BenchProgress:
    """The line and the bar of one run."""

    console: Console
    bar: Progress
    task: TaskID
    begin_s: float = field(default_factory=time.monotonic)
    _what: str = "starting servers"
    _share: float = 0.0
    _told_s: float = field(default_factory=time.monotonic)

    @classmethod
    @contextmanager
    def shown(cls, console: Console) -> Iterator[Self]:
        """Show progress while the context is open."""
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            yield cls(console, bar, bar.add_task("starting servers", total=1.0))

    def tell(self, text: str) -> None:
        """Print a line."""
        self._told_s = time.monotonic()
        self.console.print(f"faser: {self._told_s - self.begin_s:4.0f} s: {text}", soft_wrap=True)

    def advance(self, what: str, share: float) -> None:
        """Take in what is measured now, and the share of the run that is done, 0 to 1."""
        self._what, self._share = what, min(share, 1.0)
        self.bar.update(self.task, description=what, completed=self._share)

    async def keep_telling(self) -> None:
        """Print a line whenever there was none for a while, for ever; in a terminal the bar says it."""
        while not self.console.is_terminal:
            await asyncio.sleep(max(self._told_s + SILENT_S - time.monotonic(), 0.1))
            if time.monotonic() - self._told_s >= SILENT_S:
                self.tell(f"{self._share:.0%}: {self._what}")
