"""What a demo shows while it runs: a live table on a terminal, a line every few seconds elsewhere.

Called by controller/demo/demo.py in its event loop. It looks at the load generator's counters and asks the sidecar; it
never touches the engine, and a sidecar that does not answer only leaves its cells empty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ..config import LinkConfig
from ..engine.load_generator import LoadGenerator
from ..errors import FaserError
from ..link.ask import ask
from ..snapshot import EngineStatus

_LOOK_S: Final = 0.5
_LINE_S: Final = 5.0
_ASK_S: Final = 0.4
_BARS: Final = " ▁▂▃▄▅▆▇█"


class View:
    """The picture of one load run."""

    def __init__(self, generator: LoadGenerator, link: LinkConfig, console: Console, is_live: bool) -> None:
        self._generator = generator
        self._link = link
        self._console = console
        self._is_live = is_live
        self._last_tokens, self._last_s = 0, 0.0
        self._tokens_per_s = 0.0

    async def follow(self) -> None:
        """Show the run until cancelled."""
        with (
            Live(console=self._console, auto_refresh=False, transient=True) if self._is_live else nullcontext() as live
        ):
            while True:
                await asyncio.sleep(_LOOK_S if live else _LINE_S)
                engine = await asyncio.to_thread(self._ask)
                self._measure()
                if live:
                    live.update(self.table(engine), refresh=True)
                else:
                    self._console.print(self.line(engine), soft_wrap=True)

    def table(self, engine: EngineStatus | None) -> Table:
        """Return the live table."""
        table = Table(show_header=False, title="FASER demo", title_justify="left")
        table.add_column(style="bold")
        table.add_column(min_width=60)
        for name, text in self._cells(engine):
            table.add_row(name, text)
        return table

    def line(self, engine: EngineStatus | None) -> str:
        """Return one progress line."""
        return "faser: " + ", ".join(f"{name} {text}" for name, text in self._cells(engine)[:-1])

    def _cells(self, engine: EngineStatus | None) -> list[tuple[str, str]]:
        generator = self._generator
        ended = generator.arrived - generator.in_flight
        cells = [
            ("time", f"{generator.elapsed_s:.0f} s"),
            ("requests", f"{ended} ended, {generator.in_flight} in flight, {len(generator.results)} in all"),
            ("tokens/s", f"{self._tokens_per_s:.0f}"),
        ]
        if engine is None:
            return [*cells, ("sidecar", "does not answer")]
        rate = "-" if engine.acceptance_rate is None else f"{engine.acceptance_rate:.2f}"
        return [
            *cells,
            ("engine", f"{engine.running} running, {engine.waiting} waiting, step {engine.step_ms:.0f} ms"),
            ("lengths", f"mean {engine.mean_draft_length:.2f} {bars(engine.length_histogram)} 0..{engine.k_max}"),
            ("acceptance", rate),
            ("lease", f"{engine.lease_share:.0%} of steps"),
            *([("split", engine.split)] if engine.split else []),
            *([("stages", engine.stages.told())] if engine.stages else []),
            ("reason", engine.reason or "-"),
        ]

    def _measure(self) -> None:
        now_s, tokens = self._generator.elapsed_s, self._generator.tokens
        self._tokens_per_s = (tokens - self._last_tokens) / max(now_s - self._last_s, 1e-6)
        self._last_tokens, self._last_s = tokens, now_s

    def _ask(self) -> EngineStatus | None:
        try:
            engines = ask(self._link, _ASK_S).engines
        except FaserError:
            return None
        return engines[-1] if engines else None


def bars(counts: Sequence[int]) -> str:
    """Return counts as a row of bars, the highest full."""
    top = max(counts, default=0)
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // top)] if top else _BARS[0] for count in counts)
