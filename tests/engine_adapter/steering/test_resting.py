"""Who is left out of a step: those whom the lease names, while somebody else is there. No vLLM needed."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from faser.engine_adapter.hello import can_rest
from faser.engine_adapter.protocol import ActionSet, Rest
from faser.engine_adapter.settings import load_settings
from faser.engine_adapter.steering.lease import Lease
from faser.engine_adapter.steering.record import Entry
from faser.engine_adapter.steering.resting import Resting


class Batch:
    """Running requests with handles from 1 on; those in `changed` are not just decoding."""

    def __init__(self, *names: str, is_async: bool = False, **changed: dict[str, Any]) -> None:
        self.entries: dict[str, Entry] = {}
        self.running = len(names)
        self.resting = Resting(is_async)
        self.vllm_step = 100
        for handle, name in enumerate(names, start=1):
            decoding = {"is_prefill_chunk": False, "num_computed_tokens": 9, "use_structured_output": False}
            request: Any = SimpleNamespace(**decoding | changed.get(name, {}), next_decode_eligible_step=0)
            self.entries[name] = Entry(handle, name, request, 0.0, emitted=5)

    def left_out(self, rest: Rest | None) -> list[str]:
        """Return whom vLLM would not schedule in its next step."""
        self.vllm_step += 1
        count = self.resting.leave_out(rest, self.running, self.entries, self.vllm_step)
        names = [name for name, each in self.entries.items() if each.request.next_decode_eligible_step > self.vllm_step]
        assert len(names) == count
        return names


def test_who_rests_decodes_in_one_of_some_steps_all_of_them_in_the_same() -> None:
    batch = Batch("a", "b", "c")
    assert [batch.left_out(Rest((1, 3), 3)) for _ in range(8)] == ([["a", "c"]] * 3 + [[]]) * 2


def test_it_is_for_one_step_only() -> None:
    batch = Batch("a", "b")
    assert batch.left_out(Rest((1,), 1)) == ["a"]
    steps = [entry.request.next_decode_eligible_step for entry in batch.entries.values()]
    assert steps == [batch.vllm_step + 1, 0]


def test_no_cadence_however_it_changes_keeps_anybody_out_for_more_than_its_steps_in_a_row() -> None:
    batch, chance, row, longest = Batch("a", "b", "c"), random.Random(1), 0, 0
    for _ in range(2000):
        steps = chance.randint(1, 3)
        is_out = bool(batch.left_out(Rest(chance.choice([(1,), (2,), (1, 2)]), steps)))
        row = row + 1 if is_out else 0
        assert row <= steps
        longest = max(longest, row)
    assert longest == 3


def test_a_lease_that_ends_ends_the_row() -> None:
    batch = Batch("a", "b")
    seen = [batch.left_out(rest) for rest in (Rest((1,), 2), None, Rest((1,), 2), Rest((1,), 2), Rest((1,), 2))]
    assert seen == [["a"], [], ["a"], ["a"], []]


def test_nobody_rests_alone() -> None:
    assert Batch("a", "b").left_out(Rest((1, 2), 1)) == []


def test_nobody_rests_within_a_prompt_before_its_first_token_or_without_its_cache() -> None:
    batch = Batch("a", "b", "c", "d", a={"is_prefill_chunk": True}, c={"num_computed_tokens": 0})
    batch.entries["b"].emitted = 0
    assert batch.left_out(Rest((1, 2, 3, 4), 1)) == ["d"]


@pytest.mark.parametrize(("is_async", "names"), [(False, ["a", "b"]), (True, ["b"])])
def test_a_draft_that_waits_is_checked_against_its_grammar(is_async: bool, names: list[str]) -> None:
    batch = Batch("a", "b", "c", is_async=is_async, a={"use_structured_output": True})
    assert batch.left_out(Rest((1, 2), 1)) == names


def test_others_may_be_named_and_those_who_left_are_nobody() -> None:
    batch = Batch("a", "b", "c")
    assert batch.left_out(Rest((1, 2), 3)) == ["a", "b"]
    assert batch.left_out(Rest((2,), 3)) == ["b"]
    del batch.entries["b"]
    batch.running -= 1
    assert batch.left_out(Rest((2,), 3)) == []
    assert batch.left_out(Rest((1, 77), 3)) == ["a"]


def test_a_request_that_faser_does_not_know_is_somebody_else() -> None:
    batch = Batch("a", "b")
    del batch.entries["b"]
    assert batch.left_out(Rest((1,), 1)) == ["a"]


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


def config(**changed: Any) -> Any:
    """Return what `can_rest` reads of vLLM's configuration."""
    given = {"pp": 1, "is_async": False, "v2": False, "adaptive": False, "sampling": "greedy"} | changed
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=given["pp"]),
        scheduler_config=SimpleNamespace(async_scheduling=given["is_async"]),
        use_v2_model_runner=given["v2"],
        speculative_config=SimpleNamespace(
            enable_adaptive_verification=given["adaptive"], draft_sample_method=given["sampling"]
        ),
    )


@pytest.mark.parametrize(
    ("changed", "can"),
    [
        ({}, True),
        ({"v2": True}, True),
        ({"v2": True, "is_async": True}, True),
        ({"v2": True, "sampling": "probabilistic"}, True),
        ({"v2": True, "adaptive": True}, False),
        ({"is_async": True}, False),
        ({"pp": 2}, False),
        ({"sampling": "probabilistic"}, False),
    ],
)
def test_engines_whose_steps_take_up_what_waited_can_leave_requests_out(changed: dict[str, Any], can: bool) -> None:
    assert can_rest(config(**changed), load_settings({})) is can


def test_what_judges_drafts_by_the_step_before_does_not_go_with_it() -> None:
    assert not can_rest(config(), load_settings({"FASER_EXIT_HEADS": "heads.safetensors"}))
