"""The demo: its load, its refusals, its figures; and, with a real engine, the whole of it and Ctrl-C."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from faser.controller.config import LinkConfig
from faser.controller.demo.comparison import Bystanders, SideBySide, Speedup, plain_launch, serve_plainly
from faser.controller.demo.demo import run_demo
from faser.controller.demo.load import LENGTHS, make_requests, peak_rps, token_ms, trial_requests, with_classes
from faser.controller.demo.options import DemoOptions
from faser.controller.demo.picture import write_picture
from faser.controller.demo.result import DemoResult, final_table
from faser.controller.demo.view import View, bars
from faser.controller.engine.load_generator import LoadGenerator, LoadOptions
from faser.controller.engine.load_summary import RequestResult
from faser.controller.engine.machine import Processor
from faser.controller.engine.reaper import descendants
from faser.controller.engine.serve import embedded_launch
from faser.controller.errors import EngineError, UsageError
from faser.controller.telemetry.telemetry_file import TelemetryFile
from faser.env.estimate.objectives import TimeObjective
from faser.env.workload.held_out import is_held_out_prompt
from faser.env.workload.prompts import KINDS
from faser.env.workload.workload import TimedRequest
from faser.models.embedded.pair import EmbeddedPair

pytestmark = pytest.mark.alone

FASER = [sys.executable, "-P", "-c", "from faser.controller.cli.main import main; main()"]


def recorded(result: dict[str, Any]) -> tuple[int, int]:
    """Return how many steps and draft lengths the run's telemetry holds."""
    with TelemetryFile(Path(result["telemetry_path"])) as file:
        return len(file.steps()), len(file.lengths().drafted)


PROMISED = {
    "engine", "requests", "tokens_per_s", "ttft_ms", "tpot_ms", "e2e_ms", "steps", "decisions", "steps_under_lease",
    "dropped_records", "gaps", "acceptance_rate", "mean_draft_length", "draft_length_histogram",
    "steps_with_mixed_lengths", "adapter_us_per_step", "telemetry_path", "report_path", "policy", "seed", "duration_s",
    "speedup", "attainment",
}  # fmt: skip


def test_the_load_is_fixed_by_the_seed_and_mixes_kinds_of_held_out_prompts() -> None:
    requests = make_requests(45.0, 0, 3.0)
    assert requests == make_requests(45.0, 0, 3.0)
    assert requests != make_requests(45.0, 1, 3.0)
    assert {request.kind for request in requests} == set(KINDS)
    assert all(is_held_out_prompt(request.prompt) for request in requests)


def test_the_load_swings_from_one_request_to_beyond_the_knee() -> None:
    arrivals_s = [request.arrival_s for request in make_requests(60.0, 0, 3.0)]
    assert arrivals_s[0] == 0.0
    assert sum(arrival_s < 6 for arrival_s in arrivals_s) / 6 < 1.5
    assert sum(24 <= arrival_s < 36 for arrival_s in arrivals_s) / 12 > 0.7 * 3.0


def answered(read_s: float, token_s: float) -> list[RequestResult]:
    """Return the trial of an engine that reads prompts one by one and then says a token of each every `token_s`."""
    found = []
    for index, request in enumerate(trial := trial_requests()):
        firsts_s, said = (index + 1) * read_s, request.max_tokens
        ends_s = len(trial) * read_s + token_s * np.arange(1, said)
        found.append(RequestResult(index, request.kind, "", 0.0, 0.0))
        found[-1].token_times_s, found[-1].token_counts = [firsts_s, *ends_s.tolist()], list(range(1, said + 1))
    return found


def test_the_peak_is_half_as_much_again_as_the_machine_serves() -> None:
    """A request costs its prompt's reading and its tokens' share of the steps in which eight are answered."""
    load, trial = make_requests(60.0, 0, 1.0), trial_requests()
    tokens = np.mean([request.max_tokens for request in load])
    longer = np.mean([request.prompt_tokens for request in load]) / np.mean([each.prompt_tokens for each in trial])
    assert 0.5 < longer < 2.0
    assert peak_rps(answered(0.1, 0.04), 45.0) == pytest.approx(1.5 / (0.1 * longer + tokens * 0.04 / 8), abs=0.02)
    assert peak_rps(answered(0.4, 0.04), 45.0) < 0.7 * peak_rps(answered(0.1, 0.04), 45.0)
    assert peak_rps(answered(60.0, 1.0), 45.0) == 0.3  # a load worth the name all the same
    with pytest.raises(EngineError, match="empty"):
        peak_rps([RequestResult(0, "chat", "", 0.0)], 45.0)


def test_a_fast_machine_gets_what_the_trace_has() -> None:
    peak = peak_rps(answered(1e-3, 1e-4), 1200.0)
    assert 5000 < len(make_requests(1200.0, 0, peak)) < 9739
    with pytest.raises(UsageError, match="lower the rate or duration"):
        run_demo(DemoOptions(duration_s=1200.0, peak_rps=100.0))


def test_the_trial_is_a_few_short_answers_to_prompts_like_the_load_s_own() -> None:
    trial = trial_requests()
    assert {request.arrival_s for request in trial} == {0.0}
    assert 4 <= len(trial) <= 16
    assert max(request.max_tokens for request in trial) <= LENGTHS.min_output_tokens
    assert {request.kind for request in trial} == set(KINDS)
    assert not {request.prompt for request in trial} & {request.prompt for request in make_requests(1200.0, 0, 3.0)}
    assert all(is_held_out_prompt(request.prompt) for request in trial)


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"duration_s": 0.5}, "--duration 0.5"),
        ({"duration_s": float("nan")}, "--duration nan"),
        ({"seed": -1}, "--seed -1"),
        ({"peak_rps": 0.0}, "--peak-rps 0"),
        ({"peak_rps": float("nan")}, "--peak-rps nan"),
        ({"interactive_share": 0.0}, "--interactive-share 0"),
        ({"interactive_share": 1.0}, "--interactive-share 1"),
        ({"interactive_share": float("nan")}, "--interactive-share nan"),
        ({"method": "medusa"}, "--method medusa"),
        ({"method": "draft_model"}, "without a drafter"),
        ({"method": "ngram", "drafter": "x"}, "--drafter with --method ngram"),
        ({"drafter": "/no/such/folder"}, "--drafter /no/such/folder"),
    ],
)
def test_bad_options_are_refused_with_one_line(options: dict[str, object], seen: str) -> None:
    with pytest.raises(UsageError, match=seen):
        DemoOptions(**options)  # type: ignore[arg-type]


def test_an_unknown_policy_and_a_used_folder_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "telemetry.sqlite").touch()
    for flags, seen in ((["--policy", "nosuch"], "nosuch"), ([], "telemetry.sqlite exists")):
        output = tmp_path if not flags else tmp_path / "new"
        done = subprocess.run([*FASER, "demo", "--output", str(output), *flags], capture_output=True, text=True)
        assert done.returncode != 0
        assert seen in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["telemetry.sqlite"]


def test_the_result_has_every_promised_field_also_when_nothing_was_measured(tmp_path: Path) -> None:
    result = DemoResult(
        policy="price", seed=0, duration_s=45.0, trace="t", peak_rps=6.0, cores=2, is_interrupted=True
    )  # fmt: skip
    assert set(DemoResult.__struct_fields__) >= PROMISED
    assert (result.requests.finished, result.telemetry_path, result.tpot_ms.p50) == (0, None, None)
    console = Console(file=StringIO())
    console.print(final_table(result, None, None))


def test_without_a_sidecar_the_view_still_shows_the_load() -> None:
    generator = LoadGenerator(make_requests(5.0, 0, 3.0), LoadOptions("http://127.0.0.1:1", "m"))
    view = View(generator, LinkConfig(endpoint="ipc:///nowhere"), Console(file=StringIO()), is_live=False)
    assert "0 ended, 0 in flight" in view.line(None)
    assert view.table(None).row_count == 4


@pytest.mark.parametrize("is_live", [True, False])
def test_the_view_goes_on_when_no_sidecar_answers(is_live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOOK_S", "_LINE_S"):
        monkeypatch.setattr(f"faser.controller.demo.view.{name}", 0.005)
    screen = StringIO()
    console = Console(file=screen, force_terminal=is_live, width=100)
    generator = LoadGenerator(make_requests(5.0, 0, 3.0), LoadOptions("http://127.0.0.1:1", "m"))

    async def follow() -> None:
        with contextlib.suppress(TimeoutError):
            view = View(generator, LinkConfig(endpoint="ipc:///nowhere/s"), console, is_live)
            await asyncio.wait_for(view.follow(), 0.3)

    asyncio.run(follow())
    assert screen.getvalue().count("tokens/s") > 2
    assert ("does not answer" in screen.getvalue()) == is_live


def test_bars_show_the_highest_full_and_every_count_above_zero() -> None:
    assert bars([0, 1, 100]) == " ▁█"
    assert bars([0, 0]) == "  "


@pytest.fixture
def demo(tmp_path: Path) -> list[str]:
    return [*FASER, "demo", "--output", str(tmp_path / "run"), "--json"]


def test_every_fourth_request_is_interactive_and_each_class_has_its_objective() -> None:
    plain = make_requests(45.0, 0, 3.0)
    requests = with_classes(plain, 0.25, 40.0)
    assert [replace(each, class_name="", tpot_ms=None) for each in requests] == plain
    assert {each.class_name for each in requests[3::4]} == {"interactive"}
    assert {each.class_name for at, each in enumerate(requests) if at % 4 != 3} == {"batch"}
    assert {each.tpot_ms for each in requests[3::4]} == {40.0}
    assert {each.tpot_ms for each in requests[:3]} == {100.0}


def test_the_classes_are_told_by_what_the_trial_took_for_a_token() -> None:
    trial = answered(0.1, 0.04)
    for each in trial:
        each.output_tokens = each.token_counts[-1]
    assert 40.0 <= token_ms(trial) <= 100.0, "tokens a step of 40 ms, and prompts read in between"
    with pytest.raises(EngineError, match="empty"):
        token_ms([RequestResult(0, "chat", "", 0.0)])


def served(tpot_s: float, count: int, outcome: str = "finished") -> list[RequestResult]:
    """Return requests that arrive a second apart; every other one takes half as long again."""
    found = []
    for at in range(count):
        result = RequestResult(at, "chat", "", float(at), float(at), outcome)  # type: ignore[arg-type]
        own_s = tpot_s * (1.5 if at % 2 else 1.0)
        result.token_times_s, result.token_counts = [at + 1.0, at + 1.0 + 9 * own_s], [1, 10]
        result.output_tokens, result.objective = 10, TimeObjective(tpot_s=0.05)
        result.class_name = "interactive" if at % 4 == 3 else "batch"
        found.append(result)
    return found


def test_each_request_is_compared_with_itself() -> None:
    comparison = SideBySide.of(served(0.04, 20), served(0.06, 20), 16.0)
    speedup = comparison.speedup()
    assert speedup is not None
    assert (speedup.value, speedup.requests) == (1.5, 16)
    assert (speedup.low, speedup.high) == (1.5, 1.5)
    assert comparison.attainment() == ({"batch": 8 / 12, "interactive": 0.0}, {"batch": 0.0, "interactive": 0.0})
    assert comparison.line() == (
        "1.50 (1.50 to 1.50) times as fast per token as without speculation, on 16 requests; "
        "in time: batch 67% (without 0%), interactive 0% (without 0%)"
    )


def test_the_interval_is_as_wide_as_stretches_of_the_load_differ() -> None:
    steered, plain = served(0.04, 16), served(0.06, 16)
    for each in plain[8:]:
        each.token_times_s[-1] += 0.2
    speedup = SideBySide.of(steered, plain, 16.0).speedup()
    assert speedup is not None
    assert speedup.low is not None
    assert speedup.high is not None
    assert speedup.low < 1.55 < speedup.value < speedup.high


def test_few_requests_have_no_interval_and_none_no_speedup() -> None:
    few = SideBySide.of(served(0.04, 5), served(0.06, 5), 9.0)
    assert few.speedup() == Speedup(1.5, None, None, 5)
    assert few.line().startswith("1.50 times as fast")
    none = SideBySide.of(served(0.04, 5), served(0.06, 5, "cancelled"), 9.0)
    assert none.speedup() is None
    assert "pass a longer --duration" in none.line()


def test_other_work_in_either_run_is_told_with_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    told = SideBySide.of(served(0.04, 5), served(0.06, 5), 9.0, "0.80 cores used by others")
    assert told.line().endswith("; disturbed by other work: 0.80 cores used by others")
    speedup = told.speedup()
    assert speedup is not None
    assert speedup.disturbed == "0.80 cores used by others"
    used_s = iter([10.0, 10.5])  # of 2 s that the machine was busy, half a second was ours
    busy = iter([Processor(100.0, 0.0), Processor(102.0, 0.0)])
    monkeypatch.setattr(Processor, "now", lambda: next(busy))
    clock_s = iter([0.0, 2.0])
    monkeypatch.setattr("faser.controller.demo.comparison.time.monotonic", lambda: next(clock_s))
    assert Bystanders(lambda: next(used_s)).reason() == "0.75 cores used by others"


@pytest.mark.parametrize("has_classes", [True, False])
def test_the_comparison_has_its_picture(has_classes: bool, tmp_path: Path) -> None:
    steered, plain = served(0.04, 12), served(0.06, 12)
    if not has_classes:
        for each in (*steered, *plain):
            each.objective = TimeObjective()
    write_picture(SideBySide.of(steered, plain, 12.0), tmp_path / "p.svg")
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")


def test_the_run_without_speculation_is_the_same_server_as_vllm_is() -> None:
    launch = embedded_launch(EmbeddedPair(Path("/t"), Path("/d")), "ipc:///s", port=8123)
    plain = plain_launch(launch)
    command = plain.command()
    assert "--speculative-config" not in command
    assert "--scheduler-cls" not in command
    assert set(command) < set(launch.command())
    environment = plain.environment({})
    assert environment["VLLM_PLUGINS"] == "none"
    assert not any(name.startswith("FASER_") for name in environment)


def test_the_run_without_speculation_ends_with_the_last_request_that_is_compared() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(0.3 if body["max_tokens"] == 2 else 30.0)
        choice = {"delta": {"content": "x"}, "finish_reason": "length"}
        event = {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        return response

    async def run(most_s: float) -> list[RequestResult]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        async with TestServer(app) as running:
            options = LoadOptions(str(running.make_url("/")), "m")
            return await serve_plainly(requests, options, 0.1, most_s, asyncio.Event())

    requests = [
        TimedRequest(0.0, "a", "chat", 2),
        TimedRequest(0.05, "b", "chat", 2),
        TimedRequest(0.1, "c", "chat", 9),
    ]
    began_s = time.monotonic()
    assert [each.outcome for each in asyncio.run(run(60.0))] == ["finished", "finished", "cancelled"]
    assert [each.outcome for each in asyncio.run(run(0.1))] == ["cancelled"] * 3
    assert time.monotonic() - began_s < 10.0


@pytest.mark.engine
def test_a_short_demo_serves_steers_and_reports(demo: list[str], tmp_path: Path) -> None:
    done = subprocess.run([*demo, "--duration", "10", "--classes"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) >= PROMISED
    assert result["requests"]["failed"] == 0
    assert result["requests"]["finished"] == len(make_requests(10.0, 0, result["peak_rps"]))
    assert result["engine"]["version"].startswith("0.32")
    assert result["gaps"] == result["dropped_records"] == 0
    assert result["lease_share_after_first_second"] > 0.95
    assert result["steps_with_mixed_lengths"] > 0
    assert result["steps"] == recorded(result)[0]
    assert Path(result["report_path"]).read_text().count("<svg") == 3
    assert set(result["attainment"]) == {"interactive", "batch"}
    assert result["speedup"]["value"] > 0.5
    assert result["speedup"]["requests"] > 0
    assert Path(result["picture_path"]).read_text().startswith("<?xml")


@pytest.mark.engine
@pytest.mark.slow  # `make proof`; the short one above has all but the numbers
def test_a_demo_of_45_seconds_steers_every_step_and_mixes_lengths(demo: list[str]) -> None:
    done = subprocess.run([*demo, "--duration", "45"], capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["requests"]["failed"] == 0
    assert result["requests"]["finished"] == len(make_requests(45.0, 0, result["peak_rps"]))
    assert result["lease_share_after_first_second"] > 0.95
    assert result["steps_under_lease"] <= result["steps"]
    assert result["steps_with_mixed_lengths"] > 100
    assert result["gaps"] == result["dropped_records"] == 0


@pytest.mark.engine
@pytest.mark.slow  # `make proof`; Ctrl-C while vLLM starts is tried in CI
def test_ctrl_c_under_load_leaves_no_process_a_readable_file_and_the_figures(demo: list[str], tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w+") as log:
        running = subprocess.Popen([*demo, "--duration", "600"], stdout=subprocess.PIPE, stderr=log, text=True)
        _await_text(tmp_path / "stderr", "requests in 600 s", running)
        _await_text(tmp_path / "stderr", "in flight", running)
        tree = descendants(running.pid)
        assert len(tree) >= 4
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=120)
    assert running.returncode == 130
    assert not [pid for pid in tree if Path(f"/proc/{pid}").exists()]
    result = json.loads(output.splitlines()[-1])
    assert result["is_interrupted"] is True
    assert result["requests"]["failed"] == 0
    steps, lengths = recorded(result)
    assert result["steps"] == steps > 0
    assert lengths > 0


@pytest.mark.engine
@pytest.mark.slow  # `make proof`
@pytest.mark.parametrize(
    ("victim", "line"),
    [
        ("EngineCore", "vLLM ended with code 0: vllm.v1.engine.exceptions.Engine"),
        ("server", "vLLM was killed"),
    ],
)
def test_an_engine_that_is_killed_under_load_is_one_line_behind_the_figures(
    demo: list[str], tmp_path: Path, victim: str, line: str
) -> None:
    with (tmp_path / "stderr").open("w+") as log:
        running = subprocess.Popen([*demo, "--duration", "60"], stdout=subprocess.PIPE, stderr=log, text=True)
        _await_text(tmp_path / "stderr", "requests in 60 s", running)
        _await_text(tmp_path / "stderr", "in flight", running)
        tree = descendants(running.pid)
        os.kill(_process_of_the_engine(tree, victim), signal.SIGKILL)
        output, _ = running.communicate(timeout=120)
    assert running.returncode == EngineError.exit_code
    assert not [pid for pid in tree if Path(f"/proc/{pid}").exists()]
    said = (tmp_path / "stderr").read_text()
    assert "Traceback" not in said
    assert said.count(line) == 1
    assert said.splitlines()[-1].startswith(f"faser: {line}")
    result = json.loads(output.splitlines()[-1])
    assert result == json.loads((tmp_path / "run/result.json").read_text())
    assert result["is_interrupted"] is False
    assert result["requests"]["failed"] + result["requests"]["cancelled"] > 0
    assert result["steps"] == recorded(result)[0] > 0
    assert "<svg" in Path(result["report_path"]).read_text()


def _process_of_the_engine(tree: list[int], victim: str) -> int:
    """Return the engine core's process, or that of the server, its parent."""
    for pid in tree:
        with contextlib.suppress(OSError):
            if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text():
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                return pid if victim == "EngineCore" else parent
    raise AssertionError(f"no engine core among {tree}")


@pytest.mark.engine
def test_ctrl_c_while_vllm_starts_leaves_no_process(demo: list[str], tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w+") as log:
        running = subprocess.Popen(demo, stdout=subprocess.PIPE, stderr=log, text=True)
        _await_text(tmp_path / "stderr", "starting vLLM", running)
        tree = descendants(running.pid)
        os.kill(running.pid, signal.SIGINT)
        output, _ = running.communicate(timeout=120)
    assert running.returncode == 130
    assert not [pid for pid in tree if Path(f"/proc/{pid}").exists()]
    assert json.loads(output.splitlines()[-1])["requests"]["finished"] == 0


def _await_text(path: Path, text: str, process: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + 200
    while text not in path.read_text():
        assert process.poll() is None, path.read_text()[-2000:]
        assert time.monotonic() < end_s, path.read_text()[-2000:]
        time.sleep(0.1)


@pytest.mark.engine
@pytest.mark.slow  # `make proof`; test_splits_engine.py has the engine under splits
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be split")
def test_a_demo_with_splits_runs_under_two_of_them_and_replay_carries_them(tmp_path: Path) -> None:
    """The view names the one in force, telemetry holds both, and replay makes of it what the sidecar made."""
    output = tmp_path / "run"
    flags = ["--output", str(output), "--splits", "1:1", "--policy", "turns:3", "--peak-rps", "3", "--duration", "15"]
    obeying = os.environ | {"FASER_PING_PONG": "always"}
    command = [*FASER, "demo", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=obeying)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["requests"]["failed"] == 0
    assert re.search("split (1:1|unsplit)", done.stderr)
    with closing(sqlite3.connect(output / "telemetry.sqlite")) as file:
        steps = dict(file.execute("SELECT split, count(*) FROM steps GROUP BY split"))
        asked = dict(file.execute("SELECT decision_split, count(*) FROM steps GROUP BY decision_split"))
    assert set(steps) == {0, 1}, steps
    assert min(steps.values()) > 20
    assert set(asked) >= {0, 1}
    again = subprocess.run([*FASER, "replay", str(output / "telemetry.sqlite")], capture_output=True, text=True)
    assert again.returncode == 0, again.stdout[-2000:]


@pytest.mark.engine
@pytest.mark.slow  # `make proof`; test_partition.py has the refusal
def test_splits_that_cannot_be_had_are_one_line_and_the_demo_serves_unsplit(tmp_path: Path) -> None:
    flags = ["--output", str(tmp_path / "run"), "--splits", "1:999", "--peak-rps", "0.5", "--duration", "4"]
    done = subprocess.run([*FASER, "demo", "--json", *flags], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("splits 1:999 cannot be had") == 1
    with closing(sqlite3.connect(tmp_path / "run/telemetry.sqlite")) as file:
        assert list(file.execute("SELECT DISTINCT split FROM steps")) == [(None,)]
