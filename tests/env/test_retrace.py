"""The replay of one recorded engine: it conserves requests and tokens, and does what a hand would compute."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from faser.env.engine_model import EngineProfile, Range, synthetic_profile
from faser.env.retrace import Decision, RecordedRequest, _Engine, _Live, retrace
from faser.env.step_basis import HOST_BASIS

STEP_S, ROW_S, HOST_S = 5.886e-3, 21e-6, 1.207e-3


def quiet(**changes: object) -> EngineProfile:
    profile = synthetic_profile(noise=0.0, k_max=4, kv_token_s=0.0)
    return replace(profile, **changes)  # type: ignore[arg-type]


def test_plain_decoding_takes_as_long_as_the_model_says() -> None:
    run = retrace(quiet(), [RecordedRequest(2.0, 100, 5)], seed=0)
    prompt_s, step_s = STEP_S + 100 * ROW_S, STEP_S + ROW_S + HOST_S
    assert run.first_token_s[0] == pytest.approx(2.0 + prompt_s)
    assert run.end_s[0] == pytest.approx(2.0 + prompt_s + 4 * step_s)
    assert run.steps == 5


def test_a_prompt_beyond_the_budget_is_computed_in_chunks() -> None:
    run = retrace(quiet(token_budget=64), [RecordedRequest(0.0, 150, 1)], seed=0)
    assert run.steps == 3


def test_drafts_that_are_always_accepted_shorten_the_answer_by_their_length() -> None:
    sure = replace(quiet().acceptance, intercepts=(30.0,) * 4)
    decided = (RecordedRequest(0.0, 10, 31, (Decision(0, 4, 4),)),)
    assert retrace(quiet(acceptance=sure), list(decided), seed=0).steps == 1 + 6


def test_drafts_that_are_never_accepted_only_cost_time() -> None:
    never = replace(quiet().acceptance, intercepts=(-30.0,) * 4, slopes=(0.0,) * 4)
    plain, drafting = RecordedRequest(0.0, 10, 20), RecordedRequest(0.0, 10, 20, (Decision(0, 4, 4),))
    without, with_ = (retrace(quiet(acceptance=never), [one], seed=0) for one in (plain, drafting))
    assert with_.steps == without.steps == 20
    assert with_.end_s[0] > without.end_s[0]


def test_every_request_ends_once_and_in_time_order() -> None:
    chance = np.random.default_rng(0)
    requests = [
        RecordedRequest(
            float(at),
            int(chance.integers(1, 300)),
            int(chance.integers(1, 60)),
            (Decision(0, 3, 3), Decision(20, 0, 0)),
        )
        for at in np.sort(chance.uniform(0, 2, 60))
    ]
    run = retrace(quiet(max_requests=8, token_budget=128), requests, seed=3)
    arrival_s = np.array([request.arrival_s for request in requests])
    assert np.isfinite(run.end_s).all()
    assert (arrival_s < run.first_token_s).all()
    assert (run.first_token_s <= run.end_s).all()


def test_the_same_seed_gives_the_same_run_and_another_one_does_not() -> None:
    requests = [RecordedRequest(0.1 * i, 50, 40, (Decision(0, 3, 3),)) for i in range(5)]
    first, again, other = (retrace(quiet(), requests, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.end_s, again.end_s)
    assert (first.end_s != other.end_s).any()


def test_idle_time_is_no_pause_between_steps() -> None:
    slow = replace(quiet().host, coefficients=(100.0,) + (0.0,) * (len(HOST_BASIS) - 1))
    run = retrace(quiet(host=slow), [RecordedRequest(0.0, 10, 1), RecordedRequest(50.0, 10, 1)], seed=0)
    assert run.end_s.max() < 51.0


def test_what_was_skipped_is_made_up_for_within_the_limit_of_a_step() -> None:
    request = RecordedRequest(0.0, 100, 30, (Decision(0, 0, 0), Decision(10, 4, 4)))
    sure = replace(quiet().acceptance, intercepts=(30.0,) * 4)
    limited = retrace(quiet(catch_up_tokens=40, acceptance=sure), [request], seed=0)
    free = retrace(quiet(catch_up_tokens=1000, acceptance=sure), [request], seed=0)
    assert limited.steps > free.steps


def test_a_decision_holds_until_the_next_one_and_before_the_first() -> None:
    request = RecordedRequest(0.0, 1, 9, (Decision(2, 1, 2), Decision(5, 3, 3)))
    assert [request.decided(emitted)[1:3] for emitted in (0, 2, 4, 5, 9)] == [(1, 2), (1, 2), (1, 2), (3, 3), (3, 3)]
    assert RecordedRequest(0.0, 1, 1).decided(5)[1:3] == (0, 0)


def test_acceptances_follow_recorded_confidences_where_all_of_a_draft_are_known() -> None:
    fair = replace(quiet().acceptance, intercepts=(0.0,) * 4, slopes=(1.0,) * 4, hidden=0.0)

    def steps(confidences: tuple[float, ...], seed: int = 0) -> int:
        request = RecordedRequest(0.0, 10, 41, (Decision(0, 4, 4, confidences=confidences),))
        return retrace(quiet(acceptance=fair), [request], seed).steps

    assert steps((1.0,) * 4) == 1 + 8
    assert steps((0.0,) * 4) == 41
    assert steps((1.0, 1.0, 0.0, 1.0)) == 1 + 14  # three a step: what is behind a rejected token is lost
    unknown = [steps((), seed) for seed in range(5)]
    assert [steps((1.0, 1.0), seed) for seed in range(5)] == unknown, "confidences of a part of the draft were used"


def test_between_two_decisions_a_replay_takes_any_around() -> None:
    """The one before alone would be met the more often, the more was accepted behind it."""
    request = RecordedRequest(
        0.0, 1, 30, tuple(Decision(at, place, place) for place, at in enumerate((1, 2, 10, 11, 12, 13)))
    )
    drawn = np.array([[each.handed for each in request.replayed(np.random.default_rng(seed))] for seed in range(200)])
    assert (drawn[:, [1, 2, 10, 11, 12, 13]] == np.arange(6)).all()
    assert set(drawn[:, 5]) == {0, 1, 2, 3}
    assert set(drawn[:, 20]) == {3, 4, 5}
    assert {each.handed for each in RecordedRequest(0.0, 1, 1).replayed(np.random.default_rng(0))} == {0}


def test_steps_outside_the_profile_are_counted() -> None:
    run = retrace(quiet(domain={"rows": Range(0, 5)}), [RecordedRequest(0.0, 10, 3)], seed=0)
    assert math.isclose(run.outside_share, 1 / 3)


def test_how_a_draft_ended_does_not_follow_into_the_next() -> None:
    """As in env/acceptance_model.py: neighbours in a draft resemble each other, and all positions scatter alike."""
    model = replace(quiet().acceptance, request_share=0.0, carry=0.9)
    request = RecordedRequest(0.0, 10, 31)
    engine, live = _Engine(quiet(acceptance=model), [request], seed=1), _Live(0, request, 0.0, 0.0, draft=4)
    drawn = []
    for _ in range(2000):
        engine._draw(live, ())
        drawn.append(live.logits)
    logits = np.array(drawn)
    assert abs(np.corrcoef(logits[:-1, 3], logits[1:, 0])[0, 1]) < 0.07
    assert np.corrcoef(logits[:, 0], logits[:, 1])[0, 1] > 0.8
    assert logits[:, 0].std() == pytest.approx(logits[:, 3].std(), rel=0.1)
