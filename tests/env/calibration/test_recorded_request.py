"""What a replay takes of a recorded request: the drafts that were made, never what was accepted of them."""

from __future__ import annotations

import numpy as np

from faser.env.calibration.recorded_request import RecordedDraft, RecordedRequest


def test_a_draft_stands_for_what_follows_it_and_the_first_for_what_was_before() -> None:
    request = RecordedRequest(0.0, 1, 9, (RecordedDraft(2, 1), RecordedDraft(5, 3)))
    assert [request.drafted(emitted).handed for emitted in (0, 2, 4, 5, 9)] == [1, 1, 1, 3, 3]
    assert RecordedRequest(0.0, 1, 1).drafted(5).handed == 0


def test_between_two_drafts_a_replay_takes_any_around() -> None:
    """The one before alone would be met the more often, the more was accepted behind it."""
    request = RecordedRequest(
        0.0, 1, 30, tuple(RecordedDraft(at, place) for place, at in enumerate((1, 2, 10, 11, 12, 13)))
    )
    drawn = np.array([[each.handed for each in request.replayed(np.random.default_rng(seed))] for seed in range(200)])
    assert (drawn[:, [1, 2, 10, 11, 12, 13]] == np.arange(6)).all()
    assert set(drawn[:, 5]) == {0, 1, 2, 3}
    assert set(drawn[:, 20]) == {3, 4, 5}
    assert {each.handed for each in RecordedRequest(0.0, 1, 1).replayed(np.random.default_rng(0))} == {0}
