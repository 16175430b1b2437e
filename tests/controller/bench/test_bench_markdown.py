"""The Markdown of a benchmark's results: tables from the file alone, and those in the documents are their files'."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import takewhile
from pathlib import Path
from statistics import geometric_mean, mean, median
from typing import Any

import msgspec
import pytest

import faser
from faser.controller.bench.bench import print_tables
from faser.controller.bench.classes.markdown import class_page
from faser.controller.bench.classes.result import ClassResults, read_class_results
from faser.controller.bench.classes.result import figures as points_of
from faser.controller.bench.markdown import page
from faser.controller.bench.result import BenchSettings, Results, Turn, read_results
from faser.controller.engine.machine import Machine
from faser.controller.errors import UsageError

ROOT = Path(faser.__file__).parent
RESULTS = ROOT / "benchmarks" / "results"
SETTINGS = BenchSettings("target", "ab" * 32, "price", 4, 1, 1.5, 96, 300, 0, 3, ())


def turn(load: int | str, round_: int, arm: str, rate: float, tokens_per_s: float, tpot_ms: float | None) -> Turn:
    return Turn(
        phase="main", load=load, kinds="all", round=round_, arm=arm, rate=rate, tokens_per_s=tokens_per_s,
        seconds=60.0, tokens=4200, requests=60, failed=0, draft_tokens=0, accepted_tokens=0, cpu_s=10.0,
        other_cpu=0.0, steal_share=0.0, load_average=1.0, disturbed="", at="", mean_tpot_ms=tpot_ms,
        good_share=None if tpot_ms is None else 0.25,
    )  # fmt: skip


def results(turns: list[Turn]) -> Results:
    machine = Machine("cpu", 2, 23.5, "Linux")
    return Results(machine, {"vllm": "0.32"}, "abc", SETTINGS, table=((1, 64, 3),), turns=turns)


def cells_of(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("| ").split("|")]


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ")]


def test_each_rival_of_a_replay_is_compared_alone_and_only_goodput_is_the_ratio() -> None:
    turns = [turn("azure-conv", 0, arm, rate, 80.0, tpot_ms) for arm, rate, tpot_ms in (
        ("none", 10.0, 100.0), ("table", 16.0, 50.0), ("faser", 20.0, 40.0),
    )]  # fmt: skip
    told = page(results(turns))
    assert "| no speculation | 10.0 | 25% | 80.0 | 100.0 | 2.000 | 2.500 |" in told
    assert "| best table (1-64=3) | 16.0 | 25% | 80.0 | 50.0 | 1.250 | 1.250 |" in told
    assert "| FASER | 20.0 | 25% | 80.0 | 40.0 |  |  |" in told


def test_a_ratio_of_several_rounds_has_its_interval() -> None:
    turns = [turn("mooncake", at, arm, rate * (1 + at), 80.0, 50.0) for at in range(3) for arm, rate in (
        ("none", 10.0), ("faser", 20.0),
    )]  # fmt: skip
    assert "| 2.000 (2.000 to 2.000) | 1.000 (1.000 to 1.000) |" in page(results(turns))


def test_loads_have_every_rival_beside_the_best_of_them_and_what_each_cost() -> None:
    rates = {"none": [100.0, 101.0, 99.0], "k2": [120.0, 121.0, 119.0], "faser": [126.0, 127.0, 125.0]}
    turns = [turn(1, at, arm, rate, rate, None) for arm, values in rates.items() for at, rate in enumerate(values)]
    told = page(results(turns))
    (row,) = (line for line in rows_of(told) if "k = 2 | 3 | met |" in line)
    assert row.startswith("| 1 | 1.260 (")
    assert "| 1 | FASER | 126.0 | 0.00 |  | 0.00 | 2.4 |" in told
    assert "started anew" not in told
    assert "huge pages" not in told


def test_loads_are_told_by_cpu_time_too_where_it_was_looked_at() -> None:
    costs_s = {"none": 42.0, "k2": 21.0, "faser": 20.0}
    rounds = [turn(1, at, arm, 9.0 + at, 9.0 + at, None) for at in range(3) for arm in costs_s]
    looked = [msgspec.structs.replace(each, compute_s=costs_s[each.arm], kinds="code") for each in rounds]
    told = page(results([*rounds, *looked]))
    by_clock, by_cpu = (told.split("CPU time of the threads that compute")[0].split("\n\n")[at] for at in (1, 3))
    assert "| 1, code | 1.000 (" in by_clock
    assert rows_of(by_cpu)[1:] == [
        "| --- | --- | --- | --- | --- |",
        "| 1, code | 2.100 (2.100 to 2.100) | 1.050 (1.050 to 1.050) | 1.050 (1.050 to 1.050) | k = 2 |",
    ], "a point that nobody looked at has no row"
    assert "| 1, code | FASER | 10.0 | 0.00 |  | 0.00 | 2.4 | 4.8 |" in told
    assert "| 1 | FASER | 10.0 | 0.00 |  | 0.00 | 2.4 |  |" in told


def test_how_it_was_measured_is_said() -> None:
    settings = msgspec.structs.replace(SETTINGS, held=160, has_huge_pages=True, temperature=0.7)
    told = msgspec.structs.replace(results([turn(1, 0, "none", 9.0, 9.0, None)]), settings=settings)
    told.failed["suffix"] = "not available"
    for said in (
        "same 160 recorded answers",
        "at temperature 0.7.",
        "in huge pages",
        "Left out: suffix: not available.",
        "1-64=3",
    ):
        assert said in page(told)


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        (("bench_full",), 7), (("bench_sources",), 6), (("bench_sources_many",), 2), (("bench_t07",), 3),
        (("bench_trace",), 5), (("bench_kinds", "bench_kinds_many"), 30), (("bench_kinds_rivals",), 30),
    ],
)  # fmt: skip
def test_tables_in_the_documents_hold_figures_of_their_files(names: tuple[str, ...], rows: int) -> None:
    """A page shows some columns of the files' tables, of a row in several files the last one's, and may word their last
    column otherwise.
    """
    behind = (ROOT / "docs" / "results.md").read_text().partition(f"`{names[-1]}.json`")[2]
    told = [cells_of(row) for row in rows_of(re.split(r"\n##+ ", behind)[0])[1:]]
    whole: dict[str, list[str]] = {}
    for name in names:
        own: dict[str, list[str]] = {}
        for first, *others in map(
            cells_of, rows_of(page(read_results(RESULTS / f"{name}.json")).split("azure-conv swell, all:")[-1])
        ):
            own.setdefault(first, others)
        whole |= own
    assert len(told) == rows
    for first, *figures in told:
        assert [figure for figure in figures if figure[:1].isdigit() and figure not in whole[first]] == []


def test_what_is_said_of_the_means_over_the_other_rivals_is_that_of_their_table() -> None:
    heading = "By kind of prompt, the other rivals"
    ratios: dict[tuple[int, int], list[float]] = {}
    for row in table_below(heading):
        for column in (1, 3, 4):  # the best table, Arctic's rule, the best of the three
            ratios.setdefault((column, int(row[0].split(",")[0])), []).append(float(row[column].split()[0]))
    below = " ".join((ROOT / "docs/results.md").read_text().partition(f"# {heading}\n")[2].split())
    told = re.search(
        r"FASER has (.*) of the best table .* requests, (.*) of Arctic's rule, and (.*) of the best of these", below
    )
    assert told is not None
    for column, figures in zip((1, 3, 4), told.groups(), strict=True):
        wanted = [geometric_mean(ratios[column, load]) for load in (1, 2, 4, 8, 16, 32)]
        assert list(map(float, figures.split(" / "))) == pytest.approx(wanted, abs=0.000501)


def test_what_is_said_of_the_mean_over_kinds_is_that_of_the_table() -> None:
    means: dict[int, list[float]] = {}
    for column in (1, 6):  # over no speculation, over the best rival
        by_load: dict[int, list[float]] = {}
        for row in table_below("By kind of prompt"):
            by_load.setdefault(int(row[0].split(",")[0]), []).append(float(row[column].split()[0]))
        for load, ratios in by_load.items():
            assert len(ratios) == 5
            means.setdefault(load, []).append(geometric_mean(ratios))
    page_said, readme_said = (" ".join((ROOT / path).read_text().split()) for path in ("docs/results.md", "README.md"))
    place = r"it has (\S+) of no speculation at 16 requests .*? and (\S+) at 32 [^,]*, (\S+) and (\S+) of the best"
    told = re.search(place, page_said)
    assert told is not None
    wanted = [means[16][0], means[32][0], means[16][1], means[32][1]]
    assert list(map(float, told.groups())) == pytest.approx(wanted, abs=0.000501)
    short = re.search(r"mean ([\d., and]+) times no speculation from 1 to 32", readme_said)
    assert short is not None
    ratios = list(map(float, re.findall(r"[\d.]*\d", short[1])))
    assert ratios == pytest.approx([means[load][0] for load in (1, 2, 4, 8, 16, 32)], abs=0.0501)
    assert ratios[4:] == pytest.approx([means[load][0] for load in (16, 32)], abs=0.00501)


def found_in(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table_below(heading: str, path: str = "docs/results.md") -> list[list[str]]:
    """Return the first table's rows below a heading."""
    below = (ROOT / path).read_text().partition(f"# {heading}\n")[2].splitlines()
    first = next(at for at, line in enumerate(below) if line.startswith("| "))
    return [cells_of(row) for row in takewhile(lambda line: line.startswith("|"), below[first + 2 :])]


def test_the_closed_loops_rates_and_lengths_are_those_of_its_file_and_the_readmes_ratios_those_of_the_page() -> None:
    arms, counts = ("none", "faser"), ("draft_tokens", "tokens", "accepted_tokens")
    told, turns = table_below("Closed loop"), found_in("closed_loop")["turns"]
    for load, rate, length, *_ in told:
        none, ours = ([turn for turn in turns if (turn["load"], turn["arm"]) == (int(load), arm)] for arm in arms)
        drafted, tokens, accepted = (sum(turn[name] for turn in ours) for name in counts)
        assert rate == f"{median(turn['tokens_per_s'] for turn in none):.0f}"
        assert length == f"{drafted / (tokens - accepted):.2f}"
    for column, ratios in enumerate(table_below("Result", "README.md"), 3):
        exact = [float(row[column].partition(" ")[0]) for row in told]
        assert [float(ratio) for ratio in ratios[1:]] == pytest.approx(exact, abs=0.00501)


def test_policies_are_told_as_in_their_file() -> None:
    policies, told = found_in("policies")["policies"], table_below("Policies in simulation")
    assert len(told) > 15
    for name, middle, least, *over in told:
        own = policies[name.partition(",")[0]]
        low, high = own["over_price_ci"]
        assert (middle, least) == (f"{own['envelope_ratio_mean']:.3f}", f"{own['envelope_ratio_min']:.3f}")
        assert over == ([] if name == "price" else [f"{own['over_price']:.3f} ({low:.3f}..{high:.3f})"])


def test_what_parts_earn_is_told_as_in_its_file() -> None:
    points, told = found_in("ablation")["points"], table_below("What each part of `price` earns")
    earned = {f"{100 * (own['ratio'] - 1):+.2f} ± {100 * own['half_width']:.2f}" for own in points}
    assert len(told) > 10
    for _, *cells, _, _ in told:
        figures = [cell.partition(" (")[0] for cell in cells]
        assert [figure for figure in figures if figure != "0.00" and figure not in earned] == []


def test_what_is_gained_inside_adaptive_verification_is_told_as_in_its_file() -> None:
    points, told = found_in("adaptive")["points"], table_below("Inside adaptive verification")
    assert [world for world, *_ in told] == list(dict.fromkeys(point["world"] for point in points))
    for world, *cells in told:
        for cell, rival in zip(cells, ("over vLLM's own", "over its best length"), strict=True):
            own = [point[rival]["ratio"] for point in points if point["world"] == world and point["load"] <= 32]
            assert cell == f"{mean(own):.3f} ({min(own):.3f} to {max(own):.3f})"


def test_what_matches_are_worth_is_told_as_in_their_file() -> None:
    rows, told = found_in("matches")["rows"], table_below("Copied drafts")
    assert len(told) == 6
    for kind, *cells in told:
        own = [row for row in rows if row["kind"] == ("all" if kind.startswith("**") else kind)]
        assert [row["temperature"] for row in own] == [0.0, 0.7]
        names = ("share", "first_right", "tokens_per_step")
        figures = [
            f"{100 * row[name]:.0f} %" if name == "share" else f"{row[name]:.2f}" for row in own for name in names
        ]
        assert cells == figures


def test_how_far_two_sources_can_go_is_told_as_in_its_file() -> None:
    rows = [row for row in found_in("sources")["rows"] if row["kind"] == "all"]
    told = table_below("How far two sources can go")
    assert [row[:2] for row in told] == [[f"{row['temperature']:g}", str(row["load"])] for row in rows]
    for row, (_, _, head, copies, mixed, _, hindsight, over_single) in zip(rows, told, strict=True):
        rates = max(row["heads"]), row["copies"], row["mixed"], row["hindsight"]
        assert [head, copies, mixed, hindsight] == [f"{rate / row['none']:.2f}" for rate in rates]
        assert over_single == f"{row['mixed_of_single']:.3f}"


def test_a_file_that_holds_no_results_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "a.json").write_text(json.dumps({"machine": {}}))
    for bad in (path, tmp_path / "none.json"):
        with pytest.raises(UsageError, match=r"^--table [^\n]+; expected the results of an earlier run$"):
            print_tables(bad)
    print_tables(RESULTS / "bench_quick.json")
    assert rows_of(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("file", "arms"),
    [("bench_classes", 4), ("bench_classes_all", 8), ("bench_classes_starts", 4), ("bench_classes_paces", 8)],
)
def test_the_classes_table_in_the_documents_is_its_files(file: str, arms: int) -> None:
    """The page leaves out intervals and columns; the documents' shares have their intervals, its rates none."""
    section = (ROOT / "docs" / "results.md").read_text().partition(f"`{file}.json`")[2].partition("\n## ")[0]
    told = {name.strip("`"): figures for name, *figures in map(cells_of, rows_of(section)[1 : 1 + arms])}
    page_of = class_page(read_class_results(RESULTS / f"{file}.json", "--table"))
    whole = {name: figures for name, *figures in map(cells_of, rows_of(page_of)[2:])}
    assert told.keys() == whole.keys()
    for name, (urgent, batch, rate, goodput) in told.items():
        seen_urgent, seen_batch, _, seen_rate, seen_goodput, *_ = (each.replace("%", " %") for each in whole[name])
        assert urgent == seen_urgent.replace(" % to", " to").replace("(0 % to", "(0 to").replace(" %)", ")")
        assert seen_batch.startswith(batch)
        seen = [float(each.split()[0]) for each in (seen_rate, seen_goodput)]
        assert [float(rate), float(goodput)] == pytest.approx(seen, abs=0.51)


def test_the_table_of_rising_load_in_the_documents_is_its_file() -> None:
    """Goodput and the interactive class's share at every peak."""
    section = (
        (ROOT / "docs" / "results.md").read_text().partition("`bench_classes_open.json`")[2].partition("\n### ")[0]
    )
    told = {name.strip("`"): figures for name, *figures in map(cells_of, rows_of(section)[1:])}
    page_of = class_page(read_class_results(RESULTS / "bench_classes_open.json", "--table"))
    seen: dict[str, list[list[str]]] = {}
    for name, *figures in map(cells_of, rows_of(page_of)):
        seen.setdefault(name, []).append(figures)
    assert len(told) == 8
    for name, figures in told.items():
        goodput, shares = figures[:3], figures[3:]
        assert goodput == [point[4].split()[0] for point in seen[name]]
        assert shares == [point[0].split("%")[0] + " %" for point in seen[name]]


def kept_by_arm(found: ClassResults, by_start: dict[int, list[int]]) -> dict[str, dict[str, tuple[int, int]]]:
    """Return by arm and class how many requests were in time and ended; FASER's interactive ones by start, too."""
    kept: dict[str, dict[str, tuple[int, int]]] = {}
    for each in found.class_turns:
        for name, count in each.classes.items():
            own = kept.setdefault(each.turn.arm, {})
            before = own.get(name, (0, 0))
            own[name] = before[0] + count.in_time, before[1] + count.finished
            if (each.turn.arm, name) == ("faser", "interactive"):
                start = by_start.setdefault(each.turn.start, [0, 0])
                start[0], start[1] = start[0] + count.in_time, start[1] + count.finished
    return kept


def test_what_is_said_of_classes_is_in_their_files() -> None:
    """Requests in time over all starts, and goodput at the knee."""
    kept, ended, seen = Counter[tuple[str, int]](), Counter[tuple[str, int]](), Counter[tuple[int, str]]()
    closed = read_class_results(RESULTS / "bench_classes_all.json", "--table")
    for each in closed.class_turns:
        start = each.turn.start, each.turn.arm
        turn = each.turn.arm, seen[start]  # the arm's first turn of a start, or its second
        kept[turn] += each.classes["interactive"].in_time
        ended[turn] += each.classes["interactive"].finished
        seen[start] += 1
    page, readme = (" ".join((ROOT / name).read_text().split()) for name in ("docs/results.md", "README.md"))
    first, second = ((kept["faser", turn], ended["faser", turn]) for turn in (0, 1))
    assert f"it keeps {first[0]} of {first[1]}, in the second {second[0]} of {second[1]}" in page
    assert f"FASER keeps {first[0] + second[0]} of {first[1] + second[1]} interactive requests" in page
    shares = {arm.arm: arm.attainment["interactive"].value or 0.0 for arm in points_of(closed)[0].arms}
    assert f"FASER keeps {shares.pop('faser'):.0%} of these".replace("%", " %") in readme
    assert shares["none"] == shares["table"] == 0.0
    assert f"up to {max(shares.values()):.0%};".replace("%", " %") in readme
    again = read_class_results(RESULTS / "bench_classes_again.json", "--table")
    starts = [
        [
            each.classes["interactive"]
            for each in again.class_turns
            if (each.turn.arm, each.turn.start) == ("faser", start)
        ]
        for start in (0, 1)
    ]
    (kept_0, ended_0), (kept_1, ended_1) = (
        (sum(each.in_time for each in start), sum(each.finished for each in start)) for start in starts
    )
    share = f"{(kept_0 + kept_1) / (ended_0 + ended_1):.0%}".replace("%", " %")
    assert f"FASER kept {kept_0 + kept_1} of {ended_0 + ended_1} interactive requests, {share}" in page
    assert f"{kept_0} of {ended_0} in the first start, {kept_1} of {ended_1} in the second" in page
    assert f"behind the look that sets objectives {share}." in readme
    by_start: dict[int, list[int]] = {}
    most = (0, 1)
    for name, own in kept_by_arm(read_class_results(RESULTS / "bench_classes_paces.json", "--table"), by_start).items():
        if name != "faser":
            most = max(most, own["interactive"], key=lambda each: each[0] / each[1])
            continue
        (urgent, asked), (batch, all_batch) = own["interactive"], own["batch"]
        assert batch == all_batch
        told = f"{urgent} of {asked}, {urgent / asked:.0%}, and all {batch} of the batch class".replace("%", " %")
        assert told in page
    shares_told = ", ".join(f"{done} of {ended}" for done, ended in by_start.values())
    assert (
        f"(the table has means over starts: {shares_told}); no other arm keeps more than {most[0]} of {most[1]}."
        in page
    )
    assert f"{urgent} of {asked} of these (three starts)" in readme
    (_, knee, _) = points_of(read_class_results(RESULTS / "bench_classes_open.json", "--table"))
    over = [arm.over.value for arm in knee.arms if arm.arm != "faser" and arm.over.value is not None]
    low, high = min(over), max(over)
    assert f"FASER has {low:.2f} to {high:.2f} times the goodput of every other arm" in page
    assert f"{low:.1f} to {high:.1f} times that of every rival at the knee" in readme
