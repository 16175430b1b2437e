"""How many draft rows go on behind a layer, fixed by the host before the device has looked at any of them.

A lease's threshold is the chance from which on a row is worth its computation: a row that leaves saves `threshold`
tokens, one that passes and has to leave loses a token at most. So the number is chosen by what passed in earlier
steps, out of the sizes that were captured. It never depends on the drafts that it cuts. Pure; for forward_v2.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

MEMORY_STEPS: Final = 32
LEAST_STEPS: Final = 4  # told of, before anything is cut


class RowBudget:
    """One layer's evidence, and the choice."""

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        """`sizes`: rows for which the layers behind were captured; none: any number will do."""
        self._sizes = np.array(sorted(sizes), dtype=np.int64)
        self._shares: deque[float] = deque(maxlen=MEMORY_STEPS)

    def note(self, drafts: int, passing: int) -> None:
        """Take in a step: how many of its draft rows passed, whether or not any left."""
        if drafts:
            self._shares.append(passing / drafts)

    def draft_rows(self, rows: int, drafts: int, threshold: float) -> int | None:
        """Return how many draft rows of a step shall go on; None: all of them.

        :param rows: of the step, drafts included.
        """
        if len(self._shares) < LEAST_STEPS or not drafts:
            return None
        passing = np.array(list(self._shares)) * drafts  # a copy: steps may be told of in another thread
        is_captured = len(self._sizes) > 0 and rows <= self._sizes[-1]  # a larger step replays nothing
        budgets = self._sizes - (rows - drafts) if is_captured else np.unique(np.ceil(passing).astype(np.int64))
        budgets = budgets[(budgets >= 0) & (budgets < drafts)]
        if not len(budgets):
            return None
        lost = np.maximum(passing[None, :] - budgets[:, None], 0.0).mean(axis=1)
        saving = threshold * (drafts - budgets) - lost
        best = int(np.argmax(saving))
        return int(budgets[best]) if saving[best] > 0.0 else None
