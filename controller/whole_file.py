"""Files that are there whole or not at all: written beside their place, then moved into it.

Called by whatever writes a file that a reader must never find half done, or that a failure must not destroy.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import UsageError


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[Path]:
    """Yield the path to write to; `path` has its content once the block ends, and is as before if it raises.

    A link is followed. What is no regular file, such as a pipe, cannot be replaced and is written to directly.
    :param mode: the file's permissions; None: as it has, or as new files get
    """
    if path.exists() and not path.is_file():
        yield path
        return
    place = Path(os.path.realpath(path))
    if mode is None:
        mode = place.stat().st_mode & 0o777 if place.exists() else 0o666 & ~_umask()
    handle, name = tempfile.mkstemp(prefix=f".{place.name}.", suffix=".partial", dir=place.parent)
    try:
        os.close(handle)
        yield Path(name)
        os.chmod(name, mode)
        with open(name, "rb") as written:
            os.fsync(written.fileno())
        os.replace(name, place)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def require_place(path: Path, option: str) -> None:
    """Raise UsageError where no file can be written, before the work whose result it is to hold.

    :param option: as the user gave it, such as --output
    """
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder", "a file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: no folder {path.parent}", "a file in a folder that is there")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written", "a place of yours")


def require_folder(path: Path, option: str) -> None:
    """Make the folder of a result, before the work; raise UsageError where none can be.

    :param option: as the user gave it
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}", "a folder, or a place for one") from None
    if not os.access(path, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written to", "a folder of yours")


def _umask() -> int:
    """Return the process's mask; only setting it tells, on Linux /proc does."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077
