"""What a benchmark says on stderr: never silent for long where nobody sees a bar."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from io import StringIO

import pytest
from rich.console import Console

from faser.controller.bench import progress as bench_progress
from faser.controller.bench.progress import BenchProgress


def said_within(seconds: float, is_terminal: bool) -> list[str]:
    """Return the lines that are said while a run measures something and tells nothing."""
    out = StringIO()
    console = Console(file=out, force_terminal=is_terminal)

    async def run() -> None:
        with BenchProgress.shown(console) as progress:
            telling = asyncio.create_task(progress.keep_telling())
            progress.advance("8 requests, all", 0.25)
            await asyncio.sleep(seconds)
            telling.cancel()
            with suppress(asyncio.CancelledError):
                await telling

    asyncio.run(run())
    return [line for line in out.getvalue().splitlines() if line.startswith("faser:")]


def test_a_run_without_a_terminal_says_now_and_then_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_progress, "SILENT_S", 0.2)
    lines = said_within(1.0, is_terminal=False)
    assert 1 <= len(lines) <= 5
    assert all(line.endswith(" s: 25%: 8 requests, all") for line in lines)


def test_in_a_terminal_the_bar_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_progress, "SILENT_S", 0.2)
    assert said_within(0.6, is_terminal=True) == []


def test_a_line_that_was_told_is_followed_by_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_progress, "SILENT_S", 30.0)
    assert said_within(0.3, is_terminal=False) == []
