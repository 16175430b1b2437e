"""Who was in time, from a file alone: the same counts as those of the sidecar that wrote it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from faser.controller.config import Config, ObjectivesConfig
from faser.controller.errors import StoreError
from faser.controller.link.ask import ask
from faser.controller.reports.run_report import write_report
from faser.controller.snapshot import AttainmentStatus
from faser.controller.telemetry.attained import attained
from faser.controller.telemetry.schema import open_for_reading
from faser.controller.telemetry.telemetry_file import read_whole
from faser.engine_adapter.protocol import RequestEvent, StepRecord

from ..older_files import older

CLASSES = ObjectivesConfig("interactive:0:300:40, batch:1::400")
BEFORE_OBJECTIVES = 6


def events_of(counter: int) -> list[RequestEvent]:
    """Return what happens in each of some records: two requests come, one is late, another leaves early."""
    return {
        1: [
            RequestEvent("arrival", 1, 0.0, 90, "r1", 0),
            RequestEvent("arrival", 2, 0.0, 90, "r2", 1),
            RequestEvent("arrival", 3, 0.0, 90, "r3", 1, ttft_ms=5.0),
        ],
        2: [RequestEvent("first_token", handle, 0.02, 1) for handle in (1, 2, 3)],
        3: [
            RequestEvent("finish", 1, 0.5, 5),
            RequestEvent("abort", 2, 0.03, 2),
            RequestEvent("finish", 3, 0.03, 2),
            RequestEvent("arrival", 4, 0.03, 90, "r4", 0),
        ],
        4: [RequestEvent("finish", 4, 0.04, 1), RequestEvent("first_token", 4, 0.04, 1)],
    }.get(counter, [])


@pytest.fixture
def recorded(
    start_daemon: Any, make_engine: Any, make_record: Callable[..., StepRecord], config: Config
) -> dict[str, AttainmentStatus]:
    """Record a few steps through a real daemon; return what it counted."""
    daemon = start_daemon(objectives=CLASSES)
    engine = make_engine()
    engine.hello()
    for counter in range(1, 6):
        engine.send(msgspec.structs.replace(make_record("boot-1", counter), events=events_of(counter)))
        engine.action()
    [shown] = ask(config.link).engines
    daemon.stop()
    return shown.attainment


def test_a_file_gives_what_the_sidecar_counted(recorded: dict[str, AttainmentStatus], config: Config) -> None:
    expected = {"interactive": AttainmentStatus(2, 1), "batch": AttainmentStatus(), "own": AttainmentStatus(1, 0)}
    assert recorded == expected
    with closing(open_for_reading(config.store.path)) as database:
        assert attained(database) == expected
        told = "SELECT handle, ttft_ms, tpot_ms FROM request_summary ORDER BY handle"
        assert database.execute(told).fetchall()[2] == (3, 5.0, None)


def test_the_report_shows_it(recorded: dict[str, AttainmentStatus], config: Config, tmp_path: Path) -> None:
    write_report(read_whole(config.store.path), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "1 of 2 finished requests in time" in text
    assert "interactive" in text


def test_a_report_of_nobody_with_objectives_says_nothing_of_them(
    start_daemon: Any, make_engine: Any, config: Config, tmp_path: Path
) -> None:
    daemon, engine = start_daemon(), make_engine()
    engine.hello()
    engine.step()
    engine.action()
    daemon.stop()
    write_report(read_whole(config.store.path), tmp_path / "report.html")
    assert "Objectives" not in (tmp_path / "report.html").read_text()


def test_of_an_older_file_nobody_spoke_for_itself(recorded: dict[str, AttainmentStatus], config: Config) -> None:
    older(config.store.path, BEFORE_OBJECTIVES)
    with closing(open_for_reading(config.store.path)) as database:
        assert attained(database)["batch"] == AttainmentStatus(1, 1)  # what the request itself said is not there
        assert database.execute("SELECT count(ttft_ms) FROM request_summary").fetchone() == (0,)


def test_a_reload_changes_the_classes_for_who_arrives_behind_it(
    recorded: dict[str, AttainmentStatus], config: Config
) -> None:
    changed = Config(objectives=ObjectivesConfig("slow:0:9000:"))
    text = msgspec.json.encode(changed, enc_hook=str).decode()
    with closing(sqlite3.connect(config.store.path)) as raw:
        [(since,)] = raw.execute("SELECT received_ns FROM events WHERE handle = 4 AND kind = 'arrival'").fetchall()
        columns = "run, received_ns, kind, detail"
        raw.execute(f"INSERT INTO events ({columns}) VALUES (1, ?, 'reload', ?)", [since, text])
        raw.commit()
    with closing(open_for_reading(config.store.path)) as database:
        found = attained(database)
    assert (found["interactive"], found["slow"]) == (AttainmentStatus(1, 0), AttainmentStatus(1, 1))


@pytest.mark.parametrize("text", ["", "[]", '{"objectives": {"classes": "a:0::"}}'])
def test_a_configuration_that_no_sidecar_wrote_is_one_line(
    recorded: dict[str, AttainmentStatus], config: Config, text: str
) -> None:
    with closing(sqlite3.connect(config.store.path)) as raw:
        raw.execute("UPDATE runs SET config = ?", [text])
        raw.commit()
    with (
        closing(open_for_reading(config.store.path)) as database,
        pytest.raises(StoreError, match="configuration cannot be read"),
    ):
        attained(database)
