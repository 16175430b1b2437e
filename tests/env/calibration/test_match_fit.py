"""The model of matches is found again from records of engines that were simulated with it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from msgspec.structs import replace

from faser.engine_adapter.protocol import StepRecord
from faser.env.calibration.acceptance_fit import DraftTrial
from faser.env.calibration.match_fit import CopyingStep, CopyRecord, MatchTrials, fit_matches, joined, trials_of
from faser.env.profile.match_model import MatchModel

from ..copying import LONGEST, match_model, match_rule, served


def trials(records: Iterable[StepRecord]) -> MatchTrials:
    told = (CopyRecord(1, one.rows, one.copied, one.verified_copies, one.lease_epoch > 0) for one in records)
    return trials_of(told)


def fitted(trials: MatchTrials) -> MatchModel:
    found = fit_matches(trials, LONGEST)
    assert found is not None
    return found


def test_a_known_model_is_found_again_where_every_match_is_copied() -> None:
    true = match_model(after_whole=1.5, after_other=-1.5, spread=1.0, lift=-0.5, surer=1.5)
    found = fitted(trials(served(true, match_rule(0.02), steps=2500)))
    assert found.after_whole == pytest.approx(1.5, abs=0.3)
    assert found.after_other == pytest.approx(-1.5, abs=0.3)
    assert found.spread == pytest.approx(1.0, abs=0.3)
    assert found.lengths == pytest.approx(true.lengths, abs=0.04)
    assert found.tokens.slopes[:3] == pytest.approx([1.0] * 3, abs=0.2)
    assert found.tokens.intercepts[:3] == pytest.approx([-0.5] * 3, abs=0.25)
    for own, wanted in (
        (found.tokens.quantiles, true.tokens.quantiles), (found.quantiles_whole, true.quantiles_whole)
    ):  # fmt: skip
        middles = np.array(own)[:3, [8, 16, 24]]  # deeper ones are seen only behind likely tokens
        assert middles == pytest.approx(np.array(wanted)[:3, [8, 16, 24]], abs=0.25)
    assert found.tokens.carry == pytest.approx(0.6, abs=0.15)


@pytest.mark.parametrize("keep", [0.15, 0.4])
def test_under_the_rule_of_the_recording_the_fit_copies_as_the_recording_does(keep: float) -> None:
    rule, steps = match_rule(keep, worth=0.3), 1500
    real = list(served(match_model(after_other=-1.5, surer=1.0), rule, 2, steps))
    again = list(served(fitted(trials(real)), rule, 2, steps, seed=4))
    for wanted, found in zip(*map(copied_of, (real, again)), strict=True):
        assert found == pytest.approx(wanted, rel=0.15)


def copied_of(records: list[StepRecord]) -> tuple[float, float, float]:
    """Return the share of copies, their verified and their accepted tokens, per decoding request and step."""
    decoding = sum(record.decode_tokens for record in records)
    copies = [row for record in records for row in record.rows if row.handle in record.verified_copies]
    return (
        len(copies) / decoding,
        sum(row.verified for row in copies) / decoding,
        sum(row.accepted for row in copies) / decoding,
    )


def test_records_without_copies_give_no_model() -> None:
    assert fit_matches(trials(served(None, None, 2, 50)), LONGEST) is None
    assert fit_matches(MatchTrials(), 0) is None


def test_a_step_without_a_lease_and_a_requests_last_one_say_nothing_of_matches() -> None:
    records = [replace(record, lease_epoch=0) if record.step % 2 else record for record in served(None, None, 2, 60)]
    seen = trials(records).steps
    told = [row for record in records for row in record.rows if row.emitted and not record.step % 2]
    ended = {event.handle for record in records for event in record.events if event.kind == "finish"}
    assert 0 < len(told) - len(seen) <= 16 + len(ended)


def test_a_draft_that_was_cut_offered_more_and_one_that_ended_did_not() -> None:
    chances = (0.9,) * 4
    drafts = [DraftTrial((0, 1), 2, 2, 1, chances[:2])] * 30  # nothing behind them
    drafts += [DraftTrial((0, 1), 2, 2, 1, chances[:3], 1)] * 30  # one was there and was left out
    drafts += [DraftTrial((0, 1), 4, 4, 1, chances)] * 30
    found = fitted_to_four(drafts)
    assert found.lengths == pytest.approx((0.0, 1 / 3, 0.0, 2 / 3))


def fitted_to_four(drafts: list[DraftTrial]) -> MatchModel:
    found = fit_matches(MatchTrials(drafts, [False] * len(drafts), [CopyingStep((0, 1), False, True)]), 4)
    assert found is not None
    return found


def test_engines_of_two_files_are_not_taken_for_one_another() -> None:
    one = MatchTrials([DraftTrial((1, 5), 1, 1, 1)], [False], [CopyingStep((1, 5), False, True)])
    both = joined([one, one])
    assert len({draft.request for draft in both.drafts}) == len({step.request for step in both.steps}) == 2
    assert [draft.request for draft in both.drafts] == [step.request for step in both.steps]
