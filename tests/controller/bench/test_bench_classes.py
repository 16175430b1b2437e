"""A benchmark with classes of requests: what it asks for, how arms take turns, who keeps what."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from faser.controller.bench import arms as bench_arms
from faser.controller.bench import workload as bench_work
from faser.controller.bench.arm import Arm, Bed
from faser.controller.bench.arms import Arms
from faser.controller.bench.bench import BenchOptions
from faser.controller.bench.best_table import Table
from faser.controller.bench.classes import course as class_course
from faser.controller.bench.classes import plan as class_plan
from faser.controller.bench.classes.bench import (
    ClassOptions,
    print_class_tables,
    require_no_class_flags,
    run_class_bench,
)
from faser.controller.bench.classes.clients import ClassLoad, tokens_between
from faser.controller.bench.classes.course import ClassCourse
from faser.controller.bench.classes.markdown import class_page
from faser.controller.bench.classes.plan import ClassPlan, ClassShare, busiest, dealt, in_shares, marked, parse_classes
from faser.controller.bench.classes.result import (
    ClassCount,
    ClassResults,
    ClassTurn,
    figures,
    has_classes,
    read_class_results,
    summary,
    wilson_interval,
    write_class_results,
)
from faser.controller.bench.classes.view import write_class_picture
from faser.controller.bench.plan import BenchPlan
from faser.controller.bench.result import BenchSettings, Results, Turn
from faser.controller.bench.workload import Mix, Replay, closed_stream
from faser.controller.engine.load_summary import RequestResult
from faser.controller.engine.machine import Machine, Noise
from faser.controller.errors import EngineError, UsageError
from faser.env.estimate.objectives import TimeObjective
from faser.env.workload.workload import TimedRequest
from faser.models.embedded.pair import EmbeddedPair

from .fake_arm import FakeArm

pytestmark = pytest.mark.alone

FASER = [sys.executable, "-P", "-c", "from faser.controller.cli.main import main; main()"]
MIX = Mix.parse("all")
SETTINGS = BenchSettings("target", "ab" * 32, "price", 4, 1, 1.5, 96, 300, 0, 3, ())
CLASSES = (ClassShare("interactive", 1, 0.7), ClassShare("batch", 3, 3.0))


def run_results() -> Results:
    return Results(Machine("cpu", 2, 23.5, "Linux"), {"vllm": "0.32"}, "abc", SETTINGS, table=((1, 64, 1),))


# -- what is asked for -------------------------------------------------------------------------------------------------


def test_classes_are_read_as_they_are_written() -> None:
    assert parse_classes("interactive:2:0.7, batch:6:2") == (
        ClassShare("interactive", 2, 0.7), ClassShare("batch", 6, 2.0),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("classes", "seen"),
    [
        ("a:2:0.7,a:6:2.0", "--classes with a twice; expected each name once"),
        ("a:2:0", "the pace '0' in 'a:2:0'; expected 0.05 to 100"),
        ("a:2:-1", "the pace '-1'"),
        ("a:2:nan", "the pace 'nan'"),
        ("a:2:fast", "the pace 'fast'"),
        ("a:60:1,b:5:1", "65 clients; expected 64 in all, which a server runs at once"),
        ("a:65:1", "'65' clients in 'a:65:1'; expected a whole number from 1 to 64"),
        ("a:0:1", "'0' clients"),
        ("a:1.5:1", "'1.5' clients"),
        ("a:2", "--classes with 'a:2'; expected NAME:CLIENTS:PACE"),
        ("a:2:1:3", "--classes with 'a:2:1:3'"),
        ("", "--classes with ''"),
        ("a:2:1,", "--classes with ''"),
        ("own:2:1", "the name 'own'"),
        ("2nd:2:1", "the name '2nd'"),
    ],
)
def test_classes_that_make_no_sense_are_refused_with_one_line(classes: str, seen: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_classes(classes)
    assert seen in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("bench", "classes", "seen"),
    [
        ({"loads": "8"}, {}, "--loads 8 beside --classes"),
        ({"minutes": 3.0}, {}, "--minutes 3 beside --classes"),
        ({"rivals": "k1"}, {}, "--classes without the rival none"),
        ({"kinds": "chat,code"}, {}, "several --kinds beside --classes"),
        ({}, {"seconds": 0.5}, "--class-seconds 0.5"),
        ({}, {"seconds": float("nan")}, "--class-seconds nan"),
        ({}, {"peaks": "1,2"}, "--peaks 1,2 without --trace"),
        ({"traces": ("azure-conv",)}, {"peaks": "0,1"}, "--peaks 0,1"),
        ({"traces": ("azure-conv",)}, {"peaks": "fast"}, "--peaks fast"),
        ({"traces": ("mooncake",), "peak_rps": 500.0, "warp": 1.0}, {}, "a peak of 500/s asked for"),
    ],
)
def test_flags_that_go_together_with_no_classes_are_refused(
    bench: dict[str, Any], classes: dict[str, Any], seen: str
) -> None:
    with pytest.raises(UsageError, match=seen):
        ClassOptions(BenchOptions(**bench), "a:2:0.7", **classes).plan()


def test_flags_of_classes_without_classes_are_refused() -> None:
    require_no_class_flags(None, None)
    for flags in ((45.0, None), (None, "1,2")):
        with pytest.raises(UsageError, match="without --classes"):
            require_no_class_flags(*flags)


def test_a_run_is_a_closed_loop_of_all_clients_or_the_traces_at_every_peak() -> None:
    closed = ClassOptions(BenchOptions(), "a:2:0.7,b:6:2").plan()
    assert closed.points == {"8 clients": None}
    assert (closed.bench.loads, closed.bench.sweep_loads) == ((8,), (8,))
    asked = BenchOptions(traces=("azure-conv",), peak_rps=1.0, swell=True)
    traced = ClassOptions(asked, "a:2:0.7", peaks="2,0.5").plan()
    rates = {name: (each.peak_rps, each.low_rps) for name, each in traced.points.items() if each is not None}
    assert rates == {
        "azure-conv swell at 0.5/s": (0.5, pytest.approx(1 / 12)),
        "azure-conv swell at 2/s": (2.0, pytest.approx(1 / 3)),
    }


# -- who is asked what -------------------------------------------------------------------------------------------------


def test_every_stretch_of_requests_has_the_classes_in_their_shares() -> None:
    order = [each.name for each in in_shares(80, CLASSES)]
    assert Counter(order) == {"interactive": 20, "batch": 60}
    assert all(Counter(order[at : at + 4])["interactive"] == 1 for at in range(0, 80, 4))


def test_each_class_has_its_clients_first_answers_and_its_own_objective() -> None:
    stream = closed_stream(4, MIX, 96, 300, 0)[:40]
    work = dealt(stream, CLASSES, 50.0)
    assert {name: len(each) for name, each in work.items()} == {"interactive": 10, "batch": 30}
    assert {each.tpot_ms for each in work["interactive"]} == {35.0}
    assert {each.tpot_ms for each in work["batch"]} == {150.0}
    firsts = [work["interactive"][0], *work["batch"][:3]]
    assert sorted(each.max_tokens for each in firsts) == [24, 48, 72, 96], "staggered: the load is at once as it stays"
    assert {each.prompt for each in firsts} == {each.prompt for each in stream[:4]}
    assert all(each.tpot_ms is None for each in dealt(stream, CLASSES, None)["batch"])


def test_who_settles_replays_where_most_arrive() -> None:
    times_s = (0.0, 5.0, 10.0, 11.0, 12.5, 20.0, 29.0)
    requests = [TimedRequest(time_s, f"p{at}", "chat", 8) for at, time_s in enumerate(times_s)]
    settled = busiest(requests, 3.0)
    assert [(each.prompt, each.arrival_s) for each in settled] == [("p2", 0.0), ("p3", 1.0), ("p4", 2.5)]
    assert busiest(requests, 1e3) == requests
    assert [each.prompt for each in busiest(requests, 0.5)] == ["p0"]


def test_a_replays_requests_keep_their_times_and_get_classes() -> None:
    requests = Replay("azure-conv", 20.0, 2.0).requests(MIX, 0)
    work = marked(requests, CLASSES, 50.0)
    assert [replace(each, class_name="", tpot_ms=None) for each in work] == requests
    assert {each.class_name for each in work} == {"interactive", "batch"}


# -- what it came to ---------------------------------------------------------------------------------------------------


def answer(sent_s: float, tpot_s: float, tokens: int = 10, outcome: str = "finished", wait_s: float = 0.5) -> Any:
    times_s = [sent_s + wait_s + tpot_s * at for at in range(tokens)]
    return RequestResult(
        0, "chat", "", sent_s, sent_s, outcome, output_tokens=tokens, token_times_s=times_s,  # type: ignore[arg-type]
        token_counts=list(range(1, tokens + 1)), class_name="a", objective=TimeObjective(tpot_s=0.1),
    )  # fmt: skip


def test_a_class_is_judged_by_the_whole_answers_begun_since_all_clients_were_served() -> None:
    results = [
        answer(0.0, 0.5), answer(2.0, 0.05), answer(3.0, 0.2, tokens=30), answer(8.0, 0.2, outcome="cancelled"),
    ]  # fmt: skip
    count = ClassLoad({"a": results}, 1.0, 9.0).counts()["a"]
    assert (count.finished, count.in_time) == (2, 1)
    received = sum(tokens_between(each, 1.0, 9.0) for each in results)
    assert count.tokens == received == 8 + 10 + 28 + 3
    assert count.good_tokens == pytest.approx(received * 10 / 40)


def test_tokens_are_counted_between_two_moments_the_first_left_out() -> None:
    result = answer(0.0, 1.0, tokens=5, wait_s=1.0)
    assert [tokens_between(result, *moments) for moments in ((0.0, 9.0), (1.0, 3.0), (0.5, 0.9), (5.0, 9.0))] == [
        5, 2, 0, 0,
    ]  # fmt: skip


def turn(arm: str, round_: int, in_time: tuple[int, int], **more: Any) -> ClassTurn:
    peak_rps, load = more.pop("peak_rps", None), more.pop("load", "4 clients")
    fixed: dict[str, Any] = {
        "phase": "classes", "load": load, "kinds": "all", "round": round_, "arm": arm, "rate": 40.0,
        "tokens_per_s": 40.0, "seconds": 10.0, "tokens": 400, "requests": 20, "failed": 0, "draft_tokens": 0,
        "accepted_tokens": 0, "cpu_s": 1.0, "other_cpu": 0.0, "steal_share": 0.0, "load_average": 1.0, "disturbed": "",
        "at": "",
    }  # fmt: skip
    counts = {
        each.name: ClassCount(10, good, 200, 20.0 * good) for each, good in zip(CLASSES, in_time, strict=True)
    }  # fmt: skip
    return ClassTurn(Turn(**fixed | more), counts, peak_rps)


def of_turns(*turns: ClassTurn) -> ClassResults:
    return ClassResults(run_results(), CLASSES, 10.0, base_tpot_ms=50.0, class_turns=list(turns))


def test_the_headline_is_who_keeps_every_class_for_nine_requests_in_ten() -> None:
    shares = {"none": (0, 10), "k1": (9, 8), "faser": (9, 9)}
    results = of_turns(*(turn(arm, at, each) for at in range(3) for arm, each in shares.items()))
    point = figures(results)[0]
    assert point.kept_by == ["faser"]
    ours = next(each for each in point.arms if each.arm == "faser")
    assert (ours.attainment["interactive"].value, ours.goodput.value, ours.tokens_per_s.value) == (0.9, 36.0, 40.0)
    over = {each.arm: each.over.value for each in point.arms}
    assert over == {"none": pytest.approx(36 / 20, abs=1e-3), "k1": pytest.approx(36 / 34, abs=1e-3), "faser": 1.0}
    told = class_page(results)
    assert "Every class in time for 90% of its requests: FASER." in told
    assert "interactive 35.0 (0.7), batch 150.0 (3)" in told
    assert "| no speculation | 0% (0% to 11%) | 100% (89% to 100%) | no |" in told


def test_a_class_without_a_whole_answer_is_not_kept_and_leaves_its_cell_empty() -> None:
    lone = turn("faser", 0, (10, 10))
    nothing = msgspec.structs.replace(lone, classes=lone.classes | {"interactive": ClassCount(0, 0, 50, 0.0)})
    point = figures(of_turns(nothing))[0]
    assert point.kept_by == []
    assert "| FASER |  | 100% (72% to 100%) | no |" in class_page(of_turns(nothing))
    json.dumps(summary(of_turns(nothing)), allow_nan=False)


def test_intervals_are_over_starts_if_there_were_several_and_end_where_shares_do() -> None:
    rounds = [turn("faser", at, (good, 10), start=at // 2) for at, good in enumerate((10, 10, 8, 8))]
    share = figures(of_turns(*rounds))[0].arms[0].attainment["interactive"]
    assert (share.value, share.high) == (0.9, 1.0)
    assert share.low is not None
    assert share.low < 0.8, "two values tell little"
    assert figures(of_turns(*rounds))[0].starts == 2


def test_a_dozen_requests_without_a_miss_are_no_certainty() -> None:
    assert wilson_interval(10, 10) == (pytest.approx(0.7225, abs=1e-3), 1.0)
    assert wilson_interval(5, 10) == (pytest.approx(0.2366, abs=1e-3), pytest.approx(0.7634, abs=1e-3))
    assert wilson_interval(0, 1000)[1] < 0.004


def test_disturbed_rounds_count_only_where_too_few_are_quiet() -> None:
    quiet = [turn("faser", at, (10, 10)) for at in range(3)]
    noisy = turn("faser", 3, (0, 10), disturbed="0.50 cores used by others")
    assert figures(of_turns(*quiet, noisy))[0].kept_by == ["faser"]
    few = figures(of_turns(*quiet[:2], noisy))[0]
    assert (few.kept_by, few.uses_disturbed, few.disturbed_rounds) == ([], True, 1)


def test_the_picture_has_shares_goodput_and_goodput_by_load(tmp_path: Path) -> None:
    closed = [turn(arm, at, (9, 10)) for at in range(2) for arm in ("none", "faser")]
    opened = [
        turn(arm, 0, (5, 5), load=f"azure-conv at {rate}/s", peak_rps=rate)
        for rate in (1.0, 2.0) for arm in ("none", "faser")
    ]  # fmt: skip
    results = of_turns(*closed, *opened)
    assert results.points() == ["4 clients", "azure-conv at 1.0/s", "azure-conv at 2.0/s"]
    for name in ("p.svg", "p.png"):
        write_class_picture(results, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    write_class_picture(of_turns(*opened), tmp_path / "open.svg")
    assert "requests/s" in (tmp_path / "open.svg").read_text()


def test_a_file_of_classes_is_known_and_its_tables_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    write_class_results(of_turns(turn("faser", 0, (9, 9))), path)
    assert has_classes(path)
    print_class_tables(path)
    assert capsys.readouterr().out == class_page(read_class_results(path, "--table")) + "\n"
    (other := tmp_path / "other.json").write_bytes(msgspec.json.encode(run_results()))
    assert not has_classes(other)
    assert not has_classes(tmp_path / "missing.json")


def test_a_run_goes_on_only_with_the_same_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faser.controller.bench.bench.ensure_embedded_pair", lambda: pytest.fail("a model was made"))
    write_class_results(of_turns(turn("faser", 0, (9, 9))), path := tmp_path / "r.json")
    asked = BenchOptions(resume=path, rivals="none")
    for classes, seconds, seen in (
        ("a:2:0.7", 10.0, "other --classes; expected interactive:1:0.7,batch:3:3, as in the file"),
        ("interactive:1:0.7,batch:3:3", 20.0, "--class-seconds 20; expected 10"),
    ):
        with pytest.raises(UsageError, match=seen):
            run_class_bench(ClassOptions(asked, classes, seconds))
    with pytest.raises(UsageError, match=r"r\.json exists"):
        run_class_bench(ClassOptions(BenchOptions(out=path, rivals="none"), "a:2:0.7"))


# -- turns -------------------------------------------------------------------------------------------------------------


class ClassArm(FakeArm):
    """A fake server that keeps what it was asked and sees itself frozen only while nobody waits for an answer."""

    def __init__(self, name: str, step_s: float = 0.01, burst: int = 1, lives: int | None = None) -> None:
        super().__init__(name, step_s, burst, lives)
        self.asked: list[dict[str, Any]] = []
        self.in_flight = self.frozen_amid = 0

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((await request.json()).get("vllm_xargs", {}))
        self.in_flight += 1
        try:
            return await super()._answer(request)
        finally:
            self.in_flight -= 1

    async def freeze(self) -> None:
        self.frozen_amid += self.in_flight if self.asked else 0
        await super().freeze()


def measure(
    plan: ClassPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arms: dict[str, ClassArm], noisy: int = 0
) -> ClassResults:
    """Run a benchmark with classes on fake arms; the first `noisy` measured turns are disturbed."""
    found = ClassResults(run_results(), plan.classes, plan.seconds)
    reasons = iter(["0.50 cores used by others"] * noisy)
    monkeypatch.setattr(Noise, "reason", lambda self, cores: next(reasons, ""))
    monkeypatch.setattr(class_course, "_CLOSE_S", 0.05)
    monkeypatch.setattr(class_course, "SETTLE_S", 0.2)
    monkeypatch.setattr(bench_work, "MOST_REQUESTS", 300)
    monkeypatch.setattr(bench_arms, "free_gib", lambda: 100.0)
    monkeypatch.setattr(bench_arms, "require_memory", lambda engines, gib: None)

    def start(name: str, bed: Bed, table: Table) -> ClassArm:
        return arms.setdefault(name, ClassArm(name))

    monkeypatch.setattr(Arm, "start", start)
    bed = Bed(EmbeddedPair(tmp_path, tmp_path), tmp_path, tmp_path, "off", 1)
    course = ClassCourse(
        plan.bench, found.run, tmp_path / "r.json", bed, lambda text: None, lambda what, share: None,
        class_plan=plan, found=found,
    )  # fmt: skip

    async def run() -> None:
        arrange = course.arms.arrange

        async def opened(wanted: Any) -> Any:
            for name in wanted:
                arm = arms.setdefault(name, ClassArm(name))
                if arm._server is None:
                    await arm.open()
            return await arrange(wanted)

        monkeypatch.setattr(Arms, "arrange", lambda self, wanted: opened(wanted))
        await course.run()

    asyncio.run(run())
    assert read_class_results(tmp_path / "r.json", "--table") == found
    return found


def class_bench(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.9, **parts: Any) -> ClassPlan:
    monkeypatch.setattr(class_plan, "LEAST_SECONDS", 0.1)
    fixed: dict[str, Any] = {
        "loads": (4,), "replays": (), "mixes": (MIX,), "rivals": ("none",), "pairs": 2, "table_lengths": (0, 1),
        "turn_s": 0.1, "max_tokens": 12, "least_tokens": 24,
    }  # fmt: skip
    peaks = parts.pop("peaks", (1.0,))
    return ClassPlan(CLASSES, BenchPlan(**fixed | parts), seconds, peaks)


def test_the_faster_arm_keeps_the_class_that_no_speculation_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = {"none": ClassArm("none"), "faser": ClassArm("faser", burst=3)}
    found = measure(class_bench(monkeypatch), tmp_path, monkeypatch, arms)
    assert [(each.turn.round, each.turn.arm) for each in found.class_turns] == [
        (0, "none"), (0, "faser"), (1, "faser"), (1, "none"),
    ]  # fmt: skip
    assert found.base_tpot_ms == pytest.approx(11.0, rel=0.4)
    point = figures(found)[0]
    assert point.kept_by == ["faser"]
    assert {each.arm: each.attainment["batch"].value for each in point.arms} == {"none": 1.0, "faser": 1.0}
    assert next(each for each in point.arms if each.arm == "none").attainment["interactive"].value == 0.0
    assert found.class_turns[1].goodput > 1.5 * found.class_turns[0].goodput
    assert all(arm.ended for arm in arms.values())


def test_requests_carry_their_objectives_and_the_pace_is_measured_without_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = {"none": ClassArm("none"), "faser": ClassArm("faser")}
    found = measure(class_bench(monkeypatch, pairs=1), tmp_path, monkeypatch, arms)
    assert found.base_tpot_ms is not None
    promised = {each.pace * found.base_tpot_ms for each in CLASSES}
    assert {said["faser_tpot_ms"] for said in arms["faser"].asked} == promised
    assert {} in arms["none"].asked
    asked = Counter(said["faser_tpot_ms"] for said in arms["faser"].asked)
    assert asked[0.7 * found.base_tpot_ms] < asked[3.0 * found.base_tpot_ms]


@pytest.mark.parametrize(("learn_s", "times"), [(0.0, 1), (20.0, 2)])
def test_an_arm_that_learns_serves_unmeasured_twice_in_each_start(
    learn_s: float, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[str] = []
    settle = ClassCourse._settle_classes

    async def settling(course: ClassCourse, point: str, each: Any, arm: Any) -> None:
        settled.append(arm.name)
        await settle(course, point, each, arm)

    monkeypatch.setattr(ClassCourse, "_settle_classes", settling)
    arms = {"none": ClassArm("none"), "faser": ClassArm("faser")}
    measure(class_bench(monkeypatch, pairs=1, starts=2, learn_s=learn_s), tmp_path, monkeypatch, arms)
    assert settled == ["none", *["faser"] * times] * 2


def test_each_start_tells_its_objectives_by_a_pace_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines change between starts: here a token takes twice as long in the second."""
    arms = {"none": ClassArm("none"), "faser": ClassArm("faser")}
    bench = class_bench(monkeypatch, pairs=1, starts=2)
    arrange = ClassCourse._arrange

    async def arranged(course: ClassCourse, group: Any) -> Any:
        if course.found.class_turns:
            for arm in arms.values():
                arm.step_s = 0.02
        return await arrange(course, group)

    monkeypatch.setattr(ClassCourse, "_arrange", arranged)
    found = measure(bench, tmp_path, monkeypatch, arms)
    first, second = found.bases_ms()
    assert second == pytest.approx(2.0 * first, rel=0.4)
    assert [each.base_tpot_ms for each in found.class_turns] == [first, first, second, second]
    assert f"interactive {0.7 * first:.1f}/{0.7 * second:.1f} (0.7)" in class_page(found)
    assert summary(found)["bases_tpot_ms"] == [first, second]


def test_a_later_start_whose_pace_cannot_be_had_goes_on_with_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is too busy at that moment does not end a run of hours."""
    paces = iter([50.0, EngineError("without speculation 9 tokens came in 2 pieces"), 70.0])

    async def base(course: ClassCourse) -> float:
        pace = next(paces)
        if isinstance(pace, EngineError):
            raise pace
        return pace

    monkeypatch.setattr(ClassCourse, "_base_tpot_ms", base)
    arms = {"none": ClassArm("none"), "faser": ClassArm("faser")}
    found = measure(class_bench(monkeypatch, pairs=1, starts=3), tmp_path, monkeypatch, arms)
    assert [each.base_tpot_ms for each in found.class_turns] == [50.0] * 4 + [70.0] * 2


def test_turns_of_an_older_file_keep_the_pace_that_was_the_files() -> None:
    older = of_turns(turn("faser", 0, (9, 9)))
    newer = msgspec.structs.replace(turn("faser", 1, (9, 9)), base_tpot_ms=60.0)
    turns = [each.with_base(older.base_tpot_ms) for each in (*older.class_turns, newer)]
    assert [each.base_tpot_ms for each in turns] == [50.0, 60.0]


def test_no_arm_is_frozen_while_it_owes_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = {"none": ClassArm("none"), "faser": ClassArm("faser")}
    measure(class_bench(monkeypatch), tmp_path, monkeypatch, arms)
    assert {arm.frozen_amid for arm in arms.values()} == {0}
    assert {name: arm.freezes for name, arm in arms.items()} == {"none": 5, "faser": 4}, "at its start and each end"


def test_a_disturbed_round_of_classes_is_repeated_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure(class_bench(monkeypatch, pairs=1), tmp_path, monkeypatch, {}, noisy=3)
    assert [(each.turn.round, bool(each.turn.disturbed)) for each in found.class_turns] == [
        (0, True), (0, False), (1, False), (1, False),
    ]  # fmt: skip


def test_all_servers_are_started_anew_and_every_arm_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = class_bench(monkeypatch, pairs=1, starts=2, rivals=("none", "k1"))
    found = measure(wanted, tmp_path, monkeypatch, {})
    assert Counter((each.turn.start, each.turn.arm) for each in found.class_turns) == Counter(
        (start, arm) for start in range(2) for arm in ("none", "k1", "faser")
    )
    assert figures(found)[0].starts == 2


def test_an_open_loop_is_measured_at_every_peak_and_counts_all_of_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = Replay("azure-conv", 1.0, 4.0, warp=20.0)
    wanted = class_bench(monkeypatch, 1.0, pairs=1, loads=(), replays=(replay,), peaks=(1.0, 2.0))
    arms = {"none": ClassArm("none", step_s=0.003), "faser": ClassArm("faser", step_s=0.003, burst=3)}
    spans_s, replayed = [], class_course.replay

    async def noted(arm: Arm, work: Sequence[TimedRequest], *rest: Any) -> Any:
        spans_s.append(work[-1].arrival_s - work[0].arrival_s)
        return await replayed(arm, work, *rest)

    monkeypatch.setattr(class_course, "replay", noted)
    found = measure(wanted, tmp_path, monkeypatch, arms)
    assert sum(span_s <= class_course.SETTLE_S for span_s in spans_s) == len(spans_s) // 2 == 4  # who settles
    assert found.points() == ["azure-conv at 4/s", "azure-conv at 8/s"]
    for each in found.class_turns:
        assert sum(count.finished for count in each.classes.values()) == each.turn.requests > 0
        assert sum(count.tokens for count in each.classes.values()) == each.turn.tokens
    assert [point.peak_rps for point in figures(found)] == [4.0, 8.0]


def test_a_rival_that_dies_is_reported_and_classes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = {"k1": ClassArm("k1", lives=1)}
    wanted = class_bench(monkeypatch, pairs=1, rivals=("none", "k1"))
    found = measure(wanted, tmp_path, monkeypatch, arms)
    assert set(found.run.failed) == {"k1"}
    assert {each.turn.arm for each in found.class_turns} == {"none", "faser"}


def test_without_a_server_without_speculation_there_is_no_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = {"none": ClassArm("none", lives=0)}
    with pytest.raises(EngineError, match=r"no server without speculation to take the pace from: .*out of memory"):
        measure(class_bench(monkeypatch), tmp_path, monkeypatch, arms)


def test_answers_longer_than_a_turn_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match=r"no answer ended within 1 s"):
        measure(class_bench(monkeypatch, seconds=1.0, max_tokens=960), tmp_path, monkeypatch, {})


def test_answers_in_one_piece_are_no_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = {"none": ClassArm("none", step_s=0.05, burst=300)}
    with pytest.raises(EngineError, match=r"tokens came in \d+ pieces; expected one by one"):
        measure(class_bench(monkeypatch), tmp_path, monkeypatch, arms)


@pytest.mark.engine
@pytest.mark.slow  # `make proof`
def test_real_servers_serve_classes(tmp_path: Path) -> None:
    flags = ["--classes", "interactive:1:0.8,batch:2:3", "--class-seconds", "6", "--rivals", "none", "--pairs", "1"]
    command = [*FASER, "bench", *flags, "--max-tokens", "16", "--json", "--out", str(tmp_path / "r.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["base_tpot_ms"] > 0
    point = told["points"][0]
    assert [arm["arm"] for arm in point["arms"]] == ["none", "faser"]
    assert all(arm["attainment"]["batch"]["value"] is not None for arm in point["arms"])
    assert (tmp_path / "r.svg").read_text().startswith("<?xml")
    turns = read_class_results(tmp_path / "r.json", "--table").class_turns
    assert any(each.turn.draft_tokens for each in turns if each.turn.arm == "faser")
