"""Exported lines equal what was recorded."""

import csv
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from faser.controller.config import Config
from faser.controller.errors import StoreError, UsageError
from faser.controller.export import COLUMNS, run_export
from faser.engine_adapter.protocol import RequestRow, StepRecord


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


@pytest.mark.parametrize("table", ["requests", "steps", "events"])
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
