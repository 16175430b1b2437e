"""The table of live requests: rows of any size are read, and requests keep what is theirs while others come and go."""

from __future__ import annotations

import numpy as np
import pytest

from faser.engine_adapter.protocol import RequestEvent, RequestRow
from faser.env.estimate.acceptance import count_trials
from faser.env.estimate.requests import COLUMNS, RequestTable
from faser.env.estimate.requests_kernel import find
from faser.env.estimate.step_rows import StepRows

K_MAX = 3


def row(handle: int, *, verified: int = 0, accepted: int = 0, context: int = 50) -> RequestRow:
    return RequestRow(handle, 1 + verified, 3, 3, verified, 0, accepted, accepted + 1, context, False)


def step(table: RequestTable, record: int, rows: list[RequestRow]) -> StepRows:
    told = StepRows.of(rows)
    table.update(told, *count_trials(told.verified, told.pruned, told.accepted, K_MAX), record)
    return told


def test_requests_keep_what_is_theirs_while_others_leave_and_the_table_grows() -> None:
    table, random = RequestTable(K_MAX), np.random.default_rng(0)
    alive: list[int] = []
    expected: dict[int, tuple[int, float, int]] = {}
    for record in range(1, 60):
        new = range(1000 * record, 1000 * record + int(random.integers(0, 12)))
        table.apply([RequestEvent("arrival", one, one + 0.5, 9, "", 3) for one in new], record)
        alive += new
        random.shuffle(alive)
        batch = alive[: 3 * len(alive) // 4]
        step(table, record, [row(one, verified=2, accepted=1, context=one + record) for one in batch])
        expected |= {one: (one + record, one + 0.5, record) for one in batch}
        gone = [one for one in alive if random.random() < 0.05]
        table.depart([RequestEvent("finish", one, 0.0, 9) for one in [*gone, 77]])
        alive = [one for one in alive if one not in gone]
    handles = table.column("handle").tolist()
    assert sorted(handles) == sorted(alive)
    assert handles == sorted(handles)  # in order of first appearance
    assert len(alive) > 64
    columns = zip(*(table.column(name).tolist() for name in ("context", "arrival_s", "seen")), strict=True)
    seen = {handle: values for handle, values in zip(handles, columns, strict=True) if handle in expected}
    assert seen == {handle: expected[handle] for handle in seen}
    assert table.trials[:, 0].tolist() == pytest.approx(table.trials[:, 1].tolist())
    assert (table.successes[:, 0] > 0.0).tolist() == [handle in expected for handle in handles]
    assert not table.successes[:, 1:].any()


def test_who_comes_after_another_left_begins_with_nothing() -> None:
    table = RequestTable(K_MAX)
    table.apply([RequestEvent("arrival", 1, 5.0, 9, "", 3, 2)], 1)
    step(table, 1, [row(1, verified=2, accepted=2)])
    table.depart([RequestEvent("abort", 1, 6.0, 9)])
    told = step(table, 2, [row(2)])
    assert told.handle.tolist() == table.column("handle").tolist() == [2]
    assert not table.trials.any()
    assert table.column("arrival_s").tolist() == [0.0]
    assert table.column("priority").tolist() == [0]


def test_a_row_that_comes_after_its_request_ended_begins_a_new_one() -> None:
    table = RequestTable(K_MAX)
    step(table, 1, [row(1, verified=2, accepted=2)])
    table.depart([RequestEvent("finish", 1, 6.0, 9)])
    step(table, 2, [row(1)])
    assert table.column("born").tolist() == [2]
    assert not table.trials.any()


def test_who_is_in_the_batch_is_asked_anew_when_somebody_comes_leaves_or_is_preempted() -> None:
    table = RequestTable(K_MAX)
    step(table, 1, [row(1), row(2), row(3)])
    assert table.running(1).tolist() == [True] * 3
    table.apply([RequestEvent("preempt", 2, 0.0, 9), RequestEvent("preempt", 7, 0.0, 9)], 1)
    assert table.running(1).tolist() == [True, False, True]
    table.apply([RequestEvent("arrival", 4, 0.0, 9)], 1)
    assert table.running(1).tolist() == table.decoding(1).tolist() == [True, False, True, False]
    table.depart([RequestEvent("finish", 1, 0.0, 9)])
    assert table.running(1).tolist() == [False, True, False]
    assert table.running(1000).tolist() == [False] * 3
    step(table, 1001, [RequestRow(4, 5, 0, 0, 0, 0, 0, 0, 5, True)])
    assert table.running(1001).tolist() == [False, False, True]
    assert not table.decoding(1001).any()


def test_a_request_is_found_wherever_one_begins_to_look() -> None:
    table = np.zeros((len(COLUMNS), 8), np.int64)
    table[COLUMNS["handle"], :5] = [9, 8, 7, 6, 5]
    for start in range(8):
        assert [find(table, 5, handle, start) for handle in (9, 7, 5, 0, 4)] == [0, 2, 4, -1, -1]
