"""`faser store check` and `faser store vacuum`: is a telemetry file sound, and how large need it be.

Called by the CLI. Checking reads only, also while a sidecar writes; vacuum wants the file for itself.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from ..errors import StoreError
from ..file_lock import FileLock
from .footprint import in_words, remedy, sizes
from .schema import open_for_reading
from .sessions import STEP_CELLS, RunSettings, read_step, whole_number

SHOWN: Final = 20
BUSY_S: Final = 5.0  # that vacuum waits for readers
NO_SETTINGS: Final = RunSettings("", 0, 0, 0, 0.0, 0.0)


@dataclass(slots=True)
class Check:
    """What was found in a file; sound if `faults` is empty."""

    steps: int = 0
    decisions: int = 0
    events: int = 0
    engines: int = 0
    gaps: int = 0  # holes in an engine's counter: records that never came, or were pruned
    file_bytes: int = 0
    log_bytes: int = 0  # of the write-ahead log beside the file, which is read with it
    faults: list[str] = field(default_factory=list)


def check(path: Path) -> Check:
    """Read everything in a file and return what was found."""
    found = Check()
    found.file_bytes, found.log_bytes = sizes(path)
    with closing(open_for_reading(path)) as database:
        try:
            found.faults += [row[0] for row in database.execute("PRAGMA integrity_check") if row[0] != "ok"]
            found.engines, found.events = (
                database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("engines", "events")
            )
            before: tuple[int, int, int] | None = None
            names = ("id", "run", "engine", "received_ns", "requests", "emitted", *STEP_CELLS)
            query = f"SELECT {', '.join(names)} FROM steps ORDER BY run, engine, id"
            for cells in database.execute(query):
                row = dict(zip(names, cells, strict=True))
                found.steps += 1
                found.decisions += row["decision_sequence"] is not None
                if fault := _fault(row):
                    found.faults.append(fault)
                run, engine, counter = row["run"], row["engine"], row["counter"]
                if not isinstance(counter, int):
                    continue
                if before is not None and before[:2] == (run, engine):
                    found.gaps += counter > before[2] + 1
                    if counter <= before[2]:
                        found.faults.append(f"step {row['id']}: record {counter} stands behind record {before[2]}")
                before = (run, engine, counter)
        except sqlite3.Error as error:
            found.faults.append(str(error))
    return found


def _fault(row: dict[str, object]) -> str:
    """Return what is wrong with a step, empty if nothing is."""
    try:
        whole_number(row["received_ns"])
        rows = read_step("", row, [], NO_SETTINGS).record.rows
    except StoreError as error:
        text = str(error)
        return text if text.startswith("step ") else f"step {row['id']}: {text}"
    if (len(rows), sum(each.emitted for each in rows)) == (row["requests"], row["emitted"]):
        return ""
    return f"step {row['id']}: its packed rows do not add up to its columns"


def run_check(path: Path, is_json: bool) -> int:
    """Print what was found; return 1 if the file is not sound."""
    found = check(path)
    console = Console(soft_wrap=True, highlight=False)
    if is_json:
        console.out(msgspec.json.encode(found).decode(), highlight=False)
        return int(bool(found.faults))
    for fault in found.faults[:SHOWN]:
        console.print(fault, markup=False)
    verdict = f"{len(found.faults)} faults" if found.faults else "sound"
    console.print(
        f"{path}: {verdict}; {found.steps} steps, {found.decisions} decisions, {found.events} events, "
        f"{found.engines} engines, {found.gaps} gaps; {in_words(found.file_bytes)}, log {in_words(found.log_bytes)}",
        markup=False,
    )
    return int(bool(found.faults))


def run_vacuum(path: Path) -> int:
    """Give the free pages of a file, and its log, back to the disk; raise StoreError while anybody else uses it."""
    open_for_reading(path).close()
    try:
        lock = FileLock(path.with_name(f"{path.name}.lock"))
    except BlockingIOError as holder:
        raise StoreError(f"{path} is written by {holder}", "a file nobody writes", "stop the sidecar first") from None
    before = sum(sizes(path))
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_S)) as connection:
            _cut_log(connection, path)  # first: beside a reader the whole file would be written to the log once more
            connection.execute("VACUUM")
            _cut_log(connection, path)
    except sqlite3.Error as error:
        raise StoreError(f"{path} cannot be vacuumed: {error}", remedy="free as much disk as the file takes") from None
    finally:
        lock.close()
    Console(soft_wrap=True, highlight=False).print(
        f"{path}: {before >> 10} KiB before, {sum(sizes(path)) >> 10} KiB now", markup=False
    )
    return 0


def _cut_log(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the log into the file and cut it; raise StoreError if a reader does not let go of it for some seconds."""
    ((is_busy, _, _),) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    if is_busy:
        raise StoreError(
            f"{path} is being read: its log of {in_words(sizes(path)[1])} cannot be cut", "a file nobody uses",
            f"{remedy(path)} and vacuum again",
        )  # fmt: skip
