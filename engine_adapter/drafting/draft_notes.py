"""The drafter's probability of its own top token at each draft position, noted while it drafts.

Used by the ragged drafter (`note`, per drafting pass) and by the runner's report (`read`, once per step). Always of
the top token and never of the drawn one: with drafts drawn at random a rule on the drawn token's probability would
depend on the token's own value, and the output's distribution with it (DESIGN section 5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def top_probability(logits: Tensor, tops: Tensor) -> Tensor:
    """Return the softmax probability (rows,) float32 of the tokens `tops` (rows,) under `logits` (rows, vocabulary).

    One softmax in float32 straight from bf16 is faster than logsumexp, which first needs a copy of the logits.
    """
    import torch

    return torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, tops[:, None])[:, 0]


class ConfidenceBook:
    """What one drafting noted, column by column."""

    def __init__(self) -> None:
        self._rows: list[list[int] | None] = []
        self._columns: list[Tensor] = []

    def note(self, rows: list[int] | None, confidences: Tensor) -> None:
        """Add a column: batch rows (None: every one) and their confidences (rows,)."""
        self._rows.append(rows)
        self._columns.append(confidences)

    def newest(self) -> list[float]:
        """Return the last column; on a GPU this waits for the pass that made it."""
        values: list[float] = self._columns[-1].tolist()
        return values

    def has_column(self, column: int) -> bool:
        """Tell whether the pass of this column left its confidences; some ways of sampling show no logits."""
        return len(self._columns) == column + 1

    def read(self, kept: list[int]) -> list[tuple[float, ...]]:
        """Return the confidences of each row's first `kept[row]` tokens and of one dropped behind them, as noted."""
        import torch

        # Rounding may go past 1; broken logits give no number at all.
        values = iter(torch.cat(self._columns).nan_to_num(0.0).clamp(0.0, 1.0).tolist() if self._columns else ())
        found: list[list[float]] = [[] for _ in kept]
        for rows in self._rows:
            for row in range(len(kept)) if rows is None else rows:
                found[row].append(next(values))
        return [tuple(row[: length + 1]) for row, length in zip(found, kept, strict=True)]
