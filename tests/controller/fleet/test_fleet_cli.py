"""`faser fleet` as a user meets it when something is wrong: one line, before any engine starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from faser.controller import ray_cluster
from faser.controller.cli.main import app
from faser.controller.engine.launch import available_cores, free_port
from faser.controller.errors import EndpointError, EngineError, FaserError, ModelError, UsageError
from faser.controller.fleet.engine_actor import EngineActor, EngineOrder, launch_of

COMMAND = "from faser.controller.cli.main import main; main()"


def fleet(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["fleet", *arguments])


@pytest.fixture
def listener() -> Iterator[int]:
    """Return a port on which somebody listens who is not Ray, and says nothing."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        found.listen()
        yield found.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (["embedded", "--replicas", "3:1"], UsageError, "--replicas 3:1; expected LEAST:MOST"),
        (["embedded", "--scheduler-cls", "x"], UsageError, "--scheduler-cls with faser fleet; expected FASER's own"),
        (["embedded", "--port", "0"], EndpointError, "port 0; expected 1 to 65535"),
        (["embedded", "--cores-per-replica", "999"], UsageError, "room for 0 replicas of 999 cores each on this"),
        (["embedded", "--replicas", "1:999"], UsageError, "of 1 core each on this machine; expected room for 999"),
        (["org/name", "--replicas", "1"], EngineError, "no drafter configured for org/name"),
        (["/nowhere", "--replicas", "1", "-sc", "{}"], ModelError, "no model at /nowhere"),
        (["embedded", "--replicas", "1", "--address", "here"], UsageError, "--address 'here'; expected HOST:PORT"),
        (["embedded", "--replicas", "1", "--address", "127.0.0.1:1"], EndpointError,
         "no Ray answers at 127.0.0.1:1; expected a running one; start it with: ray start --head"),
        (["embedded", "--replicas", "1", "--address", "ray://127.0.0.1:1"], EndpointError, "no Ray answers at ray://"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(arguments: list[str], kind: type[FaserError], said: str) -> None:
    pytest.importorskip("ray")
    ports = [] if "--port" in arguments else ["--port", str(free_port())]
    result = fleet(*arguments, *ports)
    assert isinstance(result.exception, kind), result.exception
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)


def test_a_port_in_use_is_told_before_anything_starts(listener: int) -> None:
    result = fleet("embedded", "--port", str(listener))
    assert isinstance(result.exception, EndpointError)
    assert f"port {listener} on 127.0.0.1: address already in use" in str(result.exception)


def test_without_ray_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = fleet("embedded")
    assert isinstance(result.exception, UsageError)
    assert str(result.exception) == "no ray here; expected the extra fleet; pip install 'faser-vllm[fleet]'"


def test_whoever_listens_and_is_not_ray_is_given_up_on(listener: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would try for minutes."""
    pytest.importorskip("ray")
    monkeypatch.setattr(ray_cluster, "_CONNECT_S", 1.0)
    result = fleet("embedded", "--replicas", "1", "--port", str(free_port()), "--address", f"127.0.0.1:{listener}")
    assert isinstance(result.exception, EndpointError)
    assert f"no Ray answers at 127.0.0.1:{listener}" in str(result.exception)


def test_the_line_is_on_stderr_with_the_kinds_exit_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, "fleet", "embedded", "--replicas", "2:1"],
        capture_output=True, text=True, cwd="/", env=os.environ | {"FASER_RUNTIME_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == UsageError.exit_code
    assert done.stderr == "faser: --replicas 2:1; expected LEAST:MOST with LEAST not above MOST; pass 1:2\n"


# --- what an actor does with its order ---


def order(**more: object) -> dict[str, object]:
    told = {"name": "fleet-1-replica-1", "model": "/nowhere", "arguments": ["-sc", "{}"], "endpoint": "ipc:///e",
            "host": "127.0.0.1", "cores": 0, "is_spread": False, "environment": {}}  # fmt: skip
    return {**told, **more}


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let a test change the environment and the cores of this process, as an actor does with its own."""
    cores = os.sched_getaffinity(0)
    kept = dict(os.environ)
    tmp_path.chmod(0o700)
    monkeypatch.setenv("FASER_RUNTIME_DIR", str(tmp_path))
    yield
    os.sched_setaffinity(0, cores)
    for name in set(os.environ) - set(kept):
        del os.environ[name]
    os.environ.update(kept)


def test_an_actor_tells_why_its_engine_cannot_start(own_environment: None) -> None:
    actor = EngineActor()
    assert actor.start(order()) == {"url": "", "where": "", "pid": 0}
    seen = actor.look()
    assert (seen["is_running"], seen["health"]) == (False, "dead")
    assert str(seen["reason"]).startswith("no model at /nowhere; expected")
    actor.stop()


def test_an_actor_takes_cores_of_its_own_and_leaves_them_free_again(own_environment: None) -> None:
    first, second = EngineActor(), EngineActor()
    cores = sorted(os.sched_getaffinity(0))
    first.start(order(cores=1))
    assert os.sched_getaffinity(0) == {cores[0]}
    second.start(order(cores=1))
    assert "0 of 1 cores are free" in str(second.look()["reason"])
    first.stop()
    third = EngineActor()
    third.start(order(cores=1))
    assert "no model at" in str(third.look()["reason"])
    third.stop()


def test_an_engine_of_a_fleet_is_started_as_faser_serve_would(own_environment: None, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    told = EngineOrder(
        "n", str(tmp_path / "m"), ["-sc", "{}", "--max-num-seqs", "8"], "ipc:///e", "127.0.0.1", 0, False, {}
    )
    launch = launch_of(told)
    assert launch.arguments == ("-sc", "{}", "--max-num-seqs", "8")
    assert (launch.host, launch.endpoint, launch.has_faser) == ("127.0.0.1", "ipc:///e", True)


def test_rays_number_of_threads_is_not_the_engines(own_environment: None) -> None:
    os.environ["OMP_NUM_THREADS"] = "7"  # as Ray does
    EngineActor().start(order())
    assert "OMP_NUM_THREADS" not in os.environ
    EngineActor().start(order(environment={"OMP_NUM_THREADS": "3"}))
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_this_machine_has_room_for_as_many_replicas_as_cores() -> None:
    result = fleet("embedded", "--port", str(free_port()), "--replicas", f"1:{available_cores() + 1}")
    assert isinstance(result.exception, UsageError)
    assert f"room for {available_cores()} replicas of 1 core each" in str(result.exception)
