"""An engine does not notice when its sidecar is killed, stopped or started again."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser.controller.launch import openmp_library
from faser.models.embedded import ensure_embedded_target
from faser.models.precision import dtype_on

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.timeout(900)]

LEASE_STEPS, LEASE_S = 32, 1.0


@pytest.fixture(scope="module")
def outcome() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="faser-") as name:
        folder = Path(name)
        endpoint = f"ipc://{folder / 'engine.sock'}"
        scenario = {
            "model": str(ensure_embedded_target()),
            "endpoint": endpoint,
            "result": str(folder / "result.json"),
            "rounds": 3,
            "steps": 40,
            "engine": {
                "dtype": dtype_on("cpu"),
                "enforce_eager": True,
                "max_model_len": 512,
                "max_num_seqs": 8,
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 4,
                    "prompt_lookup_max": 3,
                    "prompt_lookup_min": 1,
                },
            },
        }
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "LD_PRELOAD": str(openmp_library() or ""),
            "FASER_RUNTIME_DIR": str(folder),
            "FASER_ENDPOINT": endpoint,
        }
        script = str(Path(__file__).with_name("outage.py"))
        subprocess.run(
            [sys.executable, script], input=json.dumps(scenario), text=True, env=environment, cwd="/", check=True
        )
        yield json.loads((folder / "result.json").read_text())


def test_a_live_sidecar_steers(outcome: dict[str, Any]) -> None:
    steered = outcome["story"]["steered"]
    assert sum(step["epoch"] > 0 for step in steered) >= 0.95 * len(steered)
    assert max(step["longest"] for step in steered) == 3


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_the_default_is_back_within_the_lease(fault: str, outcome: dict[str, Any]) -> None:
    back = outcome["story"][f"default after {fault}"]
    assert back["steps"] <= LEASE_STEPS + 2 or back["seconds"] <= LEASE_S + 0.5
    assert back["steps"] <= LEASE_STEPS + 2
    quiet = outcome["story"]["dead" if fault == "kill" else "stopped"]
    assert all(step["epoch"] == 0 and step["longest"] == 0 for step in quiet)


def test_an_orderly_end_gives_the_lease_back_at_once(outcome: dict[str, Any]) -> None:
    assert outcome["story"]["default after release"]["steps"] <= 3


@pytest.mark.parametrize("event", ["first control", "control after restart", "control after continue"])
def test_control_resumes(event: str, outcome: dict[str, Any]) -> None:
    assert outcome["story"][event]["seconds"] < 30.0


def test_no_request_fails(outcome: dict[str, Any]) -> None:
    assert len(outcome["finished"]) > 4
    assert set(outcome["finished"]) == {200}


@pytest.mark.parametrize(("fault", "first"), [("stopped", 0), ("killed", 1)])
def test_step_times_stay_within_the_spread_of_a_healthy_sidecar(
    fault: str, first: int, outcome: dict[str, Any]
) -> None:
    """Each faulty turn is compared with the healthy one just before it.

    Other load on the machine can only slow a turn down, so the best of the rounds is what the fault itself costs; a
    step that waited for the sidecar would be slow in all of them.
    """
    healthy, faulty = outcome["times"]["healthy"][first::2], outcome["times"][fault]
    medians = [statistics.median(b) / statistics.median(a) for a, b in zip(healthy, faulty, strict=True)]
    tails = [float(np.percentile(b, 99) / np.percentile(a, 99)) for a, b in zip(healthy, faulty, strict=True)]
    print(f"step time {fault} / healthy per round: p50 {np.round(medians, 3)}, p99 {np.round(tails, 3)}")
    assert min(medians) <= 1.1
    assert min(tails) <= 1.25
