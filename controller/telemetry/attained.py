"""Who of a file's requests with objectives was in time, as the sidecar that wrote it counted.

Called by readers of telemetry files. By the objectives that requests asked for, and by the classes of each run's
configuration, also where it was changed meanwhile. Never writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import groupby
from typing import Final

import msgspec
from sqlite_utils import Database

from ...env.estimate.objectives import ObjectiveClasses
from ..decision.attainment import Attainment, added_up
from ..errors import ConfigError, StoreError
from ..objectives import parse_objectives
from ..snapshot import AttainmentStatus
from .sessions import EVENT_CELLS, read_event

_QUERY: Final = f"""SELECT run, engine, received_ns, counter, {EVENT_CELLS} FROM events
    WHERE handle IS NOT NULL AND engine IS NOT NULL ORDER BY run, engine, id"""
_SPOKEN: Final = "SELECT 1 FROM events WHERE ttft_ms IS NOT NULL OR tpot_ms IS NOT NULL LIMIT 1"


class _ClassesPart(msgspec.Struct, frozen=True):
    classes: str = ""
    own: bool = True


class _Promises(msgspec.Struct, frozen=True):
    """What of a run's configuration says when requests are to be served."""

    objectives: _ClassesPart = _ClassesPart()


def attained(database: Database) -> dict[str, AttainmentStatus]:
    """Return how many requests finished and were in time, by class; raise StoreError for what no sidecar writes."""
    promises: dict[int, list[tuple[int, ObjectiveClasses]]] = {}
    for run, received_ns, config in _configurations(database):
        promises.setdefault(run, []).append((received_ns, _classes(config)))
    has_classes = any(each.classes for changes in promises.values() for _, each in changes)
    if not has_classes and database.execute(_SPOKEN).fetchone() is None:
        return {}  # without a look at every event
    counts: list[dict[str, AttainmentStatus]] = []
    for (run, _), of_engine in groupby(database.execute(_QUERY), lambda cells: (cells[0], cells[1])):
        changes = deque(promises.get(run, ()))
        tally = Attainment()
        for (received_ns, _), of_record in groupby(of_engine, lambda cells: (cells[2], cells[3])):
            while changes and changes[0][0] <= received_ns:
                tally.follow(changes.popleft()[1])
            tally.take([read_event(*cells[4:]) for cells in of_record])
        counts.append(tally.status())
    return added_up(counts)


def _configurations(database: Database) -> Iterator[tuple[int, int, str]]:
    """Yield runs with the time from which on a configuration held."""
    yield from database.execute("SELECT id, 0, config FROM runs ORDER BY id")
    yield from database.execute("SELECT run, received_ns, detail FROM events WHERE kind = 'reload' ORDER BY id")


def _classes(config: str) -> ObjectiveClasses:
    try:
        promised = msgspec.json.decode(config, type=_Promises).objectives
        return parse_objectives(promised.classes, heeds_own=promised.own)
    except (msgspec.MsgspecError, TypeError, ConfigError) as error:  # ... or no text at all
        raise StoreError(f"a run's configuration cannot be read: {error}") from None
