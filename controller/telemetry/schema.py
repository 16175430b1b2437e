"""Tables and views of the telemetry file, and how wire messages become their rows.

Called by the store's writer (rows in) and by readers (open_for_reading). docs/reference/telemetry.md describes every
column and a test holds it to that. Engines are a key of every table: one file carries many.
"""

from __future__ import annotations

import logging
import sqlite3
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec
from sqlite_utils import Database

from ...engine_adapter.protocol import MAX_DRAFT_LENGTH, ActionSet, Hello, RequestEvent, StepRecord
from ..decision.audit import digest
from ..decision.canary import Draws
from ..errors import StoreError
from .packing import SUMMED, PackedRows, pack_copies, pack_draws, pack_lengths, pack_rows

logger = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 9
APPLICATION_ID: Final = 0x46415345  # "FASE": tells our files from other SQLite files

LARGEST: Final = (1 << 63) - 1  # SQLite's; a client may give its request any priority
MOST: Final = "most "  # in an arrival's detail, before the longest draft that its client allows
STOP_OR_ABORT: Final = "a stop string, or an abort"  # an abort's detail, where the client gave stop strings

Cell: TypeAlias = int | float | str | bytes | None
Row: TypeAlias = dict[str, Cell]

_NOT_PLAIN: Final = ("boot_id", "events", "rows", "copied", "verified_copies", "stage_bounds", "is_moving")
PLAIN_FIELDS: Final = tuple(name for name in StepRecord.__struct_fields__ if name not in _NOT_PLAIN)
_plain: Final = attrgetter(*PLAIN_FIELDS)
_REAL: Final = frozenset(name for name in PLAIN_FIELDS if name.endswith("_s") or name in ("kv_usage", "saved_rows"))

TABLES: Final[dict[str, dict[str, type]]] = {
    "runs": {"id": int, "epoch": int, "started_ns": int, "version": str, "config": str},
    "engines": {
        "id": int, "boot_id": str, "first_seen_ns": int, "host": str, "pid": int, "model": str, "drafter": str,
        "method": str, "device": str, "vllm_version": str, "hello": str,
    },
    "steps": {
        "id": int, "engine": int, "run": int, "received_ns": int,
        **{name: float if name in _REAL else int for name in PLAIN_FIELDS},
        "requests": int, **dict.fromkeys(SUMMED, int), "rows": bytes,
        "copies": bytes, "verified_copies": int, "accepted_copies": int, "stage_bounds": str, "is_moving": int,
        "decision_sequence": int, "decision_is_sent": int, "decision_default_length": int, "decision_price": float,
        "decision_split": int, "decision_frontier": int, "decision_prune_layer": int,
        "decision_prune_threshold": float, "decision_mode": str, "decision_valid_until_step": int,
        "decision_valid_until_s": float, "decision_s": float, "decision_reason": str, "decision_lengths": bytes,
        "decision_policy": str, "decision_digest": str, "decision_draws": bytes,
        "decision_stage_bounds": str,
    },
    "events": {
        "id": int, "engine": int, "run": int, "received_ns": int, "counter": int, "time_s": float, "kind": str,
        "handle": int, "request_id": str, "tokens": int, "priority": int, "detail": str,
        "ttft_ms": float, "tpot_ms": float,
    },
}  # fmt: skip

_NO_DECISION: Final[Row] = {name: None for name in TABLES["steps"] if name.startswith("decision_")}


class AddedColumn(NamedTuple):
    """A column that older files lack."""

    name: str
    kind: str
    value: str = "NULL"  # in older rows
    table: str = "steps"

    @property
    def declaration(self) -> str:
        """Return it as ALTER TABLE wants it."""
        return f"{self.name} {self.kind}" + (f" DEFAULT {self.value}" if self.value != "NULL" else "")


# What each version added. Columns are only ever added.
ADDED: Final[dict[int, tuple[AddedColumn, ...]]] = {
    2: (
        AddedColumn("caught_up", "INTEGER", "0"), AddedColumn("draft_rounds", "INTEGER"),
        AddedColumn("drawn_tokens", "INTEGER"),
    ),
    3: (
        AddedColumn("decision_policy", "TEXT"), AddedColumn("decision_digest", "TEXT"),
        AddedColumn("decision_draws", "BLOB"),
    ),
    4: (
        AddedColumn("prune_layer", "INTEGER"), AddedColumn("prune_s", "FLOAT", "0"),
        AddedColumn("saved_rows", "FLOAT", "0"), AddedColumn("wrongly_pruned", "INTEGER", "0"),
        AddedColumn("frontier_hits", "INTEGER", "0"), AddedColumn("frontier_misses", "INTEGER", "0"),
    ),
    5: (AddedColumn("sat_out", "INTEGER", "0"), AddedColumn("miscounted", "INTEGER", "0")),
    6: (
        AddedColumn("copies", "BLOB"), AddedColumn("verified_copies", "INTEGER", "0"),
        AddedColumn("accepted_copies", "INTEGER", "0"),
    ),
    7: (
        AddedColumn("ttft_ms", "FLOAT", table="events"), AddedColumn("tpot_ms", "FLOAT", table="events"),
    ),
    8: (
        AddedColumn("stage_moves", "INTEGER", "0"), AddedColumn("stage_bounds", "TEXT"),
        AddedColumn("is_moving", "INTEGER", "0"), AddedColumn("decision_stage_bounds", "TEXT"),
    ),
    9: (AddedColumn("rested", "INTEGER", "0"),),
}  # fmt: skip

VIEWS: Final = {
    "step_summary": """
        SELECT steps.id, engines.boot_id, runs.epoch, received_ns, step, time_s, running, waiting, requests,
            step_s * 1e3 AS step_ms, verify_s * 1e3 AS verify_ms, draft_s * 1e3 AS draft_ms,
            adapter_s * 1e6 AS adapter_us,
            prefill_tokens, decode_tokens, draft_tokens, kv_usage, drafted, verified, pruned, accepted, emitted,
            CASE WHEN verified > 0 THEN 1.0 * accepted / verified END AS acceptance_rate,
            lease_sequence, lease_epoch != 0 AS is_under_lease,
            decision_sequence, decision_default_length, decision_price, decision_s * 1e6 AS decision_us, decision_reason
        FROM steps JOIN engines ON engines.id = steps.engine JOIN runs ON runs.id = steps.run""",
    "request_summary": """
        SELECT engine, handle, max(request_id) AS request_id,
            min(CASE WHEN kind = 'arrival' THEN time_s END) AS arrival_s,
            min(CASE WHEN kind = 'first_token' THEN time_s END) AS first_token_s,
            max(CASE WHEN kind IN ('finish', 'abort') THEN time_s END) AS end_s,
            max(CASE WHEN kind IN ('finish', 'abort') THEN kind END) AS end_kind,
            max(CASE WHEN kind = 'arrival' THEN tokens END) AS prompt_tokens,
            max(CASE WHEN kind IN ('finish', 'abort') THEN tokens END) AS output_tokens,
            sum(kind = 'preempt') AS preemptions,
            max(CASE WHEN kind = 'arrival' THEN ttft_ms END) AS ttft_ms,
            max(CASE WHEN kind = 'arrival' THEN tpot_ms END) AS tpot_ms
        FROM events WHERE handle IS NOT NULL GROUP BY engine, handle""",
}


def create(database: Database) -> None:
    """Make the tables and views in an empty file, or bring an older one of ours up to date.

    Raise StoreError if it holds something else, or was written by a newer FASER.
    """
    application, version = (
        database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    )
    if database.table_names():
        _require_ours(application, version)
        _migrate(database, version)
        return
    with database.atomic():
        for name, columns in TABLES.items():
            database.table(name).create(columns, pk="id", not_null={"id"}, strict=False)
        database.table("engines").create_index(["boot_id"], unique=True)
        database.table("steps").create_index(["engine", "step"])
        database.table("events").create_index(["engine", "handle"])
        _create_views(database)
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _migrate(database: Database, version: int) -> None:
    """Add the columns that came since `version`, all or none of them; rows that are there keep every value."""
    if version == SCHEMA_VERSION:
        return
    with database.atomic():
        for name in VIEWS:
            database.execute(f"DROP VIEW IF EXISTS {name}")
        for column in _added_since(version):
            database.execute(f"ALTER TABLE {column.table} ADD COLUMN {column.declaration}")
        _create_views(database)
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    logger.info("telemetry: the file's schema %d was brought to %d", version, SCHEMA_VERSION)


def _create_views(database: Database) -> None:
    for name, sql in VIEWS.items():
        database.create_view(name, " ".join(sql.split()))


def _added_since(version: int) -> list[AddedColumn]:
    return [column for since in range(version + 1, SCHEMA_VERSION + 1) for column in ADDED[since]]


def _require_ours(application: int, version: int) -> None:
    if application != APPLICATION_ID:
        raise StoreError("the file is a SQLite database of another program", "a FASER telemetry file or a new path")
    if not 1 <= version <= SCHEMA_VERSION:
        raise StoreError(f"telemetry schema {version}", f"schema {SCHEMA_VERSION} or older", "use a new file")


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open any SQLite file, whoever's, for reading alone; raise sqlite3.Error if there is none."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


def open_for_reading(path: Path) -> Database:
    """Open a telemetry file, also while a sidecar writes it; raise StoreError if it is none."""
    if not path.is_file():
        raise StoreError(f"no telemetry file {path}", "a file a sidecar wrote", "check the path")
    try:
        connection = connect_read_only(path)
        application, version = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        _require_ours(application, version)
        if version != SCHEMA_VERSION:
            _stand_in_front(connection, _added_since(version))
    except sqlite3.Error as error:
        raise StoreError(f"{path} cannot be read: {error}", "a telemetry file") from None
    return Database(connection)


def _stand_in_front(connection: sqlite3.Connection, missing: list[AddedColumn]) -> None:
    """Put views of this connection alone before the tables that lack columns, and before the views of these."""
    connection.execute("PRAGMA temp_store = MEMORY")
    for table in dict.fromkeys(column.table for column in missing):
        columns = ", ".join(f"{column.value} AS {column.name}" for column in missing if column.table == table)
        connection.execute(f"CREATE TEMP VIEW {table} AS SELECT *, {columns} FROM main.{table}")
    for name, sql in VIEWS.items():
        connection.execute(f"CREATE TEMP VIEW {name} AS {sql}")


def engine_row(hello: Hello, received_ns: int) -> Row:
    """Return the row of table engines; the roster becomes events instead."""
    content = msgspec.to_builtins(hello)
    named = dict(zip(Hello.__struct_fields__, content[1:] if content[0] == "hello" else content, strict=True))
    named["roster"] = []
    columns = ("boot_id", "host", "pid", "model", "drafter", "method", "device", "vllm_version")
    return {
        "first_seen_ns": received_ns,
        "hello": msgspec.json.encode(named).decode(),
        **{name: named[name] for name in columns},
    }


def hello_of(text: str, where: str = "") -> Hello:
    """Return the introduction that a row of table engines holds; what came with later versions is missing there."""
    try:
        named = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        told = [named[name] for name in Hello.__struct_fields__ if name in named]
        return msgspec.json.decode(msgspec.json.encode(["hello", *told]), type=Hello)
    except (msgspec.MsgspecError, TypeError) as error:  # ... or no text at all
        raise StoreError(f"an engine's introduction{where} cannot be read: {error}") from None


def step_row(
    record: StepRecord,
    received_ns: int,
    action: ActionSet | None,
    reason: str,
    decision_s: float,
    is_sent: bool,
    policy: str = "",
    draws: Draws | None = None,
    rows: PackedRows | None = None,
) -> Row:
    """Return the row of table steps without its keys `engine` and `run`; `rows` stands for the record's own."""
    row: Row = dict(zip(PLAIN_FIELDS, _plain(record), strict=True))
    row["received_ns"] = received_ns
    packed = rows or pack_rows(record.rows, record.verified_copies)
    row["rows"], row["requests"] = packed.blob, packed.requests
    for name, total in packed.sums.items():
        row[name] = min(total, LARGEST)
    row["copies"] = pack_copies(*copies) if any(copies := (record.copied, record.verified_copies)) else None
    row["verified_copies"] = min(packed.verified_copies, LARGEST)
    row["accepted_copies"] = min(packed.accepted_copies, LARGEST)
    row["stage_bounds"], row["is_moving"] = _bounds_cell(record.stage_bounds), int(record.is_moving)
    row.update(_decision_cells(action, reason, decision_s, is_sent))
    if action is not None:
        row["decision_policy"] = policy
        row["decision_draws"] = pack_draws(draws) if draws is not None else None
    return row


def _decision_cells(action: ActionSet | None, reason: str, decision_s: float, is_sent: bool) -> Row:
    if action is None:
        return _NO_DECISION
    return {
        "decision_sequence": action.sequence,
        "decision_is_sent": int(is_sent),
        "decision_default_length": action.default_length,
        "decision_price": action.price,
        "decision_split": action.split,
        "decision_frontier": action.frontier,
        "decision_prune_layer": action.prune.layer if action.prune else None,
        "decision_prune_threshold": action.prune.threshold if action.prune else None,
        "decision_mode": action.mode,
        "decision_valid_until_step": action.valid_until_step,
        "decision_valid_until_s": action.valid_until_s,
        "decision_s": decision_s,
        "decision_reason": reason,
        "decision_lengths": pack_lengths(action.handles, action.lengths),
        "decision_digest": digest(action),
        "decision_stage_bounds": _bounds_cell(action.stage_bounds),
    }


def _bounds_cell(bounds: tuple[int, ...] | None) -> str | None:
    """Return where a pipeline is cut as text: 10,20; empty: one rank."""
    return None if bounds is None else ",".join(map(str, bounds))


def event_row(event: RequestEvent, received_ns: int, counter: int | None) -> Row:
    """Return the row of table events for something that happened to a request."""
    return {
        "received_ns": received_ns, "counter": counter, "time_s": event.time_s, "kind": event.kind,
        "handle": event.handle, "request_id": event.request_id or None, "tokens": event.tokens,
        "priority": min(max(event.priority, -LARGEST), LARGEST), "detail": _detail_of(event),
        "ttft_ms": event.ttft_ms, "tpot_ms": event.tpot_ms,
    }  # fmt: skip


def _detail_of(event: RequestEvent) -> str | None:
    if event.may_be_stop:
        return STOP_OR_ABORT
    return f"{MOST}{event.most}" if event.most < MAX_DRAFT_LENGTH else None


def notice_row(kind: str, detail: str, received_ns: int) -> Row:
    """Return the row of table events for something the sidecar noticed: engine gone, gap, silence."""
    return {
        "received_ns": received_ns, "counter": None, "time_s": None, "kind": kind, "handle": None,
        "request_id": None, "tokens": None, "priority": None, "detail": detail, "ttft_ms": None, "tpot_ms": None,
    }  # fmt: skip
