"""The model cache: folders that are built once, whole or not at all, and checked before every use.

Called by models/embedded.py. A folder is made under another name and renamed into place while a lock file is held, so
that two processes never see half a model. Its stamp lists the size and sha256 of every file; sizes are compared on
each use, contents when asked for or when the stamp is missing.
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]  # what is being done, share done 0..1
STAMP = "faser-stamp.json"


class CacheError(RuntimeError):
    """The model cache cannot be used or filled; the message says what to do."""


@dataclass(frozen=True, slots=True)
class FileCheck:
    """What a file must be."""

    size_bytes: int
    sha256: str


def cache_folder() -> Path:
    """Return the folder that holds the converted models; the environment variable FASER_CACHE moves it."""
    chosen = os.environ.get("FASER_CACHE")
    try:
        return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_cache_path("faser")
    except RuntimeError:
        raise CacheError(f"FASER_CACHE={chosen!r}: no such user's home; set it to a writable folder") from None


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
        return {name: FileCheck(int(size), str(sha256)) for name, (size, sha256) in fields.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def faults(folder: Path, expected: Mapping[str, FileCheck], full: bool, progress: Progress | None = None) -> list[str]:
    """Return what is wrong with the folder's files, one line each; `full` compares their contents too."""
    found = []
    for name, check in expected.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is missing")
        elif (size := path.stat().st_size) != check.size_bytes:
            found.append(f"{path} has {size} bytes, expected {check.size_bytes}")
        elif full and (actual := sha256_of(path, progress, f"checking {name}")) != check.sha256:
            found.append(f"{path} has sha256 {actual[:12]}..., expected {check.sha256[:12]}...")
    return found


def ensure_folder(
    name: str,
    build: Callable[[Path], None],
    expected: Mapping[str, FileCheck] | None = None,
    progress: Progress | None = None,
    full: bool = False,
) -> Path:
    """Return the cache folder `name`, built by `build(folder)` if it is missing or damaged.

    :param expected: what the files must be, where that is known beforehand; else the stamp of the build counts.
    :param full: compare contents, not only sizes.
    """
    folder = cache_folder() / name
    if not full and not _fault_lines(folder, expected, full=False, progress=None):
        return folder
    with _lock(folder.with_name(f".{name}.lock"), progress):
        wrong = _fault_lines(folder, expected, full=full or read_stamp(folder) is None, progress=progress)
        if wrong and wrong != [_NOTHING]:
            log.warning("model cache is damaged and is rebuilt: %s", wrong[0])
        if wrong:
            _replace(folder, build, expected)
        elif read_stamp(folder) is None and expected:
            _write_stamp(folder, expected)
    return folder


_NOTHING = "not built yet"


def _fault_lines(
    folder: Path, expected: Mapping[str, FileCheck] | None, full: bool, progress: Progress | None
) -> list[str]:
    if not folder.is_dir():
        return [_NOTHING]
    stamp = read_stamp(folder)
    if stamp is None and not (full and expected):
        return [f"{folder / STAMP} is missing or unreadable"]
    return faults(folder, expected or stamp or {}, full, progress)


def _replace(folder: Path, build: Callable[[Path], None], expected: Mapping[str, FileCheck] | None) -> None:
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(fresh)
        fresh.chmod(0o755)
        checks = {p.name: FileCheck(p.stat().st_size, sha256_of(p)) for p in sorted(fresh.iterdir())}
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
    text = json.dumps({name: (check.size_bytes, check.sha256) for name, check in checks.items()}, indent=1)
    (folder / STAMP).write_text(text + "\n")


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
