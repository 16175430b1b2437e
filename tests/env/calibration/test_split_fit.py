"""What splits did in measured steps: arithmetic by hand, steps behind a change, too little."""

from dataclasses import fields, replace

import numpy as np
import pytest

from faser.env.calibration.split_fit import LEAST_STEPS, UNSETTLED, fit_splits, settled
from faser.env.calibration.step_samples import StepSamples
from faser.env.profile.engine_profile import Split
from faser.env.profile.step_basis import DRAFT_BASIS, VERIFY_BASIS

VERIFY = np.array([0.1 if name == "step" else 0.0 for name in VERIFY_BASIS])
DRAFT = np.array([0.02 if name == "step" else 0.0 for name in DRAFT_BASIS])


def steps(count: int) -> StepSamples:
    zeros = StepSamples(**{item.name: np.zeros(count) for item in fields(StepSamples)})
    return replace(
        zeros, draft_tokens=np.ones(count), drafting_requests=np.ones(count), verify_s=np.full(count, 0.13),
        draft_s=np.full(count, 0.05), overlap_s=np.full(count, 0.04),
    )  # fmt: skip


def test_the_numbers_by_hand() -> None:
    found, refused = fit_splits(steps(LEAST_STEPS), np.ones(LEAST_STEPS, np.int64), ["unsplit", "1:1"], VERIFY, DRAFT)
    assert refused == []
    assert [split.name for split in found] == ["unsplit", "1:1"]
    numbers = found[1].verify_factor, found[1].draft_factor, found[1].overlap
    assert numbers == pytest.approx((1.3, 2.5, 0.8))


def test_a_split_that_is_known_stays_where_too_little_was_measured() -> None:
    known = (Split("unsplit"), Split("1:1", 1.2, 1.5, 0.7), Split("1:3", 1.1, 1.4, 0.6))
    few = np.zeros(LEAST_STEPS, np.int64)
    found, refused = fit_splits(steps(LEAST_STEPS), few, ["unsplit", "1:1"], VERIFY, DRAFT, known=known)
    assert found == known[:2]
    assert len(refused) == 1


def test_prompts_and_steps_without_drafts_say_nothing() -> None:
    mixed = steps(LEAST_STEPS + 3)
    mixed.prompt_tokens[0], mixed.draft_tokens[1] = 64.0, 0.0
    mixed.drafting_requests[2] = 0.0
    mixed.verify_s[:3] = 9.0
    index = np.ones(LEAST_STEPS + 3, np.int64)
    found, _ = fit_splits(mixed, index, ["unsplit", "1:1"], VERIFY, DRAFT)
    assert found[1].verify_factor == pytest.approx(1.3)
    mixed.prompt_tokens[3] = 64.0
    found, refused = fit_splits(mixed, index, ["unsplit", "1:1"], VERIFY, DRAFT)
    assert len(found) == 1
    assert refused == [f"split 1:1: {LEAST_STEPS - 1} steps that verify and draft; expected {LEAST_STEPS} or more"]


def test_steps_behind_a_change_and_the_last_one_under_a_split_are_of_none() -> None:
    engine = np.array([0] * 10 + [1] * 4)
    split = np.array([0, 0, 1, 1, 1, 1, 1, 0, 0, 0, *[np.nan] * 4])
    expected = [0, 0, *[UNSETTLED] * 3, 1, *[UNSETTLED] * 4, 0, 0, 0, 0]
    assert settled(engine, split).tolist() == expected


def test_an_engines_last_change_leaves_the_next_engine_alone() -> None:
    assert settled(np.array([0, 0, 1, 1]), np.array([0.0, 1.0, 0.0, 0.0])).tolist() == [0, UNSETTLED, 0, 0]
