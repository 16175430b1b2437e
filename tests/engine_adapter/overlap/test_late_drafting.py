"""Drafts that are put off: in which order they are copied, launched and waited for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from faser.engine_adapter.overlap import late_drafting
from faser.engine_adapter.overlap.late_drafting import LateDrafting
from faser.engine_adapter.patches.v2 import Proposal


class Told:
    """Copies and a stream that tell what is done to them."""

    is_beside = True

    def __init__(self) -> None:
        self.done: list[str] = []

    def __call__(self, runner: Any) -> Told:
        return self

    def take(self, given: dict[str, Any]) -> dict[str, Any]:
        self.done.append("copy")
        return given

    def stand_in(self, batch: Any) -> str:
        return "stand-in"

    def draft(self, taken: dict[str, Any], rounds: int, draft: Callable[[dict[str, Any]], Any]) -> None:
        self.done.append(f"draft {','.join(taken['input_batch'].req_ids)}")
        draft(taken)

    def launch(self, work: Callable[[], None], split: int) -> None:
        assert split == 2
        self.done.append("launch")
        work()

    def wait(self) -> None:
        self.done.append("wait")

    def finish(self) -> None:
        self.done.append("finish")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    one = Told()
    monkeypatch.setattr(late_drafting, "DraftInputs", one)
    return one


def step(*names: str, **changes: Any) -> Any:
    nothing = dict.fromkeys(("preempted_req_ids", "new_block_ids_to_zero", "kv_cache_block_copies"))
    nothing |= {"finished_req_ids": set()}
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1), **nothing | changes)


def proposal(*names: str, **changes: Any) -> Proposal:
    whole = {"has_structured_output_reqs": False, "has_prefill": False} | changes
    batch = SimpleNamespace(req_ids=list(names), **whole)
    given = {"input_batch": batch, "mm_inputs": None}
    return Proposal(lambda: None, batch, 4, lambda: given, lambda **_: None)


def put_off(late: LateDrafting, *names: str) -> Any:
    stand_in = late.hold(proposal(*names), 4, None)
    late.launch(lambda again, rounds: again.run(), 2)
    return stand_in


def test_one_drafting_is_under_way_at_most(told: Told) -> None:
    """The second one's copies take the place of the first one's."""
    late = LateDrafting(None, told)
    assert put_off(late, "a", "b") == put_off(late, "c") == "stand-in"
    assert told.done == ["copy", "launch", "draft a,b", "wait", "copy", "launch", "draft c"]


@pytest.mark.parametrize(
    ("following", "waits"),
    [
        (step("c", "b"), 1), (step("c", "d"), 0), (step(), 0),
        (step("c", finished_req_ids={"a"}), 1), (step("c", finished_req_ids={"e"}), 0),
        (step("c", preempted_req_ids={"b"}), 1), (step("c", preempted_req_ids={"e"}), 0),
        (step("c", new_block_ids_to_zero=[3]), 1), (step("c", kv_cache_block_copies=[object()]), 1),
    ],
)  # fmt: skip
def test_a_step_waits_if_it_touches_what_is_drafted_for(told: Told, following: Any, waits: int) -> None:
    """Whose requests left, their places and blocks may be another's in this very step."""
    late = LateDrafting(None, told)
    put_off(late, "a", "b")
    late.meet(following)
    late.meet(following)
    assert told.done.count("wait") == waits


@pytest.mark.parametrize("waiting", ["has_structured_output_reqs", "has_prefill"])
def test_a_step_whose_drafts_are_needed_or_that_reads_a_prompt_drafts_at_once(told: Told, waiting: str) -> None:
    """But behind the drafting that is under way."""
    late = LateDrafting(None, told)
    put_off(late, "a")
    assert late.hold(proposal("b", **{waiting: True}), 4, None) is None
    late.launch(lambda again, rounds: again.run(), 2)
    assert told.done == ["copy", "launch", "draft a", "wait"]


@pytest.mark.parametrize("broken", ["take", "stand_in", "draft"])
def test_after_a_failure_nothing_is_put_off(told: Told, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(told, broken, fail)
    late = LateDrafting(None, told)
    assert (put_off(late, "a") is None) == (broken != "draft")
    assert not late.is_on
    monkeypatch.undo()
    assert late.hold(proposal("b"), 4, None) is None
    assert told.done.count("wait") == (broken == "draft")


@pytest.mark.parametrize("broken", ["launch", "wait"])
def test_a_stream_that_fails_is_waited_for_by_the_host_and_never_asked_again(
    told: Told, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else work of which nobody knows when it runs would write where others do."""
    late = LateDrafting(None, told)
    if broken == "wait":
        put_off(late, "a", "b")

    def fail(*_: Any) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(told, broken, fail, raising=False)
    if broken == "wait":
        late.settle()
    else:
        put_off(late, "a", "b")
    assert told.done[-1] == "finish"
    assert not late.is_on
    late.settle()
    assert told.done.count("finish") == 1
    assert late.hold(proposal("c"), 4, None) is None
