"""`faser store export`: telemetry files as CSV, JSON lines or Parquet, packed columns unfolded.

Called by the CLI; reads a file also while a sidecar writes it, and never changes it. An output file is there whole or
not at all.
"""

from __future__ import annotations

import csv
import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final, Literal, TextIO, cast

import msgspec
from sqlite_utils import Database

from ...engine_adapter.protocol import RequestRow
from ..errors import StoreError, UsageError
from ..extras import require_extra
from ..whole_file import replacing
from .packing import step_copies, unpack_draws, unpack_lengths, unpack_rows
from .schema import TABLES, open_for_reading

Table = Literal["requests", "steps", "events"]
Cell = int | float | str | bool | list[float] | None
Line = dict[str, Cell]

STEP_COLUMNS: Final = tuple(
    name for name, kind in TABLES["steps"].items() if kind is not bytes and name not in ("id", "engine", "run")
)
REQUEST_COLUMNS: Final = (
    "boot_id", "epoch", "counter", "step", "time_s", *RequestRow.__struct_fields__, "is_drafted_copied",
    "is_verified_copied", "decided_length", "preferred_length", "propensity",
)  # fmt: skip
EVENT_COLUMNS: Final = ("boot_id", "epoch", *(name for name in TABLES["events"] if name not in ("id", "engine", "run")))
COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "requests": REQUEST_COLUMNS, "steps": ("boot_id", "epoch", *STEP_COLUMNS), "events": EVENT_COLUMNS,
}  # fmt: skip
Kind = Literal["int", "float", "str", "bool", "floats"]
_OF_TABLES: Final[dict[str, Kind]] = {
    name: cast(Kind, kind.__name__) for columns in TABLES.values() for name, kind in columns.items()
}
# What a column holds, whatever its first rows hold; every one but those of RequestRow may be empty.
KINDS: Final[dict[str, dict[str, Kind]]] = {
    table: {name: _OF_TABLES.get(name, "int") for name in columns} for table, columns in COLUMNS.items()
}
KINDS["requests"].update(
    {
        **dict.fromkeys(RequestRow.__struct_fields__, "int"),
        **dict.fromkeys(("is_prefill", "is_drafted_copied", "is_verified_copied"), "bool"),
        "confidences": "floats",
        "propensity": "float",
    }
)


def run_export(file: Path, format: str, table: str, output: Path | None) -> int:
    """Write one table of a telemetry file to `output`, or to stdout."""
    if format not in ("csv", "jsonl", "parquet") or table not in COLUMNS:
        raise UsageError(f"export of {table} as {format}", "requests, steps or events as csv, jsonl or parquet")
    if format == "parquet" and output is None:
        raise UsageError("--format parquet without --output", "a file to write", "add --output FILE")
    if format == "parquet":
        require_extra("parquet", "pyarrow")
    with closing(open_for_reading(file)) as database:
        if output is not None and output.exists() and output.samefile(file):  # opening it for writing would empty it
            raise UsageError(
                f"--output {output} is the telemetry file itself", "another one", "choose another --output"
            )
        try:
            _export(database, format, table, output)
        except sqlite3.Error as error:
            raise StoreError(f"{file} cannot be read: {error}", remedy="the file may be damaged") from None
        except BrokenPipeError:  # the reader, such as head, has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit fails again
        except OSError as error:
            raise StoreError(
                f"{output or 'stdout'} cannot be written: {error.strerror or error}",
                "a writable path",
                "choose another --output",
            ) from None
    return 0


def _export(database: Database, format: str, table: str, output: Path | None) -> None:
    content = lines(database, table)
    if output is None:
        _write(sys.stdout, format, COLUMNS[table], content)
        return
    with replacing(output) as path:
        if format == "parquet":
            from .parquet import write_parquet

            write_parquet(path, KINDS[table], content)
            return
        with path.open("w", newline="", encoding="utf-8") as stream:
            _write(stream, format, COLUMNS[table], content)


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
    packed = "steps.rows, copies, decision_default_length, decision_lengths, decision_draws"
    for *values, rows, copied, default, lengths, drawn in database.execute(
        f"SELECT {_named('steps', keys)}, {packed} {_joined('steps')}"
    ):
        decided = unpack_lengths(lengths) if lengths is not None else {}
        draws = _draws(drawn)
        copies = step_copies(copied)
        for row in unpack_rows(rows):
            line: Line = dict(zip(keys, values, strict=True))
            line.update(zip(RequestRow.__struct_fields__, msgspec.to_builtins(row), strict=True))
            line["is_drafted_copied"] = row.handle in copies.drafted
            line["is_verified_copied"] = row.handle in copies.verified
            line["decided_length"] = decided.get(row.handle, default)
            line["preferred_length"], line["propensity"] = draws.get(row.handle, (None, None))
            yield line


def _draws(blob: bytes | None) -> dict[int, tuple[int, float]]:
    """Return what the policy wanted for each canary request, and the probability of what was drawn instead."""
    if blob is None:
        return {}
    draws = unpack_draws(blob)
    return dict(zip(draws.handles, zip(draws.preferred, draws.propensities, strict=True), strict=True))


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
