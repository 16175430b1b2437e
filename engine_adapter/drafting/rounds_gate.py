"""Whether it pays on V2 that rows leave the draft batch, found out by measuring the rounds behind the first.

Each request verifies its own length either way, so that these rounds are all that differs: their seconds per round are
compared, without the noise of verification, of prompts in the first pass and of the tokens that were emitted. They
are read once the device is past them, one or two steps later. Only batch sizes and clocks decide, never tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..gate import Gate
from ..patches.speculators.rounds import has_peers
from ..settings import ALWAYS, load_settings

if TYPE_CHECKING:
    from ..runner.step_events import StepEvents

BEGIN: Final = "rounds"  # the moment of a step at which they begin
END: Final = "drafted"  # ... and end, which the runner marks
MOST_UNTOLD: Final = 8  # draftings; an older one whose time is still not known will not be


@dataclass(frozen=True, slots=True)
class Untold:
    """A drafting whose time is not known yet."""

    events: StepEvents
    requests: int
    is_ragged: bool
    rounds: int  # behind the first, of the longest draft


class RoundsGate:
    """One engine's evidence."""

    def __init__(self) -> None:
        self._gates: dict[bool, Gate] = {}  # of rounds beside a verification, which are slower, and of those in turn
        self._untold: deque[Untold] = deque(maxlen=MOST_UNTOLD)

    def ask(self, requests: int, rounds: int, events: StepEvents | None) -> bool:
        """Tell whether rows may leave in the rounds that begin now.

        :param events: of the step under way; None: nothing is timed, and rows leave
        """
        if events is None:
            return True
        self._learn()
        is_ragged = self._gate_of(events).ask(requests)
        events.mark(BEGIN)
        self._untold.append(Untold(events, requests, is_ragged, rounds))
        return is_ragged

    def _learn(self) -> None:
        """Take in what the device is past, in the order of steps; waits for nothing."""
        while self._untold and (time_s := self._untold[0].events.seconds(BEGIN, END)) > 0.0:
            first = self._untold.popleft()
            self._gate_of(first.events).note(first.requests, first.is_ragged, time_s, first.rounds)

    def _gate_of(self, events: StepEvents) -> Gate:
        return self._gates.setdefault(events.is_late, Gate())


def rounds_gate() -> RoundsGate | None:
    """Return the gate of this engine; None where rows always leave.

    Ranks measure different times: each would choose rounds of its own, and wait for the others' for ever.
    """
    return None if load_settings().ragged == ALWAYS or has_peers() else RoundsGate()
