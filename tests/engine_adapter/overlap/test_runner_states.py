"""The runner's part that keeps the target's states for the drafter's process, on plain objects."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from faser.engine_adapter.drafter_process.mailbox import StateRows
from faser.engine_adapter.drafter_process.target_states import TargetStates
from faser.engine_adapter.overlap.frontier_runner import FrontierRunner
from faser.engine_adapter.steering.orders import StepOrder

torch = pytest.importorskip("torch")

BLOCKS = [2, 0]  # of the one request, four tokens each


class Vllm:
    def execute_model(self, scheduled: Any) -> None: ...


class Runner(FrontierRunner, Vllm):
    def __init__(self) -> None:
        self.states = self._states = TargetStates.create(3, 4, 2, "float32")
        remote: Any = SimpleNamespace(forget=lambda names: None, process=SimpleNamespace(close=lambda: None))
        self.remote = remote
        self.input_batch = SimpleNamespace(
            req_ids=["a"], num_tokens_no_spec=np.array([5]), token_ids_cpu=np.arange(20).reshape(1, 20)
        )

    def run(self, first: int, count: int, is_drafted: bool = True) -> None:
        """Run the target over tokens whose states are their numbers."""
        scheduled = SimpleNamespace(
            total_num_scheduled_tokens=count, finished_req_ids=set(), faser=StepOrder({}),
            num_scheduled_tokens={"a": count}, scheduled_spec_decode_tokens={},
        )  # fmt: skip
        self.execute_model(scheduled)
        numbers = range(first, first + count)
        slots = torch.tensor([BLOCKS[number // 4] * 4 + number % 4 for number in numbers] + [99])
        auxiliary = [torch.tensor([*numbers, 77.0])[:, None] + part for part in (0.0, 0.5)]  # one row of padding
        metadata = SimpleNamespace(slot_mapping=slots, block_table_tensor=torch.tensor([BLOCKS], dtype=torch.int32))
        if is_drafted:
            self.keep_states(scheduled, (None, None, None, None, auxiliary, None, metadata, None))

    def told(self) -> StateRows:
        """Return what the process is told after one more token was sampled."""
        return self._turns([[7]], [2])[0].states


@pytest.fixture
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    if made._states is not None:
        made._end_remote()


def test_the_states_of_every_step_are_found_again(runner: Runner) -> None:
    runner.run(0, 3)
    runner.run(3, 2)
    told = runner.told()
    assert told.count == 4, "behind the four tokens that were there, one was sampled"
    assert told.blocks.tolist() == BLOCKS[:1]
    found = runner.states.read(told, 1)
    assert found is not None
    assert found.tolist() == [[number, number + 0.5] for number in (1.0, 2.0, 3.0)]


def test_a_step_that_nobody_saw_makes_every_state_a_doubt(runner: Runner) -> None:
    """vLLM asks no drafter where a request is too long for it; slots may have been given away meanwhile."""
    runner.run(0, 3)
    runner.run(3, 2, is_drafted=False)
    runner.run(3, 1)
    assert runner.states.read(runner.told(), 0) is None
    assert runner.states.read(runner.told(), 3) is not None


def test_states_of_another_width_end_the_process(runner: Runner) -> None:
    scheduled = SimpleNamespace(total_num_scheduled_tokens=1)
    metadata = SimpleNamespace(slot_mapping=torch.tensor([0]), block_table_tensor=None)
    runner.keep_states(scheduled, (None, None, None, None, [torch.ones(1, 9)], None, metadata, None))
    assert runner.remote is None
    assert runner._states is None
