"""Who is left out of a step: those whom the lease names, while somebody else is there. No vLLM needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from faser.engine_adapter.protocol import ActionSet, Rest
from faser.engine_adapter.steering.lease import Lease
from faser.engine_adapter.steering.record import Entry
from faser.engine_adapter.steering.resting import Resting

VLLM_STEP = 100  # vLLM counts steps of its own


class Batch:
    """Running requests with handles from 1 on; `reading` are in their prompt, `begun` have no token yet."""

    def __init__(self, *names: str, reading: tuple[str, ...] = (), begun: tuple[str, ...] = ()) -> None:
        self.entries: dict[str, Entry] = {}
        self.running = len(names)
        self.resting = Resting()
        for handle, name in enumerate(names, start=1):
            request: Any = SimpleNamespace(is_prefill_chunk=name in reading, next_decode_eligible_step=0)
            self.entries[name] = Entry(handle, name, request, 0.0, emitted=0 if name in begun else 5)

    def left_out(self, rest: Rest, step: int) -> list[str]:
        """Return whom vLLM would not schedule in its next step."""
        at = VLLM_STEP + step
        count = self.resting.leave_out(rest, self.running, self.entries, step, at)
        names = [name for name, each in self.entries.items() if each.request.next_decode_eligible_step > at]
        assert len(names) == count
        return names


def test_who_rests_decodes_in_one_of_some_steps_all_of_them_in_the_same() -> None:
    batch = Batch("a", "b", "c")
    seen = [batch.left_out(Rest((1, 3), 3), step) for step in range(1, 9)]
    assert seen == [["a", "c"]] * 3 + [[]] + [["a", "c"]] * 3 + [[]]


def test_it_is_for_one_step_only() -> None:
    batch = Batch("a", "b")
    assert batch.left_out(Rest((1,), 1), 1) == ["a"]
    steps = [entry.request.next_decode_eligible_step for entry in batch.entries.values()]
    assert steps == [VLLM_STEP + 2, 0]


def test_nobody_rests_alone() -> None:
    assert Batch("a", "b").left_out(Rest((1, 2), 1), 1) == []


def test_nobody_rests_within_a_prompt_or_before_its_first_token() -> None:
    assert Batch("a", "b", "c", reading=("a",), begun=("b",)).left_out(Rest((1, 2, 3), 1), 1) == ["c"]


def test_others_may_be_named_and_those_who_left_are_nobody() -> None:
    batch = Batch("a", "b", "c")
    assert batch.left_out(Rest((1, 2), 1), 1) == ["a", "b"]
    assert batch.left_out(Rest((2,), 1), 3) == ["b"]
    assert batch.left_out(Rest((2, 77), 1), 5) == ["b"]
    del batch.entries["b"]
    batch.running -= 1
    assert batch.left_out(Rest((2, 77), 1), 7) == []


def test_a_request_that_faser_does_not_know_is_somebody_else() -> None:
    batch = Batch("a", "b")
    del batch.entries["b"]
    assert batch.left_out(Rest((1,), 1), 1) == ["a"]


def leased(engine_steps: int, asked: int) -> Rest | None:
    lease = Lease("b", 4, 32, 1.0, rest_steps=engine_steps)
    action = ActionSet("b", 1, 1, 32, 10.0, 0, [], [], rest=Rest((1,), asked))
    assert lease.offer(action, 1, 0.0) is None
    found = lease.in_force(1, 0.0)
    assert found is not None
    return found.rest


def test_an_engine_grants_no_more_steps_than_its_operator_allows() -> None:
    assert leased(2, 3) == Rest((1,), 2)
    assert leased(3, 2) == Rest((1,), 2)
    assert leased(0, 1) is None
