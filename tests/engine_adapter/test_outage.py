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

from faser.controller.engine.launch import openmp_library
from faser.models.embedded.pair import ensure_embedded_target
from faser.models.embedded.precision import dtype_on

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.timeout(900)]

LEASE_STEPS, LEASE_S = 32, 1.0
ROUNDS = 4


@pytest.fixture(scope="module")
def outcome() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="faser-") as name:
        folder = Path(name)
        endpoint = f"ipc://{folder / 'engine.sock'}"
        scenario = {
            "model": str(ensure_embedded_target()),
            "endpoint": endpoint,
            "result": str(folder / "result.json"),
            "rounds": ROUNDS,
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
            "NUMBA_NUM_THREADS": "1",
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


Times = dict[str, list[list[float]]]
FIRST = {"stopped": 0, "killed": 1}  # which of a round's two healthy turns comes before the fault
TOLERANCES = {50: 1.1, 99: 1.25}  # percentile of the step times -> factor beyond the healthy turns' own spread


def ratios(times: Times, fault: str, percentile: int) -> tuple[list[float], list[float]]:
    """Return for each round the faulty turn over the healthy one before it, and its slower healthy turn over the other.

    What a round's healthy turns differ by is the machine's doing: nothing but time lies between them.
    """
    faulty, healthy = ([float(np.percentile(turn, percentile)) for turn in times[name]] for name in (fault, "healthy"))
    pairs = list(zip(healthy[::2], healthy[1::2], strict=True))
    outage = [value / pair[FIRST[fault]] for value, pair in zip(faulty, pairs, strict=True)]
    return outage, [max(pair) / min(pair) for pair in pairs]


def beyond_the_spread(times: Times, fault: str) -> list[str]:
    """Return what the fault slowed down in more than half of the rounds, by more than healthy turns ever differ.

    Load from elsewhere comes and goes: it slows down some turns of either kind. A step that waits for the sidecar does
    so in every round.
    """
    seen = {percentile: ratios(times, fault, percentile) for percentile in TOLERANCES}
    return [
        f"p{percentile}: {np.round(outage, 3)}, healthy {np.round(healthy, 3)}"
        for percentile, (outage, healthy) in seen.items()
        if statistics.median_low(outage) > TOLERANCES[percentile] * max(healthy)
    ]


@pytest.mark.parametrize("fault", list(FIRST))
def test_step_times_stay_within_the_spread_of_a_healthy_sidecar(fault: str, outcome: dict[str, Any]) -> None:
    times = outcome["times"]
    for name in ("healthy", fault):
        print(f"p99 of a step, {name}: {[round(1e3 * float(np.percentile(turn, 99)), 2) for turn in times[name]]} ms")
    for percentile in TOLERANCES:
        outage, healthy = (np.round(values, 3) for values in ratios(times, fault, percentile))
        print(f"p{percentile}, by round: {fault} / healthy {outage}, healthy / healthy {healthy}")
    assert beyond_the_spread(times, fault) == []


@pytest.mark.parametrize(("every", "percentile"), [(1, "p50"), (20, "p99")])
def test_control_steps_that_wait_for_the_sidecar_are_seen(every: int, percentile: str) -> None:
    """Also on a machine of which one turn in six is half as slow again."""
    chance = np.random.default_rng(1)

    def turns(count: int) -> list[list[float]]:
        return [
            list(chance.normal(0.03, 0.001, 40) * chance.choice([1.0, 1.0, 1.0, 1.0, 1.0, 1.5])) for _ in range(count)
        ]

    times = {"healthy": turns(2 * ROUNDS), "killed": turns(ROUNDS)}
    assert beyond_the_spread(times, "killed") == []
    for turn in times["killed"]:
        turn[::every] = [step_s + 0.05 for step_s in turn[::every]]
    assert any(line.startswith(percentile) for line in beyond_the_spread(times, "killed"))
