"""Which mode each engine is in, switched at run time and kept in a file across restarts.

Called by the daemon's loop (look up, switch) and at its start (load). The file is written by a thread of its own,
whole and atomically: the loop never waits for a disk.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Final

import msgspec

from ...engine_adapter.protocol import Hello, Mode
from ..errors import StoreError
from ..whole_file import replacing

logger = logging.getLogger(__name__)

EVERY: Final = "*"  # the target that means every engine nobody named
MAX_TARGETS: Final = 1024  # remembered, the oldest go first
FILE_VERSION: Final = 1
CLOSE_S: Final = 2.0  # for a disk that is slow, at the end


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """The file's content: modes by target, oldest switch first."""

    version: int
    modes: dict[str, Mode]


def engine_name(hello: Hello) -> str:
    """Return a name that outlives an engine's restart: its model, its host and, among ranks, its rank."""
    rank = f"/{hello.data_parallel_rank}" if hello.data_parallel > 1 else ""
    return f"{hello.model}@{hello.host}{rank}"


class ModeBoard:
    """Modes by boot id, by engine name or for every engine; what is more particular wins.

    :param default: the mode of engines that nobody switched.
    :param path: the file, None to keep nothing; raises StoreError if it exists and cannot be read.
    """

    def __init__(self, default: Mode = "active", path: Path | None = None) -> None:
        self.default: Mode = default
        self.error = ""  # why the last switch is not on disk, empty while all is well
        self.revision = 0
        self._path = path
        self._modes = _read(path) if path is not None else {}
        self._wake = threading.Condition()
        self._to_write: bytes | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def mode_of(self, hello: Hello) -> Mode:
        """Return the mode that holds for an engine."""
        modes = self._modes
        for target in (hello.boot_id, engine_name(hello), EVERY):
            if (mode := modes.get(target)) is not None:
                return mode
        return self.default

    def switch(self, target: str, mode: Mode | None) -> None:
        """Put an engine (boot id or name) or EVERY into a mode; None forgets what was switched.

        A switch of every engine takes what was said of single ones back, so that it means what it says.
        """
        if target == EVERY:
            self._modes.clear()
        self._modes.pop(target, None)
        if mode is not None:
            self._modes[target] = mode
        while len(self._modes) > MAX_TARGETS:
            del self._modes[next(name for name in self._modes if name != EVERY)]
        self.revision += 1
        self._write_soon()

    def set_default(self, mode: Mode) -> None:
        """Take another mode for engines that nobody switched."""
        self.default = mode
        self.revision += 1

    def switched(self) -> dict[str, Mode]:
        """Return a copy of what was switched, by target."""
        return dict(self._modes)

    def close(self) -> None:
        """Write what waits, at most for CLOSE_S."""
        if self._thread is None:
            return
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(CLOSE_S)

    def _write_soon(self) -> None:
        if self._path is None:
            return
        with self._wake:
            self._to_write = msgspec.json.encode(_File(FILE_VERSION, self._modes))
            self._wake.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_until_closed, name="faser-modes", daemon=True)
            self._thread.start()

    def _write_until_closed(self) -> None:
        while True:
            with self._wake:
                while self._to_write is None and not self._is_closing:
                    self._wake.wait()
                content, self._to_write = self._to_write, None
            if content is None:
                return
            self._write(content)

    def _write(self, content: bytes) -> None:
        assert self._path is not None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._path, 0o600) as place:
                place.write_bytes(content)
            self.error = ""
        except OSError as error:
            self.error = f"{self._path}: {error.strerror}"
            logger.error("ALARM a switched mode holds, but will not survive a restart: %s", self.error)


def _read(path: Path) -> dict[str, Mode]:
    """Return the modes of a file, none if there is no file; one that cannot be read must not switch engines on."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(
            f"modes in {path} cannot be read: {error}",
            "a file that faser mode wrote",
            "remove it and switch again, or set mode.state",
        ) from None
    if file.version != FILE_VERSION:
        raise StoreError(
            f"modes in {path} are of version {file.version}", str(FILE_VERSION), "use a FASER that knows it"
        )
    return file.modes
