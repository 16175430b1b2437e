"""Long work shows progress where there is no terminal, too: a line now and then."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from faser.controller import progress
from faser.controller.progress import progress_bar


def shown(*, is_terminal: bool) -> str:
    """Return what two notes write."""
    text = io.StringIO()
    with progress_bar(Console(file=text, force_terminal=is_terminal)) as show:
        show("evaluating", 0.25)
        show("evaluating", 0.5)
    return text.getvalue()


def test_without_a_terminal_a_line_says_what_is_done_and_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else does."""
    monkeypatch.setattr(progress, "SILENT_S", 0.0)
    lines = shown(is_terminal=False).splitlines()
    assert [line.split(": ", 2)[2] for line in lines if line] == ["evaluating 25%", "evaluating 50%"]


def test_short_work_says_nothing_there() -> None:
    """Half a minute without a line is no silence."""
    assert not shown(is_terminal=False).strip()


def test_a_terminal_has_its_bar_and_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar is gone at the end."""
    monkeypatch.setattr(progress, "SILENT_S", 0.0)
    assert "faser:" not in shown(is_terminal=True)
