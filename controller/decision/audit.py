"""The audit stream: what the sidecar decided, switched, refused and why, one JSON object per line.

Events go to the logger `faser.audit` at once, always at INFO, after the literal `AUDIT `; they are rare. Decisions go
to a file (`audit.path`), written by a thread: handing one over costs the loop a deque's append.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from ...engine_adapter.protocol import ActionSet, StepRecord, encode
from ...env.estimate.step_rows import StepRows
from ..snapshot import AuditStatus

audit_logger = logging.getLogger("faser.audit")
logger = logging.getLogger(__name__)

Cell = str | int | float | bool | None

# Every event and the fields it has besides event, boot_id and time_ns; absent values are null, never left out.
EVENTS: Final[dict[str, tuple[str, ...]]] = {
    "decision": ("counter", "sequence", "policy", "mode", "is_sent", "reason", "inputs", "action", "lengths"),
    "mode": ("engine", "mode", "was"),
    "switch": ("target", "mode", "by"),
    "guard": ("stance", "reason", "was", "lag_s"),
    "envelope": ("ratio", "margin"),
    "engine": ("kind", "detail"),
    "reload": ("is_taken", "detail"),
    "refused": ("reason", "detail"),
    "keys": ("allowed",),
    "store": ("detail",),
}
QUEUE: Final = 20_000  # lines that wait to be written; more are dropped and counted
LINES_PER_WRITE: Final = 512  # a write's cost is per call


def audit_event(event: str, boot_id: str = "", **fields: Cell) -> None:
    """Write one event to the log."""
    named = dict.fromkeys(EVENTS[event])
    if unknown := fields.keys() - named.keys():
        raise AssertionError(f"audit event {event} has no field {sorted(unknown)}")
    line = {"event": event, "time_ns": time.time_ns(), "boot_id": boot_id, **named, **fields}
    audit_logger.info("AUDIT %s", msgspec.json.encode(line).decode())


@dataclass(frozen=True, slots=True)
class DecisionNote:
    """One decision as it is handed over."""

    record: StepRecord
    action: ActionSet
    policy: str
    reason: str
    is_sent: bool
    received_ns: int


def digest(message: StepRecord | ActionSet) -> str:
    """Return 16 hexadecimal digits that stand for a message's exact bytes."""
    if isinstance(message, StepRecord) and isinstance(message.rows, StepRows):
        message = replace(message, rows=message.rows.frame)  # objects for each request would hold up who decides
    return hashlib.blake2b(encode(message), digest_size=8).hexdigest()


def decision_line(note: DecisionNote) -> bytes:
    """Return a decision as a line of JSON; `lengths` counts requests by length."""
    action = note.action
    counts: dict[str, int] = {}
    for length in action.lengths:
        counts[str(length)] = counts.get(str(length), 0) + 1
    unnamed = max(len(note.record.rows) - len(action.lengths), 0)
    if unnamed:
        counts[str(action.default_length)] = counts.get(str(action.default_length), 0) + unnamed
    return msgspec.json.encode(
        {
            "event": "decision", "time_ns": note.received_ns, "boot_id": action.boot_id,
            "counter": note.record.counter, "sequence": action.sequence, "policy": note.policy, "mode": action.mode,
            "is_sent": note.is_sent, "reason": note.reason, "inputs": digest(note.record), "action": digest(action),
            "lengths": counts,
        }
    )  # fmt: skip


class AuditFile:
    """A file of decisions that starts anew at `max_bytes`, keeping `files` old ones beside it (.1 is the newest).

    What cannot be written is dropped and counted; deciding never waits for it.
    """

    def __init__(self, path: Path, max_bytes: int, files: int, flush_s: float = 0.5) -> None:
        self.written = self.failures = 0
        self.error = ""
        self._turned_away = self._lost = 0  # each has one thread that counts it
        self._path, self._max_bytes, self._files, self._flush_s = path, max_bytes, files, flush_s
        self._queue: deque[DecisionNote] = deque()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._write_until_closed, name="faser-audit", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Return how many decisions are in no file: the queue was full, or the write failed."""
        return self._turned_away + self._lost

    def status(self) -> AuditStatus:
        """Return what a status reader sees."""
        return AuditStatus(str(self._path), self.written, self.dropped, self.failures, self.error)

    def put(self, note: DecisionNote) -> None:
        """Hand a decision over."""
        if len(self._queue) >= QUEUE:
            self._turned_away += 1
        else:
            self._queue.append(note)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits, at most for `timeout_s`."""
        self._is_stopping.set()
        self._thread.join(timeout_s)

    def _write_until_closed(self) -> None:
        while True:
            is_last = self._is_stopping.wait(self._flush_s)
            while self._queue:
                notes = [self._queue.popleft() for _ in range(min(len(self._queue), LINES_PER_WRITE))]
                self._write(notes)
            if is_last:
                return

    def _write(self, notes: list[DecisionNote]) -> None:
        try:
            content = b"".join(decision_line(note) + b"\n" for note in notes)
            self._turn_over(len(content))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab", opener=_private) as stream:
                stream.write(content)
            self.written += len(notes)
            self.error = ""
        except Exception as error:  # mostly OSError; whatever it is, the thread goes on and says so
            self._lost += len(notes)
            self.failures += 1
            if not self.error:
                logger.error("ALARM the audit file is not written, deciding goes on: %s: %s", self._path, error)
            self.error = str(error)

    def _turn_over(self, more: int) -> None:
        if not self._path.exists() or self._path.stat().st_size + more <= self._max_bytes:
            return
        for number in range(self._files - 1, 0, -1):
            older = self._numbered(number)
            if older.exists():
                older.replace(self._numbered(number + 1))
        if self._files:
            self._path.replace(self._numbered(1))
        else:
            self._path.unlink()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
