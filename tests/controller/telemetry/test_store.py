"""The telemetry file: what is written, what happens when the disk fails or the writer is killed."""

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from faser.controller.errors import StoreError
from faser.controller.telemetry import store as module
from faser.controller.telemetry.schema import TABLES, VIEWS, open_for_reading
from faser.controller.telemetry.store import EngineEntry, NoticeEntry, RunEntry, StepEntry, Store
from faser.engine_adapter.protocol import ActionSet, Hello, Prune, RequestEvent, RequestRow, StepRecord

RUN = RunEntry(7, 1_000, "0.1.0", "{}")


def hello(boot_id: str = "boot-1", roster: list[RequestEvent] | None = None) -> Hello:
    return Hello(
        boot_id, 1, "host", "0.1.0", "0.32.0", "target", "cpu", "v1", False, "eagle3", "drafter", 6, 0, [], 256, 8192,
        100_000, [], ["unsplit"], [], 1, 1, 1, 0, 32, 1000, roster or [],
    )  # fmt: skip


def record(counter: int, boot_id: str = "boot-1") -> StepRecord:
    rows = [RequestRow(handle, 4, 3, 3, 3, 1, 2, 3, 50, False, (0.5, 0.1, 0.2)) for handle in (1, 2)]
    events = [RequestEvent("arrival", counter, 0.5, 90, f"req-{counter}")]
    return StepRecord(
        boot_id, counter, counter, counter * 0.01, 0.01, 1e-4, 8e-3, 1e-4, 1e-3, 0.0, 1e-5, 2, 1, 0, 2, 6, 0.5, None,
        None, 7, counter, 0, 0, events, rows,
    )  # fmt: skip


def decision(counter: int) -> ActionSet:
    return ActionSet("boot-1", 7, counter, counter + 32, 1.5, 2, [1], [4], 1e-5, 0, 3, Prune(5, 0.25))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "telemetry.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    opened = Store(path, RUN, flush_s=0.01)
    yield opened
    opened.close()


def query(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(sql).fetchall()


def test_a_step_is_one_row_with_plain_sums_and_the_decision_on_it(store: Store, path: Path) -> None:
    store.put(EngineEntry(hello(), 10))
    store.put(StepEntry(record(1), 11, decision(1), "because", 5e-5, True))
    store.put(StepEntry(record(2), 12))
    store.close()
    columns = "counter, requests, drafted, verified, pruned, accepted, emitted, decision_sequence, decision_reason"
    assert query(path, f"SELECT {columns} FROM steps") == [
        (1, 2, 6, 6, 2, 4, 6, 1, "because"),
        (2, 2, 6, 6, 2, 4, 6, None, None),
    ]
    prune = "SELECT decision_prune_layer, decision_prune_threshold, decision_mode FROM steps WHERE counter = 1"
    assert query(path, prune) == [(5, 0.25, "active")]


def test_a_hello_becomes_one_row_per_boot_and_its_roster_becomes_events(store: Store, path: Path) -> None:
    arrival = RequestEvent("arrival", 9, 0.25, 40, "req-9")
    for _ in range(2):
        store.put(EngineEntry(hello(roster=[arrival]), 10))
    store.close()
    [(boot_id, text)] = query(path, "SELECT boot_id, hello FROM engines")
    assert boot_id == "boot-1"
    assert msgspec.json.decode(text)["k_max"] == 6
    assert query(path, "SELECT DISTINCT request_id, tokens FROM events WHERE handle = 9") == [("req-9", 40)]


def test_engines_share_a_file_and_are_told_apart_in_every_table(store: Store, path: Path) -> None:
    boots = [f"boot-{number}" for number in range(32)]
    for boot_id in boots:
        store.put(EngineEntry(hello(boot_id), 10))
        store.put(StepEntry(record(1, boot_id), 11))
        store.put(NoticeEntry(boot_id, "gone", "", 12))
    store.close()
    for table in ("steps", "events"):
        seen = query(path, f"SELECT DISTINCT boot_id FROM {table} JOIN engines ON engines.id = engine ORDER BY engine")
        assert [boot_id for (boot_id,) in seen] == boots


def test_views_unfold_plain_columns(store: Store, path: Path) -> None:
    store.put(EngineEntry(hello(), 10))
    store.put(StepEntry(record(1), 11, decision(1), "because", 5e-5, True))
    store.close()
    assert query(path, "SELECT boot_id, epoch, acceptance_rate, is_under_lease FROM step_summary") == [
        ("boot-1", 7, pytest.approx(4 / 6), 1)
    ]
    assert query(path, "SELECT request_id, arrival_s, prompt_tokens FROM request_summary") == [("req-1", 0.5, 90)]


def test_a_second_life_appends_to_the_same_file(path: Path) -> None:
    for life in range(2):
        store = Store(path, RunEntry(life, 1, "0.1.0", "{}"))
        store.put(EngineEntry(hello(), 10))
        store.put(StepEntry(record(life + 1), 11))
        store.close()
    assert query(path, "SELECT run, engine, counter FROM steps") == [(1, 1, 1), (2, 1, 2)]


def test_a_full_queue_drops_and_counts_instead_of_waiting(path: Path) -> None:
    store = Store(path, RUN, queue_entries=10, flush_s=30.0)
    store.put(EngineEntry(hello(), 10))
    begin = time.monotonic()
    handed_over = [store.put(StepEntry(record(number), 11)) for number in range(1, 101)]
    assert time.monotonic() - begin < 1.0
    store.close()
    assert sum(handed_over) == 9
    assert store.health().dropped == 91
    assert query(path, "SELECT count(*) FROM steps") == [(9,)]


def test_rows_are_inserted_many_at_a_time(path: Path) -> None:
    """sqlite3 lets go of the interpreter with every row of an executemany: beside a busy loop the queue overflows."""
    store, statements = Store(path, RUN, flush_s=30.0), []
    store._database.conn.set_trace_callback(statements.append)
    store.put(EngineEntry(hello(), 1))
    for counter in range(1, 65):
        store.put(StepEntry(record(counter), counter))
    store.close()
    inserts = [
        statement for statement in statements if statement.startswith(("INSERT INTO steps", "INSERT INTO events"))
    ]
    assert query(path, "SELECT count(*) FROM steps") == [(64,)]
    assert 2 <= len(inserts) <= 8


def priorities() -> dict[str, int]:
    return {
        thread.name: os.getpriority(os.PRIO_PROCESS, thread.native_id or 0)
        for thread in threading.enumerate()
    }  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="other systems know no priority of a thread")
def test_it_stands_aside_while_others_are_behind_but_not_when_much_waits_or_it_ends(
    path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setattr(module, "UNHURRIED_ENTRIES", 50)
    before = priorities()["MainThread"]
    store = Store(path, RUN, flush_s=0.01)
    store.stand_aside(time.monotonic() + 60.0)
    store.put(EngineEntry(hello(), 10))
    for number in range(1, 40):
        store.put(StepEntry(record(number), 11))
    time.sleep(0.2)
    assert store.health().written == 0
    assert priorities()["faser-store"] == 19
    assert priorities()["MainThread"] == before
    for number in range(40, 60):
        store.put(StepEntry(record(number), 11))
    eventually(lambda: store.health().written, "what is too much is written")
    store.close()
    assert store.health().written == 60


def test_closing_writes_what_waits(path: Path) -> None:
    store = Store(path, RUN, flush_s=30.0)
    store.put(EngineEntry(hello(), 10))
    for number in range(1, 2001):
        store.put(StepEntry(record(number), 11))
    store.close()
    assert query(path, "SELECT count(*) FROM steps") == [(2000,)]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: path.mkdir(), "is no regular file"),
        (lambda path: path.write_bytes(b"no database at all" * 100), "cannot be written: file is not a database"),
        (lambda path: sqlite3.connect(path).executescript("CREATE TABLE other (id)").close(), "another program"),
        (lambda path: _age(path), "telemetry schema 99; expected schema 9 or older"),
    ],
)
def test_a_file_that_is_not_ours_is_refused_and_left_alone(
    path: Path, prepare: Callable[[Path], object], message: str
) -> None:
    prepare(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(StoreError, match=message) as caught:
        Store(path, RUN)
    assert "\n" not in str(caught.value)
    assert (path.read_bytes() if path.is_file() else b"") == before


def _age(path: Path) -> None:
    Store(path, RUN).close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def test_an_unwritable_folder_is_one_clear_line() -> None:
    with pytest.raises(StoreError, match=r"cannot be written.*store\.path"):
        Store(Path("/proc/telemetry.sqlite"), RUN)


def test_two_writers_of_one_file_are_refused(store: Store, path: Path) -> None:
    with pytest.raises(StoreError, match=f"is written by process {os.getpid()}"):
        Store(path, RUN)


def test_a_full_disk_stops_recording_with_an_alarm_and_nothing_else(
    path: Path, caplog: pytest.LogCaptureFixture, eventually: Any
) -> None:
    store = Store(path, RUN, flush_s=0.01)
    store.put(EngineEntry(hello(), 10))
    eventually(lambda: store.health().written == 1, "the engine is written")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))  # the kernel refuses to let the file grow beyond
        numbers = iter(range(1, 1_000_000))

        def has_stopped() -> str:
            for _ in range(50):
                store.put(StepEntry(record(next(numbers)), 11))
            return store.health().error

        error = eventually(has_stopped, "recording stops")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "full" in error or "I/O" in error
    assert not store.put(StepEntry(record(1), 11))
    assert store.health().dropped > 0
    eventually(lambda: "ALARM telemetry stops, deciding goes on" in caplog.text, "the alarm is in the log")
    store.close()
    steps, events = (query(path, f"SELECT count(*) FROM {table}")[0][0] for table in ("steps", "events"))
    assert steps == events - 1 == store.health().written - 1, "a batch is written whole or not at all"
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


def test_an_entry_no_column_holds_is_dropped_and_counted_and_the_others_are_kept(
    store: Store, path: Path, eventually: Any
) -> None:
    store.put(EngineEntry(hello(roster=[RequestEvent("arrival", 1, 0.5, 9, "x", (1 << 64) - 1)]), 10))
    for number in range(1, 6):
        step = record(number)
        if number == 3:
            step.split = (1 << 64) - 1
        store.put(StepEntry(step, 11))
    eventually(lambda: store.health().written + store.health().dropped == 6, "all are dealt with")
    assert (store.health().dropped, store.health().error) == (1, "")
    assert query(path, "SELECT counter FROM steps ORDER BY counter") == [(1,), (2,), (4,), (5,)]
    assert query(path, "SELECT priority FROM events WHERE request_id = 'x'") == [((1 << 63) - 1,)]


def test_what_a_locked_file_cannot_take_is_written_when_the_lock_goes(
    store: Store, path: Path, caplog: pytest.LogCaptureFixture, eventually: Any
) -> None:
    store.put(EngineEntry(hello(), 10))
    eventually(lambda: store.health().written == 1, "the engine is written")
    with closing(sqlite3.connect(path, isolation_level=None)) as shell:
        shell.execute("BEGIN IMMEDIATE")
        for number in range(1, 4):
            store.put(StepEntry(record(number), 11))
        eventually(lambda: "locked by another program" in caplog.text, "the writer notices")
        shell.execute("ROLLBACK")
    eventually(lambda: store.health().written == 4, "the steps are written")
    assert (store.health().dropped, store.health().error) == (0, "")
    assert query(path, "SELECT counter FROM steps") == [(1,), (2,), (3,)], "in order"


WRITER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_store import RUN, hello, record
from faser.controller.telemetry.store import EngineEntry, StepEntry, Store
store = Store(Path(sys.argv[1]), RUN, flush_s=0.001)
store.put(EngineEntry(hello(), 10))
number = 0
while True:
    number += 1
    store.put(StepEntry(record(number), 11))
    time.sleep(0.0002)
"""


KILLS = int(os.environ.get("FASER_CHAOS_KILLS", "3"))  # `make chaos` kills fifty times


@pytest.mark.parametrize("after_steps", [1 + 211 * (kill % 7) + kill for kill in range(KILLS)])
def test_kill_9_of_the_writer_leaves_a_sound_file_with_a_prefix_of_the_steps(
    path: Path, after_steps: int, eventually: Any
) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(Path(__file__).parent)], cwd="/")
    try:
        eventually(lambda: path.exists() and _count(path) >= after_steps, "the file grows", 60.0)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert query(path, "PRAGMA integrity_check") == [("ok",)]
    counters = [counter for (counter,) in query(path, "SELECT counter FROM steps ORDER BY id")]
    assert counters == list(range(1, len(counters) + 1))
    store = Store(path, RUN)  # and the next life goes on with it
    store.close()


def _count(path: Path) -> int:
    try:
        return int(query(path, "SELECT count(*) FROM steps")[0][0])
    except sqlite3.OperationalError:  # not yet created
        return 0


def test_reading_needs_no_right_to_write_and_refuses_other_files(store: Store, path: Path, tmp_path: Path) -> None:
    with closing(open_for_reading(path)) as database, pytest.raises(sqlite3.OperationalError, match="readonly"):
        database.execute("DELETE FROM steps")
    with pytest.raises(StoreError, match="no telemetry file"):
        open_for_reading(tmp_path / "absent.sqlite")


def test_every_column_and_view_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "telemetry.md").read_text()
    for table, columns in TABLES.items():
        section = text.split(f"### `{table}`")[1].split("###")[0]
        missing = [column for column in columns if f"`{column}`" not in section]
        assert not missing, f"{table}: {missing}"
    assert not [view for view in VIEWS if f"`{view}`" not in text]
