"""The command line and environment of vLLM with FASER switched on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from faser.controller.engine import launch as launching
from faser.controller.engine.launch import EngineLaunch, default_threads, free_port, rank_cores, require_free_port
from faser.controller.errors import EndpointError

SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4}
NUMBA_AFTER_OPENMP = """
import ctypes, numba, numpy
threads = ctypes.CDLL("libiomp5.so").omp_get_max_threads
before = threads()
@numba.njit(parallel=True)
def add(values):
    for index in numba.prange(len(values)):
        values[index] += 1
numba.set_num_threads(1)
add(numpy.ones(9))
print(before, threads())
"""


def launch(**changes: object) -> EngineLaunch:
    return EngineLaunch(**({"model": "/m", "port": 8000} | changes))  # type: ignore[arg-type]


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_faser_is_switched_on_by_two_flags() -> None:
    command = launch(speculative=SPECULATIVE).command()
    assert value_of(command, "--scheduler-cls") == "faser.engine_adapter.scheduler.FaserScheduler"
    assert value_of(command, "--worker-cls") == "faser.engine_adapter.worker.FaserWorker"
    assert json.loads(value_of(command, "--speculative-config")) == SPECULATIVE


def test_without_faser_nothing_of_it_is_on_the_command_line() -> None:
    _interpreter, *arguments = launch(has_faser=False, endpoint="ipc:///x").command()  # a checkout may be called faser
    assert "faser" not in " ".join(arguments)
    assert "FASER_ENDPOINT" not in launch(has_faser=False, endpoint="ipc:///x").environment({})


def test_the_operators_arguments_come_last_and_untouched() -> None:
    assert launch(arguments=("--max-model-len", "77")).command()[-2:] == ["--max-model-len", "77"]


def test_the_working_directory_is_kept_out_of_the_import_path() -> None:
    assert launch().command()[1] == "-P"
    assert launch().environment({})["PYTHONSAFEPATH"] == "1"


def test_nothing_is_reported_to_anybody() -> None:
    environment = launch().environment({})
    assert (environment["VLLM_NO_USAGE_STATS"], environment["DO_NOT_TRACK"]) == ("1", "1")


def test_local_models_never_ask_the_hub(tmp_path: Path) -> None:
    local = launch(model=str(tmp_path), speculative={"model": str(tmp_path)})
    assert local.environment({})["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in launch(model="org/name").environment({})
    assert "HF_HUB_OFFLINE" not in launch(model=str(tmp_path), speculative={"model": "org/name"}).environment({})


def test_on_a_cpu_the_v1_runner_and_openmp_are_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "openmp_library", lambda: tmp_path / "libiomp5.so")
    environment = launch().environment({"LD_PRELOAD": "/lib/other.so"})
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert environment["LD_PRELOAD"] == f"{tmp_path}/libiomp5.so:/lib/other.so"
    assert launch().environment({"LD_PRELOAD": "/x/libgomp.so"})["LD_PRELOAD"] == "/x/libgomp.so"
    cuda = launch(is_cpu=False).environment({})
    assert "VLLM_USE_V2_MODEL_RUNNER" not in cuda
    assert "LD_PRELOAD" not in cuda


def test_an_unset_preload_is_no_empty_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "openmp_library", lambda: None)
    assert "LD_PRELOAD" not in launch().environment({})


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 3), (8, 7)])
def test_a_small_machine_leaves_one_core_to_the_others(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "available_cores", lambda: cores)
    environment = launch().environment({})
    assert default_threads(cores) == threads
    assert environment["OMP_NUM_THREADS"] == str(threads)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_a_big_machine_is_left_to_vllms_own_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "available_cores", lambda: 64)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in launch().environment({})


@pytest.mark.parametrize(
    ("cores", "ranks", "bound"),
    [([0, 1], 2, "0|1"), ([0, 1, 2, 3, 6], 2, "0,1|2,3"), ([4, 5], 4, "4|5|4|5"), ([7], 3, "7|7|7")],
)
def test_each_rank_of_a_pipeline_is_bound_to_cores(cores: list[int], ranks: int, bound: str) -> None:
    assert rank_cores(cores, ranks) == bound


def test_a_pipelines_ranks_are_bound_for_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching.os, "sched_getaffinity", lambda _: {3, 5})
    bind = "VLLM_CPU_OMP_THREADS_BIND"
    environment = launch(ranks=2).environment({})
    assert environment[bind] == "3|5"
    assert "OMP_NUM_THREADS" not in environment
    assert launch(ranks=2).environment({bind: "0-1|2"})[bind] == "0-1|2"
    assert bind not in launch(ranks=2, is_cpu=False).environment({})


def test_the_operators_environment_wins() -> None:
    base = {"VLLM_CPU_KVCACHE_SPACE": "9", "OMP_NUM_THREADS": "5", "HF_HUB_OFFLINE": "0"}
    environment = launch(kv_cache_gib=1).environment(base)
    assert {name: environment[name] for name in base} == base
    assert launch(environment_extra={"OMP_NUM_THREADS": "2"}).environment(base)["OMP_NUM_THREADS"] == "2"


def test_numbas_pool_is_no_larger_than_the_targets() -> None:
    numba = "NUMBA_NUM_THREADS"
    assert launch(threads=3).environment({})[numba] == "3"
    assert launch().environment({"OMP_NUM_THREADS": "5"})[numba] == "5"
    assert launch(environment_extra={"OMP_NUM_THREADS": "2"}).environment({"OMP_NUM_THREADS": "5"})[numba] == "2"
    assert launch().environment({"OMP_NUM_THREADS": "5", numba: "4"})[numba] == "4"
    assert numba not in launch().environment({"OMP_NUM_THREADS": "4,2"})
    assert numba not in launch(is_cpu=False).environment({"OMP_NUM_THREADS": "5"})


@pytest.mark.parametrize(("pool", "threads"), [({"NUMBA_NUM_THREADS": "1"}, 1), ({"NUMBA_NUM_THREADS": "2"}, 2)])
def test_numbas_pool_sets_the_size_of_every_other(pool: dict[str, str], threads: int) -> None:
    """Why the pool is told its size: without it the target runs on as many threads as there are cores."""
    ours = {"OMP_NUM_THREADS": "1", "LD_PRELOAD": str(launching.openmp_library())} | pool
    found = subprocess.run(
        [sys.executable, "-c", NUMBA_AFTER_OPENMP], env=os.environ | ours, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["1", str(threads)]


def test_files_are_found_from_where_the_user_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heads.safetensors").touch()
    launch = EngineLaunch("model", 8000)
    found = launch.environment({"FASER_EXIT_HEADS": "heads.safetensors"})["FASER_EXIT_HEADS"]
    assert found == str(tmp_path / "heads.safetensors")
    assert launch.environment({"FASER_EXIT_HEADS": "none.safetensors"})["FASER_EXIT_HEADS"] == "none.safetensors"


def test_a_list_of_plugins_is_extended() -> None:
    assert launch().environment({"VLLM_PLUGINS": "other"})["VLLM_PLUGINS"] == "other,faser"
    assert launch().environment({"VLLM_PLUGINS": "faser"})["VLLM_PLUGINS"] == "faser"
    assert "VLLM_PLUGINS" not in launch().environment({})


@pytest.mark.parametrize(
    ("host", "url"),
    [(None, "http://127.0.0.1:1"), ("0.0.0.0", "http://127.0.0.1:1"), ("::1", "http://[::1]:1"), ("h", "http://h:1")],
)
def test_the_url_is_reachable_from_this_machine(host: str | None, url: str) -> None:
    assert launch(host=host, port=1).url == url


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        with pytest.raises(EndpointError, match=f"port {port} on 127.0.0.1: address already in use; .*--port"):
            require_free_port(port, "127.0.0.1")
    require_free_port(free_port(), "127.0.0.1")


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_an_impossible_port_is_one_clear_line(port: int) -> None:
    with pytest.raises(EndpointError, match="expected 1 to 65535"):
        require_free_port(port, None)
