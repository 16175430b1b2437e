"""A disk that fails under a real sidecar: recording stops with an alarm, deciding goes on, a restart goes on recording.

The error is a real one for the process: a library preloaded into it answers writes or syncs of the telemetry file with
EIO, or ENOSPC, once a flag is there. Where no C compiler is, a file size limit makes SQLite's writes fail instead.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from faser.controller.config import Config
from faser.controller.errors import NotRunningError
from faser.controller.link.ask import ask
from faser.controller.snapshot import Snapshot
from faser.controller.telemetry.maintenance import run_check
from faser.engine_adapter.protocol import Release

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
WAYS = ["write", "full", "sync", "limit"] if COMPILER else ["limit"]
SOURCE = Path(__file__).with_name("failing_disk.c")


class Sidecar:
    """A sidecar process on a disk that can be made to fail; what it says goes to a file."""

    def __init__(self, config: Config, folder: Path, way: str) -> None:
        self.config, self._way, self._flag, self.log = config, way, folder / "failing", folder / "sidecar.log"
        self._file = folder / "faser.toml"
        self._file.write_text(
            f'[link]\nendpoint = "{config.link.endpoint}"\n[mode]\nstate = "{config.mode.state}"\n'
            f'[policy]\nspec = "fixed:3"\n[store]\npath = "{config.store.path}"\nflush_s = 0.02\n'
            "[guard]\nstale_ms = 600000\nenvelope_margin = 1.0\n"
        )
        self._environment = {
            **os.environ,
            "FAILING_DISK_FLAG": str(self._flag),
            "FAILING_DISK_FILE": str(config.store.path),
        }
        if COMPILER:
            library = folder / "failing_disk.so"
            subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
            self._environment["LD_PRELOAD"] = str(library)

    def start(self, *more: str) -> None:
        command = [
            sys.executable,
            "-P",
            "-c",
            "from faser.controller.cli.main import main; main()",
            "sidecar",
            "--config",
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*command, self._file, *more], env=self._environment, cwd="/", stderr=log)

    def fail(self) -> None:
        if self._way == "limit":  # writes beyond what is there end with EFBIG, which SQLite reports as an I/O error
            size = max(self.config.store.path.with_name(name).stat().st_size for name in self._names())
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        else:
            self._flag.write_text(self._way[0])

    def mend(self) -> None:
        if self._way == "limit":
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, unlimited)
        else:
            self._flag.unlink()

    def _names(self) -> tuple[str, str]:
        return self.config.store.path.name, f"{self.config.store.path.name}-wal"

    def status(self) -> Snapshot | None:
        try:
            return ask(self.config.link, timeout_s=5.0)
        except NotRunningError:
            return None

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20.0)


@pytest.fixture
def start(config: Config, tmp_path: Path) -> Iterator[Callable[[str], Sidecar]]:
    started: list[Sidecar] = []

    def begin(way: str) -> Sidecar:
        started.append(Sidecar(config, tmp_path, way))
        started[-1].start()
        return started[-1]

    yield begin
    for sidecar in started:
        sidecar.process.kill()
        sidecar.process.wait()


def recorded(path: Path) -> list[tuple[int, int]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT run, counter FROM steps ORDER BY id").fetchall()


@pytest.mark.parametrize("way", WAYS)
def test_an_io_error_stops_recording_with_an_alarm_and_never_deciding(
    start: Any, make_engine: Any, config: Config, eventually: Any, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sidecar = start(way)
    eventually(lambda: sidecar.status() is not None, "the sidecar answers", 30.0)
    engine = make_engine()
    engine.hello()

    def decided(steps: int) -> int:
        """Send steps and see that each of them is answered."""
        for _ in range(steps):
            engine.step()
            assert engine.action().default_length == 3
        return int(engine.counter)

    decided(20)
    eventually(lambda: sidecar.status().store.written >= 21, "the first steps are written")
    sidecar.fail()

    def has_stopped() -> str:
        decided(100)
        return str(sidecar.status().store.error)

    error = eventually(has_stopped, "recording stops", 120.0)
    assert ("is full" if way == "full" else "I/O error") in error
    last = decided(50)  # and it goes on deciding
    assert sidecar.status().engines[0].records == last
    assert sidecar.log.read_text().count("ALARM telemetry stops, deciding goes on") == 1
    dropped = sidecar.status().store.dropped
    assert dropped >= 50

    sidecar.mend()  # the disk is well again: it is not trusted before somebody has looked
    decided(50)
    store = sidecar.status().store
    assert (store.error, store.dropped) == (error, dropped + 50)
    assert sidecar.end() == 0
    assert "Traceback" not in sidecar.log.read_text()

    assert run_check(config.store.path, False) == 0, capsys.readouterr().out
    first = recorded(config.store.path)
    assert first == [(1, counter) for counter in range(1, len(first) + 1)], "a prefix, nothing behind a hole"
    assert store.written + store.dropped == last + 50 + 1, "every entry is written or counted as dropped"
    assert len(first) == store.written - 1

    while not isinstance(engine.receive(), Release):
        pass
    sidecar.start()
    eventually(lambda: sidecar.status() is not None, "the next life answers", 30.0)
    engine.hello()
    decided(5)
    eventually(lambda: sidecar.status().store.written >= 6, "it records")
    assert sidecar.end() == 0
    assert recorded(config.store.path) == first + [(2, last + 50 + number) for number in range(1, 6)]


@pytest.mark.skipif(COMPILER is None, reason="a disk that fails from the start needs a C compiler")
def test_a_disk_that_fails_at_the_start_is_one_line_and_a_sidecar_without_a_store_does_not_mind(
    start: Any, config: Config, eventually: Any, tmp_path: Path
) -> None:
    (tmp_path / "failing").write_text("w")
    sidecar = start("write")
    assert sidecar.process.wait(30.0) == 4
    (line,) = [line for line in sidecar.log.read_text().splitlines() if line.startswith("faser: ")]
    assert re.fullmatch(
        r"faser: \S+ cannot be written: (Input/output|disk I/O) error; expected .*; set store.path.*", line
    )
    assert "Traceback" not in sidecar.log.read_text()
    sidecar.start("--no-record")
    eventually(lambda: sidecar.status() is not None, "the sidecar answers", 30.0)
    assert sidecar.end() == 0
