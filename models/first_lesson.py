"""Drafts made once to learn what the drafter's confidence tells, where nothing is drafted for want of knowing it.

A forecast of stop rules needs drafts that were tested, and where no length for all pays none are made: whether rules
would pay is then never learnt. Pure, no clock; called by models/price.py.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ..env.confidence import FIRST_ROWS
from ..env.state import EngineState

FROM_RECORD: Final = 24  # what steps cost without drafts is to be known first: the first ones may be ten times as long
DRAFTS: Final = 176  # a forecast needs 150 that were tested, and some belong to requests that end
MARGIN: Final = 0.02  # a drafter whose confidence tells all must promise this much more tokens/s


class FirstLesson:
    """Counts its drafts: so many in a policy's life."""

    def __init__(self) -> None:
        self.drafts = 0

    def begins(self, state: EngineState, requests: int, rate: float) -> bool:
        """Return whether all `requests` are to draft a token now, and count them; `rate` is had without drafts.

        Whoever calls it drafts nothing, and would look at confidences.
        """
        if self.drafts >= DRAFTS or not state.confidence.is_told or state.confidence.forecast is not None:
            return False
        if state.link.records < FROM_RECORD or state.is_sitting_out or not _could_pay(state, requests, rate):
            return False
        self.drafts += min(requests, FIRST_ROWS)  # of more only a sample is looked at
        return True


def _could_pay(state: EngineState, requests: int, rate: float) -> bool:
    """Return whether drafts of one would pay if just those that will be accepted were verified."""
    accepted = requests * float(state.population.mean[0])
    rows, drafted = np.array([requests + accepted]), np.array([float(requests)])
    least_s, most_s = state.cost.time_range_s(rows, np.ones(1), drafted, state.prompts())
    step_s = 0.5 * float(least_s[0] + most_s[0]) + state.keep_up_s()
    return (requests + accepted) / step_s > (1.0 + MARGIN) * rate
