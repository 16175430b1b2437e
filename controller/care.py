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

from .endpoint import FileLock
from .errors import StoreError
from .packing import unpack_draws, unpack_lengths, unpack_rows
from .schema import open_for_reading

SHOWN: Final = 20


@dataclass(slots=True)
class Check:
    """What was found in a file; sound if `faults` is empty."""

    steps: int = 0
    decisions: int = 0
    events: int = 0
    engines: int = 0
    gaps: int = 0  # holes in an engine's counter: records that never came, or were pruned
    faults: list[str] = field(default_factory=list)


def check(path: Path) -> Check:
    """Read everything in a file and return what was found."""
    found = Check()
    with closing(open_for_reading(path)) as database:
        try:
            found.faults += [row[0] for row in database.execute("PRAGMA integrity_check") if row[0] != "ok"]
            found.engines, found.events = (
                database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("engines", "events")
            )
            before: tuple[int, int, int] | None = None
            query = (
                "SELECT id, run, engine, counter, requests, emitted, rows, decision_sequence, decision_lengths,"
                " decision_draws FROM steps ORDER BY run, engine, id"
            )
            for key, run, engine, counter, requests, emitted, rows, sequence, lengths, draws in database.execute(query):
                found.steps += 1
                found.decisions += sequence is not None
                if before is not None and before[:2] == (run, engine):
                    found.gaps += counter > before[2] + 1
                    if counter <= before[2]:
                        found.faults.append(f"step {key}: record {counter} stands behind record {before[2]}")
                before = (run, engine, counter)
                if fault := _blob_fault(requests, emitted, rows, lengths, draws):
                    found.faults.append(f"step {key}: {fault}")
        except sqlite3.Error as error:
            found.faults.append(str(error))
    return found


def _blob_fault(requests: int, emitted: int, rows: bytes, lengths: bytes | None, draws: bytes | None) -> str:
    try:
        unpacked = unpack_rows(rows)
        if lengths is not None:
            unpack_lengths(lengths)
        if draws is not None:
            unpack_draws(draws)
    except StoreError as error:
        return str(error)
    is_same = (len(unpacked), sum(row.emitted for row in unpacked)) == (requests, emitted)
    return "" if is_same else "its packed rows do not add up to its columns"


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
        f"{found.engines} engines, {found.gaps} gaps",
        markup=False,
    )
    return int(bool(found.faults))


def run_vacuum(path: Path) -> int:
    """Give the free pages of a file back to the disk; raise StoreError while a sidecar writes it."""
    open_for_reading(path).close()
    try:
        lock = FileLock(path.with_name(f"{path.name}.lock"))
    except BlockingIOError as holder:
        raise StoreError(f"{path} is written by {holder}", "a file nobody writes", "stop the sidecar first") from None
    before = path.stat().st_size
    try:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        raise StoreError(f"{path} cannot be vacuumed: {error}", remedy="free as much disk as the file takes") from None
    finally:
        lock.close()
    Console(soft_wrap=True, highlight=False).print(
        f"{path}: {before >> 10} KiB before, {path.stat().st_size >> 10} KiB now", markup=False
    )
    return 0
