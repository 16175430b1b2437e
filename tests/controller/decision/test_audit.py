"""The audit stream: every decision is a line with all its fields; files turn over, and a bad path is an alarm."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from faser.controller.config import AuditConfig, Config
from faser.controller.daemon.metrics import exposition
from faser.controller.decision.audit import (
    EVENTS,
    AuditFile,
    DecisionNote,
    audit_event,
    decision_line,
    digest,
)
from faser.controller.link.ask import ask, overview
from faser.controller.snapshot import AuditStatus
from faser.engine_adapter.protocol import ActionSet, StepRecord


def note_of(record: StepRecord) -> DecisionNote:
    action = ActionSet("boot-1", 9, 5, 34, 4.0, 2, [1, 2], [3, 3], mode="canary")
    return DecisionNote(record, action, "price", "because", True, 77)


def test_every_decision_is_a_line_with_all_its_fields(
    start_daemon: Any, make_engine: Any, config: Config, tmp_path: Path
) -> None:
    path = tmp_path / "audit" / "decisions.jsonl"
    daemon = start_daemon(audit=AuditConfig(str(path)), mode=replace(config.mode, default="active"))
    engine = make_engine()
    engine.hello()
    pairs = []
    for _ in range(5):
        record = engine.step()
        pairs.append((record, engine.action()))
    daemon.stop()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 5
    for line, (record, action) in zip(lines, pairs, strict=True):
        assert set(line) == {"event", "time_ns", "boot_id", *EVENTS["decision"]}
        assert (line["inputs"], line["action"]) == (digest(record), digest(action))
        assert (line["counter"], line["sequence"]) == (record.counter, action.sequence)
        assert (line["policy"], line["mode"], line["is_sent"]) == ("fixed:3", "active", True)
        assert (line["reason"], line["lengths"]) == ("policy fixed:3", {"3": 4})
    assert path.stat().st_mode & 0o077 == 0
    assert len({line["inputs"] for line in lines}) == 5


def test_lengths_count_those_at_the_default_too(make_record: Any) -> None:
    assert json.loads(decision_line(note_of(make_record("boot-1", 1, 4))))["lengths"] == {"3": 2, "2": 2}


def test_a_full_file_is_set_aside_and_only_so_many_are_kept(make_record: Any, tmp_path: Path) -> None:
    note = note_of(make_record("boot-1", 1))
    audit = AuditFile(tmp_path / "a", 2 * len(decision_line(note)), 2, flush_s=60.0)
    for _ in range(5):
        audit._write([note, note])
    audit.close()
    assert sorted(os.listdir(tmp_path)) == ["a", "a.1", "a.2"]
    assert (audit.written, audit.dropped, audit.error) == (10, 0, "")


def test_a_file_that_cannot_be_written_is_one_alarm(
    make_record: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit = AuditFile(tmp_path, 1 << 20, 0, flush_s=60.0)  # a folder
    for _ in range(3):
        audit.put(note_of(make_record("boot-1", 1)))
        audit._write([audit._queue.popleft()])
    audit.close()
    assert (audit.written, audit.dropped) == (0, 3)
    assert [record.message.split(",")[0] for record in caplog.records] == ["ALARM the audit file is not written"]


def test_a_failing_audit_file_shows_in_the_status_and_in_the_metrics(
    start_daemon: Any, make_engine: Any, config: Config, tmp_path: Path, eventually: Any
) -> None:
    folder = tmp_path / "audit"
    folder.mkdir()  # where the file should be
    start_daemon(audit=AuditConfig(str(folder)))
    engine = make_engine()
    engine.hello()
    engine.step()
    engine.action()
    eventually(lambda: ask(config.link).audit.failures, "a write fails")
    folder.rmdir()
    for _ in range(2):
        engine.step()
        engine.action()
    eventually(lambda: ask(config.link).audit.written == 2, "it is tried again")
    snapshot = ask(config.link)
    assert (snapshot.audit.dropped, snapshot.audit.failures, snapshot.audit.error) == (1, 1, "")
    text = exposition(msgspec.structs.replace(snapshot, audit=AuditStatus("a", 4, 3, 2, "full"))).decode()
    figures = dict(line.split() for line in text.splitlines() if line.startswith("faser_audit"))
    assert figures == {
        "faser_audit_written_total": "4.0", "faser_audit_dropped_total": "3.0", "faser_audit_failures_total": "2.0",
        "faser_audit_failed": "1.0",
    }  # fmt: skip
    assert "audit a: 4 written, 3 dropped, 2 failed writes; FAILING: full" in overview(
        msgspec.structs.replace(snapshot, audit=AuditStatus("a", 4, 3, 2, "full"))
    )
    assert "\naudit " not in overview(msgspec.structs.replace(snapshot, audit=AuditStatus()))


def test_a_queue_that_is_full_drops_and_counts(
    make_record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("faser.controller.decision.audit.QUEUE", 2)
    audit = AuditFile(tmp_path / "a", 1 << 20, 0, flush_s=60.0)
    for _ in range(5):
        audit.put(note_of(make_record("boot-1", 1)))
    audit.close()
    assert (audit.written, audit.dropped, audit.failures) == (2, 3, 0)


def test_an_event_has_all_its_fields_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "faser.audit"):
        audit_event("guard", "boot-1", stance="hold")
    line = json.loads(caplog.records[0].message.removeprefix("AUDIT "))
    assert {name: line[name] for name in EVENTS["guard"]} == {
        "stance": "hold", "reason": None, "was": None, "lag_s": None,
    }  # fmt: skip
    with pytest.raises(AssertionError, match="no field"):
        audit_event("guard", nonsense=1)
