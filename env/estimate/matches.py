"""What copied drafts are worth: how often there is one, what it brings, and how sure the engine's own chances are.

Called by env/estimate/engine_state.py with every record of an engine that copies. Reads no clock, file or random
source.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...engine_adapter.arrays import Bools, Floats
from ...engine_adapter.protocol import StepRecord
from .acceptance import count_trials
from .confidence import Confidence, DraftRows
from .step_rows import StepRows

MEMORY_STEPS = 256.0  # of requests: what is known of older ones has faded
GUESS_STEPS = 16.0  # what the first guess, no copies at all, counts for


@dataclass(slots=True)
class Matches:
    """The copies of one engine's requests; shares and tokens per decoding request and step."""

    k_max: int
    confidence: Confidence = field(init=False)
    steps: float = GUESS_STEPS  # ... of requests, with forgetting
    _copies: float = 0.0
    _verified: float = 0.0
    _accepted: float = 0.0

    def __post_init__(self) -> None:
        self.confidence = Confidence(self.k_max)

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
        decoding = int(np.count_nonzero(~rows.is_prefill))
        keep = float(np.exp(-decoding / MEMORY_STEPS))
        verified, accepted = (int(column[is_copy].sum()) for column in (rows.verified, rows.accepted))
        self.steps = self.steps * keep + decoding
        self._copies = self._copies * keep + int(np.count_nonzero(is_copy))
        self._verified, self._accepted = self._verified * keep + verified, self._accepted * keep + accepted
        if verified:
            trials, successes = count_trials(rows.verified * is_copy, rows.pruned, rows.accepted, self.k_max)
            drafts = DraftRows(rows.confidences, self.k_max * is_copy, trials, successes, None, record)
            self.confidence.learn(drafts)

    def curve(self) -> tuple[Floats, Floats]:
        """Return slopes and intercepts, (k_max,), by which an engine's own chances become true ones."""
        return self.confidence.slopes.copy(), self.confidence.intercepts.copy()


def copies_of(record: StepRecord, rows: StepRows) -> tuple[Bools, Bools]:
    """Return (n,) whose next draft is a copy, and (n,) whose verified one was."""
    handles = rows.handle
    return np.isin(handles, record.copied), np.isin(handles, record.verified_copies)


def drafters_rows(rows: StepRows, copied: Bools, verified_copies: Bools) -> StepRows:
    """Return what the drafter did in the step: nothing for those whose drafts are copies."""
    if not (copied.any() or verified_copies.any()):
        return rows
    return rows.without(copied, verified_copies)
