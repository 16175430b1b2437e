"""The telemetry file's one writer: a thread that takes what the daemon hands over and commits it in batches.

Called by the daemon. Handing over never blocks: when the queue is full or the disk has failed, entries are dropped
and counted. Exactly one connection writes and checkpoints (SQLite before 3.51.3 can corrupt a WAL file otherwise).
Checkpoints are asked for, not left to SQLite: it says nothing when one of its own fails, and a disk that fails has to
be noticed.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from sqlite_utils import Database

from ...engine_adapter.protocol import ActionSet, Hello, StepRecord
from ..decision.canary import Draws
from ..errors import StoreError
from ..file_lock import FileLock
from .packing import PackedRows
from .retention import Retention, prune
from .schema import TABLES, Row, create, engine_row, event_row, notice_row, step_row
from .write_ahead_log import BUSY_S, WriteAheadLog

logger = logging.getLogger(__name__)

# Making rows holds the interpreter, and a record that comes in meanwhile waits for it in turns: a few at a time, with
# pauses twice as long as the work, unless the queue fills.
ENTRIES_PER_COMMIT: Final = 32
PAUSE_RATIO: Final = 2.0
UNHURRIED_ENTRIES: Final = 2048
HURRIED_ENTRIES_PER_COMMIT: Final = 256  # ... then: each commit waits for the interpreter three times
VARIABLES_PER_STATEMENT: Final = 32_000  # SQLite's own limit is 32,766
ASIDE_LOOK_S: Final = 0.01  # how often it looks whether too much waits
LOWEST_PRIORITY: Final = 19  # of the thread that writes, once many engines wait
LOOK_S: Final = 10.0  # between two looks at the file's size while it is within its limits
BITES_PER_LOOK: Final = 8


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One life of the sidecar."""

    epoch: int
    started_ns: int
    version: str
    config: str  # JSON


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """An engine introduced itself."""

    hello: Hello
    received_ns: int


@dataclass(slots=True)  # not frozen: made for every record
class StepEntry:
    """A step record and, on the newest record of a batch, the decision that was made on it.

    With `rows`, those are stored in place of the record's own, which then need not be kept until the disk is ready.
    """

    record: StepRecord
    received_ns: int
    action: ActionSet | None = None
    reason: str = ""
    decision_s: float = 0.0
    is_sent: bool = False
    policy: str = ""
    draws: Draws | None = None
    rows: PackedRows | None = None


@dataclass(frozen=True, slots=True)
class NoticeEntry:
    """Something the sidecar noticed about an engine; `boot_id` is empty where it concerns none."""

    boot_id: str
    kind: str
    detail: str
    received_ns: int


Entry: TypeAlias = EngineEntry | StepEntry | NoticeEntry


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """How the store is doing; `error` is empty while it records, `pinned_s` is 0 unless a reader pins the log."""

    path: str
    written: int
    queued: int
    dropped: int
    error: str
    file_bytes: int
    log_bytes: int
    pinned_s: float


class Store:
    """A telemetry file open for writing; raises StoreError when it cannot be written at start."""

    def __init__(
        self,
        path: Path,
        run: RunEntry,
        queue_entries: int = 20_000,
        flush_s: float = 0.5,
        retention: Retention | None = None,
    ) -> None:
        self._path = path
        self._queue: deque[Entry] = deque()
        self._queue_entries = queue_entries
        self._flush_s = flush_s
        self._written = self._dropped = self._unwritable = 0
        self._has_waited = self._is_nice = False
        self._error = ""
        self._engine_keys: dict[str, int] = {}
        self._retention = retention or Retention()
        self._next_look_s = self._aside_until_s = 0.0
        self._lock, self._database, self._run_key = _open(path, run)
        self._log = WriteAheadLog(path, self._database)
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._write_until_closed, name="faser-store", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> bool:
        """Hand an entry over; False if it had to be dropped."""
        is_full = len(self._queue) >= self._queue_entries and not isinstance(entry, EngineEntry)  # steps need its key
        if self._error or is_full:
            self._dropped += 1
            return False
        self._queue.append(entry)
        return True

    def health(self) -> StoreHealth:
        """Return how many entries were written, wait and were dropped, and what is on the disk."""
        return StoreHealth(
            str(self._path), self._written, len(self._queue), self._dropped, self._error,
            self._log.file_bytes, self._log.log_bytes, self._log.pinned_s(),
        )  # fmt: skip

    def close(self, timeout_s: float = 3.0) -> None:
        """Write what waits, at most for `timeout_s`, and close the file."""
        self._is_stopping.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("telemetry: %d entries were not written within %g s", len(self._queue), timeout_s)
            return
        self._cut_for_good()
        self._database.close()
        self._lock.close()

    def _cut_for_good(self) -> None:
        """Leave no log behind: SQLite does not cut it at the end if anybody else has the file open, reading or not."""
        try:
            if not self._error:
                self._log.cut(self._retention, lambda: False, is_last=True)
        except (sqlite3.Error, OSError) as error:
            logger.error("telemetry: %s keeps its log for the next sidecar: %s", self._path, error)

    def _write_until_closed(self) -> None:
        while True:
            is_last = self._is_stopping.wait(self._flush_s)
            try:
                while self._queue and not self._error:
                    is_last = self._wait_aside() or is_last
                    begun_s = time.monotonic()
                    self._write_batch()
                    self._look_after_size()  # here too: under steady load the queue never empties
                    took_s = time.monotonic() - begun_s
                    self._look_after_log()
                    if 0 < len(self._queue) < UNHURRIED_ENTRIES and not is_last:
                        is_last = self._is_stopping.wait(PAUSE_RATIO * took_s)
                if not self._error and not is_last:
                    self._look_after_size()
                    self._look_after_log()
            except (sqlite3.Error, OSError) as error:
                if _is_busy(error) and not is_last:
                    self._note_busy()  # what waits is written when the other one lets go
                else:
                    self._stop_recording(str(error))
            except Exception as error:  # a bug here must not end deciding either
                logger.exception("telemetry writer failed")
                self._stop_recording(repr(error))
            if is_last:
                return

    def stand_aside(self, until_s: float) -> None:
        """Leave the processor to whoever answers engines until then (time.monotonic), unless many entries wait."""
        self._aside_until_s = until_s

    def _wait_aside(self) -> bool:
        """Wait as long as `stand_aside` asks for; return whether the store is to be closed."""
        while len(self._queue) < UNHURRIED_ENTRIES and not self._is_stopping.is_set():
            rest_s = self._aside_until_s - time.monotonic()
            if rest_s <= 0.0:
                return False
            self._step_down()
            self._is_stopping.wait(min(rest_s, ASIDE_LOOK_S))
        return self._is_stopping.is_set()

    def _step_down(self) -> None:
        """Let answers go first for good: a thread may lower its priority and not raise it again.

        Not from the start: on a processor that the engine fills, a writer of the lowest priority that holds the
        interpreter would keep a single engine waiting.
        """
        if not self._is_nice and sys.platform == "linux":  # elsewhere this would be the whole process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        self._is_nice = True

    def retain(self, retention: Retention) -> None:
        """Take other limits from the next look on."""
        self._retention = retention

    def _look_after_size(self) -> None:
        """Delete the oldest steps where the file is over its limits; in small bites, so that records need not wait.

        Also before the log is cut: what is in it then finds room in the file.
        """
        for _ in range(1 if self._queue else BITES_PER_LOOK):
            if not self._is_time_to_look():
                return
            self._log.grown_bytes = 0
            is_over = prune(self._database, self._retention, time.time_ns())
            self._next_look_s = 0.0 if is_over else time.monotonic() + LOOK_S
            if not is_over:
                return

    def _is_time_to_look(self) -> bool:
        if self._log.is_due(self._retention) or self._log.grown_bytes > self._retention.log_bytes:
            return True
        return time.monotonic() >= self._next_look_s and not self._is_stopping.is_set()

    def _look_after_log(self) -> None:
        if self._log.is_due(self._retention):
            self._log.cut(self._retention, self._wait_for_readers)

    def _wait_for_readers(self) -> bool:
        """Wait a moment; return whether nothing speaks against another one."""
        is_short = len(self._queue) < min(UNHURRIED_ENTRIES, self._queue_entries // 4)
        return is_short and not self._is_stopping.wait(ASIDE_LOOK_S)

    def _write_batch(self) -> None:
        waiting = len(self._queue)
        most = ENTRIES_PER_COMMIT if waiting < UNHURRIED_ENTRIES else HURRIED_ENTRIES_PER_COMMIT
        batch = [self._queue.popleft() for _ in range(min(waiting, most))]
        try:
            self._commit(batch)
        except (OverflowError, ValueError, KeyError):  # a number no SQLite column holds: find it, keep the others
            for entry in batch:
                self._commit_alone(entry)
        except BaseException as error:
            if _is_busy(error):
                self._queue.extendleft(reversed(batch))
            else:
                self._dropped += len(batch)
            raise

    def _commit(self, batch: Sequence[Entry]) -> None:
        known = dict(self._engine_keys)
        try:
            with self._database.atomic():
                self._insert(batch)
        except BaseException:
            self._engine_keys = known  # rows made in this transaction are gone
            raise
        self._written += len(batch)
        self._log.add(len(batch))

    def _commit_alone(self, entry: Entry) -> None:
        try:
            self._commit([entry])
        except (OverflowError, ValueError, KeyError) as error:
            self._dropped += 1
            self._unwritable += 1
            if self._unwritable == 1:
                logger.warning("telemetry: an entry cannot be written (%r); further ones are only counted", error)

    def _note_busy(self) -> None:
        if not self._has_waited:
            self._has_waited = True
            logger.warning("telemetry: %s is locked by another program; records wait until it lets go", self._path)

    def _insert(self, batch: Sequence[Entry]) -> None:
        steps: list[Row] = []
        events: list[Row] = []
        key: int | None
        for entry in batch:
            if isinstance(entry, EngineEntry):
                key = self._engine_key(entry)
                rows = [event_row(event, entry.received_ns, None) for event in entry.hello.roster]
                rows.append(notice_row("hello", str(entry.hello.epoch or ""), entry.received_ns))
            elif isinstance(entry, StepEntry):
                key = self._engine_keys[entry.record.boot_id]
                steps.append(self._keyed(key, _step_row(entry)))
                rows = [event_row(event, entry.received_ns, entry.record.counter) for event in entry.record.events]
            else:
                key = self._engine_keys.get(entry.boot_id)
                rows = [notice_row(entry.kind, entry.detail, entry.received_ns)]
            events += [self._keyed(key, row) for row in rows]
        self._insert_rows("steps", steps)
        self._insert_rows("events", events)

    def _insert_rows(self, table: str, rows: list[Row]) -> None:
        """Insert plain cells; insert_all of sqlite-utils looks at every cell for one to encode: three times as long.

        Many rows a statement: sqlite3 lets go of the interpreter for each, and gets it back from a busy loop after
        SWITCH_INTERVAL_S only.
        """
        columns = [name for name in TABLES[table] if name != "id"]
        most = VARIABLES_PER_STATEMENT // len(columns)
        places = f"({', '.join('?' * len(columns))})"
        for start in range(0, len(rows), most):
            part = rows[start : start + most]
            sql = f"INSERT INTO {table} ({', '.join(columns)}) VALUES {', '.join([places] * len(part))}"
            self._database.execute(sql, [row[name] for row in part for name in columns])

    def _keyed(self, engine: int | None, row: Row) -> Row:
        return {"engine": engine, "run": self._run_key, **row}

    def _engine_key(self, entry: EngineEntry) -> int:
        """Return the key of the engine's row, made now if this file never saw that boot."""
        boot_id = entry.hello.boot_id
        if boot_id not in self._engine_keys:
            seen = self._database.execute("SELECT id FROM engines WHERE boot_id = ?", [boot_id]).fetchone()
            if seen is None:
                self._database.table("engines").insert(engine_row(entry.hello, entry.received_ns))
                seen = self._database.execute("SELECT id FROM engines WHERE boot_id = ?", [boot_id]).fetchone()
            self._engine_keys[boot_id] = seen[0]
        return self._engine_keys[boot_id]

    def _stop_recording(self, reason: str) -> None:
        self._error = reason or "unknown"
        self._dropped += len(self._queue)
        self._queue.clear()
        logger.error(
            "ALARM telemetry stops, deciding goes on: %s: %s; free the disk and restart the sidecar", self._path, reason
        )


def _is_busy(error: BaseException) -> bool:
    """Return whether another program, such as a SQLite shell, holds the file's write lock."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _step_row(entry: StepEntry) -> Row:
    return step_row(
        entry.record, entry.received_ns, entry.action, entry.reason, entry.decision_s, entry.is_sent,
        entry.policy, entry.draws, entry.rows,
    )  # fmt: skip


def _open(path: Path, run: RunEntry) -> tuple[FileLock, Database, int]:
    """Open and prepare the file in the caller's thread, so that what is wrong with it ends the start."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a folder, /dev/null: leave nothing beside it
            raise StoreError(f"{path} is no regular file", "a telemetry file or a free path", "set store.path")
        lock = FileLock(path.with_name(f"{path.name}.lock"))
    except BlockingIOError as holder:
        raise StoreError(f"{path} is written by {holder}", "one writer per file", "choose another store.path") from None
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written: {error.strerror}", "a writable path", "set store.path or store.enabled = false"
        ) from None
    try:
        database = Database(sqlite3.connect(path, check_same_thread=False, timeout=BUSY_S))
        create(database)
        database.enable_wal()
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA wal_autocheckpoint = 0")
        database.table("runs").insert(
            {"epoch": run.epoch, "started_ns": run.started_ns, "version": run.version, "config": run.config}
        )
        key: int = database.execute("SELECT max(id) FROM runs").fetchone()[0]
    except StoreError as error:
        lock.close()
        raise StoreError(f"{path}: {error.seen}", error.expected, error.remedy or "set store.path") from None
    except sqlite3.Error as error:
        lock.close()
        raise StoreError(f"{path} cannot be written: {error}", "a writable SQLite file", "set store.path") from None
    return lock, database, key
