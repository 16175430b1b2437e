"""`price` with one of its parts switched off, for benchmarks/ablation.py: the product has no switch for any of them.

A part is switched off by what takes the places of some names that models/policies/price.py uses, for as long as
`PolicyPart.off` is entered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from faser.engine_adapter.arrays import Floats
from faser.env.estimate.planning_view import PlanningView
from faser.models.evaluation.worlds import WorldSpec, going_ahead, held_out, side_by_side
from faser.models.policies import price
from faser.models.policies.probe import ProbeAccount
from faser.models.policies.split_choice import SplitChoice
from faser.models.policies.step_grid import Choice, choose


def choose_one_length(table: Floats, view: PlanningView, reading_s: float, verify_s: Floats | None = None) -> Choice:
    """Return the best length for all, by the same costs: a table's last threshold lets everything pass."""
    last = len(table[0]) - 1
    few_s = None if verify_s is None else np.ascontiguousarray(verify_s[last:])
    row = np.ascontiguousarray(table[:, last:])
    return choose(row, view, reading_s, few_s)._replace(threshold=last)


def choose_by_rule(table: Floats, view: PlanningView, reading_s: float, verify_s: Floats | None = None) -> Choice:
    """Return the best cell of stop rules, or the best length for all of history."""
    is_history = len(table[0]) == price.BINS + 1
    return (choose_one_length if is_history else choose)(table, view, reading_s, verify_s)


class NoProbes(ProbeAccount):
    """Probes nothing; looks back as before."""

    def choose(self, *_: object, **__: object) -> None:
        """Return no length."""


class NoLooksBack(ProbeAccount):
    """Probes as before, never steps without drafts that are nearly as good."""

    def looks_back(self, view: PlanningView, lead: float) -> bool:
        """Return False."""
        return False


def confident() -> tuple[WorldSpec, ...]:
    """Return the held-out worlds whose drafter tells its confidence: in others nothing ends by it."""
    return tuple(world for world in held_out() if world.has_confidence)


@dataclass(frozen=True, slots=True)
class PolicyPart:
    """One mechanism, how it is switched off, and where it can matter."""

    name: str
    replaced: Mapping[str, Any] = field(default_factory=dict)  # names of models/policies/price.py
    worlds: Callable[[], tuple[WorldSpec, ...]] = held_out
    policy: str = "price"  # without the part

    def off(self) -> contextlib.AbstractContextManager[object]:
        """Return what switches the part off while it is entered; policies must be made in it, too."""
        return patch.multiple(price, **self.replaced) if self.replaced else contextlib.nullcontext()


PARTS: Final = (
    PolicyPart("grid", {"choose": choose_by_rule}),
    PolicyPart("grid and stop rules", {"choose": choose_one_length}, confident),
    PolicyPart("settling", {"SETTLE_DECISIONS": 1, "SETTLED_DECISIONS": 1}),
    PolicyPart("operating point per size", {"_size": lambda requests: 0}),
    PolicyPart("stop rules", worlds=confident, policy="price:history"),
    PolicyPart("probes", {"ProbeAccount": NoProbes}),
    PolicyPart("look-backs", {"ProbeAccount": NoLooksBack}),
    PolicyPart("split trials", {"SplitChoice": lambda splits: SplitChoice(1)}, side_by_side),
    PolicyPart("asking for drafting ahead", {"_frontier": lambda capabilities, depth: 0}, going_ahead),
)
