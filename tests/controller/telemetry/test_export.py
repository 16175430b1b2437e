"""Exported lines equal what was recorded."""

import csv
import json
import os
import sqlite3
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet
import pytest

from faser.controller.config import Config
from faser.controller.errors import StoreError, UsageError
from faser.controller.telemetry.export import COLUMNS, run_export
from faser.engine_adapter.protocol import RequestRow, StepRecord

from ..older_files import BEFORE_COPIES, older


@pytest.fixture
def recorded(start_daemon: Any, make_engine: Any, config: Config) -> list[StepRecord]:
    """Record three steps of four requests through a real daemon."""
    daemon = start_daemon()
    engine = make_engine()
    engine.hello()
    records = []
    for _ in range(3):
        records.append(engine.step())
        engine.action()
    daemon.stop()
    return records


def exported(config: Config, tmp_path: Path, format: str, table: str) -> list[dict[str, Any]]:
    output = tmp_path / f"{table}.{format}"
    assert run_export(config.store.path, format, table, output) == 0
    with output.open(newline="") as stream:
        return list(csv.DictReader(stream)) if format == "csv" else [json.loads(line) for line in stream]


def test_requests_are_one_line_per_request_and_step(recorded: list[StepRecord], config: Config, tmp_path: Path) -> None:
    lines = exported(config, tmp_path, "jsonl", "requests")
    expected = [row for record in recorded for row in record.rows]
    fields = RequestRow.__struct_fields__
    assert [msgspec.convert([line[name] for name in fields], RequestRow) for line in lines] == expected
    assert {line["decided_length"] for line in lines} == {3}
    assert {line["boot_id"] for line in lines} == {"boot-1"}


def test_copied_drafts_are_marked(
    start_daemon: Any, make_engine: Any, make_record: Any, config: Config, tmp_path: Path
) -> None:

    daemon = start_daemon()
    engine = make_engine()
    engine.hello(copy_max=6)
    engine.send(msgspec.structs.replace(make_record("boot-1", 1), copied=(2, 3), verified_copies=(3,)))
    engine.action()
    daemon.stop()
    lines = exported(config, tmp_path, "csv", "requests")
    marks = [(line["handle"], line["is_drafted_copied"], line["is_verified_copied"]) for line in lines]
    assert marks == [("1", "0", "0"), ("2", "1", "0"), ("3", "1", "1"), ("4", "0", "0")]


def test_a_file_from_before_there_were_copies_is_exported_without_any(
    recorded: list[StepRecord], config: Config, tmp_path: Path
) -> None:
    older(config.store.path, BEFORE_COPIES)
    lines = exported(config, tmp_path, "jsonl", "requests")
    assert {(line["is_drafted_copied"], line["is_verified_copied"]) for line in lines} == {(False, False)}
    assert {line["accepted_copies"] for line in exported(config, tmp_path, "jsonl", "steps")} == {0}


TABLES = pytest.mark.parametrize("table", ["requests", "steps", "events"])


@TABLES
def test_parquet_holds_the_same_cells_as_json_and_their_types(
    recorded: list[StepRecord], config: Config, tmp_path: Path, table: str
) -> None:
    objects = exported(config, tmp_path, "jsonl", table)
    output = tmp_path / "a.parquet"
    assert run_export(config.store.path, "parquet", table, output) == 0
    found = pyarrow.parquet.read_table(output)
    assert found.to_pylist() == objects
    assert tuple(found.column_names) == COLUMNS[table]
    kinds = {field.name: str(field.type) for field in found.schema}
    assert kinds["counter"] == "int64"
    assert kinds["time_s"] == "double"  # also where every row of a table has none
    assert kinds["boot_id"] == "string"
    if table == "requests":
        assert (kinds["is_prefill"], kinds["confidences"]) == ("bool", "list<element: double>")
        assert kinds["decided_length"] == kinds["context"] == "int64"
    if table == "steps":
        assert (kinds["decision_reason"], kinds["decision_price"], kinds["split"]) == ("string", "double", "int64")
    assert set(kinds.values()) <= {"int64", "double", "string", "bool", "list<element: double>"}


def test_a_parquet_file_of_no_lines_and_one_of_many_groups_have_the_same_columns(
    recorded: list[StepRecord], config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("faser.controller.telemetry.parquet.GROUP_ROWS", 5)
    run_export(config.store.path, "parquet", "requests", tmp_path / "many")
    whole = pyarrow.parquet.ParquetFile(tmp_path / "many")
    assert (whole.metadata.num_rows, whole.metadata.num_row_groups) == (12, 3)
    with closing(sqlite3.connect(config.store.path)) as raw:
        raw.execute("DELETE FROM steps")
        raw.commit()
    run_export(config.store.path, "parquet", "requests", tmp_path / "none")
    empty = pyarrow.parquet.read_table(tmp_path / "none")
    assert (empty.num_rows, empty.schema) == (0, whole.schema_arrow)


def test_parquet_without_its_library_or_a_file_to_write_is_one_line(
    recorded: list[StepRecord], config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="add --output FILE"):
        run_export(config.store.path, "parquet", "steps", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("faser.controller.extras.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"no pyarrow here; expected the extra parquet; pip install") as caught:
        run_export(config.store.path, "parquet", "steps", tmp_path / "a.parquet")
    assert "\n" not in str(caught.value)
    assert run_export(config.store.path, "csv", "steps", tmp_path / "a.csv") == 0, "the others need nothing"


def test_a_canarys_draws_stand_with_the_requests(
    start_daemon: Any, make_engine: Any, config: Config, tmp_path: Path
) -> None:
    daemon = start_daemon(mode=replace(config.mode, default="canary", canary_share=1.0, canary_epsilon=0.5))
    engine = make_engine()
    engine.hello()
    for _ in range(3):
        engine.step()
        engine.action()
    daemon.stop()
    lines = exported(config, tmp_path, "jsonl", "requests")
    assert {line["preferred_length"] for line in lines} == {3}
    for line in lines:
        assert line["propensity"] == pytest.approx(0.5 / 7 + 0.5 * (line["decided_length"] == 3))
    assert not [line for line in exported(config, tmp_path, "jsonl", "steps") if "decision_draws" in line]


@pytest.mark.parametrize("format", ["csv", "jsonl", "parquet"])
def test_an_export_that_fails_leaves_what_was_there_and_nothing_else(
    recorded: list[StepRecord], config: Config, tmp_path: Path, format: str
) -> None:
    with closing(sqlite3.connect(config.store.path)) as raw:  # a word where a number belongs, behind good rows
        raw.execute("UPDATE steps SET rows = x'0102' WHERE counter = 3")
        raw.commit()
    folder = tmp_path / "exports"
    folder.mkdir()
    output = folder / "requests"
    output.write_text("the one from yesterday")
    with pytest.raises(StoreError):
        run_export(config.store.path, format, "requests", output)
    assert output.read_text() == "the one from yesterday"
    assert [path.name for path in folder.iterdir()] == ["requests"]


def test_a_column_that_holds_something_else_is_named(
    recorded: list[StepRecord], config: Config, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(config.store.path)) as raw:
        raw.execute("UPDATE steps SET running = 'many' WHERE counter = 2")
        raw.commit()
    with pytest.raises(StoreError, match=r"lines 1 to 3 cannot be written as Parquet.*many") as caught:
        run_export(config.store.path, "parquet", "steps", tmp_path / "a.parquet")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a.parquet").exists()


def test_a_link_is_followed_its_rights_are_kept_and_a_pipe_is_written_to(
    recorded: list[StepRecord], config: Config, tmp_path: Path
) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.touch(0o600)
    link.symlink_to(target)
    run_export(config.store.path, "csv", "steps", link)
    assert link.is_symlink()
    assert target.read_text().startswith("boot_id,epoch,")
    assert target.stat().st_mode & 0o777 == 0o600
    run_export(config.store.path, "csv", "steps", Path(os.devnull))
    assert not Path(os.devnull).is_file()


@TABLES
def test_both_formats_hold_the_same_cells(
    recorded: list[StepRecord], config: Config, tmp_path: Path, table: str
) -> None:
    rows, objects = (exported(config, tmp_path, format, table) for format in ("csv", "jsonl"))
    assert len(rows) == len(objects) > 0
    for row, content in zip(rows, objects, strict=True):
        assert tuple(row) == tuple(content) == COLUMNS[table]
        assert row == {name: as_cell(value) for name, value in content.items()}


def as_cell(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else str(int(value) if isinstance(value, bool) else value)


def test_what_cannot_be_written_or_read_is_an_error_of_ours(
    recorded: list[StepRecord], config: Config, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match="cannot be written"):
        run_export(config.store.path, "csv", "steps", tmp_path / "no" / "folder")
    with pytest.raises(UsageError, match="expected requests, steps or events"):
        run_export(config.store.path, "xml", "steps", None)
    before = config.store.path.read_bytes()
    link = tmp_path / "link"
    link.symlink_to(config.store.path)
    with pytest.raises(UsageError, match="is the telemetry file itself"):
        run_export(config.store.path, "csv", "steps", link)
    assert config.store.path.read_bytes() == before
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(b"\0" * 10_000)
    with pytest.raises(StoreError, match=r"cannot be read|another program"):
        run_export(damaged, "csv", "steps", None)
