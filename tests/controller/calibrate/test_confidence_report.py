"""Figures of the drafter's confidence: by hand, and end to end from synthetic step rows."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from faser.controller.calibrate.confidence_report import (
    auc,
    calibration_error,
    draw,
    judge,
    quality,
    reliability,
)
from faser.engine_adapter.protocol import RequestRow


def test_auc_counts_pairs_and_ties_by_half() -> None:
    score = np.array([0.9, 0.8, 0.8, 0.1])
    # Of the four pairs three are in order and one is a tie.
    assert auc(score, np.array([True, True, False, False])) == pytest.approx(3.5 / 4)
    assert auc(-score, np.array([True, True, False, False])) == pytest.approx(0.5 / 4)
    assert math.isnan(auc(score, np.ones(4, np.bool_)))


def test_calibration_error_is_the_weighted_distance_per_tenth() -> None:
    chance = np.array([0.95, 0.95, 0.95, 0.15])
    hit = np.array([True, True, False, False])
    assert np.array(reliability(chance, hit)) == pytest.approx(np.array([[0.15, 0.0, 1.0], [0.95, 2 / 3, 3.0]]))
    assert calibration_error(chance, hit) == pytest.approx((0.15 + 3 * (0.95 - 2 / 3)) / 4)


def steps(count: int) -> list[list[RequestRow]]:
    """Return steps of 8 requests whose drafter is too sure: the chance is sigmoid(0.5 logit(c) - 0.5)."""
    random = np.random.default_rng(4)
    found = []
    for _ in range(count):
        logits = random.normal(1.5, 2.0, (8, 2))
        hits = random.random((8, 2)) < 1.0 / (1.0 + np.exp(0.5 - 0.5 * logits))
        accepted = hits.cumprod(axis=1).sum(axis=1)
        sure = (1.0 / (1.0 + np.exp(-logits))).tolist()
        found.append([
            RequestRow(handle + 1, 3, 2, 2, 2, 0, int(hit), int(hit) + 1, 9, False, tuple(row))
            for handle, (row, hit) in enumerate(zip(sure, accepted, strict=True))
        ])  # fmt: skip
    return found


def test_calibration_mends_a_drafter_that_is_too_sure_and_only_reached_tokens_count(tmp_path: Path) -> None:
    qualities = [quality(position, judged) for position, judged in enumerate(judge(steps(1500), 2), start=1)]
    first, second = qualities
    assert first.tokens == 12000
    assert second.tokens == first.tokens - first.rejected
    assert first.auc_low < first.auc < first.auc_high
    assert 0.7 < first.auc < 0.8
    assert first.raw_error > 0.15
    assert max(first.error, second.error) < 0.03
    draw(qualities, tmp_path / "curve.svg")
    assert "<svg" in (tmp_path / "curve.svg").read_text()


def test_telemetry_without_confidences_has_no_figures(tmp_path: Path) -> None:
    qualities = [quality(1, judge([[RequestRow(1, 2, 1, 1, 1, 0, 1, 2, 9, False)]], 1)[0])]
    assert qualities[0].tokens == 0
    assert math.isnan(qualities[0].auc)
    assert math.isnan(qualities[0].error)
    draw(qualities, tmp_path / "curve.svg")
