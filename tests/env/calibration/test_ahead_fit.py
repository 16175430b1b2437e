"""What drafting ahead did in measured steps: arithmetic by hand, and too little told apart from nothing."""

from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest

from faser.engine_adapter.arrays import Floats
from faser.env.calibration.ahead_fit import LEAST_STEPS, AheadSteps, Chains, fit_ahead
from faser.env.calibration.step_fit import CalibrationError
from faser.env.calibration.step_samples import StepSamples
from faser.env.profile.step_basis import DRAFT_BASIS, VERIFY_BASIS

VERIFY = np.array([0.1 if name == "step" else 0.0 for name in VERIFY_BASIS])
DRAFT = np.array([0.02 if name == "step" else 0.0 for name in DRAFT_BASIS])
HALF = LEAST_STEPS


def make_steps(verify_s: float = 0.11, waited_s: float = 0.004, hits: float = 4.0, is_busy: bool = True) -> AheadSteps:
    """Return equal steps of four requests whose drafts were all accepted; every other one has no hit and waits."""
    n = 2 * HALF
    zeros = {item.name: np.zeros(n) for item in fields(StepSamples)}
    samples = StepSamples(**zeros)
    has_hits = np.arange(n) % 2 == 0
    ahead_s = np.full(n, 0.01)
    samples = replace(
        samples, drafting_requests=np.full(n, 4.0), verify_s=np.full(n, verify_s), overlap_s=ahead_s,
        draft_s=np.where(has_hits, waited_s, 0.02) + ahead_s,
    )  # fmt: skip
    first = np.where(has_hits.repeat(4), np.arange(4 * n) % 4 < 1, np.arange(4 * n) % 4 < 2).astype(np.float64)
    return AheadSteps(
        samples, np.full(n, is_busy), np.where(has_hits, hits, 0.0), Chains(np.arange(n).repeat(4), first)
    )


def waiting(steps: AheadSteps, waited_s: Floats) -> AheadSteps:
    """Return the steps with other times waited for drafts."""
    return replace(steps, samples=replace(steps.samples, draft_s=waited_s + steps.samples.overlap_s))


def test_steps_of_which_the_wait_is_not_known_say_nothing() -> None:
    steps = make_steps()
    unknown = waiting(steps, np.where(np.arange(len(steps.samples)) < 2, np.nan, steps.waited_s))
    assert fit_ahead(unknown, VERIFY, DRAFT).hidden == pytest.approx(fit_ahead(steps, VERIFY, DRAFT).hidden)


def test_on_a_faster_machine_drafts_are_waited_for_as_much_less() -> None:
    steps = make_steps()
    faster = replace(steps, samples=steps.samples.on_a_machine(np.full(len(steps.samples), 2.0)))
    assert faster.waited_s == pytest.approx(steps.waited_s / 2.0)


def test_the_numbers_by_hand() -> None:
    found = fit_ahead(make_steps(), VERIFY, DRAFT)
    assert found.ready == pytest.approx(0.5)  # four of four, or none
    assert found.hidden == pytest.approx(0.8)  # 16 of 20 ms
    assert found.verify_factor == pytest.approx(1.1)
    assert found.acceptance == pytest.approx(0.5)  # one of four against two of four


def test_a_machine_on_which_drafting_got_slower_hides_no_less() -> None:
    steps = make_steps(waited_s=0.008)
    slower = waiting(steps, np.where(steps.hits > 0.0, 0.008, 0.04))
    assert fit_ahead(steps, VERIFY, DRAFT).hidden == pytest.approx(0.6)
    assert fit_ahead(slower, VERIFY, DRAFT).hidden == pytest.approx(0.8)


def test_a_verification_hides_no_more_than_it_lasts() -> None:
    steps = make_steps(verify_s=0.005, waited_s=0.015)
    assert fit_ahead(steps, VERIFY, DRAFT).hidden == pytest.approx(1.0)


def test_requests_that_hit_beside_others_say_nothing_of_acceptance() -> None:
    assert fit_ahead(make_steps(hits=2.0), VERIFY, DRAFT).acceptance == pytest.approx(0.9)  # the default


def test_steps_of_several_files_keep_their_chains() -> None:
    both = AheadSteps.joined([make_steps(), make_steps()])
    assert len(both.samples) == 4 * HALF
    assert both.chains.step.tolist() == np.arange(4 * HALF).repeat(4).tolist()
    found, alone = (msgspec.structs.astuple(fit_ahead(steps, VERIFY, DRAFT)) for steps in (both, make_steps()))
    assert found == pytest.approx(alone)


def test_too_few_busy_steps_are_refused() -> None:
    with pytest.raises(CalibrationError, match=r"0 steps .* expected 20 or more"):
        fit_ahead(make_steps(is_busy=False), VERIFY, DRAFT)
