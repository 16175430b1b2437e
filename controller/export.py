"""`faser store export`: telemetry files as CSV or JSON lines, packed columns unfolded.

Called by the CLI; reads a file also while a sidecar writes it, and never changes it.
"""

from __future__ import annotations

import csv
import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Final, Literal, TextIO

import msgspec
from sqlite_utils import Database

from ..engine_adapter.protocol import RequestRow
from .errors import StoreError, UsageError
from .packing import unpack_lengths, unpack_rows
from .schema import TABLES, open_for_reading

Format = Literal["csv", "jsonl"]
Table = Literal["requests", "steps", "events"]
Cell = int | float | str | bool | list[float] | None
Line = dict[str, Cell]

STEP_COLUMNS: Final = tuple(
    name for name in TABLES["steps"] if name not in ("id", "engine", "run", "rows", "decision_lengths")
)
REQUEST_COLUMNS: Final = (
    "boot_id", "epoch", "counter", "step", "time_s", *RequestRow.__struct_fields__, "decided_length",
)  # fmt: skip
EVENT_COLUMNS: Final = ("boot_id", "epoch", *(name for name in TABLES["events"] if name not in ("id", "engine", "run")))
COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "requests": REQUEST_COLUMNS, "steps": ("boot_id", "epoch", *STEP_COLUMNS), "events": EVENT_COLUMNS,
}  # fmt: skip


def run_export(file: Path, format: str, table: str, output: Path | None) -> int:
    """Write one table of a telemetry file to `output`, or to stdout."""
    if format not in ("csv", "jsonl") or table not in COLUMNS:
        raise UsageError(f"export of {table} as {format}", "requests, steps or events as csv or jsonl")
    with closing(open_for_reading(file)) as database:
        if output is not None and output.exists() and output.samefile(file):  # opening it for writing would empty it
            raise UsageError(
                f"--output {output} is the telemetry file itself", "another one", "choose another --output"
            )
        try:
            opened = nullcontext(sys.stdout) if output is None else output.open("w", newline="", encoding="utf-8")
            with opened as stream:
                _write(stream, format, COLUMNS[table], lines(database, table))
        except sqlite3.Error as error:
            raise StoreError(f"{file} cannot be read: {error}", remedy="the file may be damaged") from None
        except BrokenPipeError:  # the reader, such as head, has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit fails again
        except OSError as error:
            raise StoreError(
                f"{output or 'stdout'} cannot be written: {error.strerror}",
                "a writable path",
                "choose another --output",
            ) from None
    return 0


def lines(database: Database, table: str) -> Iterator[Line]:
    """Yield one table's lines: per request and step, per step, or per event."""
    if table == "events":
        yield from _query(database, f"SELECT {_named('events', EVENT_COLUMNS)} {_joined('events')}", EVENT_COLUMNS)
    elif table == "steps":
        columns = COLUMNS["steps"]
        yield from _query(database, f"SELECT {_named('steps', columns)} {_joined('steps')}", columns)
    else:
        yield from _request_lines(database)


def _request_lines(database: Database) -> Iterator[Line]:
    keys = REQUEST_COLUMNS[:5]
    query = f"SELECT {_named('steps', keys)}, steps.rows, decision_default_length, decision_lengths {_joined('steps')}"
    for *values, rows, default, lengths in database.execute(query):
        decided = unpack_lengths(lengths) if lengths is not None else {}
        for row in unpack_rows(rows):
            line: Line = dict(zip(keys, values, strict=True))
            line.update(zip(RequestRow.__struct_fields__, msgspec.to_builtins(row), strict=True))
            line["decided_length"] = decided.get(row.handle, default)
            yield line


def _query(database: Database, query: str, columns: tuple[str, ...]) -> Iterator[Line]:
    for values in database.execute(query):
        yield dict(zip(columns, values, strict=True))


def _named(table: str, columns: tuple[str, ...]) -> str:
    own = {"boot_id": "engines.boot_id", "epoch": "runs.epoch"}
    return ", ".join(own.get(name, f"{table}.{name}") for name in columns)


def _joined(table: str) -> str:
    return (
        f"FROM {table} LEFT JOIN engines ON engines.id = {table}.engine LEFT JOIN runs ON runs.id = {table}.run "
        f"ORDER BY {table}.id"
    )


def _write(stream: TextIO, format: str, columns: tuple[str, ...], content: Iterator[Line]) -> None:
    if format == "csv":
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        for line in content:
            writer.writerow({name: _cell(value) for name, value in line.items()})
        return
    for line in content:
        stream.write(msgspec.json.encode(line).decode() + "\n")


def _cell(value: Cell) -> Cell:
    """Return a value as one CSV cell: lists with spaces between, booleans as 0 and 1."""
    if isinstance(value, list | tuple):
        return " ".join(map(repr, value))
    return int(value) if isinstance(value, bool) else value
