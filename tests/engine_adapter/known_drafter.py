"""A drafter process that knows what the target will say, and errs as often as it is told: no model, starts at once.

Run by test_frontier_engine.py in place of a draft model: `known_drafter.py FILE MEMORY BELL`. FILE is JSON: `texts`
(whole sequences of tokens), `wrong` (share of wrong tokens, by position), and a `fault`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faser.engine_adapter.drafter_process.drafted import Drafted
from faser.engine_adapter.drafter_process.mailbox import StateRows, Tokens
from faser.engine_adapter.drafter_process.server import DraftTask, serve


class KnownDrafter:
    """Draws from recorded sequences; see `server.Drafter`."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.texts: list[list[int]] = given["texts"]
        self.wrong: float = given["wrong"]
        self.fault: str = given.get("fault", "")

    def learn(self, key: int, sequence: Tokens, states: StateRows) -> bool:
        """Tokens are all that it needs."""
        return True

    def behind(self, key: int, sequence: Tokens) -> int:
        """Nothing is ever behind."""
        return 0

    def read(self, key: int, sequence: Tokens, count: int) -> None:
        """Nothing to read."""

    def forget(self, key: int) -> None:
        """Nothing to forget."""

    def draft(self, tasks: list[DraftTask], is_cancelled: Callable[[], bool]) -> dict[int, Drafted]:
        """Return what comes next, or something else."""
        drafted = {task.key: self._next(task.sequence.tolist(), task.count) for task in tasks}
        if self.fault == "neighbour":
            keys = list(drafted)
            return dict(zip(keys, [drafted[key] for key in keys[1:] + keys[:1]], strict=True))
        return drafted

    def _next(self, sequence: list[int], count: int) -> Drafted:
        text = next((text for text in self.texts if text[: len(sequence)] == sequence), [])
        tokens = []
        for position in range(len(sequence), len(sequence) + count):
            is_wrong = random.Random(f"{sequence[:5]} {position}").random() < self.wrong
            is_known = position < len(text) and not is_wrong
            tokens.append(text[position] if is_known else 7 + position % 50)
        return Drafted(tuple(tokens), (0.5,) * count)


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    serve(int(sys.argv[2]), int(sys.argv[3]), lambda: KnownDrafter(given))
