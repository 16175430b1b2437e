"""What drafts for learning's sake bring where none pay, what they cost, and looks back at steps without drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from faser.controller.cli.evaluate import decided
from faser.engine_adapter.protocol import ActionSet
from faser.env.estimate.engine_state import EngineState
from faser.env.estimate.planning_view import PlanningView
from faser.env.simulator.simulated_engine import SimulatedEngine
from faser.env.spaces import Capabilities
from faser.models.evaluation.worlds import held_out
from faser.models.policies import confidence_bootstrap, probe
from faser.models.policies.confidence_bootstrap import DRAFTS, FROM_RECORD, ConfidenceBootstrap
from faser.models.policies.probe import LOOK_BACK_RECORDS, NEARLY_AS_GOOD, ProbeAccount
from faser.models.registry import make_policy


def run(
    name: str, world: str, requests: int, steps: int, *, has_confidence: bool = True, is_async: bool = False
) -> EngineState:
    """Return the state behind a run."""
    (spec,) = (each for each in held_out() if each.name == world)
    engine = SimulatedEngine(spec.closed(requests), 6, has_confidence=has_confidence)
    capabilities = Capabilities(k_max=engine.capabilities.k_max, is_async=is_async)
    policy, state = make_policy(name, capabilities), EngineState(capabilities)
    actions: ActionSet | None = None
    for sequence in range(1, steps):
        actions = decided(state, engine.step(actions), policy, sequence)
    return state


@pytest.fixture
def bootstraps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The records behind which all were to draft for learning's sake."""
    found, begins = list[int](), ConfidenceBootstrap.begins

    def noted(self: ConfidenceBootstrap, view: PlanningView, rate: float) -> bool:
        if is_wanted := begins(self, view, rate):
            found.append(view.records)
        return is_wanted

    monkeypatch.setattr(ConfidenceBootstrap, "begins", noted)
    return found


def test_where_no_length_pays_confidence_is_learnt_once_and_only_from_drafts_for_its_sake(
    bootstraps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "NEW_SIZE_CREDIT_STEPS", 0.0)  # probes of a new size teach it as well
    assert run("price", "cpu-embedded", 16, 300).confidence.forecast is not None
    assert bootstraps[0] >= FROM_RECORD
    assert DRAFTS / 16 <= len(bootstraps) <= DRAFTS / 16 + 2
    monkeypatch.setattr(ConfidenceBootstrap, "begins", lambda *_: False)
    assert run("price", "cpu-embedded", 16, 300).confidence.forecast is None


def test_nothing_is_learnt_by_who_could_not_act_on_it(bootstraps: list[int]) -> None:
    run("price:history", "cpu-embedded", 16, 100)
    run("price", "cpu-embedded", 16, 100, is_async=True)
    run("price", "cpu-embedded", 16, 100, has_confidence=False)
    assert bootstraps == []


def test_a_drafter_that_could_not_pay_even_if_it_were_never_verified_in_vain_costs_no_bootstrap(
    bootstraps: list[int],
) -> None:
    run("price", "cpu-weak-drafter", 128, 200)
    assert bootstraps == []


@pytest.mark.parametrize(("requests", "steps"), [(1, 176), (16, 11), (64, 3), (128, 3)])
def test_a_bootstrap_is_as_long_as_a_forecast_needs_and_of_a_crowd_a_sample_counts(
    requests: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confidence_bootstrap, "_could_pay", lambda *_: True)
    confidence = SimpleNamespace(is_told=True, forecast=None)
    view = SimpleNamespace(records=FROM_RECORD, requests=requests, confidence=confidence, is_sitting_out=True)
    bootstrap = ConfidenceBootstrap()
    assert not any(bootstrap.begins(cast(PlanningView, view), 1.0) for _ in range(10))  # nobody would draft
    view.is_sitting_out = False
    assert sum(bootstrap.begins(cast(PlanningView, view), 1.0) for _ in range(1000)) == steps
    confidence.forecast = object()
    assert not ConfidenceBootstrap().begins(cast(PlanningView, view), 1.0)


def following(records: int) -> PlanningView:
    """A view of which only the record matters."""
    return cast(PlanningView, SimpleNamespace(records=records))


def looks(lead: float, share: float = 1.0) -> int:
    """Return how often 10,000 records look back at steps without drafts."""
    account = ProbeAccount()
    account.budget_share *= share
    return sum(account.looks_back(following(record), lead) for record in range(10000))


def test_steps_without_drafts_are_looked_at_as_often_as_a_five_hundredth_of_the_tokens_pays_for() -> None:
    assert looks(0.08) == pytest.approx(10000 / 40, abs=1)
    assert looks(0.05) == pytest.approx(10000 / 25, abs=1)
    assert looks(0.01) == looks(0.001) == 10000 / LOOK_BACK_RECORDS
    assert looks(NEARLY_AS_GOOD) == looks(0.5) == looks(0.0) == looks(-0.1) == looks(float("nan")) == 0


def test_advice_to_probe_less_holds_for_looks_back() -> None:
    assert looks(0.08, share=0.5) == pytest.approx(10000 / 80, abs=1)
