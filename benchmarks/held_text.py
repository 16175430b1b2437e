"""Holds requests to texts recorded before, by the ids they were added with; controller/held_answers/engine.py says
how and why.

Called by pruning_gate.py and overlap_gate.py, whose engines run in their own process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from faser.controller.held_answers import engine as bench_held


class HeldText(bench_held.HeldText):
    """Holds the requests named in `texts`."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.texts: dict[str, list[int]] = {}

    def text_of(self, name: str) -> Sequence[int]:
        """Return the text of a request; vLLM may add a suffix to its id."""
        return self.texts.get(name.split("-")[0], ())
