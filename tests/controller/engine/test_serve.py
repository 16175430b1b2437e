"""`faser serve`: what it refuses, what it passes on, and how a failing engine is reported."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faser.controller.config import Config, LinkConfig, StoreConfig
from faser.controller.engine.launch import EngineLaunch, free_port
from faser.controller.engine.processes import ProcessTree
from faser.controller.engine.running import RunningEngine, last_error
from faser.controller.engine.serve import (
    BFLOAT16_SLOW,
    _require_no_complaint,
    embedded_launch,
    flag_value,
    is_slow,
    model_launch,
    run_serve,
)
from faser.controller.engine.sidecar_child import sidecar_environment
from faser.controller.errors import EndpointError, EngineError, FaserError, ModelError, StoreError, UsageError
from faser.controller.snapshot import AttainmentStatus
from faser.controller.telemetry.attained import attained
from faser.controller.telemetry.packing import unpack_rows
from faser.controller.telemetry.schema import open_for_reading
from faser.models.embedded.cache import STAMP
from faser.models.embedded.pair import EmbeddedPair, ensure_embedded_pair


@pytest.mark.parametrize(("code", "expected"), [(2, UsageError), (3, EndpointError), (4, StoreError)])
def test_a_sidecar_that_refuses_to_start_ends_serve_with_its_reason(
    tmp_path: Path, code: int, expected: type[FaserError]
) -> None:
    script = f"import sys; print('faser: /x cannot be written; set store.path'); sys.exit({code})"
    with ProcessTree([sys.executable, "-S", "-c", script], {}, tmp_path / "log") as sidecar:
        while (ended := sidecar.poll()) is None:
            time.sleep(0.01)
        with pytest.raises(expected, match=r"the sidecar did not start: /x cannot be written; set store\.path"):
            _require_no_complaint(sidecar, ended)
        _require_no_complaint(sidecar, 137)  # killed: the engine serves on without it


ENDPOINT = "ipc:///run/x.sock"  # nobody opens it


@pytest.fixture
def pair(tmp_path: Path) -> EmbeddedPair:
    return EmbeddedPair(tmp_path / "target", tmp_path / "drafter")


def test_the_embedded_pair_gets_its_drafter_and_the_operators_arguments(pair: EmbeddedPair) -> None:
    launch = embedded_launch(pair, ENDPOINT, 8123, ["--max-num-seqs", "8", "--port", "8123", "--host=::1"])
    assert (launch.host, launch.port, launch.speculative) == ("::1", 8123, pair.speculative())
    assert launch.arguments[-2:] == ("--max-num-seqs", "8")
    assert not {"--port", "--host", "--host=::1"} & set(launch.arguments)


@pytest.mark.parametrize(("is_slow", "expected"), [(True, "float32"), (False, "bfloat16")])
def test_the_embedded_pair_is_computed_in_what_the_processor_multiplies_well(
    pair: EmbeddedPair, monkeypatch: pytest.MonkeyPatch, is_slow: bool, expected: str
) -> None:
    monkeypatch.setattr("faser.models.embedded.precision.is_bfloat16_slow", lambda: is_slow)
    assert flag_value(embedded_launch(pair, ENDPOINT, 8123).arguments, "--dtype") == expected
    monkeypatch.setattr("faser.controller.engine.launch.is_cpu_build", lambda: False)
    assert flag_value(embedded_launch(pair, ENDPOINT, 8123).arguments, "--dtype") == "bfloat16"  # on a GPU
    asked = embedded_launch(pair, ENDPOINT, 8123, ["--dtype", "float16"])
    assert flag_value(asked.arguments, "--dtype") == "float16"  # the operator's word comes last


@pytest.mark.parametrize(
    ("is_cpu", "is_bfloat16_slow", "arguments", "expected"),
    [
        (True, True, [], True),
        (True, True, ["--dtype", "float32"], False),
        (True, True, ["--dtype=bfloat16"], False),  # they know
        (True, False, [], False),
        (False, True, [], False),
    ],
)
def test_a_model_of_the_operators_own_gets_a_line_where_bfloat16_is_slow(
    monkeypatch: pytest.MonkeyPatch, is_cpu: bool, is_bfloat16_slow: bool, arguments: list[str], expected: bool
) -> None:
    monkeypatch.setattr("faser.controller.engine.serve.is_bfloat16_slow", lambda: is_bfloat16_slow)
    launch = model_launch("org/name", ENDPOINT, ["-sc", "{}", *arguments])
    assert is_slow(dataclasses.replace(launch, is_cpu=is_cpu)) == expected
    assert "--dtype float32" in BFLOAT16_SLOW


@pytest.mark.parametrize(
    "own",
    [["--speculative-config", "{}"], ["-sc", "{}"], ["--speculative_config={}"], ["--speculative-config.method", "x"]],
)
def test_a_drafter_of_the_operators_own_takes_the_place_of_ours(pair: EmbeddedPair, own: list[str]) -> None:
    assert embedded_launch(pair, ENDPOINT, 8123, own).speculative is None
    assert model_launch("org/name", ENDPOINT, own).arguments == tuple(own)


def test_a_model_without_drafter_is_refused_with_an_example() -> None:
    with pytest.raises(EngineError, match=r"no drafter configured for org/name; .*--speculative-config '\{"):
        model_launch("org/name", ENDPOINT, ["--max-model-len", "2048"])


@pytest.mark.parametrize("flag", [["--speculative-config", "notjson"], ["--speculative-config=[1]"], ["-sc", "{a:1}"]])
def test_a_speculative_config_that_is_no_json_is_refused_before_anything_starts(flag: list[str]) -> None:
    with pytest.raises(EngineError, match="is no JSON object; expected"):
        model_launch("some/model", "ipc:///e", flag)


def test_a_local_model_survives_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_launch("m", ENDPOINT, ["-sc", "{}"]).model == str(tmp_path / "m")


def test_a_path_without_a_model_is_refused_before_vllm_starts() -> None:
    with pytest.raises(ModelError, match="no model at /nonexistent"):
        model_launch("/nonexistent", ENDPOINT, ["-sc", "{}"])


def flip_a_byte(drafter: Path) -> None:
    weights = drafter / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)


def be_a_file(drafter: Path) -> None:
    shutil.rmtree(drafter)
    drafter.touch()


@pytest.mark.parametrize(
    ("damage", "seen", "code"),
    [
        (flip_a_byte, "model.safetensors has sha256", 3),
        (lambda drafter: (drafter / "config.json").write_text(""), "config.json has 0 bytes", 3),
        (lambda drafter: (drafter / "model.safetensors").unlink(), "model.safetensors is missing", 3),
        (lambda drafter: (drafter / STAMP).write_text('{"model.safetensors": 7}'), "missing or unreadable", 3),
        (be_a_file, "cannot write the model cache", 6),
    ],
)
def test_a_damaged_model_cache_is_rebuilt_or_refused_in_one_line(
    tmp_path: Path, damage: Callable[[Path], Any], seen: str, code: int
) -> None:
    """The port, which is looked at behind the model, ends the command."""
    pair = ensure_embedded_pair()
    target, drafter = tmp_path / pair.target.name, tmp_path / pair.drafter.name
    target.symlink_to(pair.target)
    shutil.copytree(pair.drafter, drafter)
    damage(drafter)
    done = subprocess.run(
        [sys.executable, "-P", "-c", "from faser.controller.cli.main import main; main()", "serve", "embedded",
         "--port", "70000"],
        env=os.environ | {"FASER_CACHE": str(tmp_path)}, cwd="/", capture_output=True, text=True,
    )  # fmt: skip
    *told, last = filter(str.strip, done.stderr.splitlines())  # the progress bar leaves an empty line
    assert done.returncode == code
    if code == ModelError.exit_code:
        assert (told, seen in last) == ([], True)
        return
    assert len(told) == 1
    assert "model cache is damaged and is rebuilt" in told[0]
    assert seen in told[0]
    assert "port 70000" in last
    for file in pair.drafter.iterdir():
        if file.name != STAMP:
            assert (drafter / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("flag", ["--scheduler-cls", "--worker_cls=x"])
def test_a_class_of_the_operators_own_is_refused(flag: str) -> None:
    with pytest.raises(UsageError, match="drop it"):
        run_serve("org/name", [flag, "mine"], Config())


def test_a_port_that_is_no_number_is_refused() -> None:
    with pytest.raises(UsageError, match="--port x"):
        model_launch("org/name", ENDPOINT, ["-sc", "{}", "--port", "x"])


@pytest.mark.parametrize(
    ("arguments", "value"), [(["--port", "1"], "1"), (["--port=2", "--port", "3"], "3"), ([], None), (["--port"], "")]
)
def test_flags_are_read_in_both_spellings(arguments: list[str], value: str | None) -> None:
    assert flag_value(arguments, "--port") == value


def test_the_sidecar_gets_the_whole_configuration(tmp_path: Path) -> None:
    config = Config(link=LinkConfig(endpoint=ENDPOINT), store=StoreConfig(enabled=False, path=tmp_path / "t.sqlite"))
    environment = sidecar_environment(config)
    assert environment["FASER_ENDPOINT"] == ENDPOINT
    assert environment["FASER_STORE"] == str(tmp_path / "t.sqlite")
    from faser.controller.config_layers import load

    assert load(None, {"XDG_CONFIG_HOME": str(tmp_path)} | environment).config == config


LOG = """\
(APIServer pid=1) INFO 11-21 04:38:32 [api_utils.py:286] non-default args: {}
(EngineCore pid=2) ERROR 11-21 04:38:39 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-21 04:38:39 [core.py:1100] ValueError: No available memory for the cache blocks.
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


DEAD = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for more.\n"


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (LOG, "ValueError: No available memory for the cache blocks."),
        ("x\nserver.py: error: unrecognized arguments: --no\n", "server.py: error: unrecognized arguments: --no"),
        ("ValidationError: 1 validation error for A\n  long\n", "ValidationError: 1 validation error for A long"),
        ("only this\n\n", "only this"),
        (f"{DEAD}INFO:     Shutting down\nwarnings.warn('leaked')\n", DEAD.strip()),  # its core was killed
        ("", "it said nothing"),
    ],
)  # fmt: skip
def test_the_useful_line_of_a_log_is_found(log: str, line: str) -> None:
    assert last_error(log) == line


class FakeServer(EngineLaunch):
    """A launch whose command is a Python script instead of vLLM."""

    def command(self) -> list[str]:
        return [sys.executable, "-S", "-c", *self.arguments]


def test_an_engine_that_ends_while_starting_is_reported_with_its_reason(tmp_path: Path) -> None:
    script = "import sys; print('ValueError: no such model'); sys.exit(3)"
    launch = FakeServer("m", free_port(), arguments=(script,))
    with (
        RunningEngine(launch, tmp_path / "log") as engine,
        pytest.raises(EngineError, match=r"ended with code 3 while starting: ValueError: no such model; see .*log"),
    ):
        engine.wait_ready(60.0)


def test_an_engine_that_is_killed_gets_no_reason_made_up(tmp_path: Path) -> None:
    script = "import os; print('200 OK', flush=True); os.kill(os.getpid(), 9)"
    with RunningEngine(FakeServer("m", free_port(), arguments=(script,)), tmp_path / "log") as engine:
        with pytest.raises(EngineError, match=r"^vLLM was killed while starting, by somebody or .*; see"):
            engine.wait_ready(60.0)
        with pytest.raises(EngineError, match=r"^vLLM was killed, by somebody or for want of memory; see .*log$"):
            engine.require_running()


def test_an_engine_that_never_answers_is_given_up(tmp_path: Path) -> None:
    launch = FakeServer("m", free_port(), arguments=("import time; time.sleep(600)",))
    with RunningEngine(launch, tmp_path / "log") as engine, pytest.raises(EngineError, match="not ready after 0 s"):
        engine.wait_ready(0.2)


SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
print("Starting to load model", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


def test_readiness_is_the_answer_to_health(tmp_path: Path) -> None:
    port = free_port()
    shares: list[float] = []
    with RunningEngine(FakeServer("m", port, arguments=(SERVER, str(port))), tmp_path / "log") as engine:
        engine.wait_ready(60.0, lambda what, share: shares.append(share))
        assert engine.is_ready()
        engine.require_running()
    assert shares[-1] == 1.0
    assert not engine.is_running()
    with pytest.raises(EngineError, match="vLLM ended with code"):
        engine.require_running()


def test_a_proxy_is_not_asked_about_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    port = free_port()
    with RunningEngine(FakeServer("m", port, arguments=(SERVER, str(port))), tmp_path / "log") as engine:
        engine.wait_ready(60.0)


def _requests_of(file: Path, count: int) -> tuple[list[str | None], list[int]]:
    """Return what each request's arrival tells of its limit, and how many tokens were drafted for each."""
    end = time.monotonic() + 20
    while True:
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(file)) as store:
            ends = store.execute("SELECT count(*) FROM events WHERE kind = 'finish'").fetchone()[0]
            if ends >= count:
                query = "SELECT handle, detail FROM events WHERE kind = 'arrival' ORDER BY handle"
                arrivals = store.execute(query).fetchall()
                drafted = dict.fromkeys((handle for handle, _ in arrivals), 0)
                for (rows,) in store.execute("SELECT rows FROM steps"):
                    for row in unpack_rows(rows):
                        drafted[row.handle] += row.drafted
                return [detail for _, detail in arrivals], list(drafted.values())
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.engine
def test_serve_answers_a_chat_and_ends_with_its_parent(tmp_path: Path) -> None:
    import json
    import urllib.request

    ensure_embedded_pair()
    port = free_port()
    environment = os.environ | {
        "FASER_RUNTIME_DIR": str(tmp_path / "run"), "FASER_STORE": str(tmp_path / "t.sqlite"),
        "FASER_POLICY": "fixed:3",
    }  # fmt: skip
    command = [sys.executable, "-P", "-c", "from faser.controller.cli.main import main; main()"]
    serve = subprocess.Popen(
        [*command, "serve", "embedded", "--port", str(port)],
        env=environment, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert serve.stderr
        lines = iter(serve.stderr.readline, "")
        assert any("serving on" in line for line in lines)
        body = {
            "model": "SmolLM2-135M-Instruct",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 100,
        }

        def choice_for(**more: object) -> dict[str, Any]:
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/chat/completions",
                json.dumps(body | more).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as answer:
                choice: dict[str, Any] = json.load(answer)["choices"][0]
            return choice

        choice = choice_for()
        assert "Paris" in choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        # A client that opts out is told in the telemetry, and nothing is drafted for it.
        assert choice_for(vllm_xargs={"faser_max_draft": 0})["message"] == choice["message"]
        asked = {"faser_max_draft": "all", "faser_ttft_ms": "600000", "faser_tpot_ms": 60_000}  # refused: no limit
        assert "Paris" in choice_for(vllm_xargs=asked)["message"]["content"]
        told, drafted = _requests_of(tmp_path / "t.sqlite", 3)
        assert told == [None, "most 0", None]
        assert drafted[0] + drafted[2] > 0
        assert drafted[1] == 0
        with contextlib.closing(open_for_reading(tmp_path / "t.sqlite")) as store:
            assert attained(store) == {"own": AttainmentStatus(1, 1)}
        from faser.controller.engine.reaper import descendants

        below = descendants(serve.pid)
        assert len(below) >= 5  # two reapers, sidecar, API server, engine core, worker
    finally:
        serve.send_signal(signal.SIGKILL)
        serve.communicate()
    end = time.monotonic() + 30
    while left := [pid for pid in below if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def test_a_pipeline_is_launched_with_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faser.controller.engine.serve.is_cpu_build", lambda: True)
    ngram = ["-sc", '{"method": "ngram", "num_speculative_tokens": 2}']
    assert model_launch("org/name", ENDPOINT, [*ngram, "--pipeline-parallel-size", "2"]).ranks == 2
    assert model_launch("org/name", ENDPOINT, [*ngram, "-pp=4"]).ranks == 4
    assert model_launch("org/name", ENDPOINT, ngram).ranks == 1


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_a_drafter_that_a_pipeline_cannot_have_is_refused(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faser.controller.engine.serve.is_cpu_build", lambda: True)
    arguments = ["-sc", json.dumps({"method": method, "num_speculative_tokens": 2}), "-pp", "2"]
    with pytest.raises(EngineError, match=f"method {method} with --pipeline-parallel-size 2; expected ngram"):
        model_launch("org/name", ENDPOINT, arguments)
    monkeypatch.setattr("faser.controller.engine.serve.is_cpu_build", lambda: False)
    assert model_launch("org/name", ENDPOINT, arguments).ranks == 2
