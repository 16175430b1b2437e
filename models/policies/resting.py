"""Who sits out steps for others' objectives: the next means when drafts alone do not keep the urgent in time.

Asked by the price policy (models/policies/price.py) beside its lengths. A step without those who have time to spare is
shorter, so whoever is in all of them is the sooner served; who rests has a token in one of some steps. Those rest who
will be in time nevertheless, and no longer than somebody lacks something. Pure, no clock.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
import numpy as np

from ...engine_adapter.arrays import Bools, Floats, Ints
from ...engine_adapter.protocol import Rest
from ...env.estimate.planning_view import PlanningView
from .token_values import TokenValues

REST_RECORDS: Final = 4  # for so many a decision holds
SPARE: Final = 1.0  # tokens ahead that who rests shall be, the horizon of values from now
LEAST_GAIN: Final = 0.02  # a cadence must bring so much more value per second


class ExpectedStep(NamedTuple):
    """A step as it is expected."""

    seconds: float
    tokens: Floats  # (n,) of each live request, 0 of who is not in it


def expected(view: PlanningView, within: Bools, lengths: Ints, emitted: Floats) -> ExpectedStep:
    """Return a step of those `within`, (n,), at least one, who verify drafts of these lengths, (n,).

    :param emitted: (n, k_max + 1) expected tokens of each request by draft length
    """
    chosen = np.flatnonzero(within)
    tokens = np.zeros(view.size)
    own = msgspec.structs.replace(view, decoding=within, requests=len(chosen))
    drafts = lengths[chosen]
    rows, drafted, rounds = float(len(chosen) + drafts.sum()), float(drafts.sum()), float(drafts.max())
    seconds = float(own.verify_s(np.array([rows]))[0])
    if drafted:
        at_rows, at_rounds, at_drafted = np.array([[rows], [rounds], [drafted]])
        seconds += float(own.draft_s(at_rows, at_rounds, at_drafted, len(chosen))[0])
    tokens[chosen] = emitted[chosen, drafts]
    return ExpectedStep(seconds, tokens)


def expected_tokens(acceptance: Floats) -> Floats:
    """Return (n, k_max + 1) expected tokens by draft length, the target's own included."""
    sums = np.ones((acceptance.shape[0], acceptance.shape[1] + 1))
    sums[:, 1:] += np.cumsum(np.cumprod(acceptance, axis=1), axis=1)
    return sums


def choose_rest(
    view: PlanningView, worth: TokenValues, values: Floats, favoured: Bools, lengths: Ints, most: int
) -> Rest | None:
    """Return who should rest; None: nobody.

    :param values: (n,) of a token of each live request, as shares of the largest
    :param favoured: (n,) who does not rest
    :param lengths: (n,) draft lengths
    :param most: steps in a row that a request may be left out of
    """
    decoding = view.decoding
    sums = expected_tokens(np.where(decoding[:, None], view.acceptance(), 0.0))
    whole = expected(view, decoding, lengths, sums)
    best = None
    tpot_s, slack = view.table.column("tpot_s"), view.slack().tokens
    plain = float((values * whole.tokens).sum()) / whole.seconds
    lacking = _lacking(worth, slack, tpot_s, whole.tokens, whole.seconds, favoured)
    rate = plain * (1.0 + LEAST_GAIN)
    patient = decoding & ~favoured & np.isfinite(tpot_s)  # who said how slowly it may go
    for steps in range(1, most + 1):
        if lacking <= 0.0:
            break
        # A step takes no longer than with everybody: so those who rest are ahead by that much at least.
        ahead = slack + worth.horizon * (whole.tokens / (1 + steps) - whole.seconds / tpot_s)
        resting = patient & (ahead > SPARE)
        if not resting.any():
            break
        awake = expected(view, decoding & ~resting, lengths, sums)
        step_s = (whole.seconds + steps * awake.seconds) / (1 + steps)
        tokens = (whole.tokens + steps * awake.tokens) / (1 + steps)
        value = float((values * tokens).sum()) / step_s
        if value <= rate:
            break
        rate, lacking = value, _lacking(worth, slack, tpot_s, tokens, step_s, favoured)
        best = Rest(tuple(view.table.column("handle")[resting].tolist()), steps)
    return best


def _lacking(
    worth: TokenValues, slack: Floats, tpot_s: Floats, tokens: Floats, step_s: float, favoured: Bools
) -> float:
    """Return how many tokens the worst of the favoured will lack."""
    ahead = slack + worth.horizon * (tokens - step_s / tpot_s)
    return float((worth.reserve - ahead)[favoured].max(initial=-np.inf))
