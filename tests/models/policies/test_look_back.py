"""How often steps without drafts are looked at while drafts promise little more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from faser.env.estimate.planning_view import PlanningView
from faser.models.policies.probe import LOOK_BACK_RECORDS, NEARLY_AS_GOOD, ProbeAccount


def following(records: int) -> PlanningView:
    """A view of which only the record matters."""
    return cast(PlanningView, SimpleNamespace(records=records))


def looks(lead: float) -> int:
    """Return how often 10,000 records look back at steps without drafts."""
    account = ProbeAccount()
    return sum(account.looks_back(following(record), lead) for record in range(10000))


def test_steps_without_drafts_are_looked_at_as_often_as_a_five_hundredth_of_the_tokens_pays_for() -> None:
    assert looks(0.08) == pytest.approx(10000 / 40, abs=1)
    assert looks(0.05) == pytest.approx(10000 / 25, abs=1)
    assert looks(0.01) == looks(0.001) == 10000 / LOOK_BACK_RECORDS
    assert looks(NEARLY_AS_GOOD) == looks(0.5) == looks(0.0) == looks(-0.1) == looks(float("nan")) == 0
