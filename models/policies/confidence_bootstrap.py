"""Drafts single tokens once to bootstrap the confidence model, which without any drafts would never get data.

A forecast of stop rules needs drafts that were tested, and where no length for all pays none are made: whether rules
would pay is then never learnt. Pure, no clock; called by models/policies/price.py.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...env.estimate.confidence import FIRST_ROWS
from ...env.estimate.planning_view import PlanningView

FROM_RECORD: Final = 24  # what steps cost without drafts is to be known first: the first ones may be ten times as long
DRAFTS: Final = 176  # a forecast needs 150 that were tested, and some belong to requests that end
MARGIN: Final = 0.02  # a drafter whose confidence tells all must promise this much more tokens/s


class ConfidenceBootstrap:
    """Counts its drafts: so many in a policy's life."""

    def __init__(self) -> None:
        self.drafts = 0

    def begins(self, view: PlanningView, rate: float) -> bool:
        """Return whether all who decode are to draft a token now, and count them; `rate` is had without drafts.

        Whoever calls it drafts nothing, and would look at confidences.
        """
        if self.drafts >= DRAFTS or not view.confidence.is_told or view.confidence.forecast is not None:
            return False
        if view.records < FROM_RECORD or view.is_sitting_out or not _could_pay(view, rate):
            return False
        self.drafts += min(view.requests, FIRST_ROWS)  # of more only a sample is looked at
        return True


def _could_pay(view: PlanningView, rate: float) -> bool:
    """Return whether drafts of one would pay if just those that will be accepted were verified."""
    requests = view.requests
    accepted = requests * float(view.population.mean[0])
    rows, drafted = np.array([requests + accepted]), np.array([float(requests)])
    least_s, most_s = view.cost.time_range_s(rows, np.ones(1), drafted, view.prompts())
    step_s = 0.5 * float(least_s[0] + most_s[0]) + view.keep_up_s()
    return (requests + accepted) / step_s > (1.0 + MARGIN) * rate
