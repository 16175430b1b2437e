"""What drafting beside the next step has of its own, and what it leaves as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from faser.engine_adapter.patches.speculators import draft_inputs
from faser.engine_adapter.patches.speculators.draft_inputs import DraftInputs, copying_refusal

from ..graph_managers import vllm_module


def group(backend: str) -> Any:
    return SimpleNamespace(backend=SimpleNamespace(get_name=lambda: backend))


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(draft_inputs, "may_skip", lambda speculator: True)
    monkeypatch.setattr(draft_inputs, "drafters_tables", lambda runner: (0, (8, 8, 16, True)))
    speculator = SimpleNamespace(
        attn_groups=[[group("TRITON_ATTN")]], block_tables="theirs", prefill_cudagraph_manager="graphs",
        decode_cudagraph_manager="graphs",
    )  # fmt: skip
    states = SimpleNamespace(draft_tokens=torch.tensor([[5, -1], [6, 7], [-1, -1]]))
    return SimpleNamespace(
        speculator=speculator, attn_groups=[[group("FLASH_ATTN")]], ubatch_runner=None, req_states=states
    )


@pytest.fixture
def inputs(runner: Any, monkeypatch: pytest.MonkeyPatch) -> DraftInputs:
    one = DraftInputs.__new__(DraftInputs)
    one._runner, one._tables = runner, "own"
    monkeypatch.setattr(DraftInputs, "_attention", lambda *_: {})
    vllm_module("v1.worker.workspace")
    return one


def test_backends_whose_scratch_memory_may_be_shared_are_refused_by_name(runner: Any) -> None:
    assert copying_refusal(runner) is None
    runner.speculator.attn_groups.append([group("FLASHINFER")])
    assert copying_refusal(runner) == "attention by FLASHINFER; expected CPU_ATTN, FLASH_ATTN, TRITON_ATTN"
    runner.ubatch_runner = object()
    assert "more than is known" in (copying_refusal(runner) or "")


def test_whatever_stands_in_for_a_draft_is_a_token(inputs: DraftInputs, runner: Any) -> None:
    assert inputs.stand_in(SimpleNamespace(idx_mapping=torch.tensor([2, 0]))).tolist() == [[0, 0], [5, 0]]
    assert runner.req_states.draft_tokens.tolist() == [[5, -1], [6, 7], [-1, -1]]


def drafted(inputs: DraftInputs, draft: Any) -> None:
    inputs.draft({"input_batch": SimpleNamespace(idx_mapping=torch.tensor([2, 0]))}, 1, draft)


def test_it_drafts_with_tables_of_its_own_and_without_graphs_and_no_further_than_asked(
    inputs: DraftInputs, runner: Any
) -> None:
    speculator, seen = runner.speculator, list[Any]()

    def draft(given: dict[str, Any]) -> torch.Tensor:
        seen.extend(
            (speculator.block_tables, speculator.prefill_cudagraph_manager, speculator.decode_cudagraph_manager)
        )
        return torch.tensor([[8, 99], [9, 99]])

    drafted(inputs, draft)
    assert seen == ["own", None, None]
    assert (speculator.block_tables, speculator.prefill_cudagraph_manager) == ("theirs", "graphs")
    assert runner.req_states.draft_tokens.tolist() == [[9, -1], [6, 7], [8, -1]]


def test_a_drafter_that_needs_the_scratch_memory_of_both_fails_and_everything_is_back(
    inputs: DraftInputs, runner: Any
) -> None:
    scratch = vllm_module("v1.worker.workspace").WorkspaceManager(torch.device("cpu"))
    assert scratch.get_persistent("before", (4,), torch.uint8).shape == (4,)
    with pytest.raises(RuntimeError, match="lane 1 is not configured"):
        drafted(inputs, lambda given: scratch.get_persistent("within", (4,), torch.uint8))
    assert scratch.get_persistent("behind", (4,), torch.uint8).shape == (4,)
    assert (runner.speculator.block_tables, runner.speculator.decode_cudagraph_manager) == ("theirs", "graphs")
