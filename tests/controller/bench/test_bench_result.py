"""A benchmark's results: their file, the points made from it, the JSON line, table and picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from faser.controller.bench import bench
from faser.controller.bench.bench import BenchOptions, show
from faser.controller.bench.result import (
    BenchSettings,
    Latency,
    Results,
    Spans,
    Turn,
    cost_of,
    levels_at,
    points,
    prompt_surplus_s,
    read_results,
    summary,
    write_results,
)
from faser.controller.bench.view import _over, tables, write_picture
from faser.controller.engine.machine import Machine
from faser.controller.errors import UsageError

SETTINGS = BenchSettings("target", "ab" * 32, "price", 4, 1, 1.5, 96, 300, 0, 3, ())


def turn(load: int | str, round_: int, arm: str, rate: float, phase: str = "main", disturbed: str = "") -> Turn:
    return Turn(
        phase=phase, load=load, kinds="all", round=round_, arm=arm, rate=rate, tokens_per_s=rate, seconds=2.0,
        tokens=400, requests=4, failed=0, draft_tokens=300 if arm != "none" else 0,
        accepted_tokens=200 if arm != "none" else 0, cpu_s=2.0, other_cpu=0.0, steal_share=0.0, load_average=1.0,
        disturbed=disturbed, at="", mean_tpot_ms=1e3 / rate if isinstance(load, str) else None,
    )  # fmt: skip


def results(rates: Mapping[int | str, Mapping[str, list[float]]], disturbed: tuple[int, ...] = ()) -> Results:
    turns = [
        turn(load, round_, arm, rate, disturbed="0.50 cores used by others" if round_ in disturbed else "")
        for load, arms in rates.items()
        for arm, values in arms.items()
        for round_, rate in enumerate(values)
    ]
    machine = Machine("cpu", 2, 23.5, "Linux")
    return Results(machine, {"vllm": "0.32"}, "abc", SETTINGS, table=((1, 2, 3), (3, 64, 0)), turns=turns)


TWO_LOADS: dict[int | str, dict[str, list[float]]] = {
    32: {"none": [200.0, 202.0, 198.0], "k3": [100.0, 101.0, 99.0], "faser": [196.0, 198.0, 194.0]},
    1: {"none": [30.0, 31.0, 29.0], "k3": [50.0, 51.0, 49.0], "faser": [55.0, 56.1, 53.9]},
}


def test_the_json_line_has_the_promised_shape() -> None:
    told = json.loads(json.dumps(summary(results(TWO_LOADS)), allow_nan=False))
    assert [point["load"] for point in told["points"]] == [1, 32]
    first, second = told["points"]
    assert first["rivals"] == {"none": 30.0, "k3": 50.0}
    assert first["faser"] == 55.0
    assert first["envelope_ratio"] == pytest.approx(1.1, abs=1e-3)
    assert second["envelope_ratio"] == pytest.approx(0.98, abs=1e-3)
    assert first["ci"][0] <= first["envelope_ratio"] <= first["ci"][1]
    assert (first["best_rival"], second["best_rival"]) == (["k3"], ["none"])
    assert told["envelope_ratio_min"] == second["envelope_ratio"]
    mean = (first["envelope_ratio"] + second["envelope_ratio"]) / 2
    assert told["envelope_ratio_mean"] == pytest.approx(mean, abs=1e-4)
    assert told["table"] == "1-2=3,3-64=0"


def test_the_json_line_has_each_arms_cpu_time_per_token_where_it_was_looked_at() -> None:
    measured = results(TWO_LOADS)
    measured.turns = [
        msgspec.structs.replace(each, compute_s=0.8) if each.arm == "k3" and each.load == 1 else each
        for each in measured.turns
    ]
    told = [point.get("compute_ms_per_token") for point in summary(measured)["points"]]
    assert told == [{"k3": 2.0}, None]


def test_a_rival_that_failed_is_reported_and_never_counted_as_a_loss() -> None:
    measured = results(TWO_LOADS)
    measured.failed["ngram"] = "vLLM ended with code 1"
    # It was lost after one lucky round: fewer than half of the rounds choose no rival.
    measured.turns.append(turn(1, 0, "ngram", 1000.0))
    told = summary(measured)
    assert told["failed"] == {"ngram": "vLLM ended with code 1"}
    assert told["points"][0]["best_rival"] == ["k3"]
    assert told["points"][0]["envelope_ratio"] == pytest.approx(1.1, abs=1e-3)


def test_without_a_rival_or_without_us_there_is_no_ratio_and_no_nan() -> None:
    for rates in ({1: {"faser": [50.0, 51.0]}}, {1: {"none": [50.0, 51.0], "k1": [60.0, 61.0]}}):
        told = json.loads(json.dumps(summary(results(rates)), allow_nan=False))
        assert told["points"][0]["envelope_ratio"] is None
        assert told["envelope_ratio_min"] is None
    assert summary(Results(Machine("cpu", 2, 23.5, "Linux"), {}, "abc", SETTINGS))["points"] == []


def test_disturbed_rounds_are_left_out_and_the_others_alternate() -> None:
    rates: dict[int | str, dict[str, list[float]]] = {
        8: {"none": [100.0, 10.0, 100.0, 10.0, 100.0], "faser": [110.0, 110.0, 110.0, 110.0, 110.0]}
    }
    point = points(results(rates, disturbed=(1, 3)))[0]
    assert (point.envelope_ratio, point.pairs) == (pytest.approx(1.1), 3)
    assert (point.rounds, point.disturbed_rounds, point.uses_disturbed) == (5, 2, False)
    assert points(results(rates, disturbed=(0, 1, 2)))[0].uses_disturbed


def test_a_replay_is_compared_by_goodput_with_the_ratio_of_time_per_token_beside_it() -> None:
    point = points(results({"mooncake": {"none": [50.0, 50.0, 50.0], "faser": [60.0, 60.0, 60.0]}}))[0]
    assert (point.metric, point.envelope_ratio, point.tpot_ratio) == (
        "goodput", pytest.approx(1.2), pytest.approx(1.2),
    )  # fmt: skip


def test_the_sweep_compares_lengths_within_rounds_and_no_turn_of_it_is_a_point() -> None:
    measured = results({})
    for round_, level in enumerate((1.0, 0.5)):  # the machine's speed halves
        measured.turns += [
            turn(8, round_, "none", 100.0 * level, "sweep"),
            turn(8, round_, "k2", 120.0 * level, "sweep"),
        ]
    measured.turns.append(turn(8, 0, "k4", 110.0, "sweep"))
    levels = levels_at(measured, 8, "all")
    assert max(levels, key=levels.__getitem__) == 2
    assert levels[0] == 0.0
    assert points(measured) == []
    measured.turns = [each for each in measured.turns if each.arm != "none"]
    assert max(levels_at(measured, 8, "all").items(), key=lambda entry: entry[1])[0] == 4  # nothing to pair with
    assert levels_at(measured, 1, "all") == {}


def test_a_run_that_ended_in_its_sweep_is_told_without_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = results({})
    measured.turns.append(turn(8, 0, "none", 100.0, "sweep"))
    show(BenchOptions(json=True), measured, tmp_path / "result.json", Console(file=StringIO()))
    assert json.loads(capsys.readouterr().out)["points"] == []
    assert list(tmp_path.iterdir()) == []


def test_cost_says_what_drafts_earned() -> None:
    cost = cost_of([turn(1, 0, "k3", 50.0)])
    assert cost.acceptance_rate == pytest.approx(2 / 3)
    assert cost.draft_length == pytest.approx(300 / 200)
    assert cost.draft_waste == pytest.approx(100 / 400)
    assert cost.cpu_ms_per_token == pytest.approx(5.0)
    assert cost_of([]).cpu_ms_per_token is None
    assert cost.compute_ms_per_token is None
    looked = [msgspec.structs.replace(turn(1, 0, "k3", 50.0), compute_s=seconds) for seconds in (1.0, 1.4, None)]
    assert cost_of(looked).compute_ms_per_token == pytest.approx(3.0)


def test_table_and_picture_come_from_the_file_alone(tmp_path: Path) -> None:
    measured = results({**TWO_LOADS, "mooncake": {"none": [50.0, 49.0], "faser": [60.0, 61.0]}}, disturbed=(0,))
    measured.failed["ngram"] = "out of luck"
    measured.latencies.append(Latency(1, "all", "faser", 9, Spans.of([10.0, 20.0]), Spans.of([5.0]), Spans.of([])))
    write_results(measured, tmp_path / "result.json")
    again = read_results(tmp_path / "result.json")
    assert again == measured
    out = StringIO()
    Console(file=out, width=240).print(tables(again))
    assert "Left out: ngram: out of luck" in out.getvalue()
    assert "15 / 19 / 20" in out.getvalue()
    assert "mooncake" in out.getvalue()
    for name, magic in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG")):
        write_picture(again, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(magic)


def test_variants_of_faser_are_shown_and_are_no_rivals() -> None:
    rates = {1: {**TWO_LOADS[1], "faser+pruning": [90.0, 91.0, 89.0]}}
    (point,) = points(results(rates))
    assert point.best_rival == ["k3"]
    assert point.envelope_ratio == pytest.approx(1.1, abs=1e-3)
    assert point.rivals["faser+pruning"] == 90.0


def test_tokens_drawn_and_never_verified_are_waste_too() -> None:
    plain = turn(1, 0, "faser", 50.0)
    assert cost_of([plain]).draft_waste == pytest.approx(0.25)
    assert cost_of([msgspec.structs.replace(plain, unverified_tokens=100)]).draft_waste == pytest.approx(0.5)


def test_prompts_that_fall_into_another_round_do_not_make_arms_differ() -> None:
    random, measured = np.random.default_rng(0), results({8: {"none": [100.0] * 8, "faser": [100.0] * 8}})
    turns = []
    for each in measured.turns:
        prompts, mood = int(random.integers(100, 900)), 1.0 + 0.3 * (each.round % 3)
        seconds = {"none": 4.0, "faser": 3.0}[each.arm] + mood + 0.005 * prompts
        turns.append(msgspec.structs.replace(each, prompt_tokens=prompts, seconds=seconds, rate=400 / seconds))
    measured.turns = turns
    even, raw = (measured.rates(8, "all", is_even=is_even) for is_even in (True, False))
    logs, raw_logs = (np.log(rates["faser"]) - np.log(rates["none"]) for rates in (even, raw))
    assert logs.std() < 0.2 * raw_logs.std()
    assert 1.1 < np.exp(logs.mean()) < 1.25  # a second less of about seven
    point = points(measured)[0]
    assert point.envelope_ratio == pytest.approx(np.exp(logs.mean()), rel=1e-3)
    assert prompt_surplus_s([msgspec.structs.replace(each, prompt_tokens=0) for each in turns]).tolist() == [0.0] * 16


# --- going on with a file ---


def test_a_run_goes_on_in_its_own_file_where_all_is_as_it_was() -> None:
    before = results(TWO_LOADS)
    before.failed = {"ngram": "out of memory", "suffix": "not available"}
    now = msgspec.structs.replace(
        results({}), commit="def", settings=msgspec.structs.replace(SETTINGS, pairs=9, seed=4)
    )
    assert before.unlike(now) == ""
    found = before.continued(now, ("ngram", "k6"))
    assert (found.commit, found.turns, found.table) == ("abc, def", before.turns, before.table)
    assert found.failed == {"suffix": "not available"}
    assert found.continued(now, ()).commit == "abc, def"


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"settings": msgspec.structs.replace(SETTINGS, threads=3)}, "threads is 1, now 3"),
        ({"machine": Machine("another", 2, 23.5, "Linux")}, "machine is cpu, now another"),
        ({"versions": {"vllm": "0.33"}}, "versions is"),
        ({"settings": msgspec.structs.replace(SETTINGS, temperature=0.7)}, "temperature is 0.0, now 0.7"),
    ],
)
def test_a_run_that_cannot_be_compared_is_named(change: dict[str, Any], hint: str, tmp_path: Path) -> None:
    before = results(TWO_LOADS)
    assert hint in before.unlike(msgspec.structs.replace(before, **change))


@pytest.mark.parametrize(
    ("content", "hint"),
    [(None, "No such file"), ("{", "results of an earlier run"), ("", "threads is 1"), ("out", "one of them")],
)
def test_a_file_that_cannot_be_gone_on_with_is_refused(content: str | None, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    if content == "{":
        path.write_text(content)
    elif content is not None:
        write_results(results(TWO_LOADS), path)
    fresh = msgspec.structs.replace(results({}), settings=msgspec.structs.replace(SETTINGS, threads=3))
    with pytest.raises(UsageError, match=r"^[^\n]+$") as caught:
        bench._resumed(path, path if content == "out" else None, fresh, ())
    assert hint in str(caught.value)


def test_groups_that_never_met_are_drawn_by_way_of_faser() -> None:
    apart = results(
        {1: {"none": [20.0, 20.0, 0.0, 0.0], "k3": [0.0, 0.0, 60.0, 60.0], "faser": [50.0, 50.0, 40.0, 40.0]}}
    )
    found = _over(apart, 1, "all", "k3", "none")
    assert (found.value, found.pairs) == (pytest.approx(1.5 * 2.5), 2)
    assert _over(apart, 1, "all", "faser", "none").value == pytest.approx(2.5)
