"""What the drafter thought likely at each draft position: ids and its confidence, as the exit heads need them.

Noted by the ragged drafter in each drafting pass, only while exit heads are loaded; read once by the runner, which
keeps the tables until the drafts are verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class CandidateBook:
    """What one drafting noted, column by column."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._columns: list[tuple[list[int] | None, Tensor, Tensor]] = []

    def note(self, rows: list[int] | None, tokens: Tensor, confidences: Tensor) -> None:
        """Add a column: batch rows (None: every one), their candidates (rows, count) and confidences (rows,)."""
        self._columns.append((rows, tokens, confidences))

    def tables(self, requests: int) -> tuple[Tensor, Tensor] | None:
        """Return candidates (requests, columns, count) and confidences (requests, columns); None if nothing was noted.

        Cells of requests that had left the draft are never read: their drafts are shorter.
        """
        import torch

        if not self._columns:
            return None
        _, tokens, confidences = self._columns[0]
        candidates = tokens.new_zeros((requests, len(self._columns), self.count))
        sure = confidences.new_zeros((requests, len(self._columns)))
        for column, (rows, ids, values) in enumerate(self._columns):
            at = slice(None) if rows is None else torch.tensor(rows, device=ids.device)
            candidates[at, column], sure[at, column] = ids, values
        return candidates, sure
