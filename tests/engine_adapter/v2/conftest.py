"""Fixtures of the tests on vLLM's real V2 runner: tiny models, and a process that forks one engine after another."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of an engine without a sidecar."""
    given = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        "FASER_RUNTIME_DIR": str(folder),
        "FASER_ENDPOINT": f"ipc://{folder}/e.sock",
        "FASER_DEFAULT_K": "0",
        "FASER_RAGGED": "always",  # clocks do not choose what is tested
    }
    openmp = next(Path(sys.prefix).rglob("libiomp5.so"), None)
    return os.environ | given | ({} if openmp is None else {"LD_PRELOAD": str(openmp)})


class Forks:
    """A process that has vLLM imported; each job is done in a fork of it."""

    def __init__(self, fork_process: Any, folder: Path, path: str = "") -> None:
        self._folder, self._count = folder, 0
        others = os.environ.get("PYTHONPATH")
        named = environment(folder) | {"PYTHONPATH": os.pathsep.join(filter(None, (path, others)))}
        self._process = fork_process(HERE / "forks.py", folder, named)

    def __call__(self, function: str, **given: Any) -> Any:
        """Do one job of jobs.py and return its result."""
        self._count += 1
        result, log = (self._folder / f"{self._count}.{kind}" for kind in ("json", "log"))
        self._process.do({"function": function, "given": given, "result": str(result), "log": str(log)})
        return json.loads(result.read_text())

    def close(self) -> None:
        """End the process."""
        self._process.close()


@pytest.fixture(scope="session")
def engine_environment() -> Callable[[Path], dict[str, str]]:
    """Return `environment(folder)`."""
    return environment


@pytest.fixture(scope="session")
def start_forks(tmp_path_factory: pytest.TempPathFactory, fork_process: Any) -> Callable[..., Forks]:
    """Return `start(path)`: a process of the vLLM found on a path, "" for the installed one."""
    return lambda path="": Forks(fork_process, tmp_path_factory.mktemp("forks"), path)


@pytest.fixture(scope="session")
def forks(start_forks: Callable[..., Forks]) -> Iterator[Forks]:
    """A process of the installed vLLM."""
    running = start_forks()
    yield running
    running.close()


class Tiny:
    """Scenarios by the method that drafts; weights are written once, when they are first asked for."""

    def __init__(self, folder: Path, forks: Forks, eagle_pair: Callable[[str], tuple[Path, Path]]) -> None:
        self._folder, self._forks, self._eagle_pair = folder, forks, eagle_pair
        self._heads: dict[str, tuple[Path, Path]] = {}

    def scenario(self, method: str, longest: int = 4, **changes: Any) -> dict[str, Any]:
        """Return model and speculation for `none`, `itself`, `near`, `ngram_gpu`, `eagle` or `eagle3`."""
        if method in ("eagle", "eagle3"):
            if method not in self._heads:
                self._heads[method] = self._eagle_pair(method)
            target, head = self._heads[method]
            chosen = {"method": method, "model": str(head), "num_speculative_tokens": longest} | changes
            return {"model": str(target), "vocabulary": 64, "speculation": chosen}
        scenario: dict[str, Any] = {"model": str(self._llama("target"))}
        if method == "ngram_gpu":
            looked_up = {"method": method, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
            return scenario | {"speculation": looked_up | {"num_speculative_tokens": longest} | changes}
        if method != "none":
            drafter = self._llama("target" if method == "itself" else "near")
            chosen = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": longest} | changes
            return scenario | {"speculation": chosen}
        return scenario

    def without(self, method: str) -> dict[str, Any]:
        """Return the same target without speculation."""
        return {key: value for key, value in self.scenario(method).items() if key != "speculation"}

    def _llama(self, name: str) -> Path:
        folder = self._folder / name
        if not folder.exists():
            self._forks("save_model", folder=str(folder), noise=0.15 if name == "near" else 0.0)
        return folder


@pytest.fixture(scope="session")
def tiny(
    forks: Forks, tmp_path_factory: pytest.TempPathFactory, eagle_pair: Callable[[str], tuple[Path, Path]]
) -> Tiny:
    """Folders of the tiny models."""
    return Tiny(tmp_path_factory.mktemp("tiny"), forks, eagle_pair)
