"""The process's drafts among vLLM's own, on a runner made of plain objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from faser.engine_adapter.frontier import Drafted
from faser.engine_adapter.mailbox import Reply
from faser.engine_adapter.protocol import StopRule
from faser.engine_adapter.remote_drafting import RemoteDrafting
from faser.engine_adapter.runner_v1 import FaserRunnerV1
from faser.engine_adapter.steps import StepOrder, StepReport

torch = pytest.importorskip("torch")

NAMES = ["a", "b", "c"]
LONGEST = 3
AHEAD = Drafted((61, 62, 63), (0.9, 0.8, 0.1))
# Ends a draft in front of its first token whose confidence is below one half.
RULE = StopRule([1.0], [0.0], [0.3], [0.0])


class Process:
    """Answers every job for request a only."""

    pid: int | None = 7

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def look(self) -> None: ...

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

    def propose_draft_token_ids(self, *args: Any) -> Any:
        lengths = self.drafter.lengths
        if self.is_list:  # type: ignore[attr-defined]
            return [[40, 41, 42][:length] for length in lengths]
        return torch.tensor([[40, 41, 42]] * len(lengths))[:, : max(lengths)]


class Runner(FaserRunnerV1, Vllm):
    def __init__(self, is_list: bool, lengths: dict[str, int], stop: StopRule | None = None) -> None:
        self.is_list = is_list
        self.order = self._order = StepOrder(lengths, frontier=2, stop=stop)
        self.process = Process()
        given: Any = self.process
        self.remote = RemoteDrafting(given)
        self._notes = object()  # type: ignore[assignment]
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
