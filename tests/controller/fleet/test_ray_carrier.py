"""Actors on a real Ray, without engines: refused, without room, killed; on an instance of our own and on a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faser.controller.engine.launch import free_port
from faser.controller.engine.processes import ProcessTree

pytest.importorskip("ray")

CHILD = Path(__file__).with_name("ray_child.py")


def seen(folder: Path, *address: str) -> dict[str, Any]:
    """Return what the child saw."""
    folder.chmod(0o700)
    command = [sys.executable, "-P", str(CHILD), str(folder), *address]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_refused_and_without_room(found: dict[str, Any]) -> None:
    assert found["refused"]["reason"].startswith("no model at /nowhere; expected")
    assert (found["without_room"]["is_running"], found["without_room"]["is_placed"]) == (True, False)
    assert found["stopped"]["is_running"] is False


def test_on_an_instance_of_our_own(tmp_path: Path) -> None:
    before = set(Path("/tmp").glob("faser-ray-*"))
    found = seen(tmp_path)
    assert found["is_ours"]
    assert found["is_guarded"], "whoever reaches Ray's ports may run code"
    assert found["room"] == [[2, 0]] or found["room"][0][1] > 0  # on a machine with GPUs
    assert_refused_and_without_room(found)
    assert "died" in found["killed"]["reason"] or "dead" in found["killed"]["reason"]
    assert "\n" not in found["killed"]["reason"]
    assert set(Path("/tmp").glob("faser-ray-*")) == before, "its folder went with it"


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[int, int]]:
    """Return the ports of a Ray that runs already: its own, and that of its clients."""
    port, clients = free_port(), 9000 + os.getpid() % 900
    with tempfile.TemporaryDirectory(prefix="faser-", dir="/tmp") as name:
        command = [
            sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(port),
            "--ray-client-server-port", str(clients), "--num-cpus", "2", "--include-dashboard", "false",
            "--object-store-memory", str(80 << 20), "--temp-dir", name,
        ]  # fmt: skip
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        with ProcessTree(command, environment, Path(name) / "log") as tree:
            end_s = time.monotonic() + 60.0
            while "Ray runtime started" not in tree.log.read_text():
                assert tree.poll() is None, tree.log.read_text()
                assert time.monotonic() < end_s
                time.sleep(0.1)
            yield port, clients


@pytest.mark.slow  # `make proof`
@pytest.mark.parametrize("is_client", [False, True])
def test_on_a_cluster_that_runs_already(tmp_path: Path, cluster: tuple[int, int], is_client: bool) -> None:
    port, clients = cluster
    found = seen(tmp_path, f"ray://127.0.0.1:{clients}" if is_client else f"127.0.0.1:{port}")
    assert not found["is_ours"]
    assert_refused_and_without_room(found)
