"""What a plan is made of: one engine's state at one record, taken once, under the costs of one split.

`EngineState.view` makes it; the price policy and all that it asks are arithmetic on it. Arrays and estimates are the
state's own, read and never changed here; they hold until the next record is taken in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from ..cost.cost_table import NO_PROMPTS, CostTable, Prompts
from ..estimate import acceptance

if TYPE_CHECKING:
    from ...engine_adapter.arrays import Bools, Floats
    from ..cost.split_cost import SplitCost
    from ..spaces import Capabilities
    from .acceptance import Population
    from .confidence import Confidence, Forecast
    from .engine_state import Load
    from .matches import Matches
    from .requests import RequestTable, Slack

LEAST_PROMPT_SHARE: Final = 1e-3  # of the steps; what is less has faded


class PlanningView(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One engine at one record, for plans of its next step."""

    capabilities: Capabilities
    table: RequestTable  # all live requests
    decoding: Bools  # (n,) who is in the batch and past its prompt: these can use a draft now
    requests: int  # how many these are
    population: Population
    confidence: Confidence
    matches: Matches | None  # None: the engine copies no drafts
    load: Load
    records: int  # taken in so far
    time_s: float  # of the record, on the engine's clock
    has_skipped: bool  # the drafter leaves out what nobody drafts for, and makes up for it later
    unsplit_cost: CostTable
    cost: CostTable | SplitCost  # of the split that is planned for

    def under(self, cost: CostTable | SplitCost) -> PlanningView:
        """Return the same engine under the costs of another split."""
        return msgspec.structs.replace(self, cost=cost)

    @property
    def size(self) -> int:
        """Return how many requests are alive."""
        return self.table.size

    @property
    def forecast(self) -> Forecast | None:
        """Return what recent confidences promise of stop rules; None while they are not calibrated."""
        return self.confidence.forecast if self.confidence.is_ready else None

    def acceptance(self) -> Floats:
        """Return (n, k_max) chance that each position is accepted given the one before it; rows of who decodes only."""
        known = self.table.successes, self.table.trials, self.population.mean, self.population.level_variance
        return acceptance.shrink_some(*known, self.decoding)

    def slack(self) -> Slack:
        """Return how far each live request, (n,), is ahead of its objectives at this record."""
        return self.table.slack(self.time_s)

    def prompts(self) -> Prompts:
        """Return what prompts add to steps, by running means.

        Most steps of a small batch have none: a mean over all would price their rows at a place of the curve where they
        never are.
        """
        share = self.load.prefill_steps
        if share < LEAST_PROMPT_SHARE:
            return NO_PROMPTS
        return Prompts(self.cost.prompt_rows(self.load.prefill_rows / share), share)

    def catch_up_s(self) -> float:
        """Return seconds the drafter would need first, were all who decode to draft now."""
        return self.cost.catch_up_time_s(self.table.missed(self.decoding)) if self.has_skipped else 0.0

    def keep_up_s(self) -> float:
        """Return seconds per step in which the drafter reads new prompts, if it is to draft behind them."""
        return self.cost.keep_up_time_s(self.load.steady_prefill_rows)

    def verify_s(self, rows: Floats | float) -> Floats:
        """Return seconds of everything but drafting and prompts in steps of so many rows through the target."""
        prompts = self.prompts()
        times_s = self.cost.beside_prompts_s(rows, self.requests, prompts)
        off = self.unsplit_cost.plain_factor(self.requests) - 1.0 if self.cost is self.unsplit_cost else 0.0
        if off == 0.0:
            return times_s
        # It is known of steps without prompts.
        return np.where(np.asarray(rows) <= self.requests, times_s * (1.0 + off * (1.0 - prompts.share)), times_s)

    def draft_s(self, rows: Floats | float, rounds: Floats | float, drafted: Floats | float, within: float) -> Floats:
        """Return seconds of drafting in steps of `within` requests.

        Where all draft the longest, a short draft costs as much; only its verification is spared.

        :param rows: through the target
        :param rounds: of the longest draft
        :param drafted: draft tokens that are verified
        """
        drawn = drafted if self.capabilities.is_ragged else rounds * within
        return self.cost.draft_time_s(rows, rounds, drawn)
