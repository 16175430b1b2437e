"""What `faser doctor` looks at around the sidecar: folders, sockets, files, keys, settings. A check each.

Called by controller/doctor/doctor.py. A check yields findings and changes nothing.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import zmq

from ...engine_adapter.compiled import CACHE_VARIABLE, compiled, is_kept, is_private
from ...engine_adapter.link.keys import engine_keys
from ...engine_adapter.settings import SettingError, ensure_private_folder, runtime_folder
from ...models.embedded.cache import CacheError, cache_folder
from ..config import StoreConfig, settings
from ..decision.modes import ModeBoard
from ..errors import EndpointError, FaserError, StoreError
from ..home import is_homeless
from ..link.endpoint import IPC, Endpoint
from ..link.keys import load_keyring
from ..telemetry.footprint import in_words, log_path, remedy, sizes
from ..telemetry.retention import Retention
from ..telemetry.schema import connect_read_only
from .checks import Finding, Patient

_CONVERTED_BYTES = 300 << 20
_ROOM_BYTES = 1 << 30
_TRACING = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")


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
    with closing(connect_read_only(path)) as connection:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()


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


SIDECAR_CHECKS: tuple[Callable[[Patient], Iterator[Finding]], ...] = (
    check_disk, check_runtime_folder, check_endpoint, check_store, check_engine_settings, check_keys, check_modes,
    check_http, check_traces, check_estimates, check_lease,
)  # fmt: skip
