"""`faser top`: a live terminal view of the running sidecar, redrawn from status snapshots.

Called by the CLI; the demo reuses `view`. It only asks; leaving it changes nothing.
"""

from __future__ import annotations

import time
from typing import Final

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..config import LinkConfig
from ..errors import NotRunningError, UsageError
from ..link.ask import ask, engine_lines, overview
from ..snapshot import EngineStatus, Snapshot

BAR_CELLS: Final = 24
MAX_INTERVAL_S: Final = 3600.0
STYLES: Final = {"busy": "green", "idle": "cyan", "silent": "yellow", "stopped": "dim", "gone": "red"}


def run_top(link: LinkConfig, interval_s: float, rounds: int | None = None) -> int:
    """Redraw until Ctrl-C, or `rounds` times; a sidecar that goes away is shown and awaited."""
    console = Console()
    if not 0.0 < interval_s <= MAX_INTERVAL_S:
        raise UsageError(f"--interval {interval_s:g}", f"at most {MAX_INTERVAL_S:g} seconds")
    snapshot = ask(link)
    # A pipe or a file gets one picture per round instead of an alternate screen.
    with Live(view(snapshot), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while rounds is None or rounds > 0:
                rounds = None if rounds is None else rounds - 1
                live.update(_next_view(link, snapshot), refresh=True)
                time.sleep(interval_s)
        except KeyboardInterrupt:
            return 0
    return 0


def _next_view(link: LinkConfig, last: Snapshot) -> RenderableType:
    try:
        return view(ask(link))
    except NotRunningError as error:
        return Group(Text(f"{error}", style="bold red"), Text("last seen:"), view(last))


def view(snapshot: Snapshot) -> RenderableType:
    """Return the whole picture of a snapshot."""
    return Group(Panel(Text(overview(snapshot)), title="faser"), *(engine_panel(engine) for engine in snapshot.engines))


def engine_panel(engine: EngineStatus) -> Panel:
    """Return one engine's figures, length histogram and acceptance by position."""
    figures = Table.grid(padding=(0, 2))
    for name, text in engine_lines(engine):
        figures.add_row(Text(name, style="dim"), Text(text))
    lengths = _bars("draft length", [(str(k), float(count)) for k, count in enumerate(engine.length_histogram)])
    accepted = _bars(
        "accepted at position",
        [(str(position), share) for position, share in enumerate(engine.acceptance_by_position, 1)],
        whole=1.0,
    )
    style = STYLES[engine.presence]
    title = Text(f"{engine.model} [{engine.presence}] {engine.boot_id}", style=style)
    return Panel(Group(figures, Columns([lengths, accepted], padding=(0, 4))), title=title, border_style=style)


def _bars(title: str, bars: list[tuple[str, float | None]], whole: float | None = None) -> Table:
    """Return horizontal bars; `whole` is a full bar's value, by default the sum."""
    total = whole or sum(value or 0.0 for _, value in bars) or 1.0
    table = Table(title=title, show_header=False, box=None, padding=(0, 1))
    for label, value in bars:
        share = (value or 0.0) / total
        text = "-" if value is None else f"{share:.0%}"
        table.add_row(label, Text("█" * round(share * BAR_CELLS), style="green"), text)
    return table
