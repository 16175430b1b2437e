"""What a telemetry file holds, as the sidecar lived it: sessions of records in order, with the decisions made on them.

Called by the replay. Everything is rebuilt exactly: the same records, in the same order, through the same code give the
same decisions, byte for byte. Never writes.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec
from sqlite_utils import Database

from ...engine_adapter.protocol import (
    MAX_DRAFT_LENGTH,
    Count,
    DraftLength,
    EventKind,
    Hello,
    Mode,
    RequestEvent,
    StepRecord,
)
from ...env.estimate.objectives import NO_CLASSES, ObjectiveClasses
from ..decision.canary import Draws
from ..decision.session import epoch_above
from ..errors import ConfigError, StoreError
from ..objectives import parse_objectives
from .packing import unpack_copies, unpack_draws, unpack_lengths, unpack_rows
from .schema import MOST, PLAIN_FIELDS, STOP_OR_ABORT, hello_of

T = TypeVar("T")
_DECISION: Final = (
    "decision_sequence", "decision_mode", "decision_policy", "decision_digest", "decision_draws",
    "decision_default_length", "decision_lengths",
)  # fmt: skip
_STAGES: Final = ("stage_bounds", "is_moving")
EVENT_CELLS: Final = "kind, handle, time_s, tokens, request_id, priority, detail, ttft_ms, tpot_ms"  # of `read_event`
STEP_CELLS: Final = (
    *PLAIN_FIELDS,
    "rows",
    "copies",
    *_STAGES,
    *_DECISION,
)  # what `read_step` needs, besides the row's id


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What of a run's configuration decides; as it was at the start or after a reload."""

    policy: str
    lease_steps: int
    lease_ms: int
    dwell_records: int
    canary_share: float
    canary_epsilon: float
    objectives: ObjectiveClasses = NO_CLASSES


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
    classes: str = ""
    own: bool = True
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
    objectives: _Part = _Part()


def read_sessions(database: Database) -> Iterator[RecordedSession]:
    """Yield every session of a file, run by run; raise StoreError for a file that cannot be read."""
    try:
        runs = database.execute("SELECT id, epoch, config FROM runs ORDER BY id").fetchall()
        engines = database.execute("SELECT id, hello FROM engines ORDER BY id").fetchall()
        for run, epoch, config in runs:
            for engine, text in engines:
                yield from _sessions(database, run, engine, whole_number(epoch), hello_of(text), config)
    except sqlite3.Error as error:
        raise StoreError(
            f"the file cannot be read: {error}", remedy="faser store check names what is damaged"
        ) from None


def _sessions(
    database: Database, run: int, engine: int, epoch: int, hello: Hello, config: str
) -> Iterator[RecordedSession]:
    begun, events, reloads = _events(database, run, engine)
    starts, obeyed = [start for start, _ in begun], [highest for _, highest in begun]
    settings = _settings(config)
    rosters = [_roster(database, run, engine, start) for start in starts]
    names = ("id", "received_ns", *STEP_CELLS)
    query = f"SELECT {', '.join(names)} FROM steps WHERE run = ? AND engine = ? ORDER BY id"
    session: RecordedSession | None = None
    number = 0
    for cells in database.execute(query, [run, engine]):
        row = dict(zip(names, cells, strict=True))
        received_ns = whole_number(row["received_ns"])
        while reloads and reloads[0][0] <= received_ns:
            settings = _settings(reloads.pop(0)[1])
        while number < len(starts) and starts[number] <= received_ns:
            if session is not None and session.steps:
                yield session
            whole = msgspec.structs.replace(hello, roster=rosters[number])
            is_whole = row["counter"] == 1 or number > 0 or _is_first(database, run)
            session = RecordedSession(epoch_above(epoch, obeyed[number]), whole, is_whole, [])
            number += 1
        if session is None:  # its hello was deleted
            session = RecordedSession(epoch, hello, False, [])
        session.steps.append(read_step(hello.boot_id, row, events.get(row["counter"], []), settings))
    if session is not None and session.steps:
        yield session


def _is_first(database: Database, run: int) -> bool:
    """Return whether nothing was ever deleted: keys are given in order, from 1 on."""
    first = database.execute("SELECT min(id) FROM steps").fetchone()[0]
    return bool(first == 1) or bool(database.execute("SELECT min(run) FROM steps").fetchone()[0] < run)


def _events(
    database: Database, run: int, engine: int
) -> tuple[list[tuple[int, int]], dict[int, list[RequestEvent]], list[tuple[int, str]]]:
    """Return when sessions began, with the epoch obeyed until then, what happened to requests by record, and settings.

    The last are given with the times from which on they held.
    """
    events: dict[int, list[RequestEvent]] = {}
    query = (
        f"SELECT counter, {EVENT_CELLS} FROM events WHERE run = ? AND engine = ? AND counter IS NOT NULL ORDER BY id"
    )
    for counter, *cells in database.execute(query, [run, engine]):
        events.setdefault(counter, []).append(read_event(*cells))
    starts = database.execute(
        "SELECT received_ns, detail FROM events WHERE run = ? AND engine = ? AND kind = 'hello' ORDER BY id",
        [run, engine],
    ).fetchall()
    reloads = database.execute(
        "SELECT received_ns, detail FROM events WHERE run = ? AND engine IS NULL AND kind = 'reload' ORDER BY id", [run]
    ).fetchall()
    changes = [(whole_number(received_ns), detail) for received_ns, detail in reloads]
    return [(whole_number(received_ns), _obeyed(detail)) for received_ns, detail in starts], events, changes


def _obeyed(detail: object) -> int:
    """Return the epoch in a hello's row: empty where the engine had obeyed nobody, or where the file is older."""
    if not isinstance(detail, str) or not re.fullmatch("[0-9]{0,19}", detail):
        raise StoreError(f"an engine's hello has the epoch {detail!r}; expected a whole number, or nothing")
    return int(detail or 0)


def _roster(database: Database, run: int, engine: int, received_ns: int) -> list[RequestEvent]:
    query = (
        f"SELECT {EVENT_CELLS} FROM events WHERE run = ? AND engine = ?"
        " AND counter IS NULL AND handle IS NOT NULL AND received_ns = ? ORDER BY id"
    )
    return [read_event(*cells) for cells in database.execute(query, [run, engine, received_ns])]


def read_event(
    kind: EventKind,
    handle: int,
    time_s: float,
    tokens: int,
    request_id: str | None,
    priority: int,
    detail: str | None,
    *objectives_ms: float | None,
) -> RequestEvent:
    """Return a row of the table events as what it was written from; raise StoreError for what no sidecar writes."""
    most = str(detail or "").removeprefix(MOST)
    limit = int(most) if most.isdecimal() else MAX_DRAFT_LENGTH
    may_be_stop = detail == STOP_OR_ABORT
    limit = min(limit, MAX_DRAFT_LENGTH)
    cells = [kind, handle, time_s, tokens, request_id or "", priority, limit, may_be_stop, *objectives_ms]
    return _checked("an event", cells, RequestEvent)


def read_step(boot_id: str, row: dict[str, object], events: list[RequestEvent], settings: RunSettings) -> Recorded:
    """Return a row of the table steps as what it was written from; raise StoreError for what no sidecar writes."""
    what = f"step {row['id']}"
    plain = {name: row[name] for name in PLAIN_FIELDS}
    plain |= {"stage_bounds": _bounds(row["stage_bounds"]), "is_moving": row["is_moving"] == 1}
    record = _checked(what, {**plain, "boot_id": boot_id, "events": [], "rows": []}, _StepFields)
    named = {name: getattr(record, name) for name in _StepFields.__struct_fields__}
    if (copies := row["copies"]) is not None:
        named["copied"], named["verified_copies"] = map(tuple, unpack_copies(copies))  # type: ignore[arg-type]
    step = StepRecord(**{**named, "events": events, "rows": unpack_rows(row["rows"])})  # type: ignore[arg-type]
    if row["decision_sequence"] is None:
        return Recorded(step, settings)
    made = _checked(what, {name.removeprefix("decision_"): row[name] for name in _DECISION}, _DecisionCells)
    return Recorded(
        step,
        settings,
        made.sequence,
        made.mode,
        made.policy or settings.policy,
        made.digest,
        unpack_draws(made.draws) if made.draws is not None else None,
        made.default_length,
        unpack_lengths(made.lengths) if made.lengths is not None else {},
    )


def _bounds(cell: object) -> object:
    """Return the bounds that a cell holds; what is none is left to the check."""
    if not isinstance(cell, str):
        return cell
    parts = cell.split(",") if cell else []
    return [int(part) if part.isdecimal() else part for part in parts]


def whole_number(cell: object) -> int:
    """Return a cell that is a time or an epoch; raise StoreError where it is neither: SQLite keeps what it is given."""
    return _checked("a time or an epoch", cell, int)


def _checked(what: str, cells: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(cells, kind)
    except msgspec.ValidationError as error:
        raise StoreError(f"{what} is damaged: {error}", remedy="faser store check lists the damaged steps") from None


class _DecisionCells(msgspec.Struct, frozen=True):
    """A row's decision; cells without a value are None."""

    sequence: Count
    mode: Mode
    policy: str | None
    digest: str | None
    draws: bytes | None
    default_length: DraftLength
    lengths: bytes | None


# StepRecord as a map, so that a row of the file is checked on the way back as a frame is.
_StepFields = msgspec.defstruct(
    "_StepFields",
    [(entry.name, entry.type) if entry.required else (entry.name, entry.type, entry.default)
     for entry in msgspec.structs.fields(StepRecord)],
)  # fmt: skip


def _settings(config: str) -> RunSettings:
    try:
        read = msgspec.json.decode(config, type=_Config)
    except (msgspec.MsgspecError, TypeError) as error:  # ... or no text at all
        raise StoreError(f"a run's configuration cannot be read: {error}") from None
    return RunSettings(
        read.policy.spec,
        read.lease.steps,
        read.lease.ms,
        read.guard.dwell_records,
        read.mode.canary_share,
        read.mode.canary_epsilon,
        _objectives(read.objectives),
    )


def _objectives(part: _Part) -> ObjectiveClasses:
    try:
        return parse_objectives(part.classes, heeds_own=part.own)
    except ConfigError as error:
        raise StoreError(f"a run's configuration cannot be read: {error}") from None
