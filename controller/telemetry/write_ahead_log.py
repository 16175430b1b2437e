"""The telemetry file's write-ahead log: brought into the file and used again before it is large, cut if it got large.

Called by the store's writer, on its one connection, between two commits; other threads only read its figures. While a
reader holds an older state of the file SQLite can neither cut the log nor use it again. It grows then, nothing is
lost, and this says so: never a commit less, never a wait that lets the store's queue fill.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sqlite_utils import Database

from .footprint import in_words, log_path, remedy, sizes
from .retention import Retention

logger = logging.getLogger(__name__)

BUSY_S: Final = 1.0  # that a commit waits for another program's lock
ENTRIES_PER_CUT: Final = 2048  # a few MB of log
RETRY_S: Final = 1.0  # between two tries to cut a log that a reader pins; one that is of no use takes microseconds
TRIES_PER_PATIENT_ONE: Final = 10
PATIENCE_S: Final = 0.5  # of that one. Readers that take turns all leave the log while nothing is written
WARN_S: Final = 60.0  # after which a pinned log is worth a line even within the limit
REPEAT_S: Final = 3600.0


class WriteAheadLog:
    """What is known of the log, and cutting it. `grown_bytes` is for the caller to set back."""

    def __init__(self, path: Path, database: Database) -> None:
        self._path, self._database = path, database
        self.file_bytes, self.log_bytes = sizes(path)
        self.grown_bytes = self._entries = self._failed_tries = 0
        self._next_try_s = self._next_warning_s = 0.0
        self._pinned_since_s: float | None = None
        self._is_told = False

    def pinned_s(self) -> float:
        """Return for how long a reader has kept a log that is too large from being cut; 0: none does."""
        since_s = self._pinned_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def add(self, entries: int) -> None:
        """Take note of a commit."""
        self._entries += entries
        self._measure()

    def is_due(self, retention: Retention) -> bool:
        """Return whether to cut now."""
        if self._pinned_since_s is not None:
            return time.monotonic() >= self._next_try_s
        return self._entries >= ENTRIES_PER_CUT or self.log_bytes > retention.log_bytes

    def cut(self, retention: Retention, pause: Callable[[], bool], is_last: bool = False) -> None:
        """Bring the log into the file, as far as readers allow; raise sqlite3.Error if the disk does not take it.

        :param pause: sleeps for a moment and returns False when the caller has better to do than to wait for readers.
        :param is_last: leave nothing of a log; otherwise one of ordinary size keeps its place on the disk.
        """
        self._entries = 0
        if self.log_bytes <= retention.log_bytes and not is_last:
            self._database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            self._measure()
            self._release(self.log_bytes)  # where somebody else has cut it
            return
        end_s = time.monotonic() + (PATIENCE_S if self._is_patient() else 0.0)
        while not (is_cut := self._try_to_cut()) and time.monotonic() < end_s and pause():
            pass
        before_bytes = self.log_bytes
        self._measure()
        if is_cut or self.log_bytes <= retention.log_bytes:
            self._release(before_bytes)
        else:
            self._pin(retention)

    def _is_patient(self) -> bool:
        return self._failed_tries % TRIES_PER_PATIENT_ONE == TRIES_PER_PATIENT_ONE - 1

    def _try_to_cut(self) -> bool:
        self._database.execute("PRAGMA busy_timeout = 0")
        try:
            ((is_busy, _, _),) = self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            self._database.execute(f"PRAGMA busy_timeout = {BUSY_S * 1e3:.0f}")
        return not is_busy

    def _measure(self) -> None:
        before_bytes = self.log_bytes
        self.file_bytes, self.log_bytes = sizes(self._path)
        self.grown_bytes += max(0, self.log_bytes - before_bytes)

    def _release(self, before_bytes: int) -> None:
        if self._is_told:
            logger.info(
                "telemetry: no reader keeps %s any more: it had %s after %.0f s, and is cut",
                log_path(self._path), in_words(before_bytes), self.pinned_s(),
            )  # fmt: skip
        self._pinned_since_s, self._failed_tries, self._is_told = None, 0, False

    def _pin(self, retention: Retention) -> None:
        now_s = time.monotonic()
        if self._pinned_since_s is None:
            self._pinned_since_s = now_s
        self._failed_tries += 1
        self._next_try_s = now_s + RETRY_S
        is_over = 0 < retention.max_bytes < self.file_bytes + self.log_bytes
        if (is_over or self.pinned_s() >= WARN_S) and now_s >= self._next_warning_s:
            self._warn(is_over)
            self._next_warning_s = now_s + REPEAT_S

    def _warn(self, is_over: bool) -> None:
        self._is_told = True
        logger.warning(
            "telemetry: a reader pins %s: it has grown to %s beside %s of %s%s; nothing is lost, but it grows until "
            "the reader leaves: %s",
            log_path(self._path), in_words(self.log_bytes), in_words(self.file_bytes), self._path,
            ", together more than store.max_mb" if is_over else "", remedy(self._path),
        )  # fmt: skip
