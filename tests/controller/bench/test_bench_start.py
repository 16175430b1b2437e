"""Servers that are started anew: what a later start measures, and intervals over starts."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from faser.controller.bench.markdown import page
from faser.controller.bench.plan import BenchPlan
from faser.controller.bench.ratio import by_start, scatter
from faser.controller.bench.result import BenchSettings, Results, Turn, envelope_at, points, summary
from faser.controller.bench.start import arms_at, first_start
from faser.controller.bench.view import _over
from faser.controller.engine.machine import Machine
from faser.controller.errors import UsageError

SETTINGS = BenchSettings("target", "ab" * 32, "price", 4, 1, 1.5, 96, 300, 0, 3, ())
ARMS = ("none", "k1", "k3", "faser")


def results(rates: dict[str, list[float]], rounds_per_start: int = 99, disturbed: tuple[int, ...] = ()) -> Results:
    turns = [
        Turn(
            phase="main", load=1, kinds="all", round=round_, arm=arm, rate=rate, tokens_per_s=rate, seconds=4.0,
            tokens=round(4 * rate), requests=5, failed=0, draft_tokens=300, accepted_tokens=200, cpu_s=4.0,
            other_cpu=0.0, steal_share=0.0, load_average=1.0, disturbed="noise" if round_ in disturbed else "", at="",
            start=round_ // rounds_per_start,
        )
        for arm, values in rates.items()
        for round_, rate in enumerate(values)
    ]  # fmt: skip
    return Results(Machine("cpu", 2, 23.5, "Linux"), {"vllm": "0.32"}, "abc", SETTINGS, turns=turns)


def test_intervals_are_over_starts_where_servers_were_started_anew() -> None:
    """Four starts of three rounds: rounds of a start agree with each other, starts do not."""
    ours = [103.0] * 3 + [97.0] * 3 + [103.0] * 3 + [97.0] * 3
    rates = {"none": [100.0] * 12, "k1": [90.0] * 12, "faser": ours}
    told = results(rates, rounds_per_start=3)
    ratio = envelope_at(told, 1, "all").ratio
    assert (ratio.pairs, ratio.value) == (4, pytest.approx(np.sqrt(1.03 * 0.97)))
    by_rounds = envelope_at(results(rates), 1, "all").ratio
    assert ratio.half_width > 1.5 * by_rounds.half_width, "the control: rounds of one start know nothing of the others"
    assert _over(told, 1, "all", "faser", "none").pairs == 4
    (point,) = points(told)
    assert (point.pairs, point.rounds, point.starts) == (4, 12, 4)
    assert "| starts | bar |" in page(told)
    assert summary(told)["points"][0]["starts"] == 4


def test_disturbed_rounds_are_left_out_of_their_start() -> None:
    rates = {"none": [100.0] * 6, "faser": [130.0, 130.0, 10.0, 130.0, 130.0, 130.0]}
    told = results(rates, rounds_per_start=2, disturbed=(2,))
    found = envelope_at(told, 1, "all")
    assert (found.ratio.value, found.ratio.pairs, found.is_disturbed) == (pytest.approx(1.3), 3, False)


def test_a_start_that_lacks_an_arm_says_nothing_of_it() -> None:
    nothing = float("nan")
    rates = {
        "none": np.array([100.0, 100.0, 100.0, 100.0]), "k2": np.array([150.0, 150.0, nothing, nothing]),
        "faser": np.array([110.0, 90.0, 100.0, 100.0]),
    }  # fmt: skip
    found = by_start(rates, np.array([0, 0, 1, 1]))
    assert found["faser"] == pytest.approx([1.0, 1.0])
    assert found["k2"][0] == pytest.approx(150.0 / np.sqrt(110.0 * 90.0))
    assert np.isnan(found["k2"][1])
    assert by_start(rates, np.zeros(4, np.int64))["faser"] is rates["faser"], "rounds are all there is"


@pytest.mark.parametrize(("between", "is_seen"), [(0.0, False), (0.1, True)])
def test_what_differs_between_servers_is_told_from_what_differs_between_rounds(between: float, is_seen: bool) -> None:
    random = np.random.default_rng(3)
    of_start = np.repeat(random.normal(0.0, between, 40), 3) if between else np.zeros(120)
    rates = {"none": [100.0] * 120, "faser": list(100.0 * np.exp(of_start + random.normal(0.0, 0.05, 120)))}
    told = results(rates, rounds_per_start=3)
    found = scatter(np.log(rates["faser"]) - np.log(rates["none"]), told.starts(1, "all"))
    assert found is not None
    seen, expected = found
    assert expected == pytest.approx(0.05 / np.sqrt(3.0), rel=0.15)
    assert seen == pytest.approx(np.hypot(expected, between), rel=0.3)
    assert (seen > 1.5 * expected) == is_seen
    assert f"scatter by {seen:.1%}; by that of rounds within a start" in page(told)


def test_a_single_start_tells_nothing_of_what_differs_between_servers() -> None:
    told = results({"none": [100.0] * 4, "faser": [90.0, 100.0, 110.0, 100.0]})
    assert scatter(np.log([0.9, 1.0, 1.1, 1.0]), told.starts(1, "all")) is None
    assert "scatter by" not in page(told)


def test_a_later_start_measures_the_rivals_near_the_best_until_the_ratio_is_sharp() -> None:
    rates = {"none": [50.0] * 3, "k1": [95.0] * 3, "k3": [100.0] * 3, "faser": [101.0, 99.0, 100.0]}
    told = results(rates, rounds_per_start=1)
    assert arms_at(ARMS, told, 1, "all") == ("none", "k1", "k3", "faser")
    far = results(rates | {"k1": [60.0] * 3}, rounds_per_start=1)
    assert arms_at(ARMS, far, 1, "all") == ("none", "k3", "faser")
    longer = {arm: values + values[:1] for arm, values in rates.items()}
    assert arms_at(ARMS, results(longer, rounds_per_start=1), 1, "all") == ()
    assert arms_at(ARMS, results(longer | {"faser": [130.0, 80.0, 130.0, 80.0]}, rounds_per_start=1), 1, "all")


def test_a_run_of_several_starts_that_goes_on_has_new_ones_and_one_of_a_single_start_adds_rounds() -> None:
    told = results({"none": [1.0] * 4, "faser": [1.0] * 4}, rounds_per_start=2)
    fresh = msgspec.structs.replace(told, turns=[])
    assert [first_start(told, starts) for starts in (1, 3)] == [1, 2]
    assert [first_start(fresh, starts) for starts in (1, 3)] == [0, 0]


@pytest.mark.parametrize(
    ("parts", "seen"),
    [({"starts": 0}, "--starts 0"), ({"held": -1}, "--held -1"), ({"starts": 2, "minutes": 1.0}, "beside --starts")],
)
def test_starts_that_cannot_be_measured_are_refused(parts: dict[str, float], seen: str) -> None:
    with pytest.raises(UsageError, match=seen):
        BenchPlan(loads=(1,), replays=(), mixes=(), rivals=("none",), pairs=1, table_lengths=(), **parts)  # type: ignore[arg-type]
