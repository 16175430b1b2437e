"""The oracle drafter of overlap.py, run as a process: `overlap_oracle.py FILE MEMORY BELL`.

It knows what the target will say and errs as often as it is told, but it computes as a drafter does: for every token
matrices are read from memory and multiplied, as many as take `pass_s` on its core when nothing else runs, for each
request anew: half a batch takes half as long. FILE is JSON: texts, wrong (share of wrong tokens), pass_s.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faser.engine_adapter.drafter_server import Task, serve
from faser.engine_adapter.frontier import Drafted
from faser.engine_adapter.mailbox import StateRows, Tokens

WIDTH, MATRICES, SAMPLES = 1024, 64, 5  # 256 MiB: more than the caches hold


class Oracle:
    """Draws from recorded texts; see `drafter_server.Drafter`."""

    def __init__(self, given: dict[str, Any]) -> None:
        import torch

        self.texts: list[list[int]] = given["texts"]
        self.wrong: float = given["wrong"]
        self._weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(MATRICES)]
        self._state = torch.ones(1, WIDTH)
        self._next = 0
        self.matrices = round(given["pass_s"] / self._matrix_s()) if given["pass_s"] else 0

    def _matrix_s(self) -> float:
        def sample() -> float:
            began_s = time.perf_counter()
            self._compute(MATRICES)
            return (time.perf_counter() - began_s) / MATRICES

        sample()
        return statistics.median(sample() for _ in range(SAMPLES))

    def _compute(self, matrices: int) -> None:
        state = self._state
        for _ in range(matrices):
            self._next = (self._next + 1) % MATRICES
            state = state @ self._weights[self._next]

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

    def draft(self, tasks: list[Task], is_cancelled: Callable[[], bool]) -> dict[int, Drafted]:
        """Draft token after token, all requests in one pass."""
        found: dict[int, list[int]] = {task.key: [] for task in tasks}
        for depth in range(max(task.count for task in tasks)):
            if depth and is_cancelled():
                break
            self._compute(self.matrices * sum(depth < task.count for task in tasks))
            for task in tasks:
                if depth < task.count:
                    found[task.key].append(self._token(task.sequence.tolist(), found[task.key]))
        return {key: Drafted(tuple(tokens), (1.0,) * len(tokens)) for key, tokens in found.items()}

    def _token(self, sequence: list[int], drafted: list[int]) -> int:
        position = len(sequence) + len(drafted)
        text = next((text for text in self.texts if text[: len(sequence)] == sequence), [])
        is_wrong = random.Random(f"{text[:8]} {position}").random() < self.wrong
        return text[position] if position < len(text) and not is_wrong else 7 + position % 50


if __name__ == "__main__" and len(sys.argv) == 4:  # `make bench` runs every file here
    given = json.loads(Path(sys.argv[1]).read_text())
    serve(int(sys.argv[2]), int(sys.argv[3]), lambda: Oracle(given))
