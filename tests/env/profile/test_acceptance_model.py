"""The acceptance generator: what it was fitted to comes out again, with telemetry and with published traces."""

import math
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from faser.env.calibration.accept_traces import SHIPPED, read_accept_trace, shipped_accept_trace
from faser.env.calibration.acceptance_fit import DraftTrial, auc, describe, draw_like, fit_acceptance
from faser.env.profile.acceptance_model import (
    QUANTILES,
    AcceptanceModel,
    accept_chance,
    confidence_logit,
    default_acceptance,
)
from faser.env.workload.request_trace import TraceError

TRUE = AcceptanceModel(
    intercepts=(0.3, 0.0, -0.3),
    slopes=(0.9, 0.8, 0.7),
    quantiles=default_acceptance(3, 0.5, 1.2).quantiles,
    request_share=0.3,
    carry=0.4,
    hidden=0.5,
)


def asked(requests: int = 80, steps: int = 60) -> list[DraftTrial]:
    return [DraftTrial((0, request), 3, 3, 0) for request in range(requests) for _ in range(steps)]


def test_a_known_generator_is_found_again_from_its_own_drafts() -> None:
    drafts = draw_like(TRUE, asked(), seed=1)
    found = fit_acceptance(drafts, 3)
    assert found.slopes == pytest.approx(TRUE.slopes, abs=0.15)
    assert found.intercepts == pytest.approx(TRUE.intercepts, abs=0.2)
    assert found.request_share == pytest.approx(0.3, abs=0.1)
    assert found.carry == pytest.approx(0.4, abs=0.1)
    assert found.hidden == pytest.approx(0.5, abs=0.15)


def test_means_and_auc_of_drawn_drafts_match_the_measured_ones() -> None:
    drafts = draw_like(TRUE, asked(300, 40), seed=2)
    found = describe(fit_acceptance(drafts, 3), drafts)
    np.testing.assert_allclose(found.model_means, found.measured_means, atol=0.03)
    np.testing.assert_allclose(found.model_auc, found.measured_auc, atol=0.03)
    assert found.model_request_spread == pytest.approx(found.measured_request_spread, abs=0.04)


@pytest.mark.parametrize("name", SHIPPED)
def test_published_accept_lengths_are_described_by_position(name: str) -> None:
    drafts = shipped_accept_trace(name)
    found = describe(fit_acceptance(drafts, max(draft.verified for draft in drafts)), drafts)
    deviation = [
        (model - mean) / max(math.sqrt(2 * mean * (1 - mean) / trials), 0.01)
        for model, mean, trials in zip(found.model_means, found.measured_means, found.trials, strict=True)
    ]
    assert max(map(abs, deviation)) < 5.0


def test_confidence_follows_its_quantiles_and_chance_follows_confidence() -> None:
    _, _, quantiles, _ = TRUE.tables()
    draws = np.array([confidence_logit(quantiles, 0, z, z, 0.5) for z in np.linspace(-3, 3, 50)])
    assert (np.diff(draws) > 0).all()
    assert confidence_logit(quantiles, 0, 0.0, 0.0, 0.5) == pytest.approx(TRUE.quantiles[0][QUANTILES // 2])
    intercepts, slopes, _, _ = TRUE.tables()
    assert accept_chance(intercepts, slopes, 0, 2.0, 0.0, 0.5) == pytest.approx(1 / (1 + math.exp(-2.1)))


def test_neighbours_in_a_draft_resemble_each_other_and_two_drafts_do_not() -> None:
    alike = replace(TRUE, request_share=0.0, carry=0.9)
    drawn = np.array([draft.confidences for draft in draw_like(alike, asked(1, 2000), seed=3)])
    logits = np.log(drawn / (1.0 - drawn))
    assert np.corrcoef(logits[:, 0], logits[:, 1])[0, 1] > 0.8
    assert abs(np.corrcoef(logits[:-1, 2], logits[1:, 0])[0, 1]) < 0.07


def test_drawing_is_repeatable_by_seed() -> None:
    assert draw_like(TRUE, asked(3, 5), 7) == draw_like(TRUE, asked(3, 5), 7)
    assert draw_like(TRUE, asked(3, 5), 7) != draw_like(TRUE, asked(3, 5), 8)


def test_too_few_drafts_give_the_default_and_say_so() -> None:
    assert fit_acceptance([DraftTrial((0, 1), 2, 2, 1)], 2).source.startswith("default: 2 draft tokens")


def test_auc_counts_ties_half() -> None:
    assert auc(np.array([0.1, 0.2, 0.3, 0.4]), np.array([False, False, True, True])) == 1.0
    assert auc(np.array([1.0, 1.0]), np.array([True, False])) == 0.5
    assert auc(np.array([1.0, 2.0]), np.array([True, True])) == 0.5


@pytest.mark.parametrize(
    ("content", "seen"),
    [(b"", "no rows"), (b'{"accept_lengths":[0]}', "line 1"), (b'{"accept_lengths":[2]}\n{"accept_le', "line 2"),
     (b'{"other":1}', "line 1")],
)  # fmt: skip
def test_bad_traces_are_refused_by_file_and_line(tmp_path: Path, content: bytes, seen: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=rf"trace\.jsonl.*{seen}"):
        read_accept_trace(path)
