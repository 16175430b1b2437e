"""Another tool's forward-pass metrics: a frozen schema, words for what they cannot tell, damage named by row.

forward_passes.jsonl was written by hand after the record of NVIDIA Dynamo's `dynamo.fpm.trace.v1` and its
ForwardPassMetrics, version 1. It must stay readable as it is.
"""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.controller.cli.replay import ReplayOptions, run_replay
from faser.controller.errors import StoreError, UsageError
from faser.controller.replay.forward_pass_metrics import (
    ForwardPass,
    QueuedRequests,
    ScheduledRequests,
    is_forward_pass_metrics,
    read_forward_passes,
)
from faser.controller.replay.forward_pass_replay import CANNOT, replay_passes
from faser.env.estimate.engine_state import EngineState
from faser.env.spaces import Action
from faser.models.policies.policy import PolicyError

SAMPLE = Path(__file__).with_name("forward_passes.jsonl")
ZIPPED = gzip.compress(SAMPLE.read_bytes(), mtime=0)  # no time within: two workers must name the cases alike
QUEUED = {
    "num_prefill_requests": int, "sum_prefill_tokens": int, "var_prefill_length": float, "num_decode_requests": int,
    "sum_decode_kv_tokens": int, "var_decode_kv_tokens": float,
}  # fmt: skip
SCHEDULED = {
    "num_prefill_requests": int, "sum_prefill_tokens": int, "var_prefill_length": float, "sum_prefill_kv_tokens": int,
    "num_decode_requests": int, "sum_decode_kv_tokens": int, "var_decode_kv_tokens": float,
}  # fmt: skip
PASS = {
    "version": int, "worker_id": str, "dp_rank": int, "counter_id": int, "wall_time": float,
    "scheduled_requests": dict, "queued_requests": dict,
}  # fmt: skip


def rows() -> list[dict[str, Any]]:
    return [json.loads(row) for row in SAMPLE.read_text().splitlines()]


def test_every_field_of_the_frozen_schema_is_read_with_its_type_and_value() -> None:
    for struct, fields in ((ForwardPass, PASS), (ScheduledRequests, SCHEDULED), (QueuedRequests, QUEUED)):
        assert set(struct.__struct_fields__) == set(fields)
    found = read_forward_passes(SAMPLE)
    sent = [row["event"]["fpm"] for row in rows() if row["event"]["fpm"]["version"] == 1]
    for one, original in zip(found.passes, sent, strict=True):
        assert msgspec.to_builtins(one) == original
        for fields, content in ((PASS, original), (SCHEDULED, original["scheduled_requests"]),
                                (QUEUED, original["queued_requests"])):  # fmt: skip
            assert {name: type(value) for name, value in content.items()} == fields
    assert found.observed_s[0] == 1782777601.25
    assert (found.other_versions, found.is_sampled) == (1, False)


def test_the_sample_is_summed_up_as_its_rows_say() -> None:
    found = replay_passes(read_forward_passes(SAMPLE))
    assert (found.passes, found.idle, found.with_prompts, found.workers) == (11, 1, 2, 2)
    assert (found.lost, found.disordered, found.other_versions) == (2, 0, 1)  # 45 and 46
    assert found.busy_s == pytest.approx(0.1409)
    assert found.span_s == pytest.approx(0.130)
    assert (found.peak_requests, found.peak_queued) == (6, 1)
    assert [(load.first, load.last, load.passes) for load in found.loads] == [(1, 1, 4), (2, 3, 1), (4, 7, 3)]
    assert found.loads[2].median_ms == pytest.approx(12.1)
    assert found.loads[2].mean_context == pytest.approx((2310 + 2316 + 1990) / 17)
    assert (found.lengths, found.asked) == ({}, [])


def test_a_policy_by_batch_size_answers_as_it_would() -> None:
    found = replay_passes(read_forward_passes(SAMPLE), "table:1-1=4,2-5=2,6-=1")
    assert [load.asked for load in found.loads] == [4.0, 2.0, pytest.approx((6 + 6 + 5 * 2) / 17)]
    # with prompts: five requests of which three decode, then six of which five do
    assert found.asked == [2, 1, 1, 1, 4, 4, 2, 2, 4, 4]
    assert found.lengths == {1: 5 + 6 + 6, 2: 3 + 5 + 2, 4: 4}
    with pytest.raises(PolicyError):
        replay_passes(read_forward_passes(SAMPLE), "nonsense")


def test_a_policy_sees_the_requests_that_decode_in_each_pass_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int, float]] = []

    class Spy:
        name = "spy"

        def act(self, state: EngineState) -> Action:
            contexts = state.requests.column("context")[state.decoding()]
            seen.append((len(contexts), int(contexts.sum()), state.load.waiting, state.time_s))
            return Action(np.zeros(state.requests.size, np.int64), 0)

    monkeypatch.setattr("faser.controller.replay.forward_pass_replay.make_policy", lambda spec, capabilities: Spy())
    replay_passes(read_forward_passes(SAMPLE), "spy")
    assert [row[:3] for row in seen] == [
        (3, 1023, 1), (5, 1540, 0), (6, 2310, 0), (6, 2316, 0), (1, 300, 0), (1, 301, 0), (5, 1990, 0), (2, 900, 1),
        (1, 302, 0), (1, 470, 0),
    ]  # fmt: skip
    assert seen[0][3] == 0.025
    assert seen[4][3] == 0.0093, "each rank has a clock of its own"


@pytest.mark.parametrize("policy", ["price", "price:history", "goodput", "ema"])
def test_a_policy_that_learns_is_asked_and_stays_within_the_drafter(policy: str) -> None:
    found = replay_passes(read_forward_passes(SAMPLE), policy)
    assert len(found.asked) == 10
    assert set(found.lengths) <= set(range(9))


def gzipped(path: Path) -> None:
    path.write_bytes(ZIPPED)


def bare(path: Path) -> None:
    path.write_text("".join(json.dumps(row["event"]["fpm"]) + "\n\n" for row in rows()))


@pytest.mark.parametrize("write", [gzipped, bare])
def test_gzip_and_bare_records_tell_the_same(write: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "passes"
    write(path)
    assert is_forward_pass_metrics(path)
    found, expected = (replay_passes(read_forward_passes(source), "fixed:2") for source in (path, SAMPLE))
    if write is bare:
        assert found.span_s is None
        found.span_s = expected.span_s
    assert found == expected


def test_a_stream_is_read_from_stdin(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-P",
        "-c",
        "from faser.controller.cli.main import main; main()",
        "replay",
        "-",
        "--json",
    ]
    result = subprocess.run(command, input=SAMPLE.read_bytes(), capture_output=True, check=True, cwd=tmp_path)
    found = json.loads(result.stdout)
    assert (found["passes"], found["lost"]) == (11, 2)
    assert found["cannot"] == list(CANNOT)


def test_what_cannot_be_answered_is_printed_and_stands_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "passes.html"
    assert run_replay(ReplayOptions(SAMPLE, "price", report=page)) == 0
    printed, html = capsys.readouterr().out, page.read_text()
    assert "degraded input" in printed
    for text in CANNOT:
        assert text in printed
        assert text.replace("'", "&#39;") in html
    for subject in ("decision replay", "draft lengths per request", "acceptance", "off-policy", "counterfactual"):
        assert any(text.startswith(subject) for text in CANNOT), subject
    assert "one that learns from acceptance has only its prior" in " ".join(printed.split())
    assert html.count("<svg") == 1
    with pytest.raises(UsageError, match="neither arrivals nor the length of answers"):
        run_replay(ReplayOptions(SAMPLE, "price", is_counterfactual=True))


def test_a_sampled_capture_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sampled.jsonl"
    path.write_text(SAMPLE.read_text().replace('"capture_mode":"full"', '"capture_mode":"sampled"'))
    run_replay(ReplayOptions(path))
    assert "sampled, so most passes are missing" in capsys.readouterr().out


def damaged(number: int, **changes: object) -> bytes:
    """Return the sample with one record changed; None takes a field away."""
    content = rows()
    record = content[number - 1]["event"]["fpm"]
    record.update(changes)
    content[number - 1]["event"]["fpm"] = {name: value for name, value in record.items() if value is not None}
    return "".join(json.dumps(row) + "\n" for row in content).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (SAMPLE.read_bytes()[:-40], r"row 12: .*truncated"),
        (damaged(3, wall_time=-1.0), r"row 3: .*wall_time"),
        (damaged(4, wall_time="soon"), r"row 4: .*wall_time"),
        (damaged(5, scheduled_requests=None), r"row 5: .*scheduled_requests"),
        (damaged(6, scheduled_requests={"num_decode_requests": 10**9}), r"row 6: .*num_decode_requests"),
        (damaged(7, worker_id=None), r"row 7: .*worker_id"),
        (damaged(8, version="one"), r"row 8: .*version"),
        (damaged(2).replace(b'"wall_time": 0.031', b'"wall_time": NaN'), r"row 2: "),
        (damaged(1).replace(b"trace.v1", b"trace.v9", 1), r"row 1: schema 'dynamo.fpm.trace.v9'"),
        (b'{"a": 1}\n', r"row 1: .*version"),
        (b"{\n[1, 2]\n", r"row 1: "),
        (SAMPLE.read_bytes() + b"[]\n", r"row 13: "),
        (SAMPLE.read_bytes() + b"\xff\xfe\n", r"row 13: "),
        (SAMPLE.read_bytes() + b'{"x": "' + b"x" * (1 << 21) + b'"}\n', r"row 13: longer than"),
        (ZIPPED[:-20], r"row \d+: the gzip stream is damaged"),
        (ZIPPED[:40] + b"\0" * 40, r"row \d+: the gzip stream is damaged"),
        (b'{"version": 7}\n', r"holds 1 rows of other versions; expected forward-pass metrics of version 1"),
    ],
)
def test_bad_input_is_one_line_that_names_file_and_row(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "passes.jsonl"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=message) as caught:
        run_replay(ReplayOptions(path))
    assert "passes.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


HOSTILE = st.one_of(
    st.integers(-(1 << 70), 1 << 70), st.floats(), st.none(), st.text(max_size=5), st.lists(st.integers(), max_size=3)
)


@given(
    counts=st.fixed_dictionaries({name: HOSTILE | st.integers(0, 1 << 17) for name in SCHEDULED}),
    wall_time=HOSTILE | st.floats(0.0, 10.0),
    cut=st.integers(0, 400),
)
@settings(max_examples=100, deadline=None)
def test_hostile_rows_are_refused_in_our_own_words_or_summed_up(
    counts: dict[str, Any], wall_time: Any, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    record = {"version": 1, "worker_id": "w", "counter_id": 1, "wall_time": wall_time, "scheduled_requests": counts}
    path = tmp_path_factory.getbasetemp() / "hostile.jsonl"
    row = json.dumps(record).encode()
    path.write_bytes(row + b"\n" + row[: len(row) - cut])
    try:
        found = replay_passes(read_forward_passes(path), "price")
    except StoreError:  # anything else fails the test
        return
    assert found.passes in (1, 2)
    assert all(0 <= asked <= 8 for asked in found.asked)


@pytest.mark.parametrize("policy", ["price", "goodput"])
def test_the_largest_numbers_of_the_schema_are_no_trouble(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    counts = {name: 1 << 48 if name.startswith("sum") else 1e18 for name in SCHEDULED}
    for requests in (1, 1 << 16):
        counts["num_prefill_requests"] = counts["num_decode_requests"] = requests
        record = {"version": 1, "worker_id": "w", "counter_id": 1 << 48, "wall_time": 1e6, "scheduled_requests": counts}
        path.write_text(f"{json.dumps(record)}\n" * 3)
        found = replay_passes(read_forward_passes(path), policy)
        assert found.peak_requests == 2 * requests
        assert all(0 <= asked <= 8 for asked in found.asked)


def test_telemetry_and_foreign_files_are_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "telemetry.sqlite"
    for content in (b"SQLite format 3\0", b"", b"text"):
        path.write_bytes(content)
        assert not is_forward_pass_metrics(path)
        with pytest.raises(StoreError):
            run_replay(ReplayOptions(path))
    with pytest.raises(StoreError, match="no telemetry file"):
        run_replay(ReplayOptions(tmp_path / "absent"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(StoreError, match="stdin holds no row"):
        run_replay(ReplayOptions(Path("-")))
