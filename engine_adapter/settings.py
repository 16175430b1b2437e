"""The FASER_* environment variables that the engine's side reads: one table, one parser.

Called by the scheduler mixin at engine start, by the sidecar for the shared defaults, and by the documentation
test. Reads nothing but the environment; a bad value is an error that names what was expected.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .errors import EndpointError
from .protocol import MAX_DRAFT_LENGTH, MOST_REST_STEPS

ANYWHERE: Final = "all"  # cores: wherever the engine may run
NEVER, AUTO, ALWAYS = "never", "auto", "always"  # pruning, drafting ahead, ping-pong groups, ragged rounds
MAX_CORES: Final = 4096
IPC_PATH_LIMIT: Final = 107  # sun_path of Linux, without the trailing zero


class SettingError(EndpointError):
    """A FASER_* variable or a path that cannot be used; one line: seen, expected, what to do."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One environment variable: how it is parsed, its default as text, and one sentence of help."""

    name: str
    default: str
    help: str
    parse: Callable[[str, str], object]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the engine's side needs to know; see SETTINGS for meaning and defaults."""

    is_enabled: bool
    endpoint: str
    default_length: int
    lease_steps: int
    lease_ms: int
    has_confidence: bool
    catch_up_tokens: int
    exit_heads: str
    prune: str = AUTO
    drafter_cores: str = ""
    frontier: int = 0
    draft_ahead: str = AUTO
    ping_pong: str = NEVER
    splits: tuple[str, ...] = ()
    server_key: str = ""
    engine_key: str = ""
    is_varlen: bool = True
    draft_graphs: int = 8
    match_mib: int = 256
    draft_max: int = MAX_DRAFT_LENGTH
    rest_steps: int = MOST_REST_STEPS
    shared_mib: int = 0
    skipped_tokens: int = 2048
    ragged: str = AUTO
    has_stages: bool = False
    seeds_all: bool = True


def _integer(low: int, high: int) -> Callable[[str, str], int]:
    def parse(name: str, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise SettingError(f"{name}={text!r}: expected an integer from {low} to {high}; correct or unset it")
        return value

    return parse


def _switch(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise SettingError(f"{name}={text!r}: expected 0 or 1; correct or unset it")
    return text == "1"


def _choice(*values: str) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text not in values:
            raise SettingError(
                f"{name}={text!r}: expected {', '.join(values[:-1])} or {values[-1]}; correct or unset it"
            )
        return text

    return parse


def core_numbers(text: str) -> list[int]:
    """Return the cores of a list such as 1 or 2-3,6; ValueError for anything else."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low, high = int(first), int(last if dash else first)
        if not 0 <= low <= high < low + MAX_CORES:
            raise ValueError(text)
        found.update(range(low, high + 1))
    return sorted(found)


def _cores(name: str, text: str) -> str:
    try:
        if text not in ("", ANYWHERE):
            core_numbers(text)
    except ValueError:
        raise SettingError(
            f"{name}={text!r}: expected core numbers such as 1 or 2-3,6, or {ANYWHERE}; correct or unset it"
        ) from None
    return text


def _names(_name: str, text: str) -> tuple[str, ...]:
    """Return the names of a list; whether they can be had is told where they are made ready (overlap/splits.py)."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def _endpoint(name: str, text: str) -> str:
    if not text:
        return default_endpoint()
    if text.startswith("ipc://") and len(text) - len("ipc://") > IPC_PATH_LIMIT:
        raise SettingError(
            f"{name}: socket path of {len(text) - 6} bytes, at most {IPC_PATH_LIMIT}; choose a shorter one"
        )
    if not text.startswith(("ipc://", "tcp://", "inproc://")):
        raise SettingError(f"{name}={text!r}: expected ipc://PATH or tcp://HOST:PORT")
    if text.startswith("tcp://"):
        _require_address(name, text)
    return text


def _require_address(name: str, text: str) -> None:
    """Raise SettingError unless an engine can connect to it: `*` is for those who listen."""
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536
    if not is_port or host in ("", "*"):
        raise SettingError(
            f"{name}={text!r}: expected tcp://HOST:PORT with a port from 1 to 65535; correct or unset it"
        )


SETTINGS: Final = {
    "is_enabled": Setting(
        "FASER_ENABLED", "1", "0 leaves vLLM unchanged, even where its flags name FASER's classes.", _switch
    ),
    "endpoint": Setting(
        "FASER_ENDPOINT", "", "Where the sidecar listens; empty: engine.sock in the runtime folder.", _endpoint
    ),
    "default_length": Setting(
        "FASER_DEFAULT_K",
        "0",
        "Draft length without a valid lease; the engine's own Dynamic-SD table wins over it.",
        _integer(0, MAX_DRAFT_LENGTH),
    ),
    "lease_steps": Setting("FASER_LEASE_STEPS", "32", "Longest lease, in engine steps.", _integer(1, 100_000)),
    "lease_ms": Setting("FASER_LEASE_MS", "1000", "Longest lease, in milliseconds.", _integer(1, 600_000)),
    "has_confidence": Setting(
        "FASER_CONFIDENCE",
        "1",
        "0: confidence is not recorded, and rules that stop drafts by it are ignored.",
        _switch,
    ),
    "catch_up_tokens": Setting(
        "FASER_CATCH_UP_TOKENS",
        "512",
        "Most skipped tokens that a draft model reads in a step (CPU); 0: it never skips.",
        _integer(0, 1_000_000),
    ),
    "exit_heads": Setting(
        "FASER_EXIT_HEADS",
        "",
        "File of exit heads, which let a lease prune verification (docs/design/pruning.md).",
        lambda _name, text: text,
    ),
    "prune": Setting(
        "FASER_PRUNE",
        AUTO,
        "When to prune as a lease asks: auto (at batch sizes where the engine measured it to be faster) or always.",
        _choice(AUTO, ALWAYS),
    ),
    "drafter_cores": Setting(
        "FASER_DRAFTER_CORES",
        "",
        "Cores of the process that drafts ahead (docs/design/overlap.md), as 2-3; all: unpinned; empty: no process.",
        _cores,
    ),
    "frontier": Setting(
        "FASER_FRONTIER",
        "0",
        "Tokens to draft ahead per request unless a lease says otherwise; needs FASER_DRAFTER_CORES.",
        _integer(0, MAX_DRAFT_LENGTH),
    ),
    "draft_ahead": Setting(
        "FASER_DRAFT_AHEAD",
        AUTO,
        "When to draft ahead: auto (at batch sizes where the engine measured it to be faster) or always.",
        _choice(AUTO, ALWAYS),
    ),
    "ping_pong": Setting(
        "FASER_PING_PONG",
        NEVER,
        "When one half of the batch drafts while the other is verified: never, auto (where measured to be "
        "faster) or always; on the V1 runner needs FASER_DRAFTER_CORES or FASER_SPLITS.",
        _choice(NEVER, AUTO, ALWAYS),
    ),
    "splits": Setting(
        "FASER_SPLITS",
        "",
        "Splits that a lease may ask for from step to step, of the cores, drafter to target, as 1:3,1:1, or of a GPU's "
        "SMs on the V2 runner, as streams,1:15,1:7; empty: none.",
        _names,
    ),
    "server_key": Setting(
        "FASER_SERVER_KEY",
        "",
        "File with the sidecar's public key; needed where the endpoint leaves this host (SECURITY.md).",
        lambda _name, text: text,
    ),
    "engine_key": Setting(
        "FASER_ENGINE_KEY", "", "File with this engine's own secret key, mode 0600.", lambda _name, text: text
    ),
    "is_varlen": Setting(
        "FASER_VARLEN_GRAPHS",
        "1",
        "0: full CUDA graphs verify one draft length only, as vLLM captures them (V2 runner).",
        _switch,
    ),
    "draft_graphs": Setting(
        "FASER_DRAFT_GRAPHS",
        "8",
        "Most draft lengths that have a CUDA graph of their own (V2 runner); 0: vLLM chooses them.",
        _integer(0, MAX_DRAFT_LENGTH),
    ),
    "draft_max": Setting(
        "FASER_DRAFT_MAX",
        str(MAX_DRAFT_LENGTH),
        "Longest draft of the drafter, within num_speculative_tokens, which holds for copied drafts too.",
        _integer(1, MAX_DRAFT_LENGTH),
    ),
    "rest_steps": Setting(
        "FASER_REST_STEPS",
        str(MOST_REST_STEPS),
        "Most steps in a row that a request which is ahead of its objective is left out of for one that is behind; "
        "0: nobody is.",
        _integer(0, MOST_REST_STEPS),
    ),
    "shared_mib": Setting(
        "FASER_SHARED_MIB",
        "0",
        "Memory for what ended requests answered, from which others under the same cache_salt copy drafts too, in "
        "MiB, from 8 on; 0: nothing is shared (SECURITY.md).",
        _integer(0, 1 << 20),
    ),
    "match_mib": Setting(
        "FASER_MATCH_MIB",
        "256",
        "Memory for requests' texts, from which drafts are copied where words repeat themselves (V1 runner), in MiB; "
        "0: nothing is copied.",
        _integer(0, 1 << 20),
    ),
    "skipped_tokens": Setting(
        "FASER_SKIPPED_TOKENS",
        "2048",
        "Most tokens that a drafter may skip before it catches up, at most a step's (V2 runner); 0: it never skips.",
        _integer(0, 1_000_000),
    ),
    "ragged": Setting(
        "FASER_RAGGED",
        AUTO,
        "When a request leaves the draft batch behind its own length (V2 runner): auto (at batch sizes where the "
        "engine measured it to be faster; always with several ranks) or always.",
        _choice(AUTO, ALWAYS),
    ),
    "has_stages": Setting(
        "FASER_STAGES",
        "0",
        "1: with pipeline_parallel_size > 1, layers can move between ranks while requests run (CPU, eager).",
        _switch,
    ),
    "seeds_all": Setting(
        "FASER_SEEDS_ALL",
        "1",
        "0: vLLM draws for requests without a seed; else FASER gives them one, whose draws are cheaper beside drafts "
        "(CPU).",
        _switch,
    ),
}


def load_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings in force; raise SettingError for a value that cannot be used."""
    values = {field: s.parse(s.name, environ.get(s.name, s.default)) for field, s in SETTINGS.items()}
    return Settings(**values)  # type: ignore[arg-type]


def runtime_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of sockets: FASER_RUNTIME_DIR, else faser/ below XDG_RUNTIME_DIR, else one per user."""
    if named := environ.get("FASER_RUNTIME_DIR"):
        return Path(named)
    if session := environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "faser"
    return _temporary_folder() / f"faser-{os.getuid()}"


def _temporary_folder() -> Path:
    """Return the system's. Where none can be written, whoever makes a folder in it is told, and nobody else."""
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        return Path("/tmp")


def default_endpoint(environ: Mapping[str, str] = os.environ) -> str:
    """Return the endpoint that engine and sidecar share when nobody configured one."""
    return f"ipc://{runtime_folder(environ) / 'engine.sock'}"


def ensure_private_folder(folder: Path, remedy: str = "set FASER_RUNTIME_DIR to a folder you own") -> None:
    """Create `folder` with mode 0700; raise SettingError if it belongs to or is open to somebody else."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        seen = folder.stat()
    except OSError as error:
        raise SettingError(f"{folder}: {error.strerror}; {remedy}") from None
    mode = stat.S_IMODE(seen.st_mode)
    if seen.st_uid != os.getuid() or mode & 0o077:
        raise SettingError(
            f"{folder}: owner {seen.st_uid}, mode {mode:04o}; expected yours alone (0700); chmod 700 it or {remedy}"
        )
