"""How long telemetry is kept, older files, and whether a file is sound."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlite_utils import Database

from faser.controller.decision.canary import Draws
from faser.controller.errors import StoreError
from faser.controller.telemetry import store as module
from faser.controller.telemetry.maintenance import check, run_vacuum
from faser.controller.telemetry.packing import pack_draws, unpack_draws
from faser.controller.telemetry.retention import BITE_STEPS, Retention, prune, used_bytes
from faser.controller.telemetry.schema import ADDED, SCHEMA_VERSION, TABLES, open_for_reading
from faser.controller.telemetry.store import EngineEntry, RunEntry, StepEntry, Store
from faser.controller.telemetry.telemetry_file import TelemetryFile
from faser.engine_adapter.protocol import ActionSet

from ..older_files import older

RUN = RunEntry(7, 1_000, "0.1.0", "{}")
HOUR_NS = 3_600_000_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "telemetry.sqlite"


@pytest.fixture
def fill(path: Path, make_engine: Any, make_record: Any) -> Callable[..., Store]:
    """Return a function that writes steps; the file is closed unless it is told to stay open."""
    hello = make_engine().hello()

    def write(steps: int = 100, first: int = 1, requests: int = 8, retention: Retention | None = None) -> Store:
        store = Store(path, RUN, 1_000_000, 0.01, retention)
        store.put(EngineEntry(hello, 1))
        for counter in range(first, first + steps):
            record = make_record("boot-1", counter, requests)
            action = ActionSet("boot-1", 7, counter, counter + 32, 1.0, 0, [1], [2])
            draws = Draws([1], [2], [2], [0.9]) if counter % 2 else None
            store.put(StepEntry(record, counter * HOUR_NS, action, "why", 1e-4, True, "price", draws))
        return store

    return write


def test_a_file_over_its_size_loses_the_oldest_steps_and_their_events(fill: Any, path: Path) -> None:
    fill(5 * BITE_STEPS // 2, requests=2).close()
    with closing(open_for_reading(path)) as database:
        full = used_bytes(database)
    store = fill(1, first=10_000, retention=Retention(max_bytes=full // 2))
    store.close()
    with closing(sqlite3.connect(path)) as raw:
        database, retention = Database(raw), Retention(max_bytes=full // 2)
        bites = 0
        while prune(database, retention, 0):
            bites += 1
        first, last, steps = database.execute("SELECT min(counter), max(counter), count(*) FROM steps").fetchone()
        assert 0.1 * full < used_bytes(database) <= 0.5 * full
        assert bites >= 1
        assert (last, steps) == (10_000, 5 * BITE_STEPS // 2 - first + 2)
        oldest = database.execute("SELECT min(received_ns) FROM events").fetchone()[0]
        assert oldest is None or oldest >= first * HOUR_NS
    assert check(path).faults == []


def test_the_writer_keeps_the_file_within_its_limits_while_it_writes(fill: Any, path: Path, eventually: Any) -> None:
    store = fill(3 * BITE_STEPS, requests=1, retention=Retention(max_age_ns=HOUR_NS))  # all are from long ago
    eventually(lambda: store.health().written > 3 * BITE_STEPS, "all are written", 60.0)
    eventually(lambda: count(path) == 1, "all but the newest are gone", 60.0)
    store.close()
    assert store.health().error == ""


def test_a_file_is_kept_within_its_limits_though_records_never_cease(
    fill: Any, path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    waiting: list[int] = []
    look = Store._look_after_size

    def spy(store: Store) -> None:
        before = _steps(store)
        look(store)
        if _steps(store) < before:
            waiting.append(len(store._queue))

    monkeypatch.setattr(module, "LOOK_S", 0.0)
    monkeypatch.setattr(Store, "_look_after_size", spy)
    store = fill(4 * BITE_STEPS, requests=1, retention=Retention(max_bytes=1 << 18))
    eventually(lambda: store.health().written > 4 * BITE_STEPS, "all are written", 60.0)
    store.close()
    assert max(waiting) > BITE_STEPS


def _steps(store: Store) -> int:
    steps: int = store._database.execute("SELECT count(*) FROM steps").fetchone()[0]
    return steps


def count(path: Path) -> int:
    with closing(open_for_reading(path)) as database:
        steps: int = database.execute("SELECT count(*) FROM steps").fetchone()[0]
        return steps


def test_without_limits_nothing_is_deleted(fill: Any, path: Path) -> None:
    fill(50).close()
    with closing(open_for_reading(path)) as database:
        assert prune(database, Retention(), 1 << 62) is False
    assert count(path) == 50


def test_a_column_that_the_first_schema_did_not_have_is_added_to_older_files() -> None:
    later = {(column.table, column.name) for columns in ADDED.values() for column in columns}
    for table, first in (("steps", 47), ("events", 12)):
        kept = [name for name in TABLES[table] if (table, name) not in later]
        assert len(kept) == first, "a new column needs a line in ADDED"


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION))
def test_an_older_file_is_read_as_it_is_and_brought_up_to_date_by_a_writer(fill: Any, path: Path, version: int) -> None:
    fill(10).close()
    older(path, version)
    with TelemetryFile(path) as file:
        assert len(file.steps()) == 10
    assert check(path).faults == []
    with closing(sqlite3.connect(path)) as raw:
        assert raw.execute("PRAGMA user_version").fetchone() == (version,)  # reading changed nothing
    fill(5, first=11).close()
    with closing(open_for_reading(path)) as database:
        columns = [row[1] for row in database.execute("PRAGMA table_info(steps)")]
        assert set(columns) == set(TABLES["steps"])
        rows = database.execute("SELECT counter, caught_up, decision_policy FROM steps ORDER BY id").fetchall()
    assert [row[0] for row in rows] == list(range(1, 16))
    assert {row[1] for row in rows} == {0}
    assert [row[2] for row in rows] == [None] * 10 + ["price"] * 5 if version < 3 else True


def test_a_file_of_a_newer_faser_is_refused(fill: Any, path: Path) -> None:
    fill(1).close()
    with closing(sqlite3.connect(path)) as raw:
        raw.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(StoreError, match=f"schema {SCHEMA_VERSION} or older"):
        open_for_reading(path)


def test_check_counts_and_names_what_is_damaged(fill: Any, path: Path) -> None:
    fill(20).close()
    found = check(path)
    assert (found.steps, found.decisions, found.engines, found.gaps, found.faults) == (20, 20, 1, 0, [])
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("UPDATE steps SET rows = x'0178' WHERE id = 3")
        raw.execute("UPDATE steps SET emitted = 99 WHERE id = 5")
        raw.execute("UPDATE steps SET counter = 2 WHERE id = 9")
        raw.execute("DELETE FROM steps WHERE id = 15")
        raw.commit()
    found = check(path)
    assert [fault.split(":")[0] for fault in found.faults] == ["step 3", "step 5", "step 9"]
    assert found.gaps == 2


def test_vacuum_gives_space_back_and_wants_the_file_for_itself(
    fill: Any, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = fill(1500)
    with pytest.raises(StoreError, match="is written by process"):
        run_vacuum(path)
    store.close()
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("DELETE FROM steps WHERE id < 1400")
        raw.commit()
    before = path.stat().st_size
    assert run_vacuum(path) == 0
    assert path.stat().st_size < before / 2
    assert "KiB now" in capsys.readouterr().out


def test_draws_survive_packing() -> None:
    draws = Draws([9, 3], [0, 4], [2, 4], [0.02, 0.92])
    assert unpack_draws(pack_draws(draws)) == draws
    with pytest.raises(StoreError, match="draws cannot be read"):
        unpack_draws(b"\x01nonsense")
