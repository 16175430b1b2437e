"""The closed-loop benchmark: its statistics against known answers, its documents from a file, one real short run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import numpy as np
import pytest

import faser
from faser.controller.serve import EmbeddedPair

FOLDER = Path(faser.__file__).parent / "benchmarks"


@pytest.fixture(scope="module")
def report(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("closed_loop_report")


@pytest.fixture(scope="module")
def result(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("closed_loop_result")


@pytest.fixture(scope="module")
def bench(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("closed_loop")


@pytest.fixture(scope="module")
def start(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("closed_loop_run")


def results(
    result: ModuleType, rates: dict[str, list[float]], disturbed: tuple[int, ...] = (), rounds_per_start: int = 99
) -> object:
    settings = result.Settings(1.0, 160, 96, 300, 1, 4, "price", "target", "ab" * 32)
    turns = [
        result.Turn(
            round=round_,
            load=1,
            arm=arm,
            tokens_per_s=rate,
            seconds=4.0,
            slices=2,
            steps=200,
            tokens=round(4 * rate),
            requests=5,
            prompt_tokens=700,
            draft_tokens=300,
            accepted_tokens=200,
            engine_cpu=1.0,
            own_cpu=1.1,
            other_cpu=0.0,
            steal_share=0.0,
            is_disturbed=round_ in disturbed,
            at="",
            start=round_ // rounds_per_start,
        )
        for arm, values in rates.items()
        for round_, rate in enumerate(values)
    ]
    return result.Results(result.Machine("cpu", 2, 23.5, "Linux"), {"vllm": "0.32"}, ["abc"], settings, turns)


def test_disturbed_turns_count_only_where_there_are_too_few_others(result: ModuleType) -> None:
    rates = {"none": [100.0] * 4 + [10.0], "faser": [130.0] * 4 + [100.0]}
    clean = result.envelope_at(results(result, rates, disturbed=(4,)), 1)
    assert (clean.ratio.value, clean.is_disturbed) == (pytest.approx(1.3), False)
    dirty = result.envelope_at(results(result, rates, disturbed=(1, 2, 3, 4)), 1)
    assert (dirty.ratio.pairs, dirty.is_disturbed) == (5, True)


def test_intervals_are_over_starts_where_engines_were_started_anew(report: ModuleType, result: ModuleType) -> None:
    """Four starts of three rounds: rounds of a start agree with each other, starts do not."""
    ours = [103.0] * 3 + [97.0] * 3 + [103.0] * 3 + [97.0] * 3
    told = results(result, {"none": [100.0] * 12, "k1": [90.0] * 12, "faser": ours}, rounds_per_start=3)
    ratio = result.envelope_at(told, 1).ratio
    assert (ratio.pairs, ratio.value) == (4, pytest.approx(np.sqrt(1.03 * 0.97)))
    by_rounds = result.envelope_at(results(result, {"none": [100.0] * 12, "k1": [90.0] * 12, "faser": ours}), 1).ratio
    assert ratio.half_width > 2.0 * by_rounds.half_width, "the control: rounds of one start know nothing of the others"
    assert result.over_none(told, 1) == ratio
    assert "started anew 4 times" in report.markdown(told)
    assert "| starts | bar |" in report.markdown(told)


@pytest.mark.parametrize(("between", "is_seen"), [(0.0, False), (0.1, True)])
def test_what_differs_between_engines_is_told_from_what_differs_between_rounds(
    report: ModuleType, result: ModuleType, between: float, is_seen: bool
) -> None:
    random = np.random.default_rng(3)
    of_start = np.repeat(random.normal(0.0, between, 40), 3) if between else np.zeros(120)
    rates = {"none": [100.0] * 120, "faser": list(100.0 * np.exp(of_start + random.normal(0.0, 0.05, 120)))}
    told = results(result, rates, rounds_per_start=3)
    seen, expected = result.scatter_at(told, 1)
    assert expected == pytest.approx(0.05 / np.sqrt(3.0), rel=0.15)
    assert seen == pytest.approx(np.hypot(expected, between), rel=0.3)
    assert (seen > 1.5 * expected) == is_seen
    assert f"scatter by {seen:.1%} (root mean square over loads); by the scatter of rounds" in report.markdown(told)


def test_starts_whose_slices_had_other_steps_are_told(report: ModuleType, result: ModuleType) -> None:
    told = results(result, {"none": [100.0] * 4, "faser": [90.0] * 4}, rounds_per_start=2)
    assert "a slice had so many steps" not in report.markdown(told)
    told.turns = [  # type: ignore[attr-defined]
        msgspec.structs.replace(turn, slices=20 if turn.start else 2)
        for turn in told.turns  # type: ignore[attr-defined]
    ]
    assert "a slice had so many steps: 100 (starts 1), 10 (starts 2)." in report.markdown(told)


def test_a_single_start_tells_nothing_of_what_differs_between_engines(report: ModuleType, result: ModuleType) -> None:
    told = results(result, {"none": [100.0] * 4, "faser": [90.0, 100.0, 110.0, 100.0]})
    assert result.scatter_at(told, 1) is None
    assert "scatter by" not in report.markdown(told)


def test_a_start_that_lacks_an_arm_says_nothing_of_it(result: ModuleType) -> None:
    nothing = float("nan")
    rates = {
        "none": np.array([100.0, 100.0, 100.0, 100.0]), "k2": np.array([150.0, 150.0, nothing, nothing]),
        "faser": np.array([110.0, 90.0, 100.0, 100.0]),
    }  # fmt: skip
    found = result.by_start(rates, np.array([0, 0, 1, 1]))
    assert found["faser"] == pytest.approx([1.0, 1.0])
    assert found["k2"][0] == pytest.approx(150.0 / np.sqrt(110.0 * 90.0))
    assert np.isnan(found["k2"][1])


def test_prompts_that_fall_into_another_round_do_not_make_arms_differ(result: ModuleType) -> None:
    told, random = results(result, {"none": [100.0] * 8, "faser": [100.0] * 8}), np.random.default_rng(0)
    turns = []
    for turn in told.turns:  # type: ignore[attr-defined]
        prompts, mood = int(random.integers(100, 900)), 1.0 + 0.3 * (turn.round % 3)
        seconds = {"none": 4.0, "faser": 3.0}[turn.arm] + mood + 0.005 * prompts
        turns.append(msgspec.structs.replace(turn, prompt_tokens=prompts, seconds=seconds, tokens=400))
    told.turns = turns  # type: ignore[attr-defined]
    even = np.log(told.rates(1, is_even=True)["faser"]) - np.log(told.rates(1, is_even=True)["none"])  # type: ignore[attr-defined]
    raw = np.log(told.rates(1)["faser"]) - np.log(told.rates(1)["none"])  # type: ignore[attr-defined]
    assert even.std() < 0.2 * raw.std()
    assert 1.1 < np.exp(even.mean()) < 1.25  # a second less of about seven


def test_the_documents_come_from_the_file_alone_and_replace_only_their_own_section(
    report: ModuleType, result: ModuleType, tmp_path: Path
) -> None:
    rates = {"none": [100.0, 101.0, 99.0], "k2": [120.0, 121.0, 119.0], "faser": [126.0, 127.0, 125.0]}
    file = tmp_path / "closed_loop.json"
    result.write_results(results(result, rates), file)
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "results.md").write_text("# Results\n\nbefore\n\n" + report.BEGIN + "old" + report.END + "\nafter\n")
    for _ in range(2):
        command = [sys.executable, str(FOLDER / "closed_loop_report.py"), "--json", str(file), "--docs", str(docs)]
        assert subprocess.run(command, capture_output=True, cwd="/").returncode == 0
        text = (docs / "results.md").read_text()
        assert text.startswith("# Results\n\nbefore\n\n" + report.BEGIN)
        assert text.endswith(report.END + "\nafter\n")
        assert "old" not in text
        assert "| 1 | 100 (99 to 101) | 120 (119 to 121) | 126 (125 to 127) | 0.99 |" in text
        assert "| k = 2 | 3 | met |" in text
    assert (docs / "closed_loop.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("flag", "value"), [("--loads", "0"), ("--loads", "1,x"), ("--loads", "4096"), ("--arms", "k9"), ("--answers", "0"),
     ("--table", "1-4=k3")],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_anything_starts(flag: str, value: str, tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "closed_loop.py"), flag, value]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert value in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_table_is_the_one_that_a_sweep_found_unless_another_is_given(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept = json.loads(bench.TUNED.read_text())["table"]
    assert [list(row) for row in bench.table_of(None)] == swept
    assert bench.table_of("1-4=3,5-64=0") == ((1, 4, 3), (5, 64, 0))
    for bad in ("5-1=3", "1-4=3,4-8=1", "1-4=9"):
        with pytest.raises(bench.UsageError, match="--table"):
            bench.table_of(bad)
    monkeypatch.setattr(bench, "TUNED", tmp_path / "bench_full.json")
    with pytest.raises(bench.UsageError, match="no bench_full"):
        bench.table_of(None)
    assert bench.orders_of(bench.parsed(["--arms", "none,faser"])).table == ()  # nobody asks for it


def test_every_arm_drafts_as_its_name_says_and_those_with_a_sidecar_are_told_where_it_is(
    start: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, tuple[dict[str, object], dict[str, str]]] = {}

    def remote(
        script: str, arguments: list[str], folder: Path, threads: int, environment: dict[str, str], log: Path
    ) -> None:
        started[log.stem] = json.loads(arguments[0]), environment

    monkeypatch.setattr(start, "Remote", remote)
    settings = SimpleNamespace(max_tokens=96, max_prompt_tokens=300, threads=1, core=1, has_huge_pages=True)
    plan = start.Plan({}, 1, settings, ((1, 4, 3), (5, 64, 0)))
    run = start.Bench(plan, SimpleNamespace(turns=[]), tmp_path, tmp_path, start.Console())
    run.bed = start.Bed(EmbeddedPair(tmp_path / "t", tmp_path / "d"), tmp_path, tmp_path, "price", 1)
    for name in ("none", "k6", "table", "ngram", "adaspec", "faser"):
        run._launch(name)
    drafting = {name: order["speculative"] for name, (order, _) in started.items()}
    assert drafting["none"] is None
    assert {name: drafting[name]["num_speculative_tokens"] for name in ("k6", "table", "adaspec", "faser")} == {  # type: ignore[index]
        "k6": 6, "table": 3, "adaspec": 4, "faser": 4,
    }  # fmt: skip
    assert drafting["table"]["num_speculative_tokens_per_batch_size"] == [[1, 4, 3], [5, 64, 0]]  # type: ignore[index]
    assert drafting["ngram"]["method"] == "ngram"  # type: ignore[index]
    for name, (order, environment) in started.items():
        has_sidecar = name in ("adaspec", "faser")
        assert order["is_steered"] == has_sidecar
        assert order["core"] == 1, "all on the same"
        assert environment["GLIBC_TUNABLES"] == start.HUGE_PAGES
        assert environment["VLLM_PLUGINS"] == ("faser" if has_sidecar else "none")
        assert environment.get("FASER_ENDPOINT") == (run.bed.config(name).link.endpoint if has_sidecar else None)


def test_a_run_asks_for_huge_pages_and_says_so_and_none_of_before_is_continued(
    bench: ModuleType, report: ModuleType, result: ModuleType, tmp_path: Path
) -> None:
    orders = bench.orders_of(bench.parsed(["--arms", "none,faser"]))
    assert orders.settings.has_huge_pages
    before = msgspec.structs.replace(orders.settings, has_huge_pages=False)
    said = [report._pinned(settings) for settings in (orders.settings, before)]
    assert ["huge pages" in text for text in said] == [True, False]
    path = tmp_path / "r.json"
    earlier = msgspec.structs.replace(bench.open_results(path, orders, is_resumed=False), settings=before)
    result.write_results(earlier, path)
    with pytest.raises(bench.UsageError, match="drop --resume"):
        bench.open_results(path, orders, is_resumed=True)


def test_arms_have_names_for_people(report: ModuleType) -> None:
    arms = ("none", "k6", "table", "ngram", "adaspec", "faser")
    told = ["no speculation", "k = 6", "best table", "ngram", "adaspec", "FASER"]
    assert [report.name_of(arm) for arm in arms] == told


def test_a_run_goes_on_with_its_own_table_only(bench: ModuleType, result: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    settings = bench.Settings(1.0, 160, 96, 300, 1, 4, "price", "target", "ab" * 32)
    plan, other = (
        bench.Orders((1,), ("none", "faser"), 1, 1, settings, table) for table in (((1, 64, 2),), ((1, 64, 0),))
    )
    result.write_results(bench.open_results(path, plan, is_resumed=False), path)
    assert bench.open_results(path, plan, is_resumed=True).table == ((1, 64, 2),)
    with pytest.raises(bench.UsageError, match=r"table 1-64=2.*table 1-64=0"):
        bench.open_results(path, other, is_resumed=True)


def test_a_round_is_an_answer_of_every_client_or_of_enough(start: ModuleType) -> None:
    assert [start.round_tokens(load, 96) for load in (1, 4, 8, 32)] == [384, 384, 768, 1536]
    assert [start.settled_tokens(load, 96) % 96 for load in (1, 4, 8, 32)] == [48] * 4


def test_a_turn_is_the_sum_of_its_slices(start: ModuleType) -> None:
    served = {"seconds": 1.0, "cpu_s": 0.9, "steps": 10, "tokens": 30, "requests": 1}
    served |= {"draft_tokens": 20, "accepted_tokens": 15, "prompt_tokens": 100}
    served |= {"prompt_steps": 2, "prompt_steps_s": 0.7, "plain_firsts": 1, "plain_firsts_s": 0.2}
    slow = served | {"seconds": 3.0, "tokens": 30}
    quiet = start.Slice(served, 1.1, 1.0, 1.05, 0.0)
    turn = start.as_turn("k2", 4, 7, [quiet, start.Slice(slow, 3.1, 3.0, 3.0, 0.0)], start=3)
    assert (turn.tokens_per_s, turn.seconds, turn.slices, turn.draft_tokens) == (15.0, 4.0, 2, 40)
    assert turn.start == 3
    assert (turn.prompt_steps, turn.prompt_steps_s) == (4, pytest.approx(1.4))
    assert (turn.plain_firsts, turn.plain_firsts_s) == (2, pytest.approx(0.4))
    assert not turn.is_disturbed
    loud = start.as_turn("k2", 4, 7, [quiet, start.Slice(slow, 3.1, 3.0, 4.5, 0.0)])
    assert loud.is_disturbed


def test_steps_with_and_without_prompts_are_told_apart_where_slices_begin_alike(
    report: ModuleType, result: ModuleType
) -> None:
    told = results(result, {"none": [100.0] * 2, "faser": [100.0] * 2})
    spent_s = {"none": 1.0, "faser": 1.1}
    told.turns = [  # type: ignore[attr-defined]
        msgspec.structs.replace(turn, steps=40, seconds=5.0, prompt_steps=10, prompt_steps_s=spent_s[turn.arm])
        for turn in told.turns  # type: ignore[attr-defined]
    ]
    assert "without prompts and with them: -2.5% and +10.0% at 1 requests" in report.markdown(told)
    told.turns[0] = msgspec.structs.replace(told.turns[0], prompt_steps=0)  # type: ignore[attr-defined]
    assert "without prompts and with them" in report.markdown(told), "a turn without them counts too"
    told.turns = [msgspec.structs.replace(turn, prompt_steps=0) for turn in told.turns]  # type: ignore[attr-defined]
    assert "without prompts and with them" not in report.markdown(told)


def test_how_much_longer_a_plain_first_step_is_than_others_is_told_of_the_best_rival_too(
    report: ModuleType, result: ModuleType
) -> None:
    told = results(result, {"none": [100.0] * 2, "k1": [90.0] * 2, "faser": [100.0] * 2})
    firsts_s = {"none": 1.1, "k1": 9.0, "faser": 1.3}  # ten of 30 plain steps, of which the others take 2 s
    told.turns = [  # type: ignore[attr-defined]
        msgspec.structs.replace(
            turn, steps=40, prompt_steps=10, prompt_steps_s=3.0, seconds=5.0 + firsts_s[turn.arm], plain_firsts=10,
            plain_firsts_s=firsts_s[turn.arm],
        )
        for turn in told.turns  # type: ignore[attr-defined]
    ]  # fmt: skip
    assert "best rival: +30.0 and +10.0 ms at 1 requests (no speculation)." in report.markdown(told)
    told.turns = [msgspec.structs.replace(turn, plain_firsts=0) for turn in told.turns]  # type: ignore[attr-defined]
    assert "Of steps without prompts" not in report.markdown(told), "none to tell of"


def test_the_first_start_measures_every_arm_later_ones_those_near_the_best_until_the_ratio_is_sharp(
    bench: ModuleType, result: ModuleType
) -> None:
    arms = ("none", "k1", "faser")

    def planned(starts: int, ours: float = 1.02) -> dict[int, tuple[str, ...]]:
        rates = {"none": [100.0] * starts, "k1": [90.0] * starts, "faser": [100.0 * ours, 100.0] * (starts // 2)}
        rates["faser"] += [100.0] * (starts % 2)
        measured = results(result, rates, rounds_per_start=1)
        return dict(bench.Orders((1,), arms, 3, 6, measured.settings).plan(measured).arms_at)  # type: ignore[attr-defined]

    assert planned(0) == {1: arms}
    assert planned(2, ours=1.0) == {1: ("none", "faser")}, "two alike starts may be luck"
    assert planned(4, ours=1.0) == {}
    assert planned(4, ours=1.10) == {1: ("none", "faser")}


@pytest.mark.engine
@pytest.mark.slow
def test_a_short_run_measures_every_turn(result: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "smoke.json"
    command = [sys.executable, str(FOLDER / "closed_loop.py"), "--smoke", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    turns = result.read_results(file).turns
    assert {(turn.arm, turn.load) for turn in turns} == {(a, n) for a in ("none", "faser") for n in (1, 2)}
    assert all(turn.tokens_per_s > 0 for turn in turns)
    assert any(turn.accepted_tokens for turn in turns)
    assert all(turn.prompt_steps < turn.steps for turn in turns)
    assert any(0.0 < turn.prompt_steps_s < turn.seconds for turn in turns)
    assert all(turn.plain_firsts <= turn.slices for turn in turns)
    assert any(0.0 < turn.plain_firsts_s < turn.seconds - turn.prompt_steps_s for turn in turns)


def test_what_is_told_of_the_committed_figures_is_in_them(report: ModuleType, result: ModuleType) -> None:
    """docs/results.md, the README's table and the drafter's card."""
    told, root = result.read_results(result.RESULTS), report.ROOT
    assert report.markdown(told).strip() in (root / "docs" / "results.md").read_text()
    readme = (root / "README.md").read_text()
    for load in (1, 2, 4, 8, 16, 32):
        ratios = (result.over_none(told, load), result.envelope_at(told, load).ratio)
        cells = " | ".join(f"{each.value:.2f} ({each.low:.2f} to {each.high:.2f})" for each in ratios)
        assert f"| {load} | {cells} |" in readme
    says_met = "FASER meets the [bar](docs/bench.md#definitions) at every load:" in readme
    assert says_met == all(row[-1] == "met" for row in report.table_rows(told)[1])
    card = json.loads((root / "models" / "weights" / "drafter.card.json").read_text())
    assert card["tokens_per_s_ratio_batch1"] == round(result.over_none(told, 1).value, 3)
