"""Fixtures: `stage_engine` runs stage_engine.py in a clean environment and reads back what the engine did;
`short_answers` are what one rank says to the short requests; `tiny` is the folder of a target of eight small layers
with the embedded target's tokenizer.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from faser.controller.engine.launch import openmp_library, rank_cores
from faser.models.embedded.pair import ensure_embedded_target

from .scenarios import SHORT

CHILD = Path(__file__).with_name("stage_engine.py")
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 640,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 96,  # below the long prompts: they are prefilled in chunks
    "block_size": 32,
    "num_gpu_blocks_override": 52,  # below what twelve requests need: some are preempted
    "seed": 0,
}

TINY_LAYERS = 8

Outcome = dict[str, Any]


def environment(folder: Path, ranks: int, extra: dict[str, str]) -> dict[str, str]:
    """Return a clean environment for an engine with so many ranks."""
    return {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": rank_cores(sorted(os.sched_getaffinity(0)), ranks),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "NUMBA_NUM_THREADS": "1",
        "LD_PRELOAD": str(openmp_library() or ""),
        "FASER_RUNTIME_DIR": str(folder),
        "FASER_ENDPOINT": f"ipc://{folder / 'engine.sock'}",
        "FASER_STAGES": "1",
        **extra,
    }


def run_stage_engine(folder: Path, ranks: int, scenario: dict[str, Any], extra: dict[str, str]) -> Outcome:
    """Run the scenario; what it logs stands in `log`, its end in `code`."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    folder.chmod(0o700)
    parallel = {"pipeline_parallel_size": ranks, "distributed_executor_backend": "mp"} if ranks > 1 else {}
    given = {
        "model": str(ensure_embedded_target()),
        "has_faser": ranks > 1,
        "result": str(result),
        **scenario,
        "engine": ENGINE | parallel | scenario.get("engine", {}),
    }
    done = subprocess.run(
        [sys.executable, str(CHILD)],
        input=json.dumps(given), text=True, capture_output=True, env=environment(folder, ranks, extra), cwd="/",
        check=False,
    )  # fmt: skip
    seen = json.loads(result.read_text()) if result.exists() else {}
    return seen | {"log": done.stdout[-20000:] + done.stderr[-20000:], "said": done.stdout, "code": done.returncode}


@pytest.fixture(scope="session")
def stage_engine() -> Iterator[Callable[..., Outcome]]:
    """Return `run(ranks, scenario, **environment)`."""
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        yield lambda ranks, scenario, **extra: run_stage_engine(Path(folder), ranks, scenario, extra)


@pytest.fixture(scope="session")
def short_answers(stage_engine: Callable[..., Outcome]) -> dict[str, Any]:
    """Return what vLLM says by itself on one rank."""
    result = stage_engine(1, {"phases": [SHORT]})
    assert result["code"] == 0, result["log"]
    said: dict[str, Any] = result["phases"][0]["rounds"][0]
    return said


@pytest.fixture(scope="session")
def tiny(random_target: Callable[..., Path]) -> Path:
    """Return a model whose steps take milliseconds."""
    words = ensure_embedded_target()
    size = json.loads((words / "config.json").read_text())["vocab_size"]
    target = random_target(num_hidden_layers=TINY_LAYERS, vocab_size=size, max_position_embeddings=640)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(words / name, target / name)
    return target
