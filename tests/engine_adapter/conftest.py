"""Fixture `engine`: run `engine_child.py` with a clean environment and read back what the engine did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).with_name("engine_child.py")


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step; lists have one entry per scheduled request."""

    epoch: int  # of the lease; 0: the engine's default
    handles: list[int]
    lengths: list[int]
    scheduled: list[int]
    verified: list[int]
    sampled: list[int]
    drafted: list[int]
    confidences: list[list[float]]  # empty: not recorded
    rounds: list[int]
    first_rows: int
    caught_up: int
    times_s: list[float]
    pruned: list[int]  # rows that left the forward pass; empty: none
    frontiers: list[int]  # hits and misses
    overlap_s: float


@dataclass(frozen=True, slots=True)
class Batch:
    """What became of one `generate` call."""

    tokens: list[list[list[int]]]  # request, sample, token
    steps: list[Step]
    compared: list[dict[str, list[int]]]  # drafts of the process and of vLLM's own drafter for the same rows

    def acceptance(self) -> tuple[int, int]:
        """Return (accepted, verified) draft tokens; a request's last step is cut by max_tokens and left out."""
        last = {handle: number for number, step in enumerate(self.steps) for handle in step.handles}
        accepted = verified = 0
        for number, step in enumerate(self.steps):
            for handle, drafts, sampled in zip(step.handles, step.verified, step.sampled, strict=True):
                if drafts and last[handle] != number:
                    verified += drafts
                    accepted += sampled - 1
        return accepted, verified


@dataclass(frozen=True, slots=True)
class EngineRun:
    """What became of one engine."""

    batches: list[Batch]
    drafter: str
    is_ragged: bool | None
    faults: dict[str, int]
    is_pruning: bool | None = None  # None: without exit heads; False: after a failure
    gate: list[tuple[int, bool, float, int]] = field(default_factory=list)  # what the gate was told, step by step


def run_engine(folder: Path, scenario: dict[str, Any], environment: dict[str, str] | None = None) -> EngineRun:
    """Run the scenario in a process of its own; `folder` must be private and short enough for a socket."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    folder.chmod(0o700)
    environ = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "KMP_BLOCKTIME": "0",
        "FASER_ENDPOINT": f"ipc://{folder}/e.sock",
        **(environment or {}),
    }
    openmp = next(Path(sys.prefix).rglob("libiomp5.so"), None)
    if openmp is not None:
        environ["LD_PRELOAD"] = str(openmp)
    done = subprocess.run(
        [sys.executable, str(CHILD)],
        input=json.dumps({**scenario, "result": str(result)}),
        text=True,
        capture_output=True,
        env=environ,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    seen = json.loads(result.read_text())
    batches = [Batch(b["tokens"], [Step(**step) for step in b["steps"]], b["compared"]) for b in seen["batches"]]
    return EngineRun(batches, seen["drafter"], seen["is_ragged"], seen["faults"], seen["is_pruning"], seen["gate"])


@pytest.fixture(scope="session")
def engine() -> Iterator[Callable[..., EngineRun]]:
    """Return `run_engine(scenario, environment)` with a folder whose socket path is short enough."""
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        yield lambda scenario, environment=None: run_engine(Path(folder), scenario, environment)


@pytest.fixture(scope="session")
def scenario() -> Callable[..., dict[str, Any]]:
    """What a run with a drafter's process is given: the embedded target, little memory, prompts in chunks."""
    from faser.models.embedded import ensure_embedded_target

    def make(blocks: int, process: dict[str, Any] | None, *batches: dict[str, Any], **speculation: Any) -> Any:
        """Process None: no speculation; blocks of 128 tokens each."""
        given = {} if process is None else {"process": process}
        small = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        drafting = {} if process is None else {"speculative_config": speculation}
        common = {"dtype": "float32", "enforce_eager": True, "num_gpu_blocks_override": blocks}
        return {
            "model": str(ensure_embedded_target()),
            "is_steered": process is not None,
            "engine": common | small | drafting,
            "batches": list(batches),
            **given,
        }

    return make
