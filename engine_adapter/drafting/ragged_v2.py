"""Ragged drafting on the V2 runner: a request leaves the draft batch after its own number of tokens.

`lengths` never depend on a drawn token, so drafts stay lossless. After a failure vLLM drafts as it would without
FASER: every request the batch's longest. So it does where the gate (rounds_gate.py) measured that to be no slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ..operator_log import operator_log
from ..patches.speculators.rounds import DecodeRounds, around_decode, has_peers

if TYPE_CHECKING:
    from torch import Tensor

    from .rounds_gate import RoundsGate

logger = operator_log(__name__)

FIRST_ROUND: Final = 1  # rounds behind the first pass; that one runs for every row


class RaggedV2:
    """Drafts of different length in one batch of vLLM's autoregressive speculators (eagle, eagle3, mtp)."""

    def __init__(self, runner: Any, gate: RoundsGate | None = None) -> None:
        """`gate`: says in which steps rows leave; None: in all."""
        self.lengths: list[int] | None = None  # per batch row; None: no opinion
        self.rounds: tuple[int, ...] | None = None  # rows in each round of the last drafting; None: vLLM's own
        self._runner, self._gate = runner, gate
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
            if not self._pays(requests, longest):
                return False
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

    def _pays(self, requests: int, longest: int) -> bool:
        gate = self._gate
        return gate is None or gate.ask(requests, longest - FIRST_ROUND, getattr(self._runner, "events", None))


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
