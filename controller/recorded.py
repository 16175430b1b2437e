"""What a telemetry file holds, as the sidecar lived it: sessions of records in order, with the decisions made on them.

Called by the replay. Everything is rebuilt exactly: the same records, in the same order, through the same code give the
same decisions, byte for byte. Never writes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec
from sqlite_utils import Database

from ..engine_adapter.protocol import MAX_DRAFT_LENGTH, EventKind, Hello, Mode, RequestEvent, StepRecord
from .canary import Draws
from .errors import StoreError
from .packing import unpack_draws, unpack_lengths, unpack_rows
from .schema import MOST, PLAIN_FIELDS

EVENT_KINDS: Final = ("arrival", "first_token", "finish", "abort", "preempt")
_DECISION: Final = (
    "decision_sequence", "decision_mode", "decision_policy", "decision_digest", "decision_draws",
    "decision_default_length", "decision_lengths",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What of a run's configuration decides; as it was at the start or after a reload."""

    policy: str
    lease_steps: int
    lease_ms: int
    dwell_records: int
    canary_share: float
    canary_epsilon: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """One step record and, if a decision was made on it, what is known of that."""

    record: StepRecord
    settings: RunSettings
    sequence: int | None = None
    mode: Mode = "active"
    policy: str = ""
    digest: str | None = None
    draws: Draws | None = None
    default_length: int = 0
    lengths: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """One engine as one life of the sidecar knew it, from its hello on.

    :param is_whole: False where the beginning was deleted by retention: then the state cannot be rebuilt exactly.
    """

    epoch: int
    hello: Hello
    is_whole: bool
    steps: list[Recorded]


class _Part(msgspec.Struct, frozen=True):
    """One part of a configuration as it stands in the file."""

    spec: str = ""
    steps: int = 32
    ms: int = 1000
    dwell_records: int = 0
    canary_share: float = 0.1
    canary_epsilon: float = 0.1


class _Config(msgspec.Struct, frozen=True):
    policy: _Part
    lease: _Part
    guard: _Part = _Part()
    mode: _Part = _Part()


def read_sessions(database: Database) -> Iterator[RecordedSession]:
    """Yield every session of a file, run by run; raise StoreError for a file that cannot be read."""
    try:
        runs = database.execute("SELECT id, epoch, config FROM runs ORDER BY id").fetchall()
        engines = database.execute("SELECT id, hello FROM engines ORDER BY id").fetchall()
        for run, epoch, config in runs:
            for engine, text in engines:
                yield from _sessions(database, run, engine, epoch, _hello(text), config)
    except sqlite3.Error as error:
        raise StoreError(
            f"the file cannot be read: {error}", remedy="faser store check names what is damaged"
        ) from None


def _sessions(
    database: Database, run: int, engine: int, epoch: int, hello: Hello, config: str
) -> Iterator[RecordedSession]:
    starts, events, reloads = _events(database, run, engine)
    settings = _settings(config)
    rosters = [_roster(database, run, engine, start) for start in starts]
    names = ("id", "received_ns", *PLAIN_FIELDS, "rows", *_DECISION)
    query = f"SELECT {', '.join(names)} FROM steps WHERE run = ? AND engine = ? ORDER BY id"
    session: RecordedSession | None = None
    number = 0
    for cells in database.execute(query, [run, engine]):
        row = dict(zip(names, cells, strict=True))
        while reloads and reloads[0][0] <= row["received_ns"]:
            settings = _settings(reloads.pop(0)[1])
        while number < len(starts) and starts[number] <= row["received_ns"]:
            if session is not None and session.steps:
                yield session
            whole = msgspec.structs.replace(hello, roster=rosters[number])
            session = RecordedSession(epoch, whole, row["counter"] == 1 or number > 0 or _is_first(database, run), [])
            number += 1
        if session is None:  # its hello was deleted
            session = RecordedSession(epoch, hello, False, [])
        session.steps.append(_recorded(hello.boot_id, row, events.get(row["counter"], []), settings))
    if session is not None and session.steps:
        yield session


def _is_first(database: Database, run: int) -> bool:
    """Return whether nothing was ever deleted: keys are given in order, from 1 on."""
    first = database.execute("SELECT min(id) FROM steps").fetchone()[0]
    return bool(first == 1) or bool(database.execute("SELECT min(run) FROM steps").fetchone()[0] < run)


def _events(
    database: Database, run: int, engine: int
) -> tuple[list[int], dict[int, list[RequestEvent]], list[tuple[int, str]]]:
    """Return when sessions began, what happened to requests by record, and when settings were changed to what."""
    events: dict[int, list[RequestEvent]] = {}
    query = (
        "SELECT counter, kind, handle, time_s, tokens, request_id, priority, detail FROM events"
        " WHERE run = ? AND engine = ? AND counter IS NOT NULL ORDER BY id"
    )
    for counter, *cells in database.execute(query, [run, engine]):
        events.setdefault(counter, []).append(_event(*cells))
    starts = database.execute(
        "SELECT received_ns FROM events WHERE run = ? AND engine = ? AND kind = 'hello' ORDER BY id", [run, engine]
    ).fetchall()
    reloads = database.execute(
        "SELECT received_ns, detail FROM events WHERE run = ? AND engine IS NULL AND kind = 'reload' ORDER BY id", [run]
    ).fetchall()
    return [row[0] for row in starts], events, reloads


def _roster(database: Database, run: int, engine: int, received_ns: int) -> list[RequestEvent]:
    query = (
        "SELECT kind, handle, time_s, tokens, request_id, priority, detail FROM events WHERE run = ? AND engine = ?"
        " AND counter IS NULL AND handle IS NOT NULL AND received_ns = ? ORDER BY id"
    )
    return [_event(*cells) for cells in database.execute(query, [run, engine, received_ns])]


def _event(
    kind: EventKind, handle: int, time_s: float, tokens: int, request_id: str | None, priority: int, detail: str | None
) -> RequestEvent:
    most = (detail or "").removeprefix(MOST)
    limit = int(most) if most.isdecimal() else MAX_DRAFT_LENGTH
    return RequestEvent(kind, handle, time_s, tokens, request_id or "", priority, limit)


def _recorded(boot_id: str, row: dict[str, object], events: list[RequestEvent], settings: RunSettings) -> Recorded:
    plain = {name: row[name] for name in PLAIN_FIELDS}
    record = msgspec.convert({**plain, "boot_id": boot_id, "events": [], "rows": []}, _StepFields)
    named = {name: getattr(record, name) for name in _StepFields.__struct_fields__}
    step = StepRecord(**{**named, "events": events, "rows": unpack_rows(row["rows"])})  # type: ignore[arg-type]
    if row["decision_sequence"] is None:
        return Recorded(step, settings)
    lengths, draws = row["decision_lengths"], row["decision_draws"]
    return Recorded(
        step,
        settings,
        row["decision_sequence"],  # type: ignore[arg-type]
        row["decision_mode"],  # type: ignore[arg-type]
        str(row["decision_policy"] or settings.policy),
        row["decision_digest"],  # type: ignore[arg-type]
        unpack_draws(draws) if isinstance(draws, bytes) else None,
        row["decision_default_length"],  # type: ignore[arg-type]
        unpack_lengths(lengths) if isinstance(lengths, bytes) else {},
    )


# StepRecord as a map, so that a row of the file is checked on the way back as a frame is.
_StepFields = msgspec.defstruct(
    "_StepFields",
    [(entry.name, entry.type) if entry.required else (entry.name, entry.type, entry.default)
     for entry in msgspec.structs.fields(StepRecord)],
)  # fmt: skip


def _hello(text: str) -> Hello:
    try:
        named = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        fields = [named[name] for name in Hello.__struct_fields__ if name in named]
        return msgspec.json.decode(msgspec.json.encode(["hello", *fields]), type=Hello)
    except msgspec.MsgspecError as error:
        raise StoreError(f"an engine's introduction cannot be read: {error}") from None


def _settings(config: str) -> RunSettings:
    try:
        read = msgspec.json.decode(config, type=_Config)
    except msgspec.MsgspecError as error:
        raise StoreError(f"a run's configuration cannot be read: {error}") from None
    return RunSettings(
        read.policy.spec,
        read.lease.steps,
        read.lease.ms,
        read.guard.dwell_records,
        read.mode.canary_share,
        read.mode.canary_epsilon,
    )
