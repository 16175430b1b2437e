"""Progress bars on stderr of the commands that work for a while. Called by the CLI, `serve`, `demo` and `profile`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

ShowProgress = Callable[[str, float], None]  # what is being done, share done 0..1


class StageBars:
    """A bar for each stage of the work."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def stage(self, what: str, done: int, total: int, description: str = "") -> None:
        """Show how far a stage is."""
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], description=description or what, completed=done, total=total)

    def say(self, text: str) -> None:
        """Print lines above the bars."""
        self._progress.console.print(text)


@contextmanager
def stage_bars() -> Iterator[StageBars]:
    """Give bars that stay when the work is done; nothing is drawn where nobody looks."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield StageBars(progress)


@contextmanager
def progress_bar(console: Console) -> Iterator[ShowProgress]:
    """Give a callback that draws one bar, gone at the end; nothing is drawn until it is called."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: list[TaskID] = []

        def show(what: str, share: float) -> None:
            if not tasks:
                tasks.append(progress.add_task(what, total=1.0))
            progress.update(tasks[0], description=what, completed=share)

        yield show
