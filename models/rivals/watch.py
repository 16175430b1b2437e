"""What the step just recorded did, for rivals that learn from raw steps instead of the state's estimates. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ...engine_adapter.arrays import Ints
from ...env.estimate.engine_state import EngineState

LONGEST_STEPS = 4.0  # a gap beyond so many mean steps was an idle engine, not a slow step


@dataclass(frozen=True, slots=True)
class Seen:
    """One step's decoding requests; arrays (n,), tokens."""

    drafted: Ints  # draft tokens that were verified
    accepted: Ints
    emitted: int  # over all of them
    elapsed_s: float
    is_pure: bool  # no prompt rows: its time says what decoding costs


class StepWatch:
    """Gives each step once; None where the state learnt nothing new or nobody decoded."""

    def __init__(self) -> None:
        self._counter = -1
        self._time_s = 0.0

    def look(self, state: EngineState) -> Seen | None:
        """Return what the newest record says."""
        since_s, self._time_s = state.time_s - self._time_s, state.time_s
        is_next, is_new = state.counter == self._counter + 1, state.counter != self._counter
        self._counter = state.counter
        if not is_new or state.lesson is None:
            return None
        rows = state.lesson.rows
        decoding = ~rows.is_prefill
        if not decoding.any():
            return None
        if not is_next or not 0.0 < since_s < LONGEST_STEPS * max(state.load.step_s, 1e-6):
            since_s = state.load.step_s
        emitted = int(rows.emitted[decoding].sum())
        return Seen(rows.verified[decoding], rows.accepted[decoding], emitted, since_s, bool(decoding.all()))
