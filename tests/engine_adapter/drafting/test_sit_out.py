"""A step behind which nobody drafts prepares no drafting; every other step is vLLM's."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from faser.engine_adapter.drafting.catch_up import CacheShape, CatchUp, Limits
from faser.engine_adapter.drafting.ragged import RaggedModelDrafter
from faser.engine_adapter.hook_guard import HookGuard
from faser.engine_adapter.runner.v1 import FaserRunnerV1
from faser.engine_adapter.steering.orders import StepOrder

ROWS, WIDTH = 2, 3


class VllmsRunner:
    """Where vLLM would prepare the drafter's pass."""

    asked = 0
    prepared_with: object = None
    speculative_config: object = "configured"

    def _prepare_inputs(self, scheduler_output: Any, rows: list[int]) -> tuple[list[int], None, int]:
        self.prepared_with = self.speculative_config
        if not rows:
            raise ValueError("nothing is scheduled")
        return rows, None, 1

    def propose_draft_token_ids(self, *_: Any) -> Any:
        self.asked += 1
        return torch.zeros((ROWS, 1), dtype=torch.int64)


class Runner(FaserRunnerV1, VllmsRunner):
    """The mixin in front of a runner that has only what it reads."""

    def __init__(self, lengths: dict[str, int], in_prompt: tuple[bool, bool]) -> None:
        self._guard = HookGuard("runner", logging.getLogger())
        self.faults = self._guard.faults
        self.order = StepOrder(lengths, 1, 0.0, 0.0)
        self.input_batch = SimpleNamespace(num_reqs=ROWS, req_ids=["a", "b"])
        self.discard_request_mask = SimpleNamespace(np=np.array(in_prompt))
        self.input_ids = SimpleNamespace(gpu=torch.tensor([7, 8, 9, 9]))
        self.use_aux_hidden_state_outputs = True
        self.get_model = object
        self.drafter = RaggedModelDrafter()
        self.drafter.catch_up = CatchUp(CacheShape(4, 4), Limits(64, 64, 0), is_shifted=True)


def propose(lengths: dict[str, int], drafts: list[int], in_prompt: tuple[bool, bool] = (False, False)) -> Runner:
    runner = Runner(lengths, in_prompt)
    auxiliary = [torch.full((4, WIDTH), float(layer)) for layer in (1, 2)]
    metadata = SimpleNamespace(slot_mapping=torch.tensor([5, 11, 0, 0]), causal=True, batch_size=lambda: ROWS)
    runner.propose_draft_token_ids(
        SimpleNamespace(total_num_scheduled_tokens=ROWS), torch.tensor([[1], [2]]), None, torch.zeros((4, WIDTH)), None,
        auxiliary, SimpleNamespace(num_draft_tokens=drafts), metadata, None,
    )  # fmt: skip
    assert runner.faults == {}
    return runner


@pytest.mark.parametrize("drafts", [[0, 0], [0, 1]], ids=["nothing is verified", "a draft is verified"])
def test_where_nobody_drafts_vllm_prepares_nothing_and_the_steps_rows_are_kept(drafts: list[int]) -> None:
    runner = propose({"a": 0, "b": 0}, drafts)
    kept = runner.drafter.catch_up
    assert runner.asked == 0
    assert runner.drafted == [0, 0]
    assert runner.take_draft_token_ids() is None
    assert kept._tokens[[5, 11]].tolist() == [7, 8]
    assert kept._hidden[[5, 11]].tolist() == [[1.0] * WIDTH + [2.0] * WIDTH] * ROWS
    assert not kept._held[[5, 11]].any()


@pytest.mark.parametrize(
    ("lengths", "drafts", "in_prompt"),
    [
        ({"a": 1, "b": 0}, [0, 0], (False, False)),
        ({"a": 0, "b": 2}, [0, 0], (False, True)),  # a prompt that will draft behind it has to follow
    ],
    ids=["one drafts", "one will draft"],
)
def test_every_other_step_is_vllms(lengths: dict[str, int], drafts: list[int], in_prompt: tuple[bool, bool]) -> None:
    assert propose(lengths, drafts, in_prompt).asked == 1


@pytest.mark.parametrize(
    ("drafts", "is_skipping", "seen"),
    [({}, True, None), ({"a": [3]}, True, "configured"), ({}, False, "configured")],
    ids=["nothing is verified", "a draft is verified", "the drafter runs in every step"],
)
def test_a_step_that_verifies_nothing_is_prepared_as_without_speculation(
    drafts: dict[str, list[int]], is_skipping: bool, seen: object
) -> None:
    runner = Runner({"a": 0, "b": 0}, (False, False))
    if not is_skipping:
        runner.drafter.catch_up = None
    step = SimpleNamespace(scheduled_spec_decode_tokens=drafts)
    assert runner._prepare_inputs(step, [1, 1]) == ([1, 1], None, 1)
    assert runner.prepared_with == seen
    with pytest.raises(ValueError, match="nothing is scheduled"):
        runner._prepare_inputs(step, [])
    assert runner.speculative_config == "configured"


def test_a_step_prepared_without_speculation_keeps_its_rows_too() -> None:
    runner = Runner({"a": 0, "b": 0}, (False, False))
    metadata = SimpleNamespace(slot_mapping=torch.tensor([5, 11]), causal=True, batch_size=lambda: ROWS)
    scheduled = SimpleNamespace(total_num_scheduled_tokens=ROWS)
    states = [torch.ones((ROWS, WIDTH))] * 2
    runner.propose_draft_token_ids(
        scheduled, torch.tensor([[1], [2]]), None, states[0], None, states, None, metadata, None
    )
    assert runner.faults == {}
    assert runner.asked == 0
    assert runner.drafter.catch_up._tokens[[5, 11]].tolist() == [7, 8]
