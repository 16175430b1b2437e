"""Who is left out of a step: those whom the lease names, while somebody else is there. No vLLM needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from faser.engine_adapter.protocol import ActionSet, Rest
from faser.engine_adapter.steering.lease import Lease
from faser.engine_adapter.steering.record import Entry
from faser.engine_adapter.steering.resting import leave_out

VLLM_STEP = 100  # vLLM counts steps of its own


def batch(
    *names: str, reading: tuple[str, ...] = (), begun: tuple[str, ...] = ()
) -> tuple[list[Any], dict[str, Entry]]:
    """Return running requests with handles from 1 on; `reading` are in their prompt, `begun` have no token yet."""
    running: list[Any] = [
        SimpleNamespace(
            request_id=name, num_output_tokens=0 if name in begun else 5, is_prefill_chunk=name in reading,
            next_decode_eligible_step=0,
        )
        for name in names
    ]  # fmt: skip
    return running, {each.request_id: Entry(i, each.request_id, each, 0.0) for i, each in enumerate(running, start=1)}


def left_out(rest: Rest, step: int, running: list[Any], entries: dict[str, Entry]) -> list[str]:
    """Return whom vLLM would not schedule in its next step."""
    count = leave_out(rest, running, entries, step, VLLM_STEP)
    names = [each.request_id for each in running if each.next_decode_eligible_step > VLLM_STEP]
    assert len(names) == count
    return names


def test_who_rests_decodes_in_one_of_some_steps_all_of_them_in_the_same() -> None:
    seen = []
    for step in range(1, 9):
        running, entries = batch("a", "b", "c")
        seen.append(left_out(Rest((1, 3), 3), step, running, entries))
    assert seen == [["a", "c"]] * 3 + [[]] + [["a", "c"]] * 3 + [[]]


def test_it_is_for_one_step_only() -> None:
    running, entries = batch("a", "b")
    leave_out(Rest((1,), 1), running, entries, 1, VLLM_STEP)
    assert running[0].next_decode_eligible_step == VLLM_STEP + 1
    assert running[1].next_decode_eligible_step == 0


def test_nobody_rests_alone() -> None:
    running, entries = batch("a", "b")
    assert left_out(Rest((1, 2), 1), 1, running, entries) == []


def test_nobody_rests_within_a_prompt_or_before_its_first_token() -> None:
    running, entries = batch("a", "b", "c", reading=("a",), begun=("b",))
    assert left_out(Rest((1, 2, 3), 1), 1, running, entries) == ["c"]


def test_a_request_that_faser_does_not_know_is_somebody_else() -> None:
    running, entries = batch("a", "b")
    del entries["b"]
    assert left_out(Rest((1,), 1), 1, running, entries) == ["a"]


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
