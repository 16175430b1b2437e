"""Private names behind drafting beside the next step on the V2 runner: copies of all that this step overwrites.

vLLM drafts before the next step begins, from the target's own buffers: the batch, block tables, slot mappings and
attention's metadata. Imports of vLLM are lazy. Nothing here decides anything; overlap/late_drafting.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from .first_pass import drafters_tables, has_pictures, may_skip
from .rounds import is_autoregressive, masks_freed_blocks

if TYPE_CHECKING:
    from torch import Tensor

BUFFERED: Final = ("input_ids", "positions", "query_start_loc", "seq_lens")  # of the batch, in the runner's buffers
# Backends whose scratch memory is each call's own; FlashInfer's, for one, is a single piece for all.
BACKENDS: Final = frozenset({"FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN"})
_GRAPHS: Final = ("prefill_cudagraph_manager", "decode_cudagraph_manager")
_NO_LANE: Final = 1  # of vLLM's scratch memory: there is only lane 0, unless dspark drafts


def copying_refusal(runner: Any) -> str | None:
    """Return why this runner's drafter cannot run beside the target, None if it can; asked once attention is set up."""
    if not may_skip(runner.speculator) or drafters_tables(runner) is None or runner.ubatch_runner is not None:
        return "this drafter reads more than is known of it"
    groups = [group for part in (runner.attn_groups, runner.speculator.attn_groups) for each in part for group in each]
    others = {group.backend.get_name() for group in groups} - BACKENDS
    if others:
        return f"attention by {', '.join(sorted(others))}; expected {', '.join(sorted(BACKENDS))}"
    return None


def waits_for_drafts(given: dict[str, Any]) -> bool:
    """Tell whether drafts of a step are made at once: the host needs them, or the pass reads a prompt or pictures."""
    batch = given["input_batch"]
    return bool(batch.has_structured_output_reqs or batch.has_prefill) or has_pictures(given)


def meets(scheduler_output: Any, names: Iterable[str]) -> bool:
    """Tell whether a step touches what drafts for these requests read or write.

    They are in it, or left: then their places and blocks are others' already. Or vLLM itself writes to the KV cache.
    """
    if scheduler_output.new_block_ids_to_zero or scheduler_output.kv_cache_block_copies:
        return True
    left = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
    return any(name in scheduler_output.num_scheduled_tokens or name in left for name in names)


class DraftInputs:
    """One drafting's own copies; those of the next one take their place."""

    def __init__(self, runner: Any) -> None:
        from vllm.v1.worker.gpu.input_batch import InputBuffers

        speculator = runner.speculator
        self._runner = runner
        self._reads_states = is_autoregressive(speculator)
        self._buffers = InputBuffers(speculator.max_num_reqs, speculator.max_num_tokens, speculator.device)
        self._tables = _apart(runner.block_tables)

    def take(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return what `propose` is given, by name, with copies of what the next step overwrites.

        What lies by request is left where it is: no step writes the rows of these before it has waited.
        """
        batch = given["input_batch"]
        taken = given | {"input_batch": replace(batch, **{name: self._copied(name, batch) for name in BUFFERED})}
        return taken | _states(given) if self._reads_states else taken

    def _copied(self, name: str, batch: Any) -> Tensor:
        theirs = getattr(batch, name)
        own: Tensor = getattr(self._buffers, name)[: len(theirs)]
        return own.copy_(theirs)

    def draft(self, taken: dict[str, Any], rounds: int, draft: Callable[[dict[str, Any]], Tensor]) -> None:
        """Draft from the copies, by `draft`, and put the drafts where the step reads them that verifies them.

        Block tables and attention are the drafter's own, and its graphs, which have the target's buffers, stay unused.
        A drafter that needs vLLM's scratch memory, which the target uses at the same time, fails here.
        """
        import torch
        from vllm.v1.worker.workspace import use_workspace_lane

        batch = taken["input_batch"]
        with torch.inference_mode(), use_workspace_lane(_NO_LANE), self._in_place():
            drafts = draft(taken | self._attention(batch))
            self._runner.req_states.draft_tokens[batch.idx_mapping, :rounds] = drafts[:, :rounds]

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        speculator = self._runner.speculator
        own = {"block_tables": self._tables} | {name: None for name in _GRAPHS if hasattr(speculator, name)}
        theirs = {name: getattr(speculator, name) for name in own}
        _set(speculator, own)
        try:
            yield
        finally:
            _set(speculator, theirs)

    def _attention(self, batch: Any) -> dict[str, Any]:
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

        runner, tables = self._runner, self._tables
        masked = {"num_computed_tokens": runner.req_states.num_computed_tokens.gpu} if masks_freed_blocks() else {}
        blocks = tables.gather_block_tables(batch.idx_mapping, num_reqs_padded=batch.num_reqs_after_padding, **masked)
        slots = tables.compute_slot_mappings(
            batch.idx_mapping, batch.query_start_loc, batch.positions, num_tokens_padded=batch.num_tokens_after_padding
        )
        metadata = runner.model_state.prepare_attn(
            batch, CUDAGraphMode.NONE, blocks, slots, runner.speculator.attn_groups, runner.kv_cache_config
        )
        layers = build_slot_mappings_by_layer(slots, runner.kv_cache_config)
        return {"attn_metadata": metadata, "slot_mappings": layers, "is_profile": True}  # that word means: eagerly

    def stand_in(self, batch: Any) -> Tensor:
        """Return tokens for vLLM to hand on in the place of drafts that are still to come; any are valid ones."""
        tokens: Tensor = self._runner.req_states.draft_tokens[batch.idx_mapping]
        return tokens.clamp_(min=0)


def _states(given: dict[str, Any]) -> dict[str, Any]:
    """Copy the target's states, which its graphs write over."""
    if given["aux_hidden_states"]:
        return {"aux_hidden_states": [each.clone() for each in given["aux_hidden_states"]]}
    return {"last_hidden_states": given["last_hidden_states"].clone()}


def _apart(theirs: Any) -> Any:
    """Return the same block tables, gathered for a batch, and slot mappings, in memory of their own."""
    import torch

    own = copy(theirs)
    own.input_block_tables = [torch.zeros_like(each) for each in theirs.input_block_tables]
    own.slot_mappings = torch.zeros_like(theirs.slot_mappings)
    # The host writes how many blocks each request has while this is read. Whole rows hold for any number.
    widths = [[table.shape[1]] * theirs.max_num_reqs for table in own.input_block_tables]
    own.num_blocks = SimpleNamespace(gpu=torch.tensor(widths, dtype=torch.int32, device=theirs.device))
    own.init_block_table_layout_tensors()
    return own


def _set(owner: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(owner, name, value)
