"""The telemetry file and its log stay within their limit, and what a reader does to the log is told and mended."""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from faser.controller.config import Config
from faser.controller.daemon.metrics import exposition
from faser.controller.errors import StoreError
from faser.controller.link.ask import ask, overview
from faser.controller.snapshot import SNAPSHOT_VERSION, LinkStatus, Snapshot, StoreStatus
from faser.controller.telemetry import write_ahead_log as module
from faser.controller.telemetry.footprint import log_path, sizes
from faser.controller.telemetry.maintenance import check, run_check, run_vacuum
from faser.controller.telemetry.retention import Retention
from faser.controller.telemetry.store import EngineEntry, RunEntry, StepEntry, Store
from faser.engine_adapter.protocol import ActionSet

RUN = RunEntry(7, 1_000, "0.1.0", "{}")
LIMIT = Retention(max_bytes=4 << 20)
REASON = "because " * 150  # 1.2 kB to a step
PINS = "a reader pins"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "telemetry.sqlite"


class Recorder:
    """A store that is given steps; the oldest one has counter 1."""

    def __init__(self, path: Path, hello: Any, make_record: Any, retention: Retention, queue_entries: int) -> None:
        self.path, self.store = path, Store(path, RUN, queue_entries, 0.01, retention)
        self.counter, self.most_bytes, self._make_record = 0, 0, make_record
        self.store.put(EngineEntry(hello, 1))

    def put(self, steps: int) -> None:
        """Hand steps over and wait until they are written, looking at the sizes meanwhile."""
        for counter in range(self.counter + 1, self.counter + steps + 1):
            assert self.store.put(self.entry(counter)), "a step was dropped"
            while self.store.health().queued > 500:
                time.sleep(0.001)
            self._look()
        self.counter += steps
        end_s = time.monotonic() + 30.0
        while self.store.health().written < self.counter + 1 and time.monotonic() < end_s:
            self._look()
            time.sleep(0.001)
        assert self.store.health().written == self.counter + 1

    def entry(self, counter: int) -> StepEntry:
        action = ActionSet("boot-1", 7, counter, counter + 32, 1.0, 0, [1], [2])
        return StepEntry(self._make_record("boot-1", counter, 2), counter, action, REASON, 1e-4, True, "price")

    def _look(self) -> None:
        self.most_bytes = max(self.most_bytes, sum(sizes(self.path)))


@pytest.fixture
def start(path: Path, make_engine: Any, make_record: Any) -> Iterator[Callable[..., Recorder]]:
    hello, started = make_engine().hello(), []

    def begin(retention: Retention = LIMIT, queue_entries: int = 20_000) -> Recorder:
        started.append(Recorder(path, hello, make_record, retention, queue_entries))
        return started[-1]

    yield begin
    for recorder in started:
        if recorder.store._thread.is_alive():
            recorder.store.close()


@pytest.fixture
def read(path: Path) -> Iterator[Callable[[], sqlite3.Connection]]:
    """Return a function that begins a transaction on the file, as a shell that is left open does."""
    readers: list[sqlite3.Connection] = []

    def begin() -> sqlite3.Connection:
        reader = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, check_same_thread=False, isolation_level=None)
        readers.append(reader)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM steps").fetchone()
        return reader

    yield begin
    for reader in readers:
        reader.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the writer try again at once."""
    monkeypatch.setattr(module, "RETRY_S", 0.01)


def counters(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as database:
        return [counter for (counter,) in database.execute("SELECT counter FROM steps ORDER BY id")]


def test_a_burst_without_a_reader_keeps_file_and_log_together_within_the_limit(start: Any, path: Path) -> None:
    recorder = start()
    recorder.put(12_000)
    assert 2 << 20 < recorder.most_bytes <= LIMIT.max_bytes
    recorder.store.close()
    assert sum(sizes(path)) <= LIMIT.max_bytes
    assert sizes(path)[1] == 0
    kept = counters(path)
    assert kept == list(range(12_001 - len(kept), 12_001))
    assert len(kept) > 500


def test_without_a_limit_the_log_is_bounded_too(start: Any, monkeypatch: pytest.MonkeyPatch, eventually: Any) -> None:
    monkeypatch.setattr("faser.controller.telemetry.retention.LOG_BYTES", 1 << 20)
    recorder = start(Retention())
    recorder.put(2000)
    eventually(lambda: recorder.store.health().log_bytes <= 1 << 20, "the log is cut")
    assert counters(recorder.path) == list(range(1, 2001))


def test_the_log_is_cut_when_the_reader_leaves_though_nothing_is_written_any_more(
    start: Any, read: Any, path: Path, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    recorder = start()
    recorder.put(100)
    reader = read()
    recorder.put(5000)
    assert sizes(path)[1] > LIMIT.max_bytes
    assert reader.execute("SELECT count(*) FROM steps").fetchone() == (100,), "the reader keeps its view"
    eventually(lambda: PINS in caplog.text, "it is told")
    reader.close()
    eventually(lambda: sizes(path)[1] <= LIMIT.log_bytes, "the log is cut")
    eventually(lambda: recorder.store.health().pinned_s == 0.0, "and no longer pinned")
    assert sum(sizes(path)) <= LIMIT.max_bytes
    assert "no reader keeps" in caplog.text
    kept = counters(path)
    assert kept == list(range(5101 - len(kept), 5101))
    assert check(path).faults == []


def test_a_reader_that_never_leaves_is_told_once_and_costs_nothing_that_was_recorded(
    start: Any, read: Any, path: Path, eventually: Any, caplog: pytest.LogCaptureFixture, quick: None
) -> None:
    recorder = start()
    recorder.put(200)
    read()
    recorder.put(1000)  # within the file's part of the limit, were it not for the log
    recorder.store.retain(Retention(max_bytes=3 << 20))
    eventually(lambda: recorder.store.health().pinned_s, "it is noticed")
    recorder.put(100)
    eventually(lambda: PINS in caplog.text, "it is told")
    time.sleep(0.1)
    (line,) = [record.getMessage() for record in caplog.records if PINS in record.getMessage()]
    for part in (str(log_path(path)), "MiB beside", "more than store.max_mb", f"lsof {log_path(path)}"):
        assert part in line
    # The sizes are those of the writer's latest look, which may lie before its latest write.
    eventually(lambda: _told(recorder) == sizes(path), "status tells the sizes that the files have")
    health = recorder.store.health()
    assert (health.dropped, health.error) == (0, "")
    recorder.store.close()
    assert counters(path)[-1] == 1300
    assert check(path).faults == []


def test_the_log_of_a_reader_costs_no_steps_that_the_limit_leaves_room_for(
    start: Any, read: Any, path: Path, eventually: Any
) -> None:
    limit = Retention(max_bytes=16 << 20)
    recorder = start(limit)
    recorder.put(100)
    read()
    while sum(sizes(path)) <= limit.max_bytes:
        recorder.put(500)
    assert counters(path) == list(range(1, recorder.counter + 1))
    eventually(lambda: recorder.store.health().pinned_s, "it is noticed")


def test_a_pinned_log_is_told_within_the_limit_once_it_lasts_and_again_only_rarely(
    start: Any, read: Any, eventually: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RETRY_S", 0.01), ("WARN_S", 0.2), ("REPEAT_S", 0.3)):
        monkeypatch.setattr(module, name, value)
    limit = Retention(max_bytes=64 << 20)
    recorder = start(limit)
    recorder.put(100)
    begun_s = time.monotonic()
    read()
    recorder.put(2000)
    eventually(lambda: caplog.text.count(PINS) >= 3, "it is told and repeated")
    assert caplog.text.count(PINS) <= 1 + (time.monotonic() - begun_s) / 0.3
    assert "store.max_mb" not in caplog.text


def test_a_reader_that_comes_and_goes_is_told_at_most_once_and_its_log_is_cut_every_time(
    start: Any, read: Any, path: Path, eventually: Any, caplog: pytest.LogCaptureFixture, quick: None
) -> None:
    recorder = start()
    for _ in range(4):
        recorder.put(100)
        reader = read()
        recorder.put(3000)
        eventually(lambda: recorder.store.health().pinned_s, "it is noticed")
        reader.execute("ROLLBACK")  # the connection stays open
        eventually(lambda: sizes(path)[1] <= LIMIT.log_bytes, "the log is cut")
    assert caplog.text.count(PINS) == 1
    assert sum(sizes(path)) <= LIMIT.max_bytes


def test_the_log_is_pinned_until_the_last_of_several_readers_has_left(
    start: Any, read: Any, path: Path, eventually: Any, quick: None
) -> None:
    recorder = start()
    readers = []
    for _ in range(3):
        recorder.put(800)
        readers.append(read())
    recorder.put(800)
    for reader in readers:
        assert recorder.store.health().pinned_s
        assert sizes(path)[1] > LIMIT.log_bytes
        reader.close()
    eventually(lambda: sizes(path)[1] <= LIMIT.log_bytes, "the log is cut")


def test_readers_who_take_turns_so_that_one_is_always_there_do_not_pin_the_log_for_ever(
    start: Any, read: Any, path: Path, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RETRY_S", 0.05), ("PATIENCE_S", 5.0)):
        monkeypatch.setattr(module, name, value)
    recorder, is_over = start(), threading.Event()
    recorder.put(100)

    def take_turns() -> None:
        readers = [read(), read()]
        while not is_over.wait(0.2):
            readers.append(read())
            readers.pop(0).close()  # the one between them goes on

    thread = threading.Thread(target=take_turns)
    thread.start()
    try:
        recorder.put(600)
        assert sizes(path)[1] > LIMIT.log_bytes
        eventually(lambda: _put_and_see(recorder), "the log is cut while nothing is written", 30.0)
    finally:
        is_over.set()
        thread.join()


def _told(recorder: Recorder) -> tuple[int, int]:
    """Return the sizes of file and log in bytes, as the store tells them."""
    health = recorder.store.health()
    return health.file_bytes, health.log_bytes


def _put_and_see(recorder: Recorder) -> bool:
    """Hand over more steps, so that the log never rests; return whether it was cut."""
    for _ in range(5):
        recorder.counter += 1
        assert recorder.store.put(recorder.entry(recorder.counter)), "a step was dropped"
    return sizes(recorder.path)[1] <= LIMIT.log_bytes


@pytest.mark.alone
def test_waiting_for_readers_never_fills_the_queue_nor_holds_up_who_hands_over(
    start: Any, read: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RETRY_S", 0.0), ("PATIENCE_S", 60.0), ("TRIES_PER_PATIENT_ONE", 1)):
        monkeypatch.setattr(module, name, value)
    recorder = start(queue_entries=600)
    recorder.put(100)
    read()
    longest_s = 0.0
    for counter in range(101, 3101):
        entry = recorder.entry(counter)
        begun_s = time.monotonic()
        assert recorder.store.put(entry), "a step was dropped"
        longest_s = max(longest_s, time.monotonic() - begun_s)
        time.sleep(0.001)
    assert longest_s < 0.5
    eventually(lambda: recorder.store.health().written > 2500, "the writer goes on")
    assert sizes(recorder.path)[1] > LIMIT.log_bytes
    begun_s = time.monotonic()
    recorder.store.close()
    assert time.monotonic() - begun_s < 3.0
    assert recorder.store.health().dropped == 0
    assert counters(recorder.path)[-1] == 3100


def test_a_log_that_a_reader_left_behind_is_cut_by_the_next_life(
    start: Any, read: Any, path: Path, eventually: Any
) -> None:
    recorder = start()
    recorder.put(100)
    reader = read()
    recorder.put(5000)
    recorder.store.close()
    reader.close()
    assert sizes(path)[1] > LIMIT.max_bytes, "a reader may not cut it"
    start()
    eventually(lambda: sizes(path)[1] <= LIMIT.log_bytes, "the log is cut")
    assert counters(path)[-1] == 5100


def test_who_has_the_file_open_and_reads_nothing_leaves_no_log_at_the_end(start: Any, read: Any, path: Path) -> None:
    recorder = start(Retention())
    read().execute("ROLLBACK")
    recorder.put(100)
    assert sizes(path)[1] > 100_000
    recorder.store.close()
    assert sizes(path)[1] == 0


def test_vacuum_refuses_a_file_that_is_read_and_leaves_its_size_and_gives_the_log_back_after(
    start: Any, read: Any, path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("faser.controller.telemetry.maintenance.BUSY_S", 0.1)
    recorder = start()
    recorder.put(100)
    reader = read()
    recorder.put(5000)
    recorder.store.close()
    before, kept = sizes(path), counters(path)
    with pytest.raises(StoreError, match=r"is being read: its log of .* MiB cannot be cut; .*lsof .*vacuum again"):
        run_vacuum(path)
    assert sizes(path)[1] == before[1], "nothing was added to the log"
    assert run_check(path, False) == 0
    assert "sound; " in (told := capsys.readouterr().out)
    assert "MiB, log " in told
    reader.close()
    assert run_vacuum(path) == 0
    (now_kib,) = re.findall(r"KiB before, (\d+) KiB now", capsys.readouterr().out)
    assert int(now_kib) == sum(sizes(path)) >> 10 < sum(before) >> 10
    assert sum(sizes(path)) <= LIMIT.max_bytes
    assert counters(path) == kept
    assert check(path).log_bytes == 0


def test_status_and_metrics_tell_of_a_pinned_log() -> None:
    store = StoreStatus("/t.sqlite", 5, 0, 0, "", 4 << 20, 36 << 20, 12.0)
    snapshot = Snapshot(SNAPSHOT_VERSION, "", 1, 7, 1.0, "", LinkStatus("", 0, 0, {}, 0), store, [])
    told = "0 dropped; 4.0 MiB, log 36 MiB PINNED by a reader for 12 s: end the program"
    assert told in overview(snapshot)
    figures = dict(line.rsplit(" ", 1) for line in exposition(snapshot).decode().splitlines() if line[0] != "#")
    names = ("faser_store_file_bytes", "faser_store_log_bytes", "faser_store_pinned_seconds")
    assert [float(figures[name]) for name in names] == [4 << 20, 36 << 20, 12.0]


def test_a_running_sidecar_says_what_its_file_and_log_take(
    start_daemon: Any, make_engine: Any, config: Config, eventually: Any
) -> None:
    start_daemon()
    make_engine().hello()
    eventually(lambda: ask(config.link).store.written, "the engine is written")
    store = ask(config.link).store
    assert store.pinned_s == 0.0
    assert (store.file_bytes, store.log_bytes) == sizes(config.store.path)
    assert " MiB, log 0." in overview(ask(config.link))
