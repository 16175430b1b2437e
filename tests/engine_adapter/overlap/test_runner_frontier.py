"""The process's drafts among vLLM's own, on a runner made of plain objects."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from faser.engine_adapter.drafter_process.drafted import Drafted
from faser.engine_adapter.drafter_process.mailbox import Reply
from faser.engine_adapter.hook_guard import HookGuard
from faser.engine_adapter.overlap.remote_drafting import RemoteDrafting
from faser.engine_adapter.protocol import StopRule
from faser.engine_adapter.runner.phases import HostPhases
from faser.engine_adapter.runner.v1 import FaserRunnerV1
from faser.engine_adapter.settings import ALWAYS
from faser.engine_adapter.steering.orders import StepOrder, StepReport

torch = pytest.importorskip("torch")

NAMES = ["a", "b", "c"]
LONGEST = 3
AHEAD = Drafted((61, 62, 63), (0.9, 0.8, 0.1))
# Ends a draft in front of its first token whose confidence is below one half.
RULE = StopRule([1.0], [0.0], [0.3], [0.0])


class Process:
    """Answers every job for request a only."""

    pid: int | None = 7
    is_ready = True

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def look(self) -> None: ...

    def forget(self, requests: Any) -> None: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...

    def send(self, wishes: list[Any]) -> bool:
        self.sent.append(list(wishes))
        return True

    def collect(self, limit_s: float) -> Reply | None:
        return Reply(1, 0.0, 0.0, {1: AHEAD}) if self.sent else None

    def requests_of(self, reply: Reply) -> dict[str, int]:
        return {"a": 1}


class Vllm:
    """Drafts 40, 41, 42 for who is asked; never wider than the longest of them."""

    drafter = SimpleNamespace(ends=None)

    def execute_model(self, *args: Any) -> None: ...

    def propose_draft_token_ids(self, *args: Any) -> Any:
        lengths = self.drafter.lengths
        if self.is_list:  # type: ignore[attr-defined]
            return [[40, 41, 42][:length] for length in lengths]
        return torch.tensor([[40, 41, 42]] * len(lengths))[:, : max(lengths)]


class Runner(FaserRunnerV1, Vllm):
    def __init__(self, is_list: bool, lengths: dict[str, int], stop: StopRule | None = None) -> None:
        self.is_list = is_list
        self._guard = HookGuard("runner", logging.getLogger())
        self.order = self._order = StepOrder(lengths, frontier=2, stop=stop)
        self.process = Process()
        given: Any = self.process
        self.remote = RemoteDrafting(given, ALWAYS)
        self._notes = object()  # type: ignore[assignment]
        self._late_tokens, self._stopwatch = {}, HostPhases()
        tokens = np.arange(300, dtype=np.int32).reshape(3, 100)
        booked = [3, 1, 1] if is_list else [0, 0, 0]  # vLLM has written what it sampled
        self.input_batch = SimpleNamespace(
            req_ids=NAMES, num_reqs=3, num_tokens_no_spec=np.array([10, 20, 30]) + booked, token_ids_cpu=tokens
        )
        self.discard_request_mask = SimpleNamespace(np=np.array([False, False, lengths["c"] < 0]))

    def propose(self) -> list[list[int]]:
        sampled = [[5, 6, 7], [8], [9]] if self.is_list else torch.tensor([[5, 6, 7], [8, -1, -1], [9, -1, -1]])
        drafts = self.propose_draft_token_ids(None, sampled)
        assert self.drafted is not None
        assert self._handed == dict(zip(NAMES, self.drafted, strict=True))
        return [list(map(int, row[:length])) for row, length in zip(drafts, self.drafted, strict=True)]


@pytest.mark.parametrize("is_list", [False, True])
def test_each_row_has_the_processs_draft_or_vllms(is_list: bool) -> None:
    runner = Runner(is_list, {"a": 3, "b": 2, "c": 0})
    assert runner.propose() == [[61, 62, 63], [40, 41], []]
    in_turn, ahead = runner.process.sent
    assert [(wish.request, len(wish.tokens), wish.sampled, wish.count) for wish in in_turn] == [
        ("a", 10, (5, 6, 7), 3),
        ("b", 20, (8,), 2),
    ]
    assert [(wish.request, wish.chunk, wish.count) for wish in ahead] == [("a", (61, 62, 63), 3), ("b", (40, 41), 3)]
    assert runner._notes is None, "exit heads would read another drafting's candidates"


def test_vllms_drafts_are_made_wider_where_nobody_else_drafts() -> None:
    runner = Runner(False, {"a": 3, "b": 0, "c": 0})
    assert runner.propose() == [[61, 62, 63], [], []]


@pytest.mark.parametrize("is_list", [False, True])
def test_the_stop_rule_cuts_the_processs_draft_too(is_list: bool) -> None:
    runner = Runner(is_list, {"a": 3, "b": 0, "c": 0}, RULE)
    assert runner.propose() == [[61, 62], [], []]
    report = StepReport(drafted=runner.drafted or [], confidences=[(), (), ()], rounds=(2,))
    runner.report_frontiers(report)
    assert report.confidences == [(0.9, 0.8, 0.1), (), ()], "the dropped token's too"
    assert report.rounds == (1, 1, 1, 2)
    assert report.frontier == 2
    runner.process.pid = None
    report = StepReport(drafted=runner.drafted or [])
    runner.report_frontiers(report)
    assert report.frontier == 0, "what is in force is what a process does"


def test_a_step_without_a_frontier_asks_the_process_nothing() -> None:
    runner = Runner(False, {"a": 3, "b": 2, "c": 0})
    assert runner._order is not None
    runner._order.frontier = 0
    assert runner.propose() == [[40, 41, 42], [40, 41], []]
    assert runner.process.sent == []
    assert runner._notes is not None


@pytest.mark.parametrize("broken", ["send", "requests_of"])
def test_a_failure_is_vllms_own_drafting_from_then_on(broken: str) -> None:
    runner = Runner(False, {"a": 3, "b": 2, "c": 0})
    setattr(runner.process, broken, lambda *_: 1 / 0)
    assert runner.propose() == [[40, 41, 42], [40, 41], []]
    assert runner.remote is None
    assert runner.propose() == [[40, 41, 42], [40, 41], []]


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for vLLM's module, whose import warns."""
    made = SimpleNamespace(DraftTokenIds=lambda names, tokens: SimpleNamespace(req_ids=names, draft_token_ids=tokens))
    monkeypatch.setitem(sys.modules, "vllm.v1.outputs", made)  # type: ignore[arg-type]


def deferred(lengths: dict[str, int], stop: StopRule | None = None) -> Runner:
    runner = Runner(False, lengths, stop)
    assert runner._order is not None
    runner._order.is_deferred, runner._order.frontier, runner.is_paired = True, 0, True
    return runner


def scheduled(*names: str, finished: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        faser=StepOrder({}, is_deferred=True), num_scheduled_tokens=dict.fromkeys(names, 1),
        finished_req_ids=set(finished), total_num_scheduled_tokens=len(names), scheduled_spec_decode_tokens={},
    )  # fmt: skip


@pytest.mark.parametrize(("prompt_rows", "noted"), [(0, [(3, 0.25, 5)]), (4, [])])
def test_the_gate_is_told_of_steps_that_read_no_prompt(prompt_rows: int, noted: list[tuple[int, float, int]]) -> None:
    runner, told = Runner(False, {"a": 3, "b": 2, "c": 0}), []
    assert runner.remote is not None
    runner.remote.note_step = lambda *step: told.append(step)  # type: ignore[method-assign]
    step = scheduled("a", "b", "c")
    step.scheduled_spec_decode_tokens = {"a": [1, 2], "b": [3]}
    step.total_num_scheduled_tokens = 6 + prompt_rows
    runner.execute_model(step)
    runner.note_ahead(0.25, [[1, 2, 3], [4], [5]])
    assert told == noted


def next_step(runner: Runner, *names: str, finished: tuple[str, ...] = ()) -> Any:
    """Let a step pass that has these requests, none of which drafts; return what is handed to the scheduler."""
    runner.execute_model(scheduled(*names, finished=finished))
    runner.draft_remotely(torch.tensor([[1]] * 3), [0, 0, 0])
    return runner.with_late_drafts(None)


@pytest.mark.usefixtures("outputs")
def test_a_group_is_asked_for_and_handed_over_a_step_later_by_name() -> None:
    runner = deferred({"a": 3, "b": 2, "c": 0})
    assert runner.propose() == [[], [], []], "vLLM's own drafter is not asked either"
    assert [[wish.request for wish in sent] for sent in runner.process.sent] == [["a", "b"]]
    assert runner._notes is None, "exit heads would read another drafting's candidates"
    assert runner.with_late_drafts(None) is None
    late_drafts = next_step(runner, "c")
    assert (late_drafts.req_ids, late_drafts.draft_token_ids) == (["a"], [[61, 62, 63]]), "b's never came"
    assert next_step(runner, "c") is None


@pytest.mark.usefixtures("outputs")
def test_what_is_met_goes_behind_this_steps_own_drafts() -> None:
    runner = deferred({"a": 3, "b": 2, "c": 0})
    runner.propose()
    runner.execute_model(scheduled("c"))
    runner.draft_remotely(torch.tensor([[1]] * 3), [0, 0, 0])
    given: Any = SimpleNamespace(req_ids=["c"], draft_token_ids=[[7]])
    joined = runner.with_late_drafts(given)
    assert joined is not None
    assert (joined.req_ids, joined.draft_token_ids) == (["c", "a"], [[7], [61, 62, 63]])


@pytest.mark.usefixtures("outputs")
def test_who_is_scheduled_without_its_draft_never_gets_it() -> None:
    runner = deferred({"a": 3, "b": 2, "c": 0})
    runner.propose()
    assert next_step(runner, "a") is None


@pytest.mark.usefixtures("outputs")
def test_a_group_is_cut_by_the_stop_rule_of_the_step_that_asked() -> None:
    runner = deferred({"a": 3, "b": 0, "c": 0}, RULE)
    runner.propose()
    assert next_step(runner, "c").draft_token_ids == [[61, 62]]


@pytest.mark.usefixtures("outputs")
def test_drafts_that_come_later_count_in_their_requests_next_row() -> None:
    runner = deferred({"a": 3, "b": 2, "c": 0}, RULE)
    runner.drafter = SimpleNamespace(ends=None, has_book=True)
    runner.propose()
    runner.execute_model(scheduled("c"))
    runner.draft_remotely(torch.tensor([[1]] * 3), [0, 0, 0])
    late, own = StepReport(drafted=[0, 0, 0]), StepReport(drafted=[0, 1, 0])
    runner.report_frontiers(late)
    assert late.deferred == {"a": (0.9, 0.8, 0.1)}, "the dropped token's too"
    assert late.is_drafter_ready
    runner.with_late_drafts(None)
    runner.report_frontiers(own)
    assert (own.drafted, own.deferred) == ([2, 1, 0], {})
    runner.report_frontiers(own)
    assert own.drafted == [2, 1, 0], "once"


def test_a_process_that_takes_no_job_leaves_the_group_to_vllms_drafter() -> None:
    runner = deferred({"a": 3, "b": 2, "c": 0})
    runner.process.send = lambda wishes: False  # type: ignore[method-assign,assignment]
    runner.process.is_ready = False
    assert runner.propose() == [[40, 41, 42], [40, 41], []]
    report = StepReport(drafted=[3, 2, 0])
    runner.report_frontiers(report)
    assert not report.is_drafter_ready
