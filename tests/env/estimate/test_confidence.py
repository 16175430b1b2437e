"""Calibration of the drafter's confidence, the ring of recent drafts, and the forecast for stop rules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.engine_adapter.arrays import Floats
from faser.engine_adapter.protocol import StopRule
from faser.engine_adapter.steering.stop_rule import advance, kept_tokens
from faser.env.estimate.acceptance import count_trials
from faser.env.estimate.confidence import EDGES, Confidence, DraftRows, complete, foresee, unfold
from faser.env.estimate.step_rows import Confidences

K_MAX = 4
ALL = len(EDGES) - 1


def feed(
    confidence: Confidence,
    slope: float,
    intercept: float,
    records: range,
    rule: StopRule | None = None,
    batch: int = 8,
    length: int = K_MAX,
) -> None:
    """Let a drafter whose chances are sigmoid(intercept + slope * logit(c)) draft for a batch."""
    random = np.random.default_rng(records.start + 1)
    for record in records:
        logits = random.normal(1.0, 1.5, (batch, K_MAX))
        sure = 1.0 / (1.0 + np.exp(-logits))
        hits = random.random((batch, K_MAX)) < 1.0 / (1.0 + np.exp(-(intercept + slope * logits)))
        kept = [length if rule is None else kept_tokens(rule, row[:length]) for row in sure.tolist()]
        verified = np.array(kept)
        accepted = np.minimum(hits.cumprod(axis=1).sum(axis=1), verified)
        trials, successes = count_trials(verified, np.zeros_like(verified), accepted, K_MAX)
        seen = kept if rule is None else drafted_tokens(rule, sure[:, :length].tolist())
        confidences = [tuple(row[:many]) for row, many in zip(sure.tolist(), seen, strict=True)]
        confidence.learn(
            DraftRows(Confidences.of(confidences), np.full(batch, length), trials, successes, rule, record)
        )


def drafted_tokens(rule: StopRule, drafts: list[list[float]]) -> list[int]:
    """Return how many tokens of each draft are drafted: those handed over and one that the rule drops."""
    counts = []
    for sure in drafts:
        survival, count, goes_on = 1.0, 0, True
        while goes_on and count < len(sure):
            count += 1
            survival, _, goes_on = advance(rule, count, survival, sure[count - 1])
        counts.append(count)
    return counts


@pytest.mark.parametrize(("slope", "intercept"), [(1.0, 0.0), (0.5, -0.4), (1.6, 0.3), (0.2, 0.5)])
def test_calibration_finds_slope_and_intercept(slope: float, intercept: float) -> None:
    confidence = Confidence(K_MAX)
    feed(confidence, slope, intercept, range(1500))
    assert confidence.slopes == pytest.approx([slope] * K_MAX, abs=0.2)
    assert confidence.intercepts == pytest.approx([intercept] * K_MAX, abs=0.25)


def test_calibration_follows_a_drafter_that_changes() -> None:
    confidence = Confidence(K_MAX)
    feed(confidence, 1.0, 0.0, range(1000))
    feed(confidence, 0.4, -0.8, range(1000, 2500))
    assert confidence.slopes[0] == pytest.approx(0.4, abs=0.15)
    assert confidence.intercepts[0] == pytest.approx(-0.8, abs=0.2)


def test_a_stop_rule_that_hides_the_doubtful_tokens_does_not_bend_the_calibration() -> None:
    confidence = Confidence(K_MAX)
    rule = StopRule([0.6], [-0.3], [0.5], [0.6])
    feed(confidence, 0.6, -0.3, range(2500), rule)
    assert confidence.slopes[0] == pytest.approx(0.6, abs=0.15)
    assert confidence.intercepts[0] == pytest.approx(-0.3, abs=0.25)


def test_few_trials_lean_on_all_positions_and_none_on_the_confidence_itself() -> None:
    confidence = Confidence(K_MAX)
    assert confidence.slopes.tolist() == [1.0] * 4
    assert confidence.intercepts.tolist() == [0.0] * 4
    feed(confidence, 0.3, -0.5, range(400), length=1)
    assert confidence.trials[1:].tolist() == [0.0] * 3
    assert confidence.slopes[3] == pytest.approx(confidence.slopes[0], abs=0.1)


def test_the_same_records_give_the_same_forecast() -> None:
    first, second = Confidence(K_MAX), Confidence(K_MAX)
    for confidence in (first, second):
        feed(confidence, 0.6, -0.3, range(300))
    assert first.forecast is not None
    assert second.forecast is not None
    assert first.forecast.gain.tobytes() == second.forecast.gain.tobytes()


def truth(keep: int, go_on: int) -> tuple[Floats, Floats]:
    """Return kept and accepted tokens per position of the drafter of `feed` with slope 0.6, intercept -0.3."""
    logits = np.random.default_rng(99).normal(1.0, 1.5, (200_000, K_MAX))
    survival = (1.0 / (1.0 + np.exp(-(-0.3 + 0.6 * logits)))).cumprod(axis=1)
    before = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)
    is_kept = (survival >= EDGES[keep]) & (before >= EDGES[go_on])
    return is_kept.mean(axis=0), (is_kept * survival).mean(axis=0)


@pytest.mark.parametrize("rule", [None, StopRule([0.6], [-0.3], [0.3], [0.35])], ids=["whole drafts", "stopped drafts"])
@pytest.mark.parametrize(("keep", "go_on"), [(ALL, ALL), (10, 10), (12, 6), (14, 14)])
def test_the_forecast_is_right_for_thresholds_other_than_those_in_force(
    rule: StopRule | None, keep: int, go_on: int
) -> None:
    confidence = Confidence(K_MAX)
    feed(confidence, 0.6, -0.3, range(3000), rule)
    assert confidence.is_ready
    assert confidence.forecast is not None
    kept, gain = truth(keep, go_on)
    # What lies below the thresholds in force is guessed.
    tolerance = 0.05 if rule is None or EDGES[keep] >= 0.3 else 0.2
    assert confidence.forecast.kept[:, go_on, keep] == pytest.approx(kept, abs=tolerance)
    assert confidence.forecast.gain[:, go_on, keep] == pytest.approx(gain, abs=tolerance)


def test_a_dropped_token_counts_as_drafted_but_not_as_tried() -> None:
    confidence = Confidence(K_MAX)
    nothing = np.zeros((8, K_MAX))
    rule = StopRule([1.0], [0.0], [0.4], [0.6])
    for record in range(64):
        # Half of the drafts lost their first token to the rule, the others their third.
        rows = [(0.3,), (0.9, 0.8, 0.45)] * 4
        trials = np.tile([[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]], (4, 1))
        confidence.learn(DraftRows(Confidences.of(rows), np.full(8, K_MAX), trials, trials, rule, record))
        confidence.learn(DraftRows(Confidences.of([()] * 8), np.full(8, K_MAX), nothing, nothing, rule, record))
    assert confidence.trials[0] > 0.0
    assert confidence.trials[2:].tolist() == [0.0, 0.0]
    assert confidence.forecast is not None
    # Every draft begins; at a threshold of 0.52 the half that began with 0.3 goes no further.
    assert confidence.forecast.reach[0, ALL] == pytest.approx(1.0)
    assert confidence.forecast.reach[1, 10] == pytest.approx(0.5, abs=0.02)


def test_a_verified_token_without_a_confidence_teaches_nothing() -> None:
    confidence = Confidence(K_MAX)
    tried = np.tile([1.0, 1.0, 0.0, 0.0], (8, 1))
    for record in range(64):
        confidence.learn(DraftRows(Confidences.of([(0.7,)] * 8), np.full(8, K_MAX), tried, tried, None, record))
    assert confidence.trials[0] > 0.0
    assert confidence.trials[1] == 0.0


def test_a_confidence_that_tells_nothing_is_not_acted_upon() -> None:
    random = np.random.default_rng(8)
    told, untold = Confidence(K_MAX), Confidence(K_MAX)
    for record in range(200):
        hits = random.random((8, K_MAX)) < 0.7
        tried, hit = np.ones((8, K_MAX)), hits * 1.0
        for confidence, sure in ((told, np.where(hits, 0.8, 0.4)), (untold, np.full((8, K_MAX), 0.7))):
            rows = list(map(tuple, sure.tolist()))
            confidence.learn(DraftRows(Confidences.of(rows), np.full(8, K_MAX), tried, hit, None, record))
    assert untold.forecast is not None
    assert told.is_ready
    assert not untold.is_ready


def test_a_forecast_forgets_drafts_by_age_though_the_ring_still_holds_them() -> None:
    confidence = Confidence(K_MAX)
    limit, tried = np.full(8, K_MAX), np.ones((8, K_MAX))
    for first, sure, hit in ((0, 0.9, 1.0), (4000, 0.2, 0.0)):  # as many of either kind
        for record in range(first, first + 32):
            confidence.learn(DraftRows(Confidences.of([(sure,) * K_MAX] * 8), limit, tried, tried * hit, None, record))
    assert confidence.forecast is not None
    sure, doubtful = confidence.probability(np.array([[2.2] * K_MAX, [-1.4] * K_MAX]))[:, 0]
    between = int(np.flatnonzero((sure > EDGES) & (doubtful < EDGES))[0])
    assert confidence.forecast.reach[1, between] < 0.05


def test_unseen_continuations_are_taken_from_drafts_that_survived_alike() -> None:
    chance = np.column_stack([np.linspace(0.1, 0.9, 200), np.linspace(0.1, 0.9, 200)])
    depth = np.where(np.arange(200) % 2 == 0, 2, 1)
    chance[depth == 1, 1] = np.nan
    complete(chance, depth)
    assert chance[:, 1] == pytest.approx(np.linspace(0.1, 0.9, 200), abs=0.12)


def crowd(confidence: Confidence, record: int, rows: int) -> None:
    """Learn from 256 requests of which only every so-many-th tells anything: `rows` of them, others in each record."""
    apart = 256 // rows
    chances = np.where(np.arange(256) % apart == record % apart, 1.0, 0.0)[:, None]
    confidence.learn(DraftRows(Confidences.of([(0.5,)] * 256), np.ones(256, np.int64), chances, chances, None, record))


def test_many_requests_do_not_take_more_than_a_sample() -> None:
    first = Confidence(1)
    for record in range(3):  # 64 of each until there is a forecast, which is then made at once
        assert first.forecast is None
        crowd(first, record, 64)
    assert first.forecast is not None
    assert first.trials.tolist() == [192.0]
    for record in range(16, 32):
        crowd(first, record, 16)
    kept = 192.0 * (100.0 + 0.5 * 192.0) / (192.0 + 256.0 + 1.0)  # the memory grows with what was seen
    assert first.trials.tolist() == pytest.approx([kept + 256.0])


def test_drafts_that_nobody_follows_are_looked_at_all_the_same() -> None:
    confidence, tried = Confidence(K_MAX), np.ones((8, K_MAX))
    confidence.learn(DraftRows(Confidences.of([(0.5,) * K_MAX] * 8), np.full(8, K_MAX), tried, tried, None, 0))
    for record in range(1, 60):
        assert (confidence.trials[0] > 0.0) == (record > 48)
        confidence.learn(DraftRows(Confidences.of([()] * 8), np.zeros(8, np.int64), 0 * tried, 0 * tried, None, record))


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.lists(st.lists(st.floats(width=32), max_size=9).map(tuple), min_size=3, max_size=3), min_size=1, max_size=40
    )
)
def test_whatever_is_reported_the_numbers_stay_finite(reports: list[list[tuple[float, ...]]]) -> None:
    confidence = Confidence(K_MAX)
    rule = StopRule([1.0], [0.0], [0.5], [0.5])
    for record, confidences in enumerate(reports * 3):
        trials, successes = np.ones((3, K_MAX)), np.eye(3, K_MAX)
        confidence.learn(
            DraftRows(Confidences.of(confidences), np.array([4, 2, 0]), trials, successes, rule, record * 5)
        )
    assert np.isfinite(confidence.slopes).all()
    assert np.isfinite(confidence.intercepts).all()
    assert (confidence.slopes > 0.0).all()


def test_a_forecast_counts_whole_drafts_at_the_lowest_thresholds() -> None:
    forecast = foresee(np.full((64, 2), 0.5), np.full(64, 1 / 64))
    assert forecast.reach[:, ALL] == pytest.approx([1.0, 1.0])
    assert forecast.gain[:, ALL, ALL] == pytest.approx([0.5, 0.25])
    assert forecast.kept[1, ALL, 5] == 0.0


@pytest.mark.parametrize("many", [0, 1, 15, 16, 64])
@pytest.mark.parametrize("drafts", [1, 15, 16, 300])
def test_confidences_are_unfolded_up_to_the_longest_draft(many: int, drafts: int) -> None:
    sure = np.random.default_rng(many).random((drafts, many))
    logits, depth = unfold(Confidences.of(sure.tolist()), 20)
    assert depth.tolist() == [min(many, 20)] * drafts
    told = sure[:, :20]
    assert logits[:, : min(many, 20)] == pytest.approx(np.log(told / (1.0 - told)))
    assert not logits[:, many:].any()
