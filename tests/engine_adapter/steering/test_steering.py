"""The adapter between two steps: latched lengths, records and the cost of being ignored. No vLLM needed."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from faser.engine_adapter import protocol as wire
from faser.engine_adapter.link.engine_link import (
    CUT_OFF,
    HIGH_WATER_MARK,
    MAX_INCOMING_BYTES,
    TRIES_AGAIN_S,
    EngineLink,
)
from faser.engine_adapter.link.quiet_moment import QuietMoments
from faser.engine_adapter.steering.extra_args import CLIENT_LIMIT
from faser.engine_adapter.steering.lease import Lease
from faser.engine_adapter.steering.orders import StepReport
from faser.engine_adapter.steering.sampled_tokens import SampledTokens
from faser.engine_adapter.steering.steering import (
    LONG_STEP_S,
    REST_S,
    BatchOutcome,
    Default,
    Steering,
)


@dataclass
class Request:
    num_output_tokens: int = 0
    num_computed_tokens: int = 10
    max_tokens: int = 1000
    priority: int = 0
    is_prefill_chunk: bool = False
    num_prompt_tokens: int = 10
    num_output_placeholders: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


class MemoryLink:
    """Both directions as lists, so that a test decides what has arrived."""

    def __init__(self) -> None:
        self.sent: list[wire.FromEngine] = []
        self.arrived: list[wire.FromController] = []
        self.dropped = 0
        self.refused: Counter[str] = Counter()
        self.rests: list[float] = []

    def send(self, message: wire.FromEngine) -> None:
        self.sent.append(message)

    def send_later(self, make: Callable[[], wire.StepRecord], rest_s: float = 0.0) -> None:
        self.rests.append(rest_s)
        self.send(make())

    def receive(self) -> list[wire.FromController]:
        messages, self.arrived = self.arrived, []
        return messages

    def close(self, wait_s: float = 0.0) -> None:
        self.arrived = []


def hello(boot_id: str = "boot") -> wire.Hello:
    return wire.Hello(
        boot_id=boot_id, pid=1, host="h", adapter_version="0", vllm_version="0.32.0", model="m", device="cpu",
        runner="v1", is_async=False, method="ngram", drafter="", k_max=6, default_length=0, default_table=[],
        max_requests=8, max_batched_tokens=64, kv_tokens=1024, graph_sizes=[], splits=["unsplit"], exit_layers=[],
        tensor_parallel=1, pipeline_parallel=1, data_parallel=1, data_parallel_rank=0, lease_steps=32, lease_ms=1000,
        roster=[],
    )  # fmt: skip


def steering(default: Default | None = None) -> tuple[Steering, MemoryLink]:
    link = MemoryLink()
    return Steering(hello(), link, Lease("boot", 6, 32, 1.0), default or Default(0)), link


def act(lengths: dict[int, int], default_length: int = 0, sequence: int = 1) -> wire.ActionSet:
    now_s = time.monotonic()
    return wire.ActionSet(
        "boot", 1, sequence, 1000, now_s + 60, default_length, list(lengths), list(lengths.values())
    )  # fmt: skip


def outcome(scheduled: dict[str, int], drafts: dict[str, list[int]], sampled: list[list[int]]) -> BatchOutcome:
    """Return what a step did in which vLLM handed out all that the target emitted."""
    rows = {request_id: row for row, request_id in enumerate(scheduled)}
    report = StepReport(verify_s=0.01, drafted=[2] * len(scheduled))
    delivered = {name: len(tokens) for name, tokens in zip(scheduled, sampled, strict=False) if tokens}
    tokens = SampledTokens.of(sampled, is_pruned=True)
    return BatchOutcome(scheduled, drafts, rows, tokens, delivered, len(scheduled), 0, 0.5, report)


def test_without_a_lease_every_request_gets_the_default() -> None:
    adapter, _ = steering(Default(2))
    adapter.arrive("a", Request())
    assert adapter.order({"a": 1}, 0.0).lengths == {"a": 2}


def test_without_a_lease_the_operators_table_holds() -> None:
    adapter, _ = steering(Default(5, lookup=[0, 4, 1, 0]))
    for name in "abc":
        adapter.arrive(name, Request())
    assert adapter.order({"a": 1}, 0.0).lengths == {"a": 4}
    assert adapter.order({"a": 1, "b": 1}, 0.0).lengths == {"a": 1, "b": 1}
    assert adapter.order({"a": 1, "b": 1, "c": 1}, 0.0).lengths == {"a": 0, "b": 0, "c": 0}


def test_a_lease_gives_each_request_its_own_length() -> None:
    adapter, link = steering()
    for name in "abc":
        adapter.arrive(name, Request())
    link.arrived = [act({1: 3, 2: 0}, default_length=1)]
    order = adapter.order({"a": 1, "b": 1, "c": 1}, 0.0)
    assert order.lengths == {"a": 3, "b": 0, "c": 1}
    assert (order.lease_epoch, order.lease_sequence) == (1, 1)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_lease_orders_its_stop_rule_where_the_scheduler_waits_for_the_drafts(is_async: bool) -> None:
    adapter, link = steering()
    adapter.hello = msgspec.structs.replace(adapter.hello, is_async=is_async)
    adapter.arrive("a", Request())
    assert adapter.order({"a": 1}, 0.0).stop is None
    link.arrived = [msgspec.structs.replace(act({1: 3}), stop=wire.StopRule([1.0], [0.0], [0.1], [0.2]))]
    expected = None if is_async else wire.StopRule([1.0] * 6, [0.0] * 6, [0.1] * 6, [0.2] * 6)
    assert adapter.order({"a": 1}, 0.0).stop == expected


@pytest.mark.parametrize(
    ("offered", "default", "leased", "ordered"),
    [(6, 2, None, 2), (6, 0, 4, 4), (6, 2, 0, 0), (6, 2, 64, 6), (0, 2, 4, 0), (4, 9, None, 4)],
)
def test_a_frontier_is_the_leases_else_the_settings_and_never_more_than_hello_offers(
    offered: int, default: int, leased: int | None, ordered: int
) -> None:
    adapter, link = steering(Default(3, frontier=default))
    adapter.hello = msgspec.structs.replace(adapter.hello, frontier=offered)
    adapter.arrive("a", Request())
    link.arrived = [msgspec.structs.replace(act({}, default_length=3), frontier=leased)]
    order = adapter.order({"a": 1}, 0.0)
    assert order.frontier == ordered
    done = outcome({"a": 1}, {}, [[5]])
    assert done.report is not None
    done.report.frontier, done.report.frontier_hits, done.report.frontier_misses = order.frontier, 2, 1
    adapter.record(order, done)
    record = link.sent[-1]
    assert isinstance(record, wire.StepRecord)
    assert (record.frontier, record.frontier_hits, record.frontier_misses) == (ordered or None, 2, 1)


def test_confidences_go_with_the_tokens_they_belong_to() -> None:
    adapter, link = steering(Default(3))
    for name in "abc":
        adapter.arrive(name, Request())
    scheduled = {"a": 1, "b": 1, "c": 1}
    done = outcome(scheduled, {}, [[1], [1], [1]])
    assert done.report is not None
    done.report.drafted, done.report.confidences = [3, 1, 2], [(0.9, 0.8, 0.7), (0.6, 0.1), (0.5, 0.4)]
    done.report.caught_up, done.report.rounds = 40, (3, 3, 1)
    adapter.record(adapter.order(scheduled, 0.0), done)
    adapter.preempt("c")  # its drafts are gone
    # The grammar cut a's draft to two; b lost its second token to a stop rule and waits for a step; c starts over.
    later = outcome({"a": 3, "c": 9}, {"a": [5, 6]}, [[5, 7], [8]])
    assert later.report is not None
    later.report.confidences = [(), (0.3,)]
    adapter.record(adapter.order({"a": 3, "c": 9}, 0.0), later)
    last = outcome({"a": 1, "b": 2, "c": 2}, {"b": [4], "c": [3]}, [[1], [4, 5], [3, 3]])
    adapter.record(adapter.order({"a": 1, "b": 2, "c": 2}, 0.0), last)
    records = [sent for sent in link.sent if isinstance(sent, wire.StepRecord)]
    assert [(sent.caught_up, sent.draft_rounds, sent.drawn_tokens) for sent in records] == [
        (40, 3, 7), (0, None, None), (0, None, None),
    ]  # fmt: skip
    seen = [{row.handle: row.confidences for row in sent.rows} for sent in records]
    assert seen == [{1: (), 2: (), 3: ()}, {1: (0.9, 0.8, 0.7), 3: ()}, {1: (), 2: (0.6, 0.1), 3: (0.3,)}]


def test_confidences_of_drafts_that_came_between_two_steps_of_a_request() -> None:
    adapter, link = steering(Default(3))
    for name in "ab":
        adapter.arrive(name, Request())
    adapter.record(adapter.order({"a": 1}, 0.0), outcome({"a": 1}, {}, [[1]]))
    between = outcome({"b": 1}, {}, [[1]])
    assert between.report is not None
    between.report.deferred = {"a": (0.9, 0.8), "gone": (0.1,)}
    adapter.record(adapter.order({"b": 1}, 0.0), between)
    adapter.record(adapter.order({"a": 2}, 0.0), outcome({"a": 2}, {"a": [5]}, [[5, 6]]))
    records = [sent for sent in link.sent if isinstance(sent, wire.StepRecord)]
    assert [row.confidences for sent in records for row in sent.rows] == [(), (), (0.9, 0.8)]


def test_a_lease_that_arrives_after_the_latch_waits_for_the_next_step() -> None:
    adapter, link = steering()
    adapter.arrive("a", Request())
    link.arrived = [act({1: 4})]
    order = adapter.order({"a": 1}, 0.0)
    link.arrived = [act({1: 1}, sequence=2)]
    adapter.record(order, outcome({"a": 1}, {}, [[5]]))
    assert order.lengths == {"a": 4}
    assert adapter.order({"a": 1}, 0.0).lengths == {"a": 1}


@pytest.mark.parametrize(("step_ends_s", "length"), [(1.6, 4), (0.2, 0)])
def test_a_step_may_outlast_a_lease_but_a_pause_ends_it(
    step_ends_s: float, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("faser.engine_adapter.steering.steering.time", clock)
    adapter, link = steering()
    now_s = 0.0
    adapter.arrive("a", Request())
    order = adapter.order({"a": 1}, 0.0)
    now_s = step_ends_s
    adapter.record(order, outcome({"a": 1}, {}, [[5]]))
    now_s = 1.6
    link.arrived = [wire.ActionSet("boot", 1, 1, 1000, 0.5, 4, [], [])]  # valid until 0.5 s
    assert adapter.order({"a": 1}, 0.0).lengths == {"a": length}
    assert adapter.order({"a": 1}, 0.0).lengths == {"a": 0}


@pytest.mark.parametrize(("left", "length"), [(1, 0), (2, 0), (3, 1), (5, 3), (100, 6)])
def test_nothing_is_drafted_that_max_tokens_would_cut_off(left: int, length: int) -> None:
    adapter, link = steering()
    adapter.arrive("a", Request(num_output_tokens=10, max_tokens=10 + left))
    link.arrived = [act({1: 6})]
    assert adapter.order({"a": 1}, 0.0).lengths == {"a": length}


def test_a_step_in_flight_emits_a_token_too() -> None:
    adapter, link = steering()
    adapter.arrive("a", Request(num_output_tokens=10, max_tokens=15, num_output_placeholders=3))
    link.arrived = [act({1: 6})]
    assert adapter.order({"a": 4}, 0.0).lengths == {"a": 2}  # of five: one in flight, one now, one behind the drafts


def test_a_preempted_request_that_is_read_again_drafts_nothing() -> None:
    adapter, link = steering()
    request = Request(num_prompt_tokens=100, num_output_tokens=20, num_computed_tokens=0)
    adapter.arrive("a", request)
    adapter.preempt("a")
    link.arrived = [act({1: 6})]
    assert adapter.order({"a": 64}, 0.0).lengths == {"a": 0}
    request.num_computed_tokens = 64
    assert adapter.order({"a": 56}, 0.0).lengths == {"a": 6}


ADMISSION = wire.Admission([1, 8, 64], [0.01, 0.01, 0.05], [1.0, 3.0])


def adaptive_steering() -> tuple[Steering, MemoryLink]:
    link = MemoryLink()
    adaptive = msgspec.structs.replace(hello(), is_adaptive=True)
    return Steering(adaptive, link, Lease("boot", 6, 32, 1.0), Default(0)), link


def test_adaptive_verification_is_told_costs_and_weights_of_mean_one() -> None:
    adapter, link = adaptive_steering()
    for name in "abc":
        adapter.arrive(name, Request())
    link.arrived = [asked := act({1: 4, 2: 4})]
    asked.admission = ADMISSION
    order = adapter.order({"a": 5, "b": 5, "c": 1}, 0.0)
    assert order.costs == ([1, 8, 64], [0.01, 0.01, 0.05])
    assert order.weights == pytest.approx({"a": 0.6, "b": 1.8, "c": 0.6})
    assert adapter.order({}, 0.0).weights == {}  # a step without tokens


def test_an_engine_without_adaptive_verification_is_told_nothing_of_it() -> None:
    adapter, link = steering()
    for name in "ab":
        adapter.arrive(name, Request())
    link.arrived = [asked := act({1: 4, 2: 4})]
    asked.admission = ADMISSION
    assert adapter.order({"a": 5, "b": 5}, 0.0).lengths == {"a": 4, "b": 4}
    assert asked.admission is ADMISSION  # the lease lets it pass
    assert adapter.order({"a": 5, "b": 5}, 0.0).costs is None


def test_a_record_says_what_adaptive_verification_verified() -> None:
    adapter, link = adaptive_steering()
    adapter.arrive("a", Request(num_output_tokens=3))
    adapter.arrive("b", Request(num_output_tokens=3))
    order = adapter.order({"a": 5, "b": 5}, time.monotonic())
    done = outcome({"a": 5, "b": 5}, {"a": [1, 2, 3, 4], "b": [5, 6, 7, 8]}, [[1, 2, 9], [7]])
    done.report = StepReport(drafted=[4, 4], admitted=[2, 0], late_confidences={"a": (0.9, 0.8, 0.5, 0.4)})
    done.counted = 8, 2  # vLLM counts what it had scheduled
    adapter.record(order, done)
    (record,) = [message for message in link.sent if isinstance(message, wire.StepRecord)]
    assert [(row.scheduled, row.verified, row.accepted) for row in record.rows] == [(3, 2, 2), (1, 0, 0)]
    assert [row.confidences for row in record.rows] == [(0.9, 0.8, 0.5, 0.4), ()]
    assert (record.draft_tokens, record.miscounted) == (2, 0)


@pytest.mark.parametrize(("admitted", "verified"), [(4, 1), (2, 1), (1, 1), (0, 0)])
def test_what_a_grammar_forbids_of_a_draft_lies_behind_what_is_admitted(admitted: int, verified: int) -> None:
    adapter, link = adaptive_steering()
    adapter.arrive("a", Request(num_output_tokens=3))
    order = adapter.order({"a": 5}, time.monotonic())
    done = outcome({"a": 5}, {"a": [1, 2, 3, 4]}, [[9]])
    done.report = StepReport(drafted=[4], admitted=[admitted])
    done.invalid, done.counted = {"a": 3}, (1, 0)
    adapter.record(order, done)
    (record,) = [message for message in link.sent if isinstance(message, wire.StepRecord)]
    assert (record.rows[0].verified, record.miscounted) == (verified, 0)


def test_what_ended_while_a_step_ran_counts_for_nobody() -> None:
    adapter, link = adaptive_steering()
    adapter.arrive("a", Request(num_output_tokens=3))
    order = adapter.order({"a": 5}, time.monotonic())
    done = outcome({"a": 5}, {"a": [1, 2, 3, 4]}, [[1, 2, 9]])
    done.report, done.delivered, done.counted = StepReport(drafted=[4], admitted=[3]), {}, (0, 0)
    adapter.record(order, done)
    (record,) = [message for message in link.sent if isinstance(message, wire.StepRecord)]
    assert (record.rows[0].verified, record.miscounted) == (0, 0)


def test_a_request_in_the_middle_of_its_prompt_drafts_nothing() -> None:
    adapter, link = steering()
    adapter.arrive("a", Request(num_prompt_tokens=100, num_computed_tokens=32))
    link.arrived = [act({1: 6})]
    assert adapter.order({"a": 32}, 0.0).lengths == {"a": 0}
    assert adapter.order({"a": 68}, 0.0).lengths == {"a": 6}


def test_a_record_says_what_every_request_did() -> None:
    adapter, link = steering()
    decoding, prefilling = Request(num_output_tokens=3), Request(num_computed_tokens=0)
    adapter.arrive("a", decoding)
    adapter.arrive("b", prefilling)
    adapter.entries["a"].has_emitted = True
    order = adapter.order({"a": 4, "b": 10}, time.monotonic())
    decoding.num_output_tokens, decoding.num_computed_tokens = 5, 17
    prefilling.num_output_tokens, prefilling.num_computed_tokens = 1, 10
    adapter.record(order, outcome({"a": 4, "b": 10}, {"a": [1, 2, 3]}, [[1, 2], [9]]))
    record = link.sent[-1]
    assert isinstance(record, wire.StepRecord)
    first, second = record.rows
    assert (first.verified, first.accepted, first.emitted, first.drafted, first.is_prefill) == (3, 1, 2, 2, False)
    assert (second.verified, second.emitted, second.is_prefill) == (0, 1, True)
    assert (record.prefill_tokens, record.decode_tokens, record.draft_tokens) == (10, 1, 3)
    assert [event.kind for event in record.events] == ["arrival", "arrival", "first_token"]


def test_a_record_says_what_pruning_did_and_where_it_was_wrong() -> None:
    """Of four drafts of four tokens three are cut behind their second test: two of those tests pass after all."""
    adapter, link = steering()
    for name in "abcd":
        adapter.arrive(name, Request(num_output_tokens=3))
    scheduled, drafts = dict.fromkeys("abcd", 5), {name: [1, 2, 3, 4] for name in "abcd"}
    done = outcome(scheduled, drafts, [[1, 2], [1, 7], [1, 2, 3, 4, 5], [1, 2]])
    assert done.report is not None
    done.report.pruned, done.report.saved_rows = [3, 3, 0, 3], 4.5
    done.report.prune_layer, done.report.prune_s = 15, 0.002
    adapter.record(adapter.order(scheduled, 0.0), done)
    adapter.record(adapter.order(scheduled, 0.0), outcome(scheduled, drafts, [[1], [1], [1], [1]]))
    told, untold = (sent for sent in link.sent if isinstance(sent, wire.StepRecord))
    assert [(row.pruned, row.accepted) for row in told.rows] == [(3, 2), (3, 1), (0, 4), (3, 2)]
    assert (told.prune_layer, told.prune_s, told.saved_rows, told.wrongly_pruned) == (15, 0.002, 4.5, 2)
    assert (untold.prune_layer, untold.prune_s, untold.saved_rows, untold.wrongly_pruned) == (None, 0.0, 0.0, 0)


def test_a_request_that_leaves_is_in_its_last_record_and_then_forgotten() -> None:
    adapter, link = steering()
    request = Request()
    adapter.arrive("a", request)
    order = adapter.order({"a": 1}, 0.0)
    request.num_output_tokens = 1
    adapter.leave("a", is_abort=False)
    adapter.record(order, outcome({"a": 1}, {}, [[5]]))
    record = link.sent[-1]
    assert isinstance(record, wire.StepRecord)
    assert record.rows[0].emitted == 1
    assert ("finish", 1) in [(event.kind, event.tokens) for event in record.events]
    assert adapter.entries == {}


def test_tokens_behind_a_stop_are_accepted_and_not_emitted() -> None:
    """vLLM counts what the target accepted, and cuts its lists behind the stop only then."""
    adapter, link = steering()
    adapter.arrive("a", Request(num_output_tokens=3))
    order = adapter.order({"a": 5}, 0.0)
    done = replace(outcome({"a": 5}, {"a": [1, 2, 3, 4]}, [[1, 2, 3, 9]]), delivered={"a": 2}, counted=(4, 3))
    adapter.leave("a", is_abort=False)
    adapter.record(order, done)
    record = link.sent[-1]
    assert isinstance(record, wire.StepRecord)
    assert [(row.verified, row.accepted, row.emitted) for row in record.rows] == [(4, 3, 2)]
    assert record.events[-1].tokens == 2
    assert record.miscounted == 0


def test_of_a_request_that_ended_while_its_step_ran_only_the_work_counts() -> None:
    """vLLM throws its tokens away and counts neither them nor its drafts; the target computed the rows all the same."""
    adapter, link = steering()
    for name in "ab":
        adapter.arrive(name, Request(num_output_tokens=3))
    scheduled, drafts = {"a": 3, "b": 3}, {"a": [1, 2], "b": [1, 2]}
    order = adapter.order(scheduled, 0.0)
    adapter.leave("a", is_abort=True)
    adapter.record(order, replace(outcome(scheduled, drafts, [[1, 2, 3], [1, 5]]), delivered={"b": 2}, counted=(2, 1)))
    record = link.sent[-1]
    assert isinstance(record, wire.StepRecord)
    told = [(row.handle, row.scheduled, row.verified, row.accepted, row.emitted) for row in record.rows]
    assert told == [(1, 3, 0, 0, 0), (2, 3, 2, 1, 2)]
    assert not any(row.is_prefill for row in record.rows)
    assert (record.decode_tokens, record.draft_tokens, record.miscounted) == (2, 4, 0)


def test_drafts_that_a_grammar_forbade_are_rows_and_not_verified() -> None:
    adapter, link = steering()
    adapter.arrive("a", Request(num_output_tokens=3))
    done = outcome({"a": 5}, {"a": [1, 2, -1, -1]}, [[1, 7]])
    adapter.record(adapter.order({"a": 5}, 0.0), replace(done, invalid={"a": 2}, counted=(2, 1)))
    record = link.sent[-1]
    assert isinstance(record, wire.StepRecord)
    assert [(row.scheduled, row.verified, row.accepted, row.is_prefill) for row in record.rows] == [(5, 2, 1, False)]
    assert (record.draft_tokens, record.miscounted) == (4, 0)


def test_what_a_session_emitted_only_ever_grows() -> None:
    """vLLM empties a request's output between two turns of a streaming session."""
    adapter, link = steering()
    request = Request()
    adapter.arrive("a", request)
    for tokens, count in (([1, 2], 2), ([3, 4], 4), ([5], 0)):
        request.num_output_tokens = count
        adapter.record(adapter.order({"a": 1}, 0.0), outcome({"a": 1}, {}, [tokens]))
    adapter.leave("a", is_abort=False)
    adapter.record(adapter.order({}, 0.0), outcome({}, {}, []))
    records = [sent for sent in link.sent if isinstance(sent, wire.StepRecord)]
    assert [row.emitted for record in records for row in record.rows] == [2, 2, 1]
    assert records[-1].events[-1].tokens == 5


@pytest.mark.parametrize(("counted", "apart"), [((4, 1), 0), ((4, 2), 1), ((2, 0), 3), (None, 0)])
def test_counts_that_are_not_vllms_are_told_and_warned_of_once(
    counted: tuple[int, int] | None, apart: int, caplog: pytest.LogCaptureFixture
) -> None:
    adapter, link = steering()
    adapter.arrive("a", Request(num_output_tokens=3))
    for _ in range(2):
        done = replace(outcome({"a": 5}, {"a": [1, 2, 3, 4]}, [[1, 9]]), counted=counted)
        adapter.record(adapter.order({"a": 5}, 0.0), done)
    records = [sent for sent in link.sent if isinstance(sent, wire.StepRecord)]
    assert [record.miscounted for record in records] == [apart, 2 * apart]
    assert sum("counts drafts otherwise" in line for line in caplog.messages) == bool(apart)


@pytest.mark.parametrize(
    ("is_abort", "has_stop_strings", "expected"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_an_abort_that_may_be_the_end_by_a_stop_string_says_so(
    is_abort: bool, has_stop_strings: bool, expected: bool
) -> None:
    adapter, link = steering()
    adapter.arrive("a", Request())
    adapter.leave("a", is_abort, has_stop_strings)
    adapter.record(adapter.order({"a": 1}, 0.0), outcome({"a": 1}, {}, [[5]]))
    record = link.sent[-1]
    assert isinstance(record, wire.StepRecord)
    assert [event.may_be_stop for event in record.events if event.kind != "arrival"] == [expected, False]


@pytest.mark.parametrize(
    ("context", "computed", "lengths", "sat_out"),
    [(20, 10, {"a": 2, "b": 2}, 0), (20, 14, {"a": 0, "b": 0}, 2), (None, 90, {"a": 2, "b": 2}, 0)],
)
def test_beside_a_sequence_longer_than_the_drafters_context_an_asynchronous_engine_schedules_no_drafts(
    context: int | None, computed: int, lengths: dict[str, int], sat_out: int
) -> None:
    """Its runner would verify zeros; k_max is 6, and the step adds a token."""
    adapter, link = steering(Default(2))
    adapter.context = context
    adapter.arrive("a", Request(num_computed_tokens=computed))
    adapter.arrive("b", Request())
    order = adapter.order({"a": 1, "b": 1}, 0.0)
    assert order.lengths == lengths
    adapter.record(order, outcome({"a": 1, "b": 1}, {}, [[5], [6]]))
    record = link.sent[-1]
    assert isinstance(record, wire.StepRecord)
    assert record.sat_out == sat_out


def test_a_request_id_that_comes_back_at_once_is_a_new_request() -> None:
    adapter, _ = steering()
    adapter.arrive("a", Request())
    adapter.leave("a", is_abort=True)
    adapter.arrive("a", Request())
    order = adapter.order({"a": 1}, 0.0)
    adapter.record(order, outcome({"a": 1}, {}, [[5]]))
    assert adapter.entries["a"].handle == 2


def test_a_controller_that_asks_gets_hello_with_all_live_requests() -> None:
    adapter, link = steering()
    adapter.arrive("a", Request(num_prompt_tokens=33))
    link.arrived = [wire.HelloRequest(1)]
    adapter.order({"a": 1}, 0.0)
    greeting = link.sent[-1]
    assert isinstance(greeting, wire.Hello)
    assert [(event.handle, event.request_id, event.tokens) for event in greeting.roster] == [(1, "a", 33)]
    assert greeting.epoch == 0  # nobody obeyed yet
    link.arrived = [act({1: 2}), wire.HelloRequest(1)]
    adapter.order({"a": 1}, 0.0)
    obeyed = link.sent[-1]
    assert isinstance(obeyed, wire.Hello)
    assert obeyed.epoch == 1


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"ipc://{Path(folder) / 'e.sock'}"


def wait_for(condition: object, seconds: float = 5.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.002)


def test_the_link_speaks_to_a_real_socket_both_ways(endpoint: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(endpoint)
        link = EngineLink(endpoint, "boot")
        link.send(wire.Goodbye("boot"))
        identity, frame = router.recv_multipart()
        assert wire.decode_from_engine(frame) == wire.Goodbye("boot")
        router.send_multipart([identity, b"noise"])
        router.send_multipart([identity, bytes(wire.encode(wire.HelloRequest(4)))])
        arrived: list[wire.FromController] = []
        wait_for(lambda: arrived.extend(link.receive()) or arrived)
        assert arrived == [wire.HelloRequest(4)]
        assert link.refused == {"malformed": 1}
        link.close()


def check_both_ways(router: zmq.Socket[bytes], link: EngineLink, epoch: int) -> bytes:
    """Let a message pass each way, of which the engine's may be dropped at first; return the engine's identity."""

    def is_heard() -> bool:
        link.send(wire.Goodbye("boot"))
        return bool(router.poll(50))

    wait_for(is_heard)
    identity, _ = router.recv_multipart()
    router.send_multipart([identity, bytes(wire.encode(wire.HelloRequest(epoch)))])
    arrived: list[wire.FromController] = []
    wait_for(lambda: arrived.extend(link.receive()) or arrived)
    assert arrived == [wire.HelloRequest(epoch)]
    return identity


def test_a_frame_above_the_limit_is_counted_and_the_link_works_again(endpoint: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # as the sidecar does
        router.bind(endpoint)
        link = EngineLink(endpoint, "boot")
        for count in (1, 2, 3):
            identity = check_both_ways(router, link, count)
            router.send_multipart([identity, bytes(MAX_INCOMING_BYTES + 1)])
            wait_for(lambda count=count: link.refused[CUT_OFF] == count)
        identity = check_both_ways(router, link, 4)
        router.send_multipart([identity, bytes(MAX_INCOMING_BYTES)])  # is let in, and is no message
        wait_for(lambda: link.refused == {CUT_OFF: 3, "malformed": 1})
        check_both_ways(router, link, 5)
        link.close()


def test_a_sidecar_that_goes_and_comes_back_is_no_frame_that_was_cut_off(endpoint: str) -> None:
    link = EngineLink(endpoint, "boot")
    with zmq.Context() as context:
        for epoch in (1, 2, 3):
            with context.socket(zmq.ROUTER) as router:
                router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # as the sidecar does
                router.bind(endpoint)
                check_both_ways(router, link, epoch)
            time.sleep(2 * TRIES_AGAIN_S)
    assert not link.refused
    link.close()


def test_somebody_else_at_the_endpoint_is_counted_and_the_sidecar_is_found_afterwards() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = stranger.getsockname()
        link = EngineLink(f"tcp://127.0.0.1:{address[1]}", "boot")
        connection, _ = stranger.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))
            wait_for(lambda: link.refused[CUT_OFF] == 1)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # as the sidecar does
        router.bind(f"tcp://127.0.0.1:{address[1]}")
        check_both_ways(router, link, 1)
        link.close()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:abc", "udp://x"])
def test_an_endpoint_that_is_none_leaves_no_thread_and_no_descriptor(endpoint: str) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(zmq.ZMQError):
            EngineLink(endpoint, "boot")
    assert threading.active_count() == threads
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


def test_without_a_sidecar_sending_never_waits_and_drops_are_counted(endpoint: str) -> None:
    link = EngineLink(endpoint, "boot")
    slowest = 0.0
    for _ in range(20 * HIGH_WATER_MARK):
        started = time.thread_time()
        link.send(wire.Goodbye("boot"))
        slowest = max(slowest, time.thread_time() - started)
    wait_for(lambda: link.dropped > 0)
    link.close()
    assert slowest < 0.005


def test_the_links_thread_takes_no_core_from_the_engines(endpoint: str) -> None:
    """Linux: a thread of the batch class does not preempt the one that wakes it."""
    link, told = EngineLink(endpoint, "boot"), list[int]()

    def make() -> wire.FromEngine:
        told.append(os.sched_getscheduler(0))
        return wire.Goodbye("boot")

    link.send_later(make)
    wait_for(lambda: told)
    link.close()
    own = os.sched_getscheduler(0)
    assert told[0] == (os.SCHED_BATCH if own == os.SCHED_OTHER else own)
    assert own != os.SCHED_BATCH or told[0] == own  # the caller's own class stays as it was


def test_a_message_that_rests_is_made_so_much_later_and_does_not_hold_up_those_after_it(endpoint: str) -> None:
    link, made_s = EngineLink(endpoint, "boot"), list[float]()

    def make() -> wire.FromEngine:
        made_s.append(time.monotonic())
        return wire.Goodbye("boot")

    for rest_s, least_s, most_s in ((0.3, 0.3, 5.0), (0.0, 0.0, 0.2)):
        asked_s = time.monotonic()
        link.send_later(make, rest_s)
        assert time.monotonic() - asked_s < 0.2, "the engine's thread waited"
        wait_for(lambda: made_s)
        assert least_s <= made_s.pop() - asked_s <= most_s
    link.close()


def test_a_rest_is_not_cut_short_by_what_the_connection_does(endpoint: str) -> None:
    link, seen = EngineLink(endpoint, "boot"), list[bool]()
    watch = link._watch

    def watched() -> None:
        watch()
        seen.append(True)

    link._watch = watched  # type: ignore[method-assign]
    link._outbox.append(wire.Goodbye("boot"))  # handed over, but the thread is not woken for it yet
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(endpoint)  # which wakes it
        wait_for(lambda: seen)
        time.sleep(0.5)  # it may have seen that the link must try again, which takes longer than the end does
        assert len(link._outbox) == 1
        link.close()
        assert router.poll(5000)  # the end sends it


def test_what_was_sent_before_the_end_arrives_the_goodbye_included(endpoint: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(endpoint)
        link = EngineLink(endpoint, "boot")
        link.send(hello())
        assert router.poll(5000)
        router.recv_multipart()
        adapter = Steering(hello(), link, Lease("boot", 6, 32, 1.0), Default(0))
        for name in "abcdefgh":
            adapter.arrive(name, Request())
            adapter.record(adapter.order({name: 1}, 0.0), outcome({name: 1}, {}, [[7]]))
        adapter.close()
        arrived: list[wire.FromEngine] = []
        while router.poll(5000 if len(arrived) < 9 else 0):
            arrived.append(wire.decode_from_engine(router.recv_multipart()[1]))
        assert [message.counter for message in arrived[:-1] if isinstance(message, wire.StepRecord)] == [*range(1, 9)]
        assert arrived[-1] == wire.Goodbye("boot")


def test_behind_a_long_step_only_the_record_leaves_the_interpreter_to_the_engine_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "faser.engine_adapter.steering.steering.QUIET_MOMENTS", QuietMoments()
    )  # as where the runner is in another process
    adapter, link = steering()
    adapter.arrive("a", Request())
    for seconds in (2 * LONG_STEP_S, LONG_STEP_S / 2):
        order = adapter.order({"a": 1}, time.monotonic() - seconds)
        adapter._last_end_s = 0.0
        adapter.record(order, outcome({"a": 1}, {}, [[5]]))
    assert link.rests == [REST_S, 0.0]


def test_the_record_behind_which_nobody_is_left_does_not_rest_for_no_step_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quiet_moments = QuietMoments()
    quiet_moments.tell()
    monkeypatch.setattr("faser.engine_adapter.steering.steering.QUIET_MOMENTS", quiet_moments)
    adapter, link = steering()
    adapter.arrive("a", Request())
    for running, waiting in ((1, 0), (0, 1), (0, 0)):
        order = adapter.order({"a": 1}, time.monotonic() - 0.05)
        adapter._last_end_s = 0.0
        adapter.record(order, replace(outcome({"a": 1}, {}, [[5]]), running=running, waiting=waiting))
    assert [rest_s > 0.0 for rest_s in link.rests] == [True, True, False]


def test_after_a_record_that_was_never_made_confidences_are_not_taken_for_those_of_other_drafts() -> None:
    adapter, link = steering(Default(3))
    adapter.arrive("a", Request(num_output_tokens=1))

    def step(confidence: float) -> None:
        told = outcome({"a": 3}, {"a": [5, 6]}, [[5]])
        assert told.report is not None
        told.report.confidences = [(confidence, confidence)]
        adapter.record(adapter.order({"a": 3}, 0.0), told)

    step(0.1)
    step(0.2)
    keep = link.send_later
    link.send_later = lambda make, rest_s: None  # type: ignore[method-assign]  # the link's queue is full
    step(0.3)
    link.send_later = keep  # type: ignore[method-assign]
    step(0.4)
    step(0.5)
    seen = [record.rows[0].confidences for record in link.sent if isinstance(record, wire.StepRecord)]
    assert seen == [(), (0.1, 0.1), (), (0.4, 0.4)]


@dataclass
class Sampling:
    extra_args: dict[str, object] | None


@dataclass
class LimitedRequest(Request):
    sampling_params: Sampling = field(default_factory=lambda: Sampling(None))


@pytest.mark.parametrize(("asked", "most"), [(0, 0), (2, 2), (2.0, 2), (10**9, wire.MAX_DRAFT_LENGTH)])
def test_a_client_may_limit_its_drafts_or_opt_out(asked: float, most: int) -> None:
    adapter, link = steering(Default(5))
    adapter.arrive("a", LimitedRequest(sampling_params=Sampling({CLIENT_LIMIT: asked, "other": 1})))
    adapter.arrive("b", LimitedRequest(sampling_params=Sampling(None)))
    assert [event.most for event in adapter.events] == [most, wire.MAX_DRAFT_LENGTH]
    assert adapter.order({"a": 1, "b": 1}, 0.0).lengths == {"a": min(most, 5), "b": 5}  # without a lease too
    link.arrived = [act({1: 4, 2: 3}, default_length=1)]
    assert adapter.order({"a": 1, "b": 1}, 0.0).lengths == {"a": min(most, 4), "b": 3}
    assert not link.refused


@pytest.mark.parametrize("asked", [-1, 1.5, "2", True, None, float("nan"), float("inf"), [1]])
def test_a_limit_that_is_none_is_ignored_and_counted(asked: object) -> None:
    adapter, link = steering(Default(3))
    adapter.arrive("a", LimitedRequest(sampling_params=Sampling({CLIENT_LIMIT: asked})))
    assert adapter.order({"a": 1}, 0.0).lengths == {"a": 3}
    assert link.refused == {"extra_args": 1}


COPY = wire.MatchRule([1.0], [0.0], [0.1], 5)


def copying() -> tuple[Steering, MemoryLink]:
    adapter, link = steering()
    adapter.hello = msgspec.structs.replace(adapter.hello, copy_max=5)
    adapter.lease.copy_max = 5
    return adapter, link


def test_copies_may_be_as_long_as_their_rule_a_client_and_what_remains_allow() -> None:
    adapter, link = copying()
    adapter.arrive("a", Request())
    adapter.arrive("b", Request(num_output_tokens=7, max_tokens=12))
    adapter.entries["a"].most = 4
    link.arrived = [asked := act({1: 2, 2: 6})]
    asked.match = COPY
    order = adapter.order({"a": 1, "b": 1, "prompt": 9}, time.monotonic())
    assert order.lengths == {"a": 2, "b": 3, "prompt": 0}
    assert order.match_lengths == {"a": 4, "b": 3, "prompt": 5}  # a runner copies for nobody inside a prompt
    assert order.longest() == {"a": 4, "b": 3, "prompt": 5}
    assert order.match is not None
    assert order.match.keep == [0.1] * 5


def test_copies_of_named_requests_have_their_weight_and_others_one() -> None:
    adapter, link = copying()
    for name in ("a", "b"):
        adapter.arrive(name, Request())
    link.arrived = [asked := act({1: 2})]
    asked.match = msgspec.structs.replace(COPY, handles=(2, 77), weights=(8.0, 3.0))
    order = adapter.order({"a": 1, "b": 1, "prompt": 9}, time.monotonic())
    assert order.match_weights == {"a": 1.0, "b": 8.0}


def test_an_engine_that_copies_nothing_is_not_asked_to() -> None:
    adapter, link = steering()
    adapter.arrive("a", Request())
    link.arrived = [asked := act({1: 2})]
    asked.match = COPY
    order = adapter.order({"a": 1}, time.monotonic())
    assert order.match is None
    assert order.longest() is order.lengths


def test_a_record_says_whose_draft_is_copied_and_a_step_later_whose_was() -> None:
    adapter, link = copying()
    names = ("a", "b", "c")
    for name in names:
        adapter.arrive(name, Request(num_output_tokens=3))
    steps = [
        ({}, [0, 2]),
        ({"a": [1, 2], "b": [3], "c": [4]}, [1]),
        ({"a": [1], "b": [3]}, []),
    ]
    records = []
    for drafts, copied in steps:
        order = adapter.order({name: 1 + len(drafts.get(name, ())) for name in names}, time.monotonic())
        done = outcome(dict.fromkeys(names, 1), drafts, [[1]] * 3)
        done.report = StepReport(drafted=[2] * 3, copied=copied)
        adapter.record(order, done)
        records.append(link.sent[-1])
    told = [(record.copied, record.verified_copies) for record in records if isinstance(record, wire.StepRecord)]
    assert told == [((1, 3), ()), ((2,), (1, 3)), ((), (2,))]


def test_confidences_of_a_draft_that_waited_are_told_when_it_is_verified() -> None:
    """The V2 runner tells them one step later, in which its request was left out."""
    adapter, link = steering()
    for name in ("a", "b"):
        adapter.arrive(name, Request(num_output_tokens=3))
    waited = {"a": (0.9,), "b": (0.8, 0.7)}
    steps: list[tuple[dict[str, list[int]], dict[str, tuple[float, ...]], int]] = [
        ({"a": [], "b": []}, {}, 0), ({"a": [1]}, waited, 1), ({"a": [1], "b": [1, 2]}, {"a": (0.6,)}, 0),
    ]  # fmt: skip
    for drafts, late, rested in steps:
        adapter.rested = rested
        order = adapter.order({name: 1 + len(tokens) for name, tokens in drafts.items()}, time.monotonic())
        done = outcome(dict.fromkeys(drafts, 1), {name: tokens for name, tokens in drafts.items() if tokens}, [[1]] * 2)
        done.report = StepReport(drafted=[2] * len(drafts), late_confidences=late)
        adapter.record(order, done)
    records = [sent for sent in link.sent if isinstance(sent, wire.StepRecord)]
    assert [record.rested for record in records] == [0, 1, 0]
    assert [row.confidences for row in records[1].rows] == [(0.9,)]
    assert [row.confidences for row in records[2].rows] == [(0.6,), (0.8, 0.7)]


def test_a_copy_of_a_request_that_was_preempted_is_forgotten() -> None:
    adapter, link = copying()
    adapter.arrive("a", Request(num_output_tokens=3))
    for copied in ([0], []):
        order = adapter.order({"a": 1}, time.monotonic())
        done = outcome({"a": 1}, {"a": [1]} if not copied else {}, [[1]])
        done.report = StepReport(drafted=[1], copied=copied)
        adapter.record(order, done)
        adapter.preempt("a")
    record = link.sent[-1]
    assert isinstance(record, wire.StepRecord)
    assert record.verified_copies == ()


def test_a_split_is_ordered_where_it_is_offered_and_recorded_where_it_was_in_force() -> None:
    """Unknown ones and no opinion are unsplit; an engine that offers none says none."""
    alone, link = steering()
    engine, wires = steering()
    engine.hello = msgspec.structs.replace(hello(), splits=["unsplit", "1:3", "1:1"])
    asked = [None, 2, 3, 1, 0]
    seen = []
    for sequence, split in enumerate(asked, 1):
        link.arrived, wires.arrived = [[msgspec.structs.replace(act({}, 1, sequence), split=split)] for _ in range(2)]
        assert alone.order({}, time.monotonic()).split is None
        seen.append(engine.order({}, time.monotonic()).split)
    assert seen == [0, 2, 0, 1, 0]
    for split in [None, 2]:
        done = outcome({}, {}, [])
        assert done.report is not None
        done.report.split = split
        engine.record(engine.order({}, time.monotonic()), done)
    records = [message for message in wires.sent if isinstance(message, wire.StepRecord)]
    assert [record.split for record in records] == [None, 2]
