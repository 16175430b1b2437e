"""Telemetry read back from a file the real store wrote, and the report made of it."""

import math
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from sqlite_utils import Database

from faser.controller.engine.load_summary import LoadSummary, RequestResult
from faser.controller.errors import StoreError
from faser.controller.reports.run_report import write_report
from faser.controller.telemetry.schema import open_for_reading
from faser.controller.telemetry.store import EngineEntry, RunEntry, StepEntry, Store
from faser.controller.telemetry.tables import CutSteps, TelemetrySummary
from faser.controller.telemetry.telemetry_file import TelemetryFile, read_whole
from faser.engine_adapter.protocol import ActionSet, Hello, RequestRow, Stages, StepRecord

from ..older_files import BEFORE_COPIES, older

HELLO = Hello(
    boot_id="boot", pid=1, host="h", adapter_version="0", vllm_version="0.32.0", model="/models/tiny", device="cpu",
    runner="v1", is_async=False, method="eagle3", drafter="d", k_max=4, default_length=0, default_table=[],
    max_requests=64, max_batched_tokens=2048, kv_tokens=1 << 16, graph_sizes=[], splits=[], exit_layers=[],
    tensor_parallel=1, pipeline_parallel=1, data_parallel=1, data_parallel_rank=0, lease_steps=32, lease_ms=1000,
    roster=[],
)  # fmt: skip


def row(handle: int, limit: int, drafted: int, *, emitted: int = 1) -> RequestRow:
    verified = 2 if emitted else 0
    return RequestRow(handle, 1 + verified, limit, drafted, verified, 0, max(emitted - 1, 0), emitted, 50, not emitted)


def step(counter: int, rows: list[RequestRow], *, boot_id: str = "boot", lease: int = 7) -> StepRecord:
    return StepRecord(
        boot_id=boot_id, counter=counter, step=counter, time_s=100.0 + 0.1 * counter, step_s=0.02, schedule_s=0.001,
        verify_s=0.01, sample_s=0.001, draft_s=0.005, overlap_s=0.0, adapter_s=30e-6, running=len(rows), waiting=0,
        prefill_tokens=0, decode_tokens=len(rows), draft_tokens=2, kv_usage=0.1, split=None, frontier=None,
        lease_epoch=lease, lease_sequence=counter if lease else 0, dropped=3, rejected=1, events=[], rows=rows,
    )  # fmt: skip


def write(path: Path, records: list[StepRecord]) -> Path:
    store = Store(path, RunEntry(7, 0, "0", "{}"))
    for boot_id in sorted({record.boot_id for record in records}):
        store.put(EngineEntry(msgspec.structs.replace(HELLO, boot_id=boot_id), 0))
    for record in records:
        action = ActionSet(record.boot_id, 7, record.counter, 99, 9.0, 0, [1], [2])
        is_decided = record.counter % 2 == 0
        store.put(StepEntry(record, 0, action if is_decided else None, "why", 50e-6, is_decided))
    store.close()
    return path


def figures(path: Path) -> TelemetrySummary:
    return read_whole(path).summary


@pytest.fixture
def telemetry(tmp_path: Path) -> Path:
    records = [step(n, [row(1, 2, 2, emitted=3), row(2, 2, 2)], lease=0 if n < 5 else 7) for n in range(30)]
    records += [step(n, [row(1, 4, 1), row(2, 1, 1), row(3, 0, 0, emitted=0)]) for n in range(33, 43)]
    return write(tmp_path / "telemetry.sqlite", records)


def test_what_the_drafter_did_is_read_back_and_silence_is_not_zero(tmp_path: Path) -> None:
    rows = [row(1, 2, 2, emitted=3)]
    rows[0].confidences = (0.5, 0.25, 0.125)  # one more than verified: the next token was dropped
    told = msgspec.structs.replace(step(1, rows), caught_up=40, draft_rounds=3, drawn_tokens=7)
    path = write(tmp_path / "telemetry.sqlite", [told, step(2, rows)])
    with TelemetryFile(path) as file:
        steps, first_rows = file.steps(), next(file.request_rows())
    assert steps.caught_up.tolist() == [40, 0]
    assert (steps.draft_rounds[0], steps.drawn_tokens[0]) == (3.0, 7.0)
    assert np.isnan([steps.draft_rounds[1], steps.drawn_tokens[1]]).all()
    assert first_rows == rows


def test_the_figures_of_a_file_are_what_the_records_say(telemetry: Path) -> None:
    summary = figures(telemetry)
    assert summary.steps == 40
    assert summary.decisions == summary.decisions_sent == 20
    assert summary.steps_under_lease == 35
    assert summary.lease_share_after_first_second == 1.0
    assert (summary.dropped_records, summary.gaps, summary.rejected_messages) == (3, 3, 1)
    assert (summary.verified_tokens, summary.accepted_tokens) == (30 * 4 + 10 * 4, 30 * 2)
    assert summary.acceptance_rate == pytest.approx(60 / 160)
    assert summary.draft_length_histogram == {1: 20, 2: 60}
    assert summary.mean_draft_length == pytest.approx(140 / 80)
    assert summary.mean_emitted == pytest.approx((30 * 4 + 10 * 2) / 80)
    assert summary.adapter_us_per_step.p50 == pytest.approx(30.0)
    assert summary.adapter_share == pytest.approx(30e-6 / 0.02)
    assert summary.peak_running == 3


def test_mixed_lengths_count_what_was_in_force_and_mixed_drafts_what_was_drafted(telemetry: Path) -> None:
    summary = figures(telemetry)
    assert summary.steps_with_mixed_lengths == 10  # limits 4 and 1
    assert summary.steps_with_mixed_drafts == 0  # both drafted 1; the request in its prompt does not count


def test_two_engines_do_not_make_gaps_of_each_other(tmp_path: Path) -> None:
    first = {"a": 0, "b": 100}  # b was met late
    records = [step(first[boot] + n, [row(1, 1, 1)], boot_id=boot) for n in range(10) for boot in ("a", "b")]
    telemetry = write(tmp_path / "two.sqlite", records)
    summary = figures(telemetry)
    assert (summary.steps, summary.gaps, summary.dropped_records) == (20, 0, 6)


def test_rows_and_engines_come_back_as_they_were(telemetry: Path) -> None:
    with TelemetryFile(telemetry) as file:
        assert file.engines() == [HELLO]
        assert next(file.request_rows()) == [row(1, 2, 2, emitted=3), row(2, 2, 2)]


def test_a_file_that_grows_while_it_is_read_is_seen_as_it_was(tmp_path: Path) -> None:
    path = write(tmp_path / "growing.sqlite", [step(1, [row(1, 2, 2)])])
    with TelemetryFile(path) as file:
        assert len(file.steps()) == 1
        write(path, [step(2, [row(1, 2, 2)])])
        assert file.lengths().step_index.tolist() == [0]
    assert figures(path).steps == 2


def test_a_report_opens_its_file_once_and_names_it_where_it_is_cut(
    telemetry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def counted(path: Path) -> Database:
        opened.append(path)
        return open_for_reading(path)

    monkeypatch.setattr("faser.controller.telemetry.telemetry_file.open_for_reading", counted)
    write_report(read_whole(telemetry), tmp_path / "report.html")
    assert opened == [telemetry]
    with closing(sqlite3.connect(telemetry)) as database:
        database.execute("ALTER TABLE steps DROP COLUMN rows")
    with pytest.raises(StoreError, match=r"telemetry\.sqlite cannot be read: no such column: rows; expected a whole"):
        write_report(read_whole(telemetry), tmp_path / "report.html")


@pytest.fixture
def copying(tmp_path: Path) -> Path:
    """Return a file in which the second of two requests copies every draft: its 2 tokens are accepted every time."""
    rows = [row(1, 2, 3, emitted=2), row(2, 2, 4, emitted=3)]
    records = [
        msgspec.structs.replace(step(n, rows), copied=(2,), verified_copies=(2,), drawn_tokens=5) for n in range(1, 21)
    ]
    return write(tmp_path / "copies.sqlite", records)


def test_copied_drafts_are_told_apart_from_the_drafters(copying: Path) -> None:
    summary = figures(copying)
    assert summary.acceptance_rate == pytest.approx(3 / 4)
    assert (summary.drafter.verified_tokens, summary.drafter.accepted_tokens) == (40, 20)
    assert (summary.copies.verified_tokens, summary.copies.accepted_tokens) == (40, 40)
    assert (summary.drafter.acceptance_rate, summary.copies.acceptance_rate) == (0.5, 1.0)
    assert summary.drafter.waste == pytest.approx((20 + 20 * (5 - 3)) / 100), "rejected, and drawn beside those"
    assert summary.copies.waste == 0.0


def test_the_report_has_a_row_and_a_line_for_copies_where_there_are_some(
    copying: Path, telemetry: Path, tmp_path: Path
) -> None:
    pages = []
    for path in (copying, telemetry):
        write_report(read_whole(path), tmp_path / "report.html")
        pages.append((tmp_path / "report.html").read_text())
    assert "... of copies" in pages[0]
    assert "40 of 40 tokens; 0.00 wasted per token emitted" in pages[0]
    assert "20 of 40 tokens; 0.60 wasted per token emitted" in pages[0]
    assert "beside those of the drafter and of copied ones" in pages[0]
    assert "... of copies" not in pages[1]
    assert "copied" not in pages[1]


def test_a_file_from_before_there_were_copies_has_none(telemetry: Path) -> None:
    older(telemetry, BEFORE_COPIES)
    summary = figures(telemetry)
    assert summary.copies.verified_tokens == 0
    assert summary.drafter.acceptance_rate == summary.acceptance_rate == pytest.approx(60 / 160)


def test_a_file_without_steps_has_figures_and_a_report(tmp_path: Path) -> None:
    telemetry = write(tmp_path / "empty.sqlite", [])
    summary = figures(telemetry)
    assert summary.steps == 0
    assert math.isnan(summary.acceptance_rate)
    write_report(read_whole(telemetry), tmp_path / "report.html")
    assert "no engine introduced itself" in (tmp_path / "report.html").read_text()


def test_the_report_of_a_telemetry_file_alone_has_tables_and_three_pictures(telemetry: Path, tmp_path: Path) -> None:
    write_report(read_whole(telemetry), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "37.5 %" in page  # acceptance
    assert "vLLM 0.32.0" in page
    assert "What clients saw" not in page
    assert not re.search(r'(src|href)="https?:', page)  # opens without a network


def test_the_report_tells_of_each_cut_of_a_pipeline(telemetry: Path, tmp_path: Path) -> None:
    path, hello = tmp_path / "stages.sqlite", msgspec.structs.replace(HELLO, stages=Stages(30, (15,)))
    store = Store(path, RunEntry(7, 0, "0", "{}"))
    store.put(EngineEntry(hello, 0))
    for counter in range(1, 31):
        cut, moves = ((15,), 0) if counter <= 10 else ((30,), 1)
        record = msgspec.structs.replace(
            # In flight together: each takes 0.15 s and ends 0.1 s after the one before.
            step(counter, [row(1, 2, 2, emitted=3)]),
            step_s=0.15,
            stage_bounds=cut,
            is_moving=counter in (9, 10),
            stage_moves=moves,
        )
        store.put(StepEntry(record, 0, None, "", 0.0, False))
    store.close()
    whole = read_whole(path)
    assert whole.cuts == [
        CutSteps((15, 15), 10, 2, 30, pytest.approx(1.05), 0),
        CutSteps((30, 0), 20, 0, 60, pytest.approx(2.0), 1),
    ]
    write_report(whole, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "15+15 layers" in page
    assert "28.6 tokens/s" in page
    assert "30 tokens in 10 steps, 2 of them while layers moved; 0 moves complete by the last" in page
    assert read_whole(telemetry).cuts == []
    write_report(read_whole(telemetry), tmp_path / "report.html")
    assert "Pipeline stages" not in (tmp_path / "report.html").read_text()


def test_the_report_shows_what_clients_saw_and_escapes_it(telemetry: Path, tmp_path: Path) -> None:
    good = RequestResult(0, "chat", "a", 0.0, 0.0, "finished", output_tokens=3)
    good.token_times_s, good.token_counts = [0.5, 1.0], [1, 3]
    bad = RequestResult(1, "chat", "b", 0.0, 0.0, "failed", "<script>")
    write_report(read_whole(telemetry), tmp_path / "report.html", LoadSummary.of([good, bad], 2, 0.01))
    page = (tmp_path / "report.html").read_text()
    assert "1 finished, 1 failed" in page
    assert "&lt;script&gt;" in page
    assert "<script>" not in page


def test_what_is_no_telemetry_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no telemetry file"):
        TelemetryFile(tmp_path / "none.sqlite")
    other = sqlite3.connect(tmp_path / "other.sqlite")
    other.execute("CREATE TABLE t (x)")
    other.commit()
    other.close()
    with pytest.raises(StoreError, match="another program"):
        TelemetryFile(tmp_path / "other.sqlite")


def test_an_unwritable_report_is_refused(telemetry: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be written"):
        write_report(read_whole(telemetry), tmp_path / "no folder" / "report.html")
