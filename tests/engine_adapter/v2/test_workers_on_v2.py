"""FASER on the real V2 runner in spawned workers, one and two of them: orders and reports travel between processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent


@pytest.mark.parametrize("tensor_parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_spawned_workers_obey_every_length(
    forks: Any, tiny: Any, engine_environment: Callable[[Path], dict[str, str]], tmp_path: Path, tensor_parallel: int
) -> None:
    plain = forks("generate", **tiny.without("near"))["tokens"]
    scenario = tiny.scenario("near") | {"rule": {"random": 4, "seed": 1}, "tensor_parallel": tensor_parallel}
    result = tmp_path / "result.json"
    spawning = {
        "FASER_TEST_V2_ON_CPU": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "PYTHONPATH": f"{HERE / 'site'}:{HERE}",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "workers.py")],
        input=json.dumps(scenario | {"vocabulary": 512, "result": str(result)}), text=True, capture_output=True,
        env=engine_environment(tmp_path) | spawning, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    seen = json.loads(result.read_text())
    check = seen["check"]
    assert seen["executor"] == "MultiprocExecutor"
    assert seen["is_steered"]
    assert seen["tokens"] == plain
    assert check["disobeyed"] == check["misreported"] == []
    assert check["obeyed"] > 20
    assert (check["without_report"], check["confident"]) == (0, check["drafting"])
    assert check["timed"] == check["records"]
