"""Ragged drafting on the V2 runner: a request leaves the draft batch after its own number of tokens.

`lengths` never depend on a drawn token, so drafts stay lossless. After a failure vLLM drafts as it would without
FASER: every request the batch's longest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ..operator_log import operator_log
from ..patches.v2_speculator import DecodeRounds, around_decode, has_peers

if TYPE_CHECKING:
    from torch import Tensor

logger = operator_log(__name__)

FIRST_ROUND: Final = 1  # rounds behind the first pass; that one runs for every row


class RaggedV2:
    """Drafts of different length in one batch of vLLM's autoregressive speculators (eagle, eagle3, mtp)."""

    def __init__(self, runner: Any) -> None:
        self.lengths: list[int] | None = None  # per batch row; None: no opinion
        self.rounds: tuple[int, ...] | None = None  # rows in each round of the last drafting; None: vLLM's own
        self._runner = runner
        self.is_on = around_decode(runner.speculator, self._decode)

    def begin(self, lengths: list[int]) -> None:
        """Note what the next drafting shall be."""
        self.lengths, self.rounds = lengths, None

    def _decode(self, requests: int, upper_bound: Tensor, longest: int) -> bool:
        lengths, self.lengths = self.lengths, None  # of one drafting only
        if not self.is_on or lengths is None or len(lengths) != requests or min(lengths) >= longest:
            return False
        decode: DecodeRounds | None = None
        try:
            decode = DecodeRounds(self._runner, requests, upper_bound, longest)
            self.rounds = draft_ragged(decode, lengths)
        except Exception:
            self.is_on = False
            if decode is not None and has_peers():
                raise  # other ranks are rounds ahead: vLLM's own would wait for them for ever
            logger.exception("FASER drafts the batch's longest length for every request: ragged drafting failed")
            if decode is not None:
                decode.restore()
        return self.rounds is not None


def draft_ragged(decode: DecodeRounds, lengths: list[int]) -> tuple[int, ...]:
    """Draft each row's own length.

    :returns: rows that drafted in each round, the first pass included
    """
    rows, rounds = list(range(decode.requests)), [decode.requests]
    for step in range(FIRST_ROUND, decode.longest):
        places = [place for place, row in enumerate(rows) if lengths[row] > step]
        if not places:
            break
        if len(places) < len(rows) and decode.shrinks_to(len(places)):
            decode.keep(places)
            rows = [rows[place] for place in places]
        decode.run(step, rows)
        rounds.append(len(rows))
    decode.hand_over()
    return tuple(rounds)
