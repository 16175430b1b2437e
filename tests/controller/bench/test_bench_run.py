"""A benchmark's course: against servers that stream as vLLM does, and once against real ones."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from faser.controller.bench import (
    arm as bench_server,
)
from faser.controller.bench import (
    arms as bench_arms,
)
from faser.controller.bench import (
    course as bench_run,
)
from faser.controller.bench import (
    workload as bench_work,
)
from faser.controller.bench.arm import Arm, Bed, Drafting
from faser.controller.bench.arms import Arms
from faser.controller.bench.bench import BenchOptions, run_bench
from faser.controller.bench.best_table import Table
from faser.controller.bench.clients import LEAST_TOKENS, Clients, Stopwatch, Times
from faser.controller.bench.course import Bench
from faser.controller.bench.plan import MATCHERS, POLICIES, VARIANTS, BenchPlan
from faser.controller.bench.ratio import Objective
from faser.controller.bench.result import BenchSettings, Latency, Results, Spans, read_results, summary
from faser.controller.bench.turn import LEAST_STEPS
from faser.controller.bench.workload import Mix, Replay, closed_stream
from faser.controller.engine.machine import Machine, Noise
from faser.controller.errors import EndpointError, EngineError, ModelError, StoreError, UsageError
from faser.controller.held_answers.answers import Answer, record
from faser.controller.held_answers.engine import HeldWorker
from faser.controller.link.endpoint import socket_folder
from faser.models.embedded.pair import EmbeddedPair, ensure_embedded_pair
from faser.models.embedded.precision import DTYPES

from .fake_arm import FakeArm

pytestmark = pytest.mark.alone

FASER = [sys.executable, "-P", "-c", "from faser.controller.cli.main import main; main()"]
MIX = Mix.parse("all")
NO_SPANS = Spans(None, None, None)
SETTINGS = BenchSettings("target", "ab" * 32, "price", 4, 1, 1.5, 96, 300, 0, 3, ())


def test_time_in_which_a_server_is_frozen_is_in_no_figure_and_no_token_is_lost() -> None:
    async def run() -> tuple[float, Clients, FakeArm]:
        arm = FakeArm("none", step_s=0.01)
        await arm.open()
        clients = Clients(arm, closed_stream(2, MIX, 24, 300, 0), 2, "m")
        began_s = time.perf_counter()
        served = []
        for _ in range(3):
            served.append(await clients.serve(clients.tokens + 30))
            arm.frozen_s += 9.0
            await asyncio.sleep(0.3)
        wall_s = time.perf_counter() - began_s
        assert [each.tokens > 0 for each in served] == [True] * 3
        assert sum(each.tokens for each in served) == clients.tokens == arm.emitted
        assert sum(each.prompt_tokens for each in served) == clients.prompt_tokens >= 3 * clients.finished > 0
        assert all(each.thread_s == {7: pytest.approx(each.tokens / 1000, abs=0.02)} for each in served)
        measured_s = sum(each.seconds for each in served)
        assert measured_s < wall_s - 0.8
        times = clients.times()
        assert len(times.ttft_ms) >= clients.finished >= len(times.e2e_ms) > 0
        assert all(0 < tpot_ms < 1e3 * (wall_s - 0.8) / LEAST_TOKENS for tpot_ms in times.tpot_ms)
        assert times.tpot_ms
        assert all(0 < e2e_ms < 1e3 * (wall_s - 0.8) for e2e_ms in times.e2e_ms)
        clients.settle()
        assert clients.times() == Times()
        await arm.thaw()
        await clients.end()
        await arm.close()
        return measured_s, clients, arm

    measured_s, clients, arm = asyncio.run(run())
    assert arm.freezes == 3
    assert clients.finished
    assert measured_s > 0


def test_tokens_that_come_before_the_thaw_is_answered_cost_time_too() -> None:
    async def run() -> float:
        arm = FakeArm("none", step_s=0.005)
        thaw = arm.thaw

        async def slow_thaw() -> None:
            await thaw()
            await asyncio.sleep(0.2)

        await arm.open()
        clients = Clients(arm, closed_stream(1, MIX, 64, 300, 0), 1, "m")
        await clients.serve(4)
        arm.thaw = slow_thaw  # type: ignore[method-assign]
        served = await clients.serve(clients.tokens + 1)
        await arm.thaw()
        await clients.end()
        await arm.close()
        return served.tokens / served.seconds

    assert asyncio.run(run()) <= 1 / 0.005


def test_a_stopwatch_runs_only_between_start_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, now_s = Stopwatch(), 10.0
    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    seen = []
    for change, after_s in ((watch.start, 2.0), (watch.stop, 5.0), (watch.start, 1.0), (watch.stop, 9.0)):
        change()
        now_s += after_s
        seen.append(watch())
    assert seen == [2.0, 2.0, 3.0, 3.0]


def test_a_failed_request_ends_the_turn_and_is_named() -> None:
    async def run() -> None:
        async def refuse(request: web.Request) -> web.Response:
            return web.Response(status=500, text="no more room")

        arm = FakeArm("none")
        arm._answer = refuse  # type: ignore[assignment, method-assign]
        await arm.open()
        clients = Clients(arm, closed_stream(1, MIX, 10, 300, 0), 1, "m")
        try:
            with pytest.raises(EngineError, match="none failed a request: HTTP 500: no more room"):
                await clients.serve(10)
        finally:
            await clients.end()
            await arm.close()

    asyncio.run(run())


def measure(
    plan: BenchPlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arms: dict[str, FakeArm],
    noisy: int = 0,
    **before: Any,
) -> Results:
    """Run a benchmark on fake arms; the first `noisy` turns are disturbed. `before`: what an earlier run left."""
    results = Results(Machine("cpu", 2, 23.5, "Linux"), {}, "abc", SETTINGS, **before)
    reasons = iter(["0.50 cores used by others"] * noisy)
    monkeypatch.setattr(Noise, "reason", lambda self, cores: next(reasons, ""))
    monkeypatch.setattr(bench_run, "_CLOSE_S", 0.0)
    monkeypatch.setattr(bench_work, "MOST_REQUESTS", 200)
    monkeypatch.setattr(bench_arms, "free_gib", lambda: 100.0)
    monkeypatch.setattr(bench_arms, "require_memory", lambda engines, gib: None)
    tables: list[Table] = []

    def start(name: str, bed: Bed, table: Table) -> FakeArm:
        tables.append(table)
        return arms.setdefault(name, FakeArm(name))

    monkeypatch.setattr(Arm, "start", start)
    bed = Bed(EmbeddedPair(tmp_path, tmp_path), tmp_path, tmp_path, "off", 1, is_sampled=plan.temperature > 0)
    bench = Bench(plan, results, tmp_path / "result.json", bed, lambda text: None, lambda what, share: None)

    async def run() -> None:
        arrange = bench.arms.arrange

        async def opened(wanted: Any) -> Any:
            for name in wanted:
                arm = arms.setdefault(name, FakeArm(name))
                if arm._server is None:
                    await arm.open()
            return await arrange(wanted)

        monkeypatch.setattr(Arms, "arrange", lambda self, wanted: opened(wanted))
        await bench.run()

    asyncio.run(run())
    assert read_results(tmp_path / "result.json") == results
    return results


def plan(**parts: Any) -> BenchPlan:
    fixed: dict[str, Any] = {
        "loads": (2,), "replays": (), "mixes": (MIX,), "rivals": ("none", "k1"), "pairs": 2, "table_lengths": (0, 1),
        "turn_s": 0.1, "max_tokens": 16, "least_tokens": 24,
    }  # fmt: skip
    return BenchPlan(**fixed | parts)


def test_arms_take_turns_of_the_same_work_and_the_faster_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = {"faser": FakeArm("faser", burst=8), "k1": FakeArm("k1")}
    results = measure(plan(least_tokens=120), tmp_path, monkeypatch, arms)
    assert [turn.arm for turn in results.turns] == ["none", "k1", "faser"] * 2
    point = summary(results)["points"][0]
    assert point["envelope_ratio"] > 1.5
    assert all(turn.compute_s == pytest.approx(turn.tokens / 1000, rel=0.4) for turn in results.turns)
    totals = {name: sum(turn.tokens for turn in results.turns if turn.arm == name) for name in arms}
    assert totals["faser"] == pytest.approx(totals["k1"], rel=0.4)  # bursts in flight at the end count too
    assert {latency.arm for latency in results.latencies} == {"none", "k1", "faser"}
    assert all(arm.ended for arm in arms.values())


def test_the_slices_of_a_round_go_round_among_the_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, slice_ = [], Bench._slice

    async def seen(self: Bench, clients: Clients, goal: int, least: int, arm: Arm) -> Any:
        found = await slice_(self, clients, goal, least, arm)
        served.append((arm.name, clients.tokens >= goal))
        return found

    monkeypatch.setattr(Bench, "_slice", seen)
    results = measure(plan(least_tokens=160, slice_s=0.0, pairs=1), tmp_path, monkeypatch, {})
    count = 160 // (LEAST_STEPS * 2)
    order = [("none", "k1", "faser"), ("k1", "faser", "none"), ("faser", "none", "k1")]
    assert served == [(name, True) for at in range(count) for name in order[at % 3]]
    assert [turn.slices for turn in results.turns] == [count] * 3


def test_all_servers_are_started_anew_and_later_starts_leave_out_who_fell_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[tuple[str, str]] = []
    wait_ready = FakeArm.wait_ready

    def ready(self: FakeArm, bed: Bed) -> None:
        starts.append((self.name, bed.folder.name))
        wait_ready(self, bed)

    monkeypatch.setattr(FakeArm, "wait_ready", ready)
    arms = {"k1": FakeArm("k1", burst=8), "k3": FakeArm("k3", burst=2), "faser": FakeArm("faser", burst=8)}
    wanted = plan(rivals=("none", "k1", "k3"), pairs=1, starts=2, least_tokens=120)
    results = measure(wanted, tmp_path, monkeypatch, arms)
    assert starts == [
        *((name, "start-0") for name in ("none", "k1", "k3", "faser")),
        *((name, "start-1") for name in ("none", "k1", "faser")),
    ]
    assert [(turn.start, turn.round, turn.arm) for turn in results.turns] == [
        (0, 0, "none"), (0, 0, "k1"), (0, 0, "k3"), (0, 0, "faser"), (1, 1, "none"), (1, 1, "k1"), (1, 1, "faser"),
    ]  # fmt: skip
    point = summary(results)["points"][0]
    assert (point["pairs"], point["starts"]) == (2, 2)


@pytest.mark.parametrize("learn_s", [0.0, 0.4])
def test_an_arm_that_learns_has_time_for_it_at_every_load_that_is_new_to_its_server(
    learn_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt: list[tuple[str, int]] = []
    learn_one = Bench._learn_one

    async def seen(self: Bench, load: int, mix: bench_work.Mix, arm: Any) -> None:
        began_s, before = time.perf_counter(), arm.emitted
        await learn_one(self, load, mix, arm)
        assert time.perf_counter() - began_s > learn_s
        assert arm.emitted > before
        learnt.append((arm.name, load))

    monkeypatch.setattr(Bench, "_learn_one", seen)
    mixes = (MIX, bench_work.Mix.parse("chat"))
    wanted = plan(rivals=("none", "adaspec", "hybrid:4"), loads=(1, 2), mixes=mixes, pairs=1, starts=2, learn_s=learn_s)
    monkeypatch.setattr(bench_run, "arms_at", lambda arms, *_: arms)
    results = measure(wanted, tmp_path, monkeypatch, {name: FakeArm(name) for name in wanted.arms})
    by_start = [(name, load) for load in (1, 2) for name in ("adaspec", "faser")]
    assert learnt == (by_start * 2 if learn_s else [])
    assert {turn.arm for turn in results.turns} == set(wanted.arms)


def test_every_server_is_held_to_the_answers_that_the_first_one_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[str] = set()
    answer = FakeArm._answer

    async def seen(self: FakeArm, request: web.Request) -> web.StreamResponse:
        asked.add((await request.json())["messages"][0]["content"])
        return await answer(self, request)

    monkeypatch.setattr(FakeArm, "_answer", seen)
    monkeypatch.setattr(bench_run, "arms_at", lambda arms, *_: arms)  # no arm falls behind by a chance of timing
    arms = {name: FakeArm(name) for name in ("none", "k1", "faser")}
    wanted = plan(rivals=("none", "table"), pairs=1, table_lengths=(0, 1), sweep_rounds=1, starts=2, held=7)
    measure(wanted, tmp_path, monkeypatch, arms)
    assert {name: arm.recorded for name, arm in arms.items()} == {"none": 0, "k1": 7, "table": 0, "faser": 0}
    assert {path for arm in arms.values() for path in arm.held} == {tmp_path / "answers.json"}
    assert {name: len(arm.held) for name, arm in arms.items()} == {"none": 3, "k1": 1, "table": 2, "faser": 2}
    assert len(json.loads((tmp_path / "answers.json").read_text())) == 7
    assert len(asked) == 7, "no prompt is sent whose answer is not known"


@pytest.mark.parametrize("point", [2, Replay("azure-conv", 1.0, 5.0, warp=20.0)])
def test_every_answer_is_sampled_at_the_temperature_that_was_asked_for_the_recorded_ones_too(
    point: int | Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    answer = FakeArm._answer

    async def seen(self: FakeArm, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked.append((body["temperature"], "return_token_ids" in body))
        return await answer(self, request)

    monkeypatch.setattr(FakeArm, "_answer", seen)
    monkeypatch.setattr(bench_run, "UNLOADED_REQUESTS", 2)
    load: dict[str, Any] = {"loads": (point,)} if isinstance(point, int) else {"loads": (), "replays": (point,)}
    arms = {name: FakeArm(name) for name in ("none", "faser")}
    measure(plan(rivals=("none",), pairs=1, held=5, temperature=0.7, **load), tmp_path, monkeypatch, arms)
    assert set(asked) == {(0.7, False), (0.7, True)}
    assert {name: arm.mended for name, arm in arms.items()} == {"none": 1, "faser": 1}


def test_a_server_that_cannot_be_held_is_no_rival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(path: Path) -> None:
        raise EngineError("k1 answered 500 to /collective_rpc")

    arms = {"k1": FakeArm("k1", burst=8)}
    arms["k1"].hold = refuse  # type: ignore[method-assign]
    results = measure(plan(held=5), tmp_path, monkeypatch, arms)
    assert results.failed == {"k1": "k1 answered 500 to /collective_rpc"}
    assert {turn.arm for turn in results.turns} == {"none", "faser"}


def test_a_replay_under_held_answers_sends_only_prompts_that_were_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_run, "UNLOADED_REQUESTS", 2)
    sent: list[set[str]] = []
    requests = Replay.requests

    def drawn(self: Replay, mix: Mix, seed: int, prompts: Any = None) -> Any:
        found = requests(self, mix, seed, prompts)
        sent.append({each.prompt for each in found})
        return found

    monkeypatch.setattr(Replay, "requests", drawn)
    replay = Replay("azure-conv", 1.0, 5.0, warp=20.0)
    wanted = plan(loads=(), replays=(replay,), rivals=("none",), pairs=1, held=10)
    measure(wanted, tmp_path, monkeypatch, {"faser": FakeArm("faser", step_s=0.0005)})
    known = {prompt.text for prompt in bench_work.prompt_pool(MIX, 300, 10)}
    assert len(known) == 10
    assert all(each <= known for each in sent)
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert {len(answer) for _, answer in answers} == {bench_work.OPEN_LENGTHS.max_output_tokens}


def test_a_rival_that_does_not_start_or_dies_is_reported_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = {"k1": FakeArm("k1", burst=4, lives=2)}
    results = measure(plan(rivals=("none", "k1", "ngram")), tmp_path, monkeypatch, arms)
    assert set(results.failed) == {"k1", "ngram"}
    assert "no such method" in results.failed["ngram"]
    assert "out of memory" in results.failed["k1"]
    point = summary(results)["points"][0]
    assert point["best_rival"] == ["none"]
    assert point["pairs"] == 2
    assert arms["k1"].ended
    assert arms["ngram"].ended


def test_our_own_server_failing_ends_the_run_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="out of memory"):
        measure(plan(), tmp_path, monkeypatch, {"faser": FakeArm("faser", lives=2)})


def test_a_disturbed_round_is_marked_and_repeated_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = measure(plan(pairs=1), tmp_path, monkeypatch, {}, noisy=1)
    assert [bool(turn.disturbed) for turn in results.turns] == [True, False, False, False, False, False]
    assert [turn.round for turn in results.turns] == [0, 0, 0, 1, 1, 1]


def test_the_table_is_swept_before_and_its_server_started_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = {"k1": FakeArm("k1", burst=8), "k2": FakeArm("k2")}
    wanted = plan(rivals=("none", "table"), pairs=1, table_lengths=(0, 1, 2), sweep_rounds=1)
    results = measure(wanted, tmp_path, monkeypatch, arms)
    assert results.table == ((1, 64, 1),)
    assert {turn.arm for turn in results.turns if turn.phase == "sweep"} == {"none", "k1", "k2"}
    assert {turn.arm for turn in results.turns if turn.phase == "main"} == {"none", "table", "faser"}


def test_the_table_is_swept_with_all_kinds_that_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixes = tuple(map(Mix.parse, ("code", "chat")))
    wanted = plan(rivals=("none", "table"), pairs=1, sweep_rounds=1, mixes=mixes, held=5)
    arms = {"k1": FakeArm("k1", burst=8)}
    results = measure(wanted, tmp_path, monkeypatch, arms)
    assert {turn.kinds for turn in results.turns if turn.phase == "sweep"} == {"chat+code"}
    assert {turn.kinds for turn in results.turns if turn.phase == "main"} == {"code", "chat"}
    assert results.table == ((1, 64, 1),)
    asked = {prompt.text for mix in (*mixes, Mix.parse("chat+code")) for prompt in bench_work.prompt_pool(mix, 300, 5)}
    assert sum(arm.recorded for arm in arms.values()) == len(asked)


def test_a_run_that_goes_on_keeps_its_table_and_the_larger_samples_of_latencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = plan(rivals=("none", "table"), pairs=1)
    with monkeypatch.context() as patched:
        before = measure(wanted, tmp_path, patched, {}, table=((1, 64, 1),))
    assert {turn.phase for turn in before.turns} == {"main"}
    large, small = (Latency(2, "all", arm, n, NO_SPANS, NO_SPANS, NO_SPANS) for arm, n in (("none", 999), ("faser", 0)))
    again = measure(wanted, tmp_path, monkeypatch, {}, table=before.table, turns=before.turns, latencies=[large, small])
    assert [turn.round for turn in again.turns] == [0, 0, 0, 1, 1, 1]
    kept = {latency.arm: latency for latency in again.latencies}
    assert kept["none"] == large
    assert kept["faser"].requests > 0


def test_a_length_far_behind_is_not_swept_at_more_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = {"k1": FakeArm("k1", burst=8), "k2": FakeArm("k2")}
    wanted = plan(loads=(1, 3), rivals=("none", "table"), pairs=1, table_lengths=(0, 1, 2), sweep_rounds=1)
    results = measure(wanted, tmp_path, monkeypatch, arms)
    swept = {load: {turn.arm for turn in results.turns_at(load, "all", "sweep")} for load in (1, 3)}
    assert swept == {1: {"none", "k1", "k2"}, 3: {"none", "k1"}}


def test_a_replay_is_told_by_goodput_against_the_unloaded_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_run, "UNLOADED_REQUESTS", 2)
    replay = Replay("azure-conv", 1.0, 5.0, warp=20.0)
    wanted = plan(loads=(), replays=(replay,), rivals=("none",), pairs=1)
    results = measure(wanted, tmp_path, monkeypatch, {"faser": FakeArm("faser", step_s=0.0005)})
    assert results.objectives["all"][1] > 2 * 4.0  # twice the time of a step
    point = summary(results)["points"][0]
    assert (point["load"], point["metric"]) == ("azure-conv", "goodput")
    assert {(turn.arm, turn.failed, turn.requests, turn.tokens) for turn in results.turns} == {
        (arm, 0, results.turns[0].requests, results.turns[0].tokens) for arm in ("none", "faser")
    }
    assert all(turn.good_share is not None and turn.mean_tpot_ms for turn in results.turns)
    assert all(turn.compute_s == pytest.approx(turn.tokens / 1000) for turn in results.turns)
    assert point["tpot_ratio"] > 0


def test_a_replay_in_which_nobody_meets_an_objective_has_no_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_run, "UNLOADED_REQUESTS", 2)
    monkeypatch.setattr(Objective, "is_met", lambda self, result: False)
    wanted = plan(loads=(), replays=(Replay("azure-conv", 1.0, 5.0, warp=20.0),), rivals=("none",), pairs=1)
    quick = {name: FakeArm(name, burst=32) for name in ("none", "faser")}
    results = measure(wanted, tmp_path, monkeypatch, quick)
    point = summary(results)["points"][0]
    assert (point["envelope_ratio"], point["faser"], point["pairs"], point["verdict"]) == (None, None, 0, "open")
    assert [turn.rate for turn in results.turns] == [0.0, 0.0]
    assert all(turn.tokens_per_s > 0 for turn in results.turns)


def test_variants_are_faser_with_what_their_names_say(tmp_path: Path) -> None:
    bed = Bed(EmbeddedPair(tmp_path, tmp_path), tmp_path, tmp_path, "price", 1)
    told = {name: bed.launch(name).environment_extra for name in VARIANTS}
    assert {name: "FASER_EXIT_HEADS" in each for name, each in told.items()} == dict(
        zip(VARIANTS, (1, 0, 1), strict=True)
    )
    assert {name: "FASER_FRONTIER" in each for name, each in told.items()} == dict(
        zip(VARIANTS, (0, 1, 1), strict=True)
    )
    assert Path(told["faser+pruning"]["FASER_EXIT_HEADS"]).exists()
    assert {bed.config(name).policy.spec for name in VARIANTS} == {"price"}
    assert {bed.config(name).guard for name in VARIANTS} == {bed.config("faser").guard}


def test_an_arms_counters_are_vllms_and_its_sidecars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def metrics(request: web.Request) -> web.Response:
        return web.Response(
            text="vllm:spec_decode_num_draft_tokens_total{} 9.0\nvllm:spec_decode_num_accepted_tokens_total{} 4\n"
        )

    async def counted(link: Any) -> Drafting:
        app = web.Application()
        app.router.add_get("/metrics", metrics)
        async with TestServer(app) as running:
            engine: Any = SimpleNamespace(launch=SimpleNamespace(url=str(running.make_url("/"))))
            arm = Arm("faser", engine, ExitStack(), None, link)
            try:
                return await arm.drafting()
            finally:
                await arm.close()

    engines = [SimpleNamespace(unverified_tokens=3), SimpleNamespace(unverified_tokens=4)]
    monkeypatch.setattr(bench_server, "ask", lambda link: SimpleNamespace(engines=engines))
    assert asyncio.run(counted(object())) == Drafting(9, 4, 7)
    assert asyncio.run(counted(None)) == Drafting(9, 4, 0)

    def silent(link: Any) -> None:
        raise EndpointError("no sidecar answers", "one", "start it")

    monkeypatch.setattr(bench_server, "ask", silent)
    with pytest.raises(EngineError, match="faser's sidecar does not answer"):
        asyncio.run(counted(object()))


@pytest.mark.parametrize("name", ["faser", *POLICIES])
def test_a_policys_arm_has_the_plugin_and_a_sidecar_of_its_own(name: str, tmp_path: Path) -> None:
    bed = Bed(EmbeddedPair(tmp_path, tmp_path), tmp_path, tmp_path, "price", 1)
    config, launch = bed.config(name), bed.launch(name)
    assert config.policy.spec == ("price" if name == "faser" else name)
    assert launch.has_faser
    assert launch.endpoint == config.link.endpoint == f"ipc://{tmp_path / name}.sock"
    assert launch.environment_extra["FASER_LEASE_MS"] == str(config.lease.ms) == "600000"  # outlives the others' slices
    assert (config.guard.envelope_margin == 1.0) == (name != "faser")  # our guard is part of FASER, not of their rule


@pytest.mark.parametrize("name", ["none", "k3", "ngram", "table", "adaspec", "faser", "faser+both"])
def test_every_server_asks_for_huge_pages_and_can_be_held_where_answers_are_recorded(name: str, tmp_path: Path) -> None:
    pair = EmbeddedPair(tmp_path, tmp_path)
    for is_held, is_sampled in ((False, False), (False, True), (True, False)):
        bed = Bed(pair, tmp_path, tmp_path, "price", 1, is_held=is_held, is_sampled=is_sampled)
        launch = bed.launch(name, ((1, 64, 2),))
        assert launch.environment()["GLIBC_TUNABLES"] == bench_server.HUGE_PAGES
        assert ("--worker-extension-cls" in launch.arguments) == (is_held or is_sampled)
    assert launch.arguments[-1] == f"{HeldWorker.__module__}.{HeldWorker.__name__}"


def test_a_server_is_told_where_the_answers_lie(tmp_path: Path) -> None:
    asked: list[Any] = []

    async def told(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"results": [None]}, status=200 if len(asked) == 1 else 500)

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/collective_rpc", told)
        async with TestServer(app) as running:
            engine: Any = SimpleNamespace(launch=SimpleNamespace(url=str(running.make_url("/"))), log="k1.log")
            arm = Arm("k1", engine, ExitStack())
            try:
                await arm.hold(tmp_path / "a.json")
                with pytest.raises(EngineError, match="k1 answered 500 to /collective_rpc"):
                    await arm.hold(tmp_path / "a.json")
            finally:
                await arm.close()

    asyncio.run(run())
    assert asked[0] == {"method": "hold_answers", "args": [str(tmp_path / "a.json")]}


@pytest.mark.parametrize("name", ["none", "k3", "faser"])
def test_every_server_computes_in_the_numbers_that_were_asked_for(name: str, tmp_path: Path) -> None:
    pair = EmbeddedPair(tmp_path, tmp_path)
    short, exact = (Bed(pair, tmp_path, tmp_path, "price", 1, dtype) for dtype in DTYPES)
    given = {bed.dtype: bed.launch(name).arguments for bed in (short, exact)}
    for dtype, arguments in given.items():
        last = len(arguments) - 1 - arguments[::-1].index("--dtype")  # vLLM follows the last
        assert arguments[last + 1] == dtype
    caches = [int(each[each.index("--kv-cache-memory-bytes") + 1]) for each in given.values()]
    assert caches[1] == 2 * caches[0]  # as many tokens
    assert exact.server_gib > short.server_gib


def test_numbers_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--dtype float16.*bfloat16 or float32"):
        run_bench(BenchOptions(dtype="float16", out=tmp_path / "r.json"))
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_go_on_is_refused_before_a_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("faser.controller.bench.bench.ensure_embedded_pair", lambda: pytest.fail("a model was made"))
    with pytest.raises(UsageError, match=r"typo\.json"):
        run_bench(BenchOptions(resume=tmp_path / "typo.json"))
    (file := tmp_path / "file").touch()
    for options in (BenchOptions(out=file / "r.json"), BenchOptions(out=tmp_path / "r.json", picture=file / "p.svg")):
        with pytest.raises(UsageError, match=r"--(out|picture) .*file"):
            run_bench(options)


def test_results_that_cannot_be_written_end_the_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(bench_run, "write_results", full)
    arms = {"faser": FakeArm("faser"), "k1": FakeArm("k1")}
    with pytest.raises(StoreError, match="No space left"):
        measure(plan(), tmp_path, monkeypatch, arms)
    assert all(arm.ended for arm in arms.values())


def test_suffix_decoding_that_is_not_installed_is_not_available_and_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_server, "find_spec", lambda name: None)
    bed = Bed(EmbeddedPair(tmp_path, tmp_path), tmp_path, tmp_path, "price", 1)
    with pytest.raises(EngineError, match="not available: arctic_inference is not installed"):
        Arm.start("suffix", bed)
    assert list(tmp_path.iterdir()) == []
    assert bed.launch("suffix").speculative == {"method": "suffix"}


def test_a_rival_that_is_not_installed_is_refused_by_name_and_otherwise_left_out_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made() -> EmbeddedPair:
        raise ModelError("a model was made")

    monkeypatch.setattr(bench_server, "find_spec", lambda name: None)
    monkeypatch.setattr("faser.controller.bench.bench.ensure_embedded_pair", made)
    with pytest.raises(EngineError, match=r"suffix:own is not available: .* expected .* 0\.1\.1; run `make suffix`"):
        run_bench(BenchOptions(rivals="none,suffix:own", out=tmp_path / "r.json"))
    with pytest.raises(ModelError):
        run_bench(BenchOptions(out=tmp_path / "r.json"))
    told = capsys.readouterr().err.splitlines()
    assert [line.split(" is not ")[0] for line in told] == ["faser: left out: suffix", "faser: left out: suffix:own"]


def test_n_grams_and_suffixes_each_run_in_two_settings_without_a_model(tmp_path: Path) -> None:
    bed = Bed(EmbeddedPair(tmp_path, tmp_path), tmp_path, tmp_path, "price", 1)
    settings = {name: bed.launch(name).speculative or {} for name in MATCHERS}
    assert not any("model" in each for each in settings.values())
    ranges = [(settings[name]["prompt_lookup_min"], settings[name]["prompt_lookup_max"]) for name in MATCHERS[:2]]
    assert ranges == [(2, 4), (3, 8)]
    assert [settings[name]["num_speculative_tokens"] for name in MATCHERS[:2]] == [4, 8]
    assert settings["suffix:own"] == {**settings["suffix"], "suffix_decoding_max_cached_requests": 0}


@pytest.mark.engine
@pytest.mark.slow  # `make proof`; test_demo.py starts a real server of the same kind
def test_real_servers_take_turns(tmp_path: Path) -> None:
    flags = ["--loads", "2", "--rivals", "none", "--pairs", "1", "--starts", "2", "--turn-seconds", "0.3"]
    flags += ["--held", "8"]
    command = [*FASER, "bench", *flags, "--max-tokens", "16", "--json", "--out", str(tmp_path / "result.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    point = json.loads(done.stdout)["points"][0]
    assert point["load"] == 2
    assert point["rivals"]["none"] > 0
    assert point["faser"] > 0
    turns = read_results(tmp_path / "result.json").turns
    assert [turn.arm for turn in turns[:2]] == ["none", "faser"]
    assert all(turn.tokens >= 10 and turn.cpu_s > (turn.compute_s or 0) > 0 for turn in turns)
    assert any(turn.draft_tokens for turn in turns if turn.arm == "faser")
    assert {turn.start for turn in turns} == {0, 1}
    assert point["starts"] == 2
    assert (tmp_path / "result.svg").read_text().startswith("<?xml")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["none", "ngram", "k3", "faser"])
def test_a_real_server_says_what_it_is_held_to(name: str, temperature: float, tmp_path: Path) -> None:
    prompts, words = ["Say hello.", "What is two plus two?"], [1000, 1001, 1002, 1003] * 6

    async def run(arm: Arm) -> tuple[list[Answer], list[Answer]]:
        await arm.mend_sampling()
        own = await record(arm, prompts, len(words), temperature)
        path = tmp_path / "answers.json"
        path.write_text(json.dumps([(own[0][0], words)]))
        await arm.hold(path)
        held = await record(arm, prompts, len(words), temperature)
        await arm.close()
        return own, held

    with socket_folder("bench") as sockets:
        bed = Bed(ensure_embedded_pair(), sockets, tmp_path, "price", 1, is_held=True)
        arm = Arm.start(name, bed)
        try:
            arm.wait_ready(bed)
            own, held = asyncio.run(run(arm))
        finally:
            arm.end()
    assert held[0] == (own[0][0], words)
    if not temperature:
        assert held[1] == own[1], "a prompt without a recorded answer is answered as always"
