"""What copied drafts are worth: how often there is one, what it brings, and how sure the engine's own chances are.

Called by env/estimate/engine_state.py with every record of an engine that copies. Reads no clock, file or random
source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...engine_adapter.arrays import Bools, Floats, Ints
from ...engine_adapter.compiled import compiled
from ...engine_adapter.protocol import StepRecord
from ..estimate import requests_kernel as kernel
from .acceptance import count_trials
from .confidence import Confidence, DraftRows
from .step_rows import StepRows

MEMORY_STEPS = 256.0  # of requests: what is known of older ones has faded
GUESS_STEPS = 16.0  # what the first guess, no copies at all, counts for


@dataclass(slots=True)
class Matches:
    """The copies of one engine's requests; shares and tokens per decoding request and step."""

    longest: int  # copy
    confidence: Confidence = field(init=False)
    steps: float = GUESS_STEPS  # ... of requests, with forgetting
    _copies: float = 0.0
    _verified: float = 0.0
    _accepted: float = 0.0

    def __post_init__(self) -> None:
        self.confidence = Confidence(self.longest)

    @property
    def share(self) -> float:
        """Requests whose draft is a copy, 0..1 of those who decode."""
        return self._copies / self.steps

    @property
    def rows(self) -> float:
        """Copied tokens that are verified."""
        return self._verified / self.steps

    @property
    def gain(self) -> float:
        """Copied tokens that are accepted."""
        return self._accepted / self.steps

    def learn(self, rows: StepRows, is_copy: Bools, record: int) -> None:
        """Take in one step.

        :param rows: as the engine told them
        :param is_copy: (n,) whose verified draft is a match's
        :param record: its number
        """
        decoding, copies, verified, accepted = _add_up(
            rows.told, is_copy, kernel.ROW_IS_PREFILL, kernel.ROW_VERIFIED, kernel.ROW_ACCEPTED
        )
        keep = math.exp(-decoding / MEMORY_STEPS)
        self.steps, self._copies = self.steps * keep + decoding, self._copies * keep + copies
        self._verified, self._accepted = self._verified * keep + verified, self._accepted * keep + accepted
        if verified:
            trials, successes = count_trials(rows.verified * is_copy, rows.pruned, rows.accepted, self.longest)
            drafts = DraftRows(rows.confidences, self.longest * is_copy, trials, successes, None, record)
            self.confidence.learn(drafts)

    def curve(self) -> tuple[Floats, Floats]:
        """Return slopes and intercepts, (k_max,), by which an engine's own chances become true ones."""
        return self.confidence.slopes.copy(), self.confidence.intercepts.copy()


def copies_of(record: StepRecord, rows: StepRows) -> tuple[Bools, Bools]:
    """Return (n,) whose next draft is a copy, and (n,) whose verified one was."""
    handles = rows.handle
    return _marked(handles, record.copied), _marked(handles, record.verified_copies)


def drafters_rows(rows: StepRows, copied: Bools, verified_copies: Bools) -> StepRows:
    """Return what the drafter did in the step: nothing for those whose drafts are copies."""
    if not (copied.any() or verified_copies.any()):
        return rows
    return rows.without(copied, verified_copies)


def _marked(handles: Ints, named: Sequence[int]) -> Bools:
    marked = np.zeros(len(handles), np.bool_)
    if len(named):
        _mark(handles, np.array(named, np.int64), marked)
    return marked


@compiled
def _mark(handles: Ints, named: Ints, marked: Bools) -> None:
    """Mark those that are named; an engine names them in the order of its rows."""
    place, n = 0, len(handles)
    for name in named:
        for _ in range(n):
            is_found = handles[place] == name
            marked[place] |= is_found
            place = place + 1 if place + 1 < n else 0
            if is_found:
                break


@compiled
def _add_up(told: Ints, is_copy: Bools, prefill: int, verified: int, accepted: int) -> tuple[int, int, int, int]:
    """Return how many requests decode, and of those with copies how many, their verified and accepted tokens.

    :param prefill: row of `told` that says who reads a prompt; `verified` and `accepted`: of these tokens
    """
    decoding = copies = rows = hits = 0
    for i in range(told.shape[1]):
        decoding += told[prefill, i] == 0
        if is_copy[i]:
            copies += 1
            rows += told[verified, i]
            hits += min(told[accepted, i], told[verified, i])
    return decoding, copies, rows, hits
