"""What a token is worth to each request: 1, and more while the request is about to miss its objective.

Asked by the price policy (models/policies/price.py), which asks for the lengths that bring most value per second. The
value is a controller's: it rises with what a request will lack some steps from now, until the drafts that it brings
are enough; the fewer lack anything, the higher, for what they ask for costs the others little. Who would not catch up
however deep it drafts, and whoever may rest, counts like any other. Pure, no clock.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Final

import msgspec
import numpy as np

from ...engine_adapter.arrays import Bools, Floats
from ...engine_adapter.compiled import compiled
from ...env.estimate.planning_view import PlanningView
from .policy import PolicyError

GIVING_UP: Final = 8.0  # tokens missing or to spare at which hope is about a quarter or three quarters
LEAST_SPREAD: Final = 0.05  # of the most that a token is worth: values that differ less favour nobody
CROWD: Final = 0.25  # power of the others over those who lack something with hope: so many times more is a token worth
LOOK_RECORDS: Final = 4  # for so many what a step could take is taken to hold
SETTING: Final = re.compile(r"([a-z]+)=(\d+(?:\.\d+)?)")
BOUNDS: Final = {
    "urgency": (1.0, 1e4), "horizon": (0.0, 1e4), "reserve": (0.0, 1e3), "width": (0.1, 1e3), "patience": (1.0, 1e4),
}  # fmt: skip


class ShortestSteps:
    """What those who are late could get of an engine, looked at once in a few records: it takes 15 us."""

    def __init__(self) -> None:
        self._seconds: Floats | None = None
        self._at = 0  # records

    def seconds(self, view: PlanningView, late: int, idle: int) -> Floats:
        """Return (k_max + 1,) seconds of a step by how deep all who are late draft, without a split."""
        if self._seconds is None or not self._at <= view.records < self._at + LOOK_RECORDS:
            self._seconds, self._at = _shortest_s(view.under(view.unsplit_cost), late, idle), view.records
        return self._seconds


@dataclass(frozen=True, slots=True)
class TokenValues:
    """How a value follows from how far ahead of its schedule a request would be with one token in each step."""

    urgency: float = 10.0  # the most that a token is worth where as many lack something as do not
    horizon: float = 15.0  # steps that are looked ahead
    reserve: float = 10.0  # tokens ahead that a request shall be then: its tokens are worth 1
    width: float = 4.0  # tokens less by which they are worth e times as much
    patience: float = 120.0  # steps in which a request must be able to catch up, else it is given up

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if not math.isfinite(value) or not low <= value <= high:
                raise PolicyError(f"{name} {value:g}; expected {low:g}..{high:g}")

    @classmethod
    def parse(cls, text: str) -> TokenValues:
        """Read settings such as urgency=10,reserve=4; what is not named stays as it is."""
        parts = [SETTING.fullmatch(part.strip()) for part in text.split(",")] if text else []
        found = {match[1]: float(match[2]) for match in parts if match}
        known = [field.name for field in fields(cls)]
        if len(found) != len(parts) or not set(found) <= set(known):
            raise PolicyError(f"{text!r}: expected NAME=NUMBER of {', '.join(known)}, each once")
        return cls(**found)

    def of(self, view: PlanningView, shortest: ShortestSteps) -> Floats | None:
        """Return (size,) what a token of each live request is worth, 0..1 of the most; None where all count alike."""
        tpot_s, slack, decoding = view.table.column("tpot_s"), view.slack().tokens, view.decoding
        values, lacking, hopes = np.empty(view.size), np.empty(view.size), np.zeros(view.size)
        settings = self.reserve, self.horizon, self.patience
        late, idle = _lack(slack, tpot_s, decoding, view.load.step_s, view.capabilities.k_max, *settings, lacking)
        if not late:
            return None
        known = view.acceptance(), view.population.delivery, slack, tpot_s, shortest.seconds(view, late, idle)
        _hope(*known, decoding, self.patience, hopes)
        spread = _fill(lacking, self.width, hopes, decoding, math.log(self.urgency), values)
        return values if spread > LEAST_SPREAD else None


VALUES: Final = TokenValues()  # as released


def _shortest_s(view: PlanningView, late: int, idle: int) -> Floats:
    """Return (k_max + 1,) seconds of a step by how deep all who are late draft: the least that they could get.

    The others draft nothing, and the idle are left out of as many steps as the engine offers, for as long as it takes.

    :param late: requests
    :param idle: requests
    """
    most = view.capabilities.rest_steps if idle else 0
    rounds: Floats = np.arange(view.capabilities.k_max + 1, dtype=np.float64)
    rows: Floats = view.requests + late * rounds
    share = most / (1 + most)
    steps_s = view.verify_s(rows)
    if most:
        awake = msgspec.structs.replace(view, requests=view.requests - idle)
        steps_s = (1.0 - share) * steps_s + share * awake.verify_s(rows - idle)
    resting = share * idle
    seconds: Floats = steps_s + view.draft_s(rows - resting, rounds, rounds * late, view.requests - resting)
    return seconds


@compiled
def _lack(
    slack: Floats, tpot_s: Floats, decoding: Bools, step_s: float, k_max: int, reserve: float, horizon: float,
    patience: float, lacking: Floats,
) -> tuple[int, int]:  # fmt: skip
    """Fill in (n,) tokens that will be lacking; return how many of those who decode are late, and how many could rest.

    Who lacks tokens and could not catch up were every draft accepted is neither.

    :param slack: (n,) tokens ahead
    """
    late = idle = 0
    for i in range(len(lacking)):
        due = step_s / tpot_s[i]
        lacking[i] = reserve - slack[i] - horizon * (1.0 - due)
        if decoding[i] and tpot_s[i] < np.inf:
            late += lacking[i] > 0.0 and slack[i] + patience * (1 + k_max - due) > 0.0
            idle += lacking[i] <= 0.0
    return late, idle


@compiled
def _hope(
    acceptance: Floats, delivery: Floats, slack: Floats, tpot_s: Floats, steps_s: Floats, decoding: Bools,
    patience: float, hopes: Floats,
) -> None:  # fmt: skip
    """Fill in (n,) how likely it is, 0..1, that who decodes and has an objective is in time if it is favoured.

    :param acceptance: (n, k_max) of each request's drafts by place
    :param delivery: (k_max,) share of the drafts asked for that the drafter gives, by place
    :param slack: (n,) tokens ahead
    :param steps_s: (k_max + 1,) seconds of a step by how deep the favoured draft
    """
    for i in range(len(hopes)):
        if not decoding[i] or tpot_s[i] == np.inf:
            continue
        tokens, survival = 1.0, 1.0
        gain = tokens - steps_s[0] / tpot_s[i]
        for j in range(acceptance.shape[1]):
            survival *= acceptance[i, j]
            tokens += survival * delivery[j]
            gain = max(gain, tokens - steps_s[j + 1] / tpot_s[i])
        hopes[i] = 1.0 / (1.0 + math.exp(min(-(slack[i] + patience * gain) / GIVING_UP, 60.0)))


@compiled
def _fill(lacking: Floats, width: float, hopes: Floats, decoding: Bools, most_log: float, values: Floats) -> float:
    """Fill in (n,) values as shares of the largest; return how far those of who decode lie apart, 0..1.

    :param lacking: (n,) tokens that will be lacking
    :param width: of these, make a token worth e times as much
    :param hopes: (n,) how likely each is to be in time, 0 without an objective
    :param most_log: logarithm of the urgency
    """
    most, least, some, others = 0.0, np.inf, 0.0, 0
    for i in range(len(values)):
        others += decoding[i]
        if lacking[i] > 0.0:
            some += hopes[i]
    most_log += CROWD * max(math.log(max(others - some, 1.0) / max(some, 1.0)), 0.0)
    for i in range(len(values)):
        values[i] = 1.0
        if not decoding[i]:
            continue
        if lacking[i] > 0.0:
            values[i] += (math.exp(min(lacking[i] / width, most_log)) - 1.0) * hopes[i]
        most, least = max(most, values[i]), min(least, values[i])
    for i in range(len(values)):
        values[i] /= most
    return 1.0 - least / most
