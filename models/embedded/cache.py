"""The model cache: folders that are built once, whole or not at all, and checked before every use.

Called by models/embedded/pair.py. A folder is made under another name and renamed into place while a lock file is
held, so that two processes never see half a model. Its stamp lists size, sha256 and time of change of every file as
last found right. On each use sizes and times are compared, and the contents of a file whose time is another; all
contents when asked for or when the stamp is missing. Damage that changes neither size nor time (a disk's own) is for
the full check.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import platformdirs

from ...engine_adapter.errors import ModelError

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]  # what is being done, share done 0..1
STAMP = "faser-stamp.json"


class CacheError(ModelError):
    """The model cache cannot be used or filled; the message says what to do."""


@dataclass(frozen=True, slots=True)
class FileCheck:
    """What a file must be, and when it was last changed when it was found to be so."""

    size_bytes: int
    sha256: str
    mtime_ns: int = field(default=0, compare=False)  # 0: not looked at yet


def cache_folder() -> Path:
    """Return the folder that holds the converted models; the environment variable FASER_CACHE moves it."""
    chosen = os.environ.get("FASER_CACHE")
    try:
        return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_cache_path("faser")
    except RuntimeError:
        if chosen:
            raise CacheError(f"FASER_CACHE={chosen!r}: no such user's home; set it to a writable folder") from None
        raise CacheError("no home folder for the model cache; set FASER_CACHE to a writable folder") from None


def sha256_of(path: Path, progress: Progress | None = None, what: str = "checking") -> str:
    """Return the sha256 of a file's content."""
    total = max(path.stat().st_size, 1)
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            done += len(block)
            if progress:
                progress(what, done / total)
    return digest.hexdigest()


def read_stamp(folder: Path) -> dict[str, FileCheck] | None:
    """Return what the folder's stamp says about its files; None without a readable stamp."""
    try:
        fields = json.loads((folder / STAMP).read_text())
        return {name: _read_check(*values) for name, values in fields.items()}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return None


def _read_check(size: int, sha256: str, mtime_ns: int = 0) -> FileCheck:
    return FileCheck(int(size), str(sha256), int(mtime_ns))


def faults(folder: Path, expected: Mapping[str, FileCheck], full: bool, progress: Progress | None = None) -> list[str]:
    """Return what is wrong with the folder's files, one line each.

    Contents are compared where a file was changed at another time than `expected` says, and with `full` everywhere.
    """
    found = (_fault(folder / name, check, full, progress) for name, check in expected.items())
    return [fault for fault in found if fault is not None]


def _fault(path: Path, check: FileCheck, full: bool, progress: Progress | None) -> str | None:
    if not os.path.isfile(path):  # nor where this user may not look
        return f"{path} is missing"
    try:
        seen = path.stat()
        if seen.st_size != check.size_bytes:
            return f"{path} has {seen.st_size} bytes, expected {check.size_bytes}"
        if not full and seen.st_mtime_ns == check.mtime_ns:
            return None
        actual = sha256_of(path, progress, f"checking {path.name}")
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return None if actual == check.sha256 else f"{path} has sha256 {actual[:12]}..., expected {check.sha256[:12]}..."


def ensure_folder(
    name: str,
    build: Callable[[Path], None],
    expected: Mapping[str, FileCheck] | None = None,
    progress: Progress | None = None,
    full: bool = False,
) -> Path:
    """Return the cache folder `name`, built by `build(folder)` if it is missing or damaged.

    :param expected: what the files must be, where that is known beforehand; else the stamp of the build counts.
    :param full: compare contents whatever size and time of change say.
    """
    folder = cache_folder() / name
    if not full and not _fault_lines(folder, expected, False, progress):
        return folder
    with _lock(folder.with_name(f".{name}.lock"), progress):
        wrong = _fault_lines(folder, expected, full or read_stamp(folder) is None, progress)
        if wrong and wrong != [_NOTHING]:
            log.warning("model cache is damaged and is rebuilt: %s", wrong[0])
        if wrong:
            _replace(folder, build, expected)
    return folder


_NOTHING = "not built yet"


def _fault_lines(
    folder: Path, expected: Mapping[str, FileCheck] | None, full: bool, progress: Progress | None
) -> list[str]:
    """Return what is wrong with a cache folder; note in its stamp when what is right was last changed."""
    if not os.path.isdir(folder):
        return [_NOTHING]
    stamp = read_stamp(folder)
    if stamp is None and not (full and expected):
        return [f"{folder / STAMP} is missing or unreadable"]
    checks = _as_stamped(expected, stamp or {}) if expected else stamp or {}
    found = _with_times(folder, checks)  # before contents are read: a file that changes meanwhile is read again
    wrong = faults(folder, checks, full, progress)
    if not wrong and (stamp is None or any(found[name].mtime_ns != checks[name].mtime_ns for name in checks)):
        with suppress(OSError):  # a cache that cannot be written is read again each time
            _write_stamp(folder, found)
    return wrong


def _as_stamped(expected: Mapping[str, FileCheck], stamp: Mapping[str, FileCheck]) -> dict[str, FileCheck]:
    """Return what is expected, with the stamp's times where it says the same of a file."""
    return {name: stamp[name] if stamp.get(name) == check else check for name, check in expected.items()}


def _with_times(folder: Path, checks: Mapping[str, FileCheck]) -> dict[str, FileCheck]:
    return {name: replace(check, mtime_ns=_mtime_ns(folder / name)) for name, check in checks.items()}


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _replace(folder: Path, build: Callable[[Path], None], expected: Mapping[str, FileCheck] | None) -> None:
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(fresh)
        fresh.chmod(0o755)
        paths = sorted(fresh.iterdir())
        checks = _with_times(fresh, {path.name: FileCheck(path.stat().st_size, sha256_of(path)) for path in paths})
        for name, check in (expected or {}).items():
            if checks.get(name) != check:
                raise CacheError(
                    f"converting {name} gave {checks.get(name)}, expected {check}: the installed gguf or numpy "
                    "computes otherwise than the tested versions; install the versions of constraints.txt"
                )
        _write_stamp(fresh, checks)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    except OSError as error:
        raise CacheError(
            f"cannot write the model cache {folder}: {error.strerror or error}; free some space there or set "
            "FASER_CACHE to a writable folder"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _write_stamp(folder: Path, checks: Mapping[str, FileCheck]) -> None:
    """Write it whole or not at all: another process may be reading it."""
    fields = {name: (check.size_bytes, check.sha256, check.mtime_ns) for name, check in checks.items()}
    fresh = folder / f".{STAMP}-{os.getpid()}"
    try:
        fresh.write_text(json.dumps(fields, indent=1) + "\n")
        fresh.replace(folder / STAMP)
    finally:
        fresh.unlink(missing_ok=True)


@contextmanager
def _lock(path: Path, progress: Progress | None) -> Iterator[None]:
    """Hold an advisory lock; it goes with the process, so a killed builder leaves none behind."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise CacheError(
            f"cannot use the model cache {path.parent}: {error.strerror or error}; set FASER_CACHE to a writable folder"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                progress("waiting for another process to convert the model", 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
