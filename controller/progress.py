"""Progress on stderr of the commands that work for a while: bars in a terminal, elsewhere a line now and then.

Called by the CLI, `serve`, `demo` and `profile`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

ShowProgress = Callable[[str, float], None]  # what is being done, share done 0..1
SILENT_S: Final = 30.0  # at most, where there is no bar to look at


class ProgressLines:
    """A line whenever there was none for a while; nothing in a terminal, which has a bar."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begin_s = self._told_s = time.monotonic()

    def note(self, what: str, share: float) -> None:
        """Take in what is being done, and the share of it that is, 0 to 1."""
        now_s = time.monotonic()
        if self._console.is_terminal or now_s - self._told_s < SILENT_S:
            return
        self._told_s = now_s
        self._console.print(f"faser: {now_s - self._begin_s:4.0f} s: {what} {share:.0%}", soft_wrap=True)


class StageBars:
    """A bar for each stage of the work."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lines = ProgressLines(progress.console)
        self._tasks: dict[str, TaskID] = {}

    def stage(self, what: str, done: int, total: int, description: str = "") -> None:
        """Show how far a stage is."""
        self._lines.note(description or what, done / max(total, 1))
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], description=description or what, completed=done, total=total)

    def say(self, text: str) -> None:
        """Print lines above the bars."""
        self._progress.console.print(text)


@contextmanager
def stage_bars() -> Iterator[StageBars]:
    """Give bars that stay when the work is done; lines where there is no terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield StageBars(progress)


@contextmanager
def progress_bar(console: Console) -> Iterator[ShowProgress]:
    """Give a callback that draws one bar, gone at the end, or lines; nothing is drawn until it is called."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: list[TaskID] = []
        lines = ProgressLines(console)

        def show(what: str, share: float) -> None:
            if not tasks:
                tasks.append(progress.add_task(what, total=1.0))
            progress.update(tasks[0], description=what, completed=share)
            lines.note(what, share)

        yield show
