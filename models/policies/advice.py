"""What a learned policy may tell the price policy: how far to lean, and which way. Neutral advice changes nothing.

Called by models/policies/price.py, which follows it, models/policies/learned.py, which gives it, and
models/training/advised.py, where it is learnt. price knows what an engine has shown; advice is what engines like it
turned out to be worth.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ...engine_adapter.arrays import Singles

SPAN_DECISIONS: Final = 16  # advice is renewed this often: a search for a plan follows within as many
# At a leaning of 1; the released policy was trained with these.
LESS_TIME: Final = 0.2  # of the exponent of a step's time
PROBE_FACTOR: Final = 8.0  # times as much of the time is probed with
STOP_LEAD: Final = 0.05  # gain by which stop rules may be behind


class Advice(NamedTuple):
    """Three leanings, each -1..1, and an output of the advice head."""

    eagerness: float = 0.0  # above 0 longer drafts: a step's time counts for less beside its tokens
    probing: float = 0.0  # above 0 more of the time for lengths that are not known
    stopping: float = 0.0  # above 0 drafts end by confidence where by history promises a little more

    @classmethod
    def of(cls, outputs: Singles) -> Advice:
        """Return what the outputs of the advice head, (3,), mean; beyond -1..1 they are clipped."""
        return cls(*np.minimum(np.maximum(outputs, np.float32(-1.0)), np.float32(1.0)).tolist())

    @property
    def time_weight(self) -> float:
        """The exponent of a step's time where its tokens have 1."""
        return 1.0 - LESS_TIME * self.eagerness

    @property
    def probe_factor(self) -> float:
        """What the account for probes earns, as a multiple of what it earns without advice."""
        return float(PROBE_FACTOR**self.probing)

    @property
    def stop_lead(self) -> float:
        """The gain by which stop rules may be behind and be followed all the same."""
        return STOP_LEAD * self.stopping


NEUTRAL: Final = Advice()
