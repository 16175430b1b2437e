"""The command line as a user meets it: a process, its exit code, its stderr."""

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faser.controller.cli.groups import GROUPS
from faser.controller.config import Config, settings
from faser.controller.errors import EndpointError, EngineError, UnsupportedError

FASER = [sys.executable, "-P", "-c", "from faser.controller.cli.main import main; main()"]
FLOORS = ("engine_adapter", "env", "models", "controller")
COMMANDS = ("demo", "serve", "sidecar", "status", "top", "doctor", "config", "store")


@pytest.fixture
def faser(sockets: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs `faser` away from the checkout and from the user's own files."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("FASER_")}
    base.update(FASER_RUNTIME_DIR=str(sockets), XDG_CONFIG_HOME=str(tmp_path / "config"), COLUMNS="100")

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from faser.controller.cli.main import main; main()", *arguments]
        return subprocess.run(command, env=base | environment, cwd="/", capture_output=True, text=True, timeout=60)

    return run


def test_help_lists_every_command(faser: Any) -> None:
    result = faser("--help")
    assert result.returncode == 0
    assert all(f"  {command} " in result.stdout for command in COMMANDS)


def test_help_lists_commands_in_groups_and_leaves_none_over(faser: Any) -> None:
    said = faser("--help").stdout
    places = [said.index(f"\n{title}:\n") for title in GROUPS]
    assert places == sorted(places)
    assert "\nOther:" not in said
    assert said.index("\n  bench ") > said.index("\nMeasure:")


def test_help_imports_nothing_slow() -> None:
    probe = (
        "import sys; sys.argv = ['faser', '--help']\n"
        "from faser.controller.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "slow = {'numpy', 'zmq', 'sqlite_utils', 'matplotlib', 'aiohttp', 'torch', 'vllm'}\n"
        "sys.exit(', '.join(sorted(slow & set(sys.modules))) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", probe], cwd="/", capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("after_s", [0.03, 0.1, 0.2, 0.4, 0.6])
def test_an_early_interrupt_ends_it_without_a_traceback(after_s: float, sockets: Path) -> None:
    code = "from faser.controller.__main__ import main; print(flush=True); main()"
    command = [sys.executable, "-P", "-c", code, "sidecar", "--endpoint", f"ipc://{sockets}/engine.sock"]
    command += ["--store", f"{sockets}/telemetry.sqlite"]
    with subprocess.Popen(command, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        running.stdout.readline()
        time.sleep(after_s)
        running.send_signal(signal.SIGINT)
        try:
            _, stderr = running.communicate(timeout=60)
        finally:
            running.kill()  # one that still runs must not hold up what comes next
    assert "Traceback" not in stderr
    assert running.returncode in (-signal.SIGINT, 0, 130)


@pytest.mark.parametrize(
    ("module", "made"),
    [("faser.controller.cli.main", "_load"), ("faser.controller.daemon.daemon", "Daemon")],
)
def test_an_interrupt_that_was_lost_in_somebody_elses_code_ends_it_all_the_same(
    sockets: Path, module: str, made: str
) -> None:
    """A destructor, or C code likewise, that swallows KeyboardInterrupt before the daemon serves."""
    code = (
        "import importlib, os, signal, time\n"
        f"module = importlib.import_module('{module}')\n"
        f"real = module.{made}\n"
        "class Swallows:\n"
        "    def __del__(self): os.kill(os.getpid(), signal.SIGINT); time.sleep(5.0)\n"
        "def made(*arguments, **named):\n"
        f"    module.{made} = real\n"
        "    Swallows()\n"
        "    return real(*arguments, **named)\n"
        f"module.{made} = made\n"
        "from faser.controller.__main__ import main\n"
        "main()"
    )
    command = [sys.executable, "-P", "-c", code, "sidecar", "--endpoint", f"ipc://{sockets}/engine.sock"]
    command += ["--store", f"{sockets}/telemetry.sqlite"]
    ended = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0
    assert "sidecar ended" in ended.stderr
    assert "Exception ignored" not in ended.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(faser: Any, command: str) -> None:
    result = faser(command, "--help")
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) > 4


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "message"),
    [
        (("sidecar", "--policy", "prize"), {}, 2, "faser: unknown policy 'prize': possible are off, fixed:K"),
        (("sidecar", "--policy", "fixed:x"), {}, 2, "faser: policy 'fixed:x': length 'x'"),
        (("config",), {"FASER_POLCY": "off"}, 2, "faser: unknown environment variable FASER_POLCY"),
        (("config", "--config", "/nowhere.toml"), {}, 2, "faser: no configuration file /nowhere.toml"),
        (
            ("sidecar", "--endpoint", "tcp://0.0.0.0:5555"),
            {},
            3,
            "faser: endpoint tcp://0.0.0.0:5555; expected tcp://127",
        ),
        (("status",), {}, 3, "faser: no sidecar runs at ipc://"),
        (("top",), {}, 3, "faser: no sidecar runs at ipc://"),
        (("sidecar", "--store", "/proc/x/t.sqlite"), {}, 4, "faser: /proc/x/t.sqlite cannot be written"),
        (("store", "export", "/nowhere.sqlite"), {}, 4, "faser: no telemetry file /nowhere.sqlite"),
        (("sidecar",), {"FASER_STORE": "~nobody-at-all/t.sqlite"}, 2, "faser: store.path = '~nobody-at-all"),
        (
            ("sidecar",),
            {"FASER_STORE": "/tmp/\udcff"},
            2,
            "faser: store.path = '/tmp/\\udcff' from FASER_STORE; expected",
        ),
        (("sidecar", "--store", "/dev/full"), {}, 4, "faser: /dev/full is no regular file"),
        (("top", "--interval", "inf"), {}, 2, "faser: --interval inf; expected at most 3600 seconds"),
        (("serve", "./", "-sc", "{}"), {"FASER_POLICY": "prize"}, 2, "faser: unknown policy 'prize'"),
    ],
)
def test_what_cannot_be_used_is_one_line_on_stderr_and_an_exit_code(
    faser: Any, arguments: tuple[str, ...], environment: dict[str, str], code: int, message: str
) -> None:
    result = faser(*arguments, **environment)
    assert (result.returncode, result.stdout) == (code, "")
    said = result.stderr.splitlines()
    (line,) = [line for line in said if "controller.daemon.warm_up" not in line]  # said where it is slow
    assert line.startswith(message)


@pytest.mark.parametrize(
    ("place", "code", "told"), [("/dev/full", 1, "faser: No space left on device\n"), ("pipe", 1, "")]
)
def test_a_full_disk_behind_stdout_is_one_line_and_a_closed_pipe_none(
    place: str, code: int, told: str, sockets: Path
) -> None:
    with open("/dev/full", "w") as full, subprocess.Popen(["true"], stdin=subprocess.PIPE) as gone:
        gone.wait()
        done = subprocess.run(
            [*FASER, "policy", "list"], stdout=full if place == "/dev/full" else gone.stdin, stderr=subprocess.PIPE,
            text=True, check=False, env=os.environ | {"FASER_RUNTIME_DIR": str(sockets)},
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, told)


def test_without_a_stdout_nothing_is_said(sockets: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *FASER, "policy", "list"], stderr=subprocess.PIPE, text=True, check=False,
        env=os.environ | {"FASER_RUNTIME_DIR": str(sockets)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def with_vllm(version: str, folder: Path) -> dict[str, str]:
    """Return the environment of an installation with this vLLM; what is planted has metadata and no module."""
    told = folder / f"vllm-{version}.dist-info" / "METADATA"
    told.parent.mkdir()
    told.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_a_vllm_that_faser_does_not_know_is_one_line_before_anything_is_started(
    faser: Any, command: str, tmp_path: Path, sockets: Path
) -> None:
    output = tmp_path / "demo"
    arguments = {"serve": ("embedded",), "demo": ("--output", str(output))}
    cache = tmp_path / "cache"
    result = faser(command, *arguments[command], FASER_CACHE=str(cache), **with_vllm("0.99.1", tmp_path))
    assert (result.returncode, result.stdout) == (UnsupportedError.exit_code, "")
    assert result.stderr == (
        "faser: vLLM 0.99.1, which FASER does not know; expected vLLM 0.32 or 0.33; "
        "install vLLM 0.32 or 0.33, or a FASER that knows this one\n"
    )
    assert list(sockets.iterdir()) == []
    assert not output.exists()
    assert not cache.exists()


def test_serve_without_a_drafter_is_one_line_with_an_example(faser: Any, tmp_path: Path, sockets: Path) -> None:
    result = faser("serve", "org/name", "--max-model-len", "2048", **with_vllm("0.32.0", tmp_path))
    assert (result.returncode, result.stdout) == (EngineError.exit_code, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("faser: no drafter configured for org/name; expected vLLM's --speculative-config; add for")
    assert list(sockets.iterdir()) == []


def test_serve_on_a_port_in_use_is_one_line_before_anything_is_started(
    faser: Any, tmp_path: Path, sockets: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ("--host", "127.0.0.1", "--port", str(port), "-sc", "{}", "--dtype", "float32")
        result = faser("serve", "org/name", *arguments, **with_vllm("0.32.0", tmp_path))
    assert (result.returncode, result.stdout) == (EndpointError.exit_code, "")
    assert result.stderr == (
        f"faser: port {port} on 127.0.0.1: address already in use; expected a free port; "
        "stop its owner or pass --port N\n"
    )
    assert list(sockets.iterdir()) == []


@pytest.mark.parametrize("arguments", [("--nope",), ("frobnicate",), ("store", "export"), ("demo", "--duration", "x")])
def test_a_wrong_flag_exits_with_2(faser: Any, arguments: tuple[str, ...]) -> None:
    result = faser(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_config_prints_each_value_and_where_it_came_from(faser: Any, tmp_path: Path) -> None:
    text = faser("config", FASER_POLICY="fixed:2").stdout
    assert 'spec = "fixed:2"  # environment FASER_POLICY' in text
    values = faser("config", "--json", FASER_POLICY="fixed:2").stdout
    assert list(json.loads(values)) == list(settings())
    file = tmp_path / "printed.toml"  # what is printed is a file that says the same
    file.write_text(text)
    assert faser("config", "--json", "--config", str(file)).stdout == values


def test_the_error_tree_draws_every_error_of_every_floor_with_its_exit_code() -> None:
    import faser.controller.errors as module

    root = Path(module.__file__).parents[1]
    sources = [path for floor in FLOORS for path in (root / floor).rglob("*.py")]
    bases = {
        node.name: [ast.unparse(base) for base in node.bases]
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }

    def code(name: str) -> str | None:
        """Return the exit code of a class of errors, its own or the one it inherits; None for other classes."""
        if (kind := getattr(module, name, None)) is not None:
            return str(kind.exit_code)
        return next(filter(None, map(code, bases.get(name, []))), None)

    drawn = dict(re.findall(r"(\w+Error) +(\d)", module.__doc__ or ""))
    assert drawn == {name: found for name in bases if (found := code(name)) is not None}
    assert drawn["PolicyError"] == "2"


def test_status_and_top_show_a_running_sidecar(start_daemon: Any, make_engine: Any, config: Config, faser: Any) -> None:
    start_daemon()
    engine = make_engine()
    engine.hello()
    action = None
    for _ in range(5):
        engine.step(lease=action)
        action = engine.action()
    text = faser("status", FASER_ENDPOINT=config.link.endpoint).stdout
    assert "policy fixed:3" in text
    assert "boot-1: target" in text
    snapshot = json.loads(faser("status", "--json", "--endpoint", config.link.endpoint).stdout)
    [shown] = snapshot["engines"]
    assert shown["decisions"] == 5
    assert shown["lease_share"] == pytest.approx(0.8)
    assert shown["length_histogram"] == [0, 0, 0, 20, 0, 0, 0]
    assert shown["acceptance_by_position"][:4] == [0.75, 0.5, 0.25, None]
    assert shown["lease_age_s"] < 60.0


def test_top_redraws_and_says_when_the_sidecar_has_gone(
    start_daemon: Any, make_engine: Any, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    from faser.controller.cli.top import _next_view, run_top
    from faser.controller.link.ask import ask

    daemon = start_daemon()
    engine = make_engine()
    engine.hello()
    engine.step()
    engine.action()
    assert run_top(config.link, 0.01, rounds=2) == 0
    shown = capsys.readouterr().out
    assert "draft length" in shown
    assert "accepted at position" in shown
    last = ask(config.link)
    daemon.stop()
    from rich.console import Console

    Console().print(_next_view(config.link, last))
    assert "no sidecar runs" in capsys.readouterr().out


def test_names_with_brackets_are_shown_as_they_are(start_daemon: Any, make_engine: Any, config: Config) -> None:
    from faser.controller.link.ask import ask, engine_table, overview, run_status

    start_daemon()
    engine = make_engine(boot_id="[/b] boot")
    engine.hello()
    engine.step()
    engine.action()
    assert run_status(config.link, is_json=False) == 0
    snapshot = ask(config.link)
    assert "[/b] boot" in str(engine_table(snapshot.engines[0]).title)
    assert overview(snapshot)


def test_times_beyond_any_clock_leave_status_readable(start_daemon: Any, make_engine: Any, config: Config) -> None:
    import msgspec

    from faser.controller.link.ask import ask
    from faser.engine_adapter.protocol import encode

    start_daemon()
    engine = make_engine()
    engine.hello()
    for _ in range(2):
        record = engine.step()
        engine.action()
    for counter in (3, 4):
        wild = msgspec.structs.replace(record, counter=counter, time_s=1e308, step_s=1e308, adapter_s=1e308)
        engine.socket.send(encode(wild))
    engine.step(counter=5)
    engine.action()
    snapshot = ask(config.link)
    (status,) = snapshot.engines
    assert (status.records, status.step_ms < 1e3, status.adapter_us < 1e3) == (3, True, True)
    assert snapshot.link.dropped == {"out_of_bounds": 2}


def test_a_sidecar_that_hangs_is_a_clear_line_within_the_timeout(start_daemon: Any, config: Config) -> None:
    import zmq

    from faser.controller.errors import NotRunningError
    from faser.controller.link.ask import ask

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.ROUTER) as mute:
        mute.bind(config.link.endpoint.replace("engine.sock", "status.sock"))
        begin = time.monotonic()
        with pytest.raises(NotRunningError, match=r"no answer within 0\.2 s.*if one runs, it hangs"):
            ask(config.link, 0.2)
        assert time.monotonic() - begin < 5.0
    context.term()
