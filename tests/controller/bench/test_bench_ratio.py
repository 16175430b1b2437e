"""The benchmarks' statistics against known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from faser.controller.bench.ratio import (
    Goodput,
    Objective,
    Ratio,
    bootstrap_interval,
    chained,
    cleanest,
    envelope,
    paired_ratio,
    student_interval,
    wider_interval,
)
from faser.controller.engine.load_summary import Outcome, RequestResult


def test_the_interval_holds_the_true_ratio_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    ratios = [paired_ratio(random.normal(0.05, 0.02, 5)) for _ in range(2000)]
    assert np.mean([ratio.low <= np.exp(0.05) <= ratio.high for ratio in ratios]) == pytest.approx(0.95, abs=0.015)


def test_a_rival_is_not_chosen_on_the_rounds_it_is_compared_on() -> None:
    """Among arms that differ by noise alone, one chosen on all rounds would look better than ours."""
    random = np.random.default_rng(1)
    values = []
    for _ in range(400):
        rates = {arm: np.exp(random.normal(0.0, 0.05, 6)) for arm in ("k1", "k2", "k3", "k4", "faser")}
        values.append(envelope(rates).ratio.value)
    assert np.mean(np.log(values)) == pytest.approx(0.0, abs=0.006)


def test_rounds_an_arm_was_left_out_of_do_not_count_against_it() -> None:
    rates = {
        "k1": np.array([100.0, 100.0, np.nan, np.nan]),
        "k3": np.array([120.0, 120.0, 121.0, 119.0]),
        "faser": np.array([126.0, 126.0, 127.05, 124.95]),
    }
    best = envelope(rates)
    assert best.rivals == ("k3", "k3")
    assert (best.ratio.value, best.ratio.pairs) == (pytest.approx(1.05), 4)


def test_an_arm_left_out_of_most_rounds_is_no_rival_however_lucky_its_few_rounds_were() -> None:
    steady, faser = np.full(12, 100.0), np.full(12, 100.0)
    lucky = np.full(12, np.nan)
    lucky[:3] = 150.0
    found = envelope({"none": steady, "k1": lucky, "faser": faser})
    assert set(found.rivals) == {"none"}
    assert found.ratio.value == pytest.approx(1.0)
    lucky[:6] = 150.0  # half of the rounds: a rival
    assert "k1" in envelope({"none": steady, "k1": lucky, "faser": faser}).rivals


def test_the_bootstrap_of_many_values_is_near_students_interval_and_of_few_never_leaves_their_range() -> None:
    many = np.random.default_rng(2).normal(0.0, 1.0, 200)
    assert bootstrap_interval(many) == pytest.approx(student_interval(many), abs=0.03)
    few = np.array([-0.1, 0.0, 0.2])
    low, high = bootstrap_interval(few)
    assert few.min() - 1e-9 <= low < high <= few.max() + 1e-9
    assert bootstrap_interval(few) == bootstrap_interval(few)
    wide = wider_interval(few)
    assert wide == student_interval(few)  # three values: 4.3 standard errors
    assert bootstrap_interval(np.full(4, 0.25)) == (0.25, 0.25)


def test_one_pair_has_a_ratio_and_no_interval() -> None:
    ratio = paired_ratio(np.array([math.log(1.1), np.nan]), wider_interval)
    assert ratio.value == pytest.approx(1.1)
    assert math.isnan(ratio.low)
    assert not ratio.is_sharp()
    assert not ratio.meets_envelope()


@pytest.mark.parametrize(
    ("logs", "is_met"),
    [([0.0] * 6, True), ([-0.009, -0.008] * 4, True), ([-0.02, -0.021] * 4, False), ([0.3, -0.2] * 4, False)],
)
def test_the_bar_wants_a_ratio_an_interval_and_its_lower_end(logs: list[float], is_met: bool) -> None:
    assert paired_ratio(np.array(logs), wider_interval).meets_envelope() is is_met


def test_quiet_rounds_count_alone_if_there_are_three_pairs_of_them() -> None:
    whole = {"none": np.array([100.0, 100.0, 100.0, 10.0]), "faser": np.array([110.0] * 4)}
    clean = {arm: rates[:3] for arm, rates in whole.items()}
    assert (cleanest(clean, whole).ratio.value, cleanest(clean, whole).is_disturbed) == (pytest.approx(1.1), False)
    two = {arm: rates[:2] for arm, rates in whole.items()}
    assert cleanest(two, whole).is_disturbed


def answered(ttft_s: float, tpot_s: float, tokens: int, outcome: Outcome = "finished") -> RequestResult:
    times_s = [1.0 + ttft_s + tpot_s * at for at in range(tokens)]
    return RequestResult(
        0, "chat", "p", 1.0, 1.0, outcome, output_tokens=tokens, token_times_s=times_s,
        token_counts=list(range(1, tokens + 1)),
    )  # fmt: skip


def test_goodput_counts_the_tokens_of_requests_within_five_and_two_times_the_unloaded_values() -> None:
    objective = Objective.of_unloaded([answered(0.1, 0.02, 10)] * 3)
    assert (objective.ttft_ms, objective.tpot_ms) == (pytest.approx(500.0), pytest.approx(40.0))
    load = [
        answered(0.49, 0.039, 10),
        answered(0.51, 0.010, 100),  # first token too late
        answered(0.10, 0.041, 100),  # too slow after it
        answered(0.10, 0.010, 100, "failed"),
        answered(0.10, 0.010, 1),  # nothing to be slow with
    ]
    goodput = Goodput.of(load, objective, seconds=2.0)
    assert goodput.tokens_per_s == pytest.approx((10 + 1) / 2.0)
    assert goodput.share == pytest.approx(2 / 5)
    assert goodput.mean_tpot_ms == pytest.approx((39.0 + 10.0 + 41.0) / 3)


def test_ratios_of_other_rounds_are_chained_with_both_their_errors() -> None:
    found = chained(Ratio(2.0, 1.8, 2.2, 5), Ratio(0.5, 0.45, 0.55, 3))
    assert (found.value, found.pairs) == (1.0, 3)
    assert found.low == pytest.approx(math.exp(-math.sqrt(2.0) * math.log(2.0 / 1.8)))
    assert found.high == pytest.approx(math.exp(math.sqrt(2.0) * math.log(2.2 / 2.0)))
