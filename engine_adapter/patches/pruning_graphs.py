"""Private names of vLLM's V2 runner that a target captured in two halves touches: what a half is, and what it reads.

A half is what the decoder's forward pass does in front of a layer, or from it on; each is a CUDA graph of its own, for
every size that vLLM captured the whole for. Owned by pruning/halves.py, which decides. Imports of vLLM are lazy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from .pruning import PreparedStep, ShortBatch

NO_SLOT: Final = -1  # vLLM's PAD_SLOT_ID: a row that is written nowhere


class Output(NamedTuple):
    """What a half hands on."""

    states: Tensor  # (rows, hidden) behind the last norm; of the first half: the stream without its residual
    residual: Tensor | None  # (rows, hidden) of the first half
    auxiliary: list[Tensor]  # (rows, hidden) of each layer in it that an EAGLE-3 drafter reads


def first_half(decoder: Any, layer: int, token_ids: Tensor, positions: Tensor) -> Output:
    """Run a decoder of PRUNABLE_DECODERS up to layer L, as its forward pass does (vLLM 0.32)."""
    hidden, residual, auxiliary = decoder.embed_input_ids(token_ids), None, list[Any]()
    decoder._maybe_add_hidden_state(auxiliary, 0, hidden, residual)
    for index in range(layer):
        hidden, residual = decoder.layers[index](positions, hidden, residual)
        decoder._maybe_add_hidden_state(auxiliary, index + 1, hidden, residual)
    return Output(hidden, residual, auxiliary)


def second_half(decoder: Any, layer: int, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> Output:
    """Run the layers from L on and the last norm."""
    auxiliary: list[Any] = []
    for index in range(layer, len(decoder.layers)):
        hidden, residual = decoder.layers[index](positions, hidden, residual)
        decoder._maybe_add_hidden_state(auxiliary, index + 1, hidden, residual)
    return Output(decoder.norm(hidden, residual)[0], None, auxiliary)


def halves_refusal(runner: Any) -> str | None:
    """Return why the target's graphs have no halves, None if they can; once vLLM has captured its own."""
    from vllm.model_executor.offloader.base import NoopOffloader, get_offloader

    if not any(_takes_any_mix(desc) for desc in runner.cudagraph_manager.graphs):
        return "its full graphs replay one draft length, or there are none"
    if runner.uses_inputs_embeds:
        return "the target reads embeddings, not tokens"
    if not isinstance(get_offloader(), NoopOffloader):
        return "weights are fetched while the target runs (offloading)"
    return None


def _takes_any_mix(desc: Any) -> bool:
    is_plain = desc.uniform_token_count is None and not desc.num_active_loras and desc.num_ubatches == 1
    return is_plain and desc.cg_mode.name == "FULL"


def captured_shapes(runner: Any) -> list[Any]:
    """Return vLLM's descriptors of full graphs that replay batches of any mix of lengths, the largest first."""
    found = [desc for desc in runner.cudagraph_manager.graphs if _takes_any_mix(desc)]
    return sorted(found, key=lambda desc: desc.num_tokens, reverse=True)


def shapes_to_come(runner: Any) -> int:
    """Return how many more shapes there will be: while vLLM measures memory it captures the largest few alone."""
    manager = runner.cudagraph_manager
    planned = [desc for descs in manager._capture_descs.values() for desc in descs if _takes_any_mix(desc)]
    return len(planned) - len(captured_shapes(runner))


def own_groups(runner: Any, names: Iterable[str]) -> list[list[Any]]:
    """Return the attention groups of some layers with builders of their own, one list per group of KV caches.

    A builder of vLLM's keeps what it builds in memory that its graphs read, and a drafter reads what was built for its
    target's: what holds behind a cut must not lie there.
    """
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.gpu.attn_utils import init_attn_backend

    with set_current_vllm_config(runner.vllm_config):
        groups, *_ = init_attn_backend(
            runner.kv_cache_config, runner.vllm_config, runner.device, active_layer_names=set(names)
        )
    return groups


@dataclass(slots=True)
class _OwnSlots:
    """In the place of vLLM's block tables where a graph of the second half is captured: other slots."""

    tables: Any
    slots: Tensor
    cp_size: int = 1  # context parallelism is several ranks: not pruned

    def get_dummy_block_tables(self, requests: int) -> Any:
        return self.tables.get_dummy_block_tables(requests)

    def get_dummy_slot_mappings(self, rows: int) -> Tensor:
        return self.slots.fill_(NO_SLOT)[:, :rows]


class ShortInputs:
    """What the graphs of a second half read, at addresses that stay: its rows and where they lie."""

    def __init__(self, runner: Any, groups: list[list[Any]], most: int, states: Output) -> None:
        """`most`: rows; `states`: of the first half, for their width and kind."""
        from vllm.v1.worker.gpu.input_batch import InputBuffers

        assert states.residual is not None
        self._runner, self._groups = runner, groups
        self._buffers = InputBuffers(runner.max_num_reqs, most, runner.device)
        self._slots = runner.block_tables.slot_mappings.new_full((len(groups), most), NO_SLOT)
        self.hidden = states.states.new_zeros((most, states.states.shape[1]))
        self.residual = states.residual.new_zeros((most, states.residual.shape[1]))
        self.positions = self._buffers.positions

    def attention_to_capture(self, desc: Any) -> Any:
        """Return vLLM's AttentionState for capturing a shape."""
        return attention_to_capture(
            self._runner, desc, self._buffers, _OwnSlots(self._runner.block_tables, self._slots), self._groups
        )

    def write(self, step: PreparedStep, short: ShortBatch, desc: Any, hidden: Tensor, residual: Tensor) -> None:
        """Write in the rows that stay, and what the attention layers need to know of them, for a replay of a shape.

        What lies behind them in the shape is a row of no request: it is written nowhere, and nobody reads it.

        :param hidden: (rows of the whole batch, hidden), and so is the residual
        """
        import torch
        from vllm.config import CUDAGraphMode

        batch, buffers, count = step.batch, self._buffers, len(short.rows)
        requests, padded = batch.num_reqs, desc.num_reqs
        torch.index_select(hidden, 0, short.rows, out=self.hidden[:count])
        torch.index_select(residual, 0, short.rows, out=self.residual[:count])
        for states in (self.hidden, self.residual):
            states[count : desc.num_tokens] = 0.0  # layers add to what they read
        buffers.positions[:count] = short.positions
        buffers.positions[count : desc.num_tokens] = 0
        buffers.query_start_loc[: requests + 1] = short.starts
        buffers.query_start_loc[requests + 1 :] = count
        buffers.seq_lens[:requests] = batch.seq_lens[:requests] - short.left
        buffers.seq_lens[requests:] = 0
        starts = np.full(padded + 1, count, np.int32)
        starts[: requests + 1] = short.guessed_starts
        slots = self._runner.block_tables.compute_slot_mappings(
            batch.idx_mapping, buffers.query_start_loc[: requests + 1], buffers.positions, desc.num_tokens,
            out=self._slots,
        )  # fmt: skip
        shortened = replace(
            batch, num_reqs_after_padding=padded, num_tokens=count, num_tokens_after_padding=desc.num_tokens,
            positions=buffers.positions[: desc.num_tokens], query_start_loc=buffers.query_start_loc[: padded + 1],
            query_start_loc_np=starts, seq_lens=buffers.seq_lens[:padded], max_query_len=desc.max_query_len,
        )  # fmt: skip
        self._runner.model_state.prepare_attn(
            shortened, CUDAGraphMode.FULL, tuple(table[:padded] for table in step.tables), slots, self._groups,
            self._runner.kv_cache_config,
        )  # fmt: skip


def attention_to_capture(runner: Any, desc: Any, buffers: Any = None, tables: Any = None, groups: Any = None) -> Any:
    """Return vLLM's AttentionState for capturing a shape, of the runner's own inputs where nothing else is said."""
    from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture

    return prepare_inputs_to_capture(
        desc.num_reqs, desc.num_tokens, runner.model_state, buffers or runner.input_buffers,
        tables or runner.block_tables, groups or runner.attn_groups, runner.kv_cache_config, True,
        max_query_len=desc.max_query_len,
    )  # fmt: skip


@contextmanager
def capturing(runner: Any, desc: Any, attention: Any) -> Iterator[None]:
    """Within the block, attention layers find what was built for a shape."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import set_forward_context

    with set_forward_context(
        attention.attn_metadata, runner.vllm_config, num_tokens=desc.num_tokens,
        cudagraph_runtime_mode=CUDAGraphMode.NONE, slot_mapping=attention.slot_mappings,
    ):  # fmt: skip
        yield


@contextmanager
def capture_stream(runner: Any) -> Iterator[None]:
    """Within the block, work runs on a stream that can be captured."""
    import torch
    from vllm.distributed.parallel_state import graph_capture
    from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture

    # As around vLLM's own captures: a collection of garbage within one may unload a kernel that it holds.
    with torch.inference_mode(), freeze_gc_for_cudagraph_capture(), graph_capture(device=runner.device):
        yield


def recorded(manager: Any, call: Callable[[], object]) -> Any:
    """Return a CUDA graph of a call, in the memory of a manager's graphs."""
    import torch
    from vllm.compilation.cudagraph_pool import capture_pool
    from vllm.utils.torch_utils import current_stream

    graph: Any = torch.cuda.CUDAGraph()
    held: Any = capture_pool(manager.pool, manager.vllm_config)
    with held as pool, torch.cuda.graph(graph, pool, stream=current_stream()):
        call()
    return graph


def free_bytes() -> int:
    """Return how much of the device's memory nobody has."""
    import torch

    torch.accelerator.synchronize()
    return int(torch.accelerator.get_memory_info()[0])


class _Halved:
    """In front of vLLM's manager of the target's graphs: a step may replay two halves instead of the whole."""

    instead: Callable[[Any], bool] | None = None

    def run_fullgraph(self, desc: Any) -> Any:
        if self.instead is None or not self.instead(desc):
            return super().run_fullgraph(desc)  # type: ignore[misc]
        if not self.use_aux_hidden_state_outputs:  # type: ignore[attr-defined]
            return self.hidden_states[: desc.num_tokens]  # type: ignore[attr-defined]
        auxiliary = [states[: desc.num_tokens] for states in self.aux_hidden_states]  # type: ignore[attr-defined]
        return self.hidden_states[: desc.num_tokens], auxiliary  # type: ignore[attr-defined]


def replay_instead(manager: Any, instead: Callable[[Any], bool] | None) -> None:
    """Ask before a whole graph is replayed; True: it was done, and its outputs lie where the whole leaves them."""
    if not isinstance(manager, _Halved):
        manager.__class__ = type(f"Halved{type(manager).__name__}", (_Halved, type(manager)), {})
    manager.instead = instead


def outputs_of(manager: Any) -> tuple[Tensor, list[Tensor]]:
    """Return where the whole graphs leave their states, and the auxiliary ones; (largest shape, hidden) each."""
    return manager.hidden_states, list(manager.aux_hidden_states)
