"""A rank of vLLM's pipeline: its group, what it hands on, and its KV caches.

Called by stages/stage_rank.py and by the worker mixin.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class PipelineRank:
    """This worker's place in the pipeline, as vLLM's worker uses it."""

    def __init__(self) -> None:
        from vllm.distributed.parallel_state import get_pp_group

        self._group = get_pp_group()
        self.number: int = self._group.rank_in_group
        self.ranks: list[int] = list(self._group.ranks)
        if len(self.ranks) > 2:
            # vLLM's shared memory counts messages between neighbours (csrc/cpu/shm.cpp): over an empty rank it hangs.
            self._group.use_cpu_custom_send_recv = False
        self._first = copy.copy(self._group)
        self._first.ranks = sorted({self._group.rank, self.ranks[-1]})

    @contextmanager
    def as_first(self) -> Iterator[None]:
        """Let vLLM take this rank for the first one: it embeds tokens and waits for nobody."""
        from vllm.distributed import parallel_state

        parallel_state._PP = self._first
        try:
            yield
        finally:
            parallel_state._PP = self._group

    def receive(self, source: int) -> Any:
        """Return the hidden states that a rank of the pipeline hands to this one."""
        from vllm.distributed.parallel_state import get_tp_group
        from vllm.v1.worker.gpu_worker import AsyncIntermediateTensors

        tensors, handles, finish = self._group.irecv_tensor_dict(src=source, all_gather_group=get_tp_group())
        assert tensors is not None  # it is for one rank alone
        return AsyncIntermediateTensors(tensors, comm_handles=handles, comm_postprocess=finish)

    def send(self, tensors: Any, target: int) -> list[Any]:
        """Hand hidden states to a rank; return what is to be waited for before the next step."""
        from vllm.distributed.parallel_state import get_tp_group

        handles = self._group.isend_tensor_dict(tensors.tensors, dst=target, all_gather_group=get_tp_group())
        return list(handles[1:])


def update_states(runner: Any, scheduler_output: Any) -> None:
    """Let a runner note a step that it does not compute."""
    with runner.synchronize_input_prep():
        runner._update_states(scheduler_output)


def make_receive_buffers(runner: Any) -> None:
    """Make the buffers in which a rank behind the first one receives hidden states.

    vLLM 0.32 makes them in a dummy run (gpu_model_runner.py:5802), which an eager engine on a CPU never has: its first
    step fails at an assertion (:3174).
    """
    from vllm.distributed.parallel_state import get_pp_group

    if get_pp_group().is_first_rank or runner.intermediate_tensors is not None:
        return
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def note_missing_drafter(runner: Any) -> None:
    """Say of a loaded runner that it has no drafter where it has none.

    vLLM 0.32 reads the attribute on every rank and makes it on the last one (gpu_model_runner.py:7017, :590).
    """
    if not hasattr(runner, "drafter"):
        runner.drafter = None


def kv_caches(runner: Any) -> list[Tensor]:
    """Return each layer's KV cache, (blocks, ...)."""
    from vllm.model_executor.models.utils import extract_layer_index

    config = runner.kv_cache_config
    (group,) = config.kv_cache_groups
    layers = sorted(group.layer_names, key=extract_layer_index)
    context = runner.compilation_config.static_forward_context
    return [context[name].kv_cache.unflatten(0, (config.num_blocks, -1)) for name in layers]
