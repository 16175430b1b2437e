"""What is replayed of a recorded request: when it came, how long it was, and what was drafted for it.

Called by controller/calibrate/fidelity.py, which replays it with env/simulator/serve_requests.py. What was accepted
is never part of it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

NEIGHBOURS: Final = 2  # decisions to either side that a replay may take between two


class RecordedDraft(NamedTuple):
    """One recorded draft of a request."""

    emitted: int  # tokens of the answer when it was decided
    handed: int  # draft tokens
    is_looked_at: bool = False  # by exit heads, while it was verified
    confidences: tuple[float, ...] = ()  # the drafter's in what was handed over; empty: not known


NOTHING: Final = RecordedDraft(0, 0)


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """What is replayed of one request."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    drafts: tuple[RecordedDraft, ...] = ()  # by tokens emitted

    def drafted(self, emitted: int) -> RecordedDraft:
        """Return what was drafted at so many tokens emitted: the last draft until then, else the first."""
        return self.drafts[self._place(emitted)] if self.drafts else NOTHING

    def replayed(self, chance: np.random.Generator) -> list[RecordedDraft]:
        """Return which draft a replay takes at each number of tokens emitted, from 0 on.

        Where one was made, that one. Between two it takes any of those around: the one before would be met the more
        often the more was accepted behind it, and what was accepted must not decide what is accepted again.
        """
        moves = chance.integers(-NEIGHBOURS, NEIGHBOURS + 1, self.output_tokens + 1).tolist()
        return [self._around(emitted, move) for emitted, move in enumerate(moves)]

    def _around(self, emitted: int, move: int) -> RecordedDraft:
        own = self.drafted(emitted)
        if own is NOTHING or own.emitted == emitted:
            return own
        return self.drafts[min(max(self._place(emitted) + move, 0), len(self.drafts) - 1)]

    def _place(self, emitted: int) -> int:
        return max(bisect_right(self.drafts, emitted, key=attrgetter("emitted")) - 1, 0)
