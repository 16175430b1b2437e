"""Private names of the first pass of vLLM's V2 speculators: what it reads, and running it over rows of earlier steps.

Imports of vLLM are lazy. Nothing here decides anything; drafting/catch_up_v2.py does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .rounds import has_more_state, is_autoregressive, keeps_its_own_rounds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from ...drafting.kept_rows import Missed


def may_skip(speculator: Any) -> bool:
    """Tell whether this drafter's first pass is one that is known here: eagle, eagle3, mtp, draft_model."""
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

    if is_autoregressive(speculator):
        is_plain = type(speculator).propose is TargetDependentARSpeculator.propose
        return is_plain and bool(speculator.advance_draft_positions)
    return keeps_its_own_rounds(speculator)


def has_pictures(given: dict[str, Any]) -> bool:
    """Tell whether rows of a step, by the arguments of `propose`, are embedded from pictures: they are not kept."""
    pictures = given["mm_inputs"]
    return pictures is not None and len(pictures[0]) > 0


def drafters_tables(runner: Any) -> tuple[int, tuple[int, int, int, bool]] | None:
    """Return the KV cache group of the drafter and the shape of its block tables.

    That is requests, blocks per request, tokens per block, and whether blocks are found again by later requests.
    None where its pass cannot be repeated later.

    Blocks of sliding windows are given away while their request lives, a connector sends them away as they are, and
    ranks of a context share them. LoRA's mapping is that of the step.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    config, speculator = runner.vllm_config, runner.speculator
    is_apart = config.kv_transfer_config is not None or config.lora_config is not None
    if is_apart or has_more_state(speculator) or speculator.eplb_state is not None or speculator.dcp_size > 1:
        return None
    groups = runner.kv_cache_config.kv_cache_groups
    own = [place for place, group in enumerate(groups) if speculator.draft_attn_layer_names & set(group.layer_names)]
    if len(own) != 1:
        return None
    spec = groups[own[0]].kv_cache_spec
    kinds = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)
    if not all(isinstance(kind, FullAttentionSpec) for kind in kinds):
        return None
    requests, blocks = runner.block_tables.input_block_tables[own[0]].shape
    is_reused = bool(config.cache_config.enable_prefix_caching)
    return own[0], (requests, blocks, int(runner.block_tables.block_sizes[own[0]]), is_reused)


def steps_under_way(runner: Any) -> int:
    """Return how many steps may be scheduled before the tokens of the first of them are known."""
    config = runner.vllm_config
    return int(config.parallel_config.pipeline_parallel_size) + bool(config.scheduler_config.async_scheduling)


def after_load(runner: Any, hook: Callable[[], object]) -> None:
    """Call `hook` once the drafter is loaded, where what it allocates counts as the model's memory."""
    speculator = runner.speculator
    inherited = speculator.load_model

    def load_model(*args: Any, **kwargs: Any) -> None:
        inherited(*args, **kwargs)
        hook()

    speculator.load_model = load_model


class LaterPass:
    """What a speculator's first pass reads, kept for so many rows, and the pass over them."""

    def __init__(self, runner: Any, room: int) -> None:
        import torch

        speculator = runner.speculator
        self._runner, self._speculator = runner, speculator
        self._reads_states = is_autoregressive(speculator)
        self._tokens = torch.zeros(room, dtype=torch.int32, device=speculator.device)
        self._states: Tensor | None = None
        if self._reads_states:
            shape = room, self._width()
            self._states = torch.zeros(shape, dtype=speculator.dtype, device=speculator.device)

    def _width(self) -> int:
        if not self._runner.use_aux_hidden_state_outputs:
            return int(self._speculator.hidden_size)
        from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

        named = get_eagle3_aux_layers_from_config(self._speculator.speculative_config)
        layers = named or self._runner.model.get_eagle3_default_aux_hidden_state_layers()
        return len(layers) * int(self._runner.model_config.get_hidden_size())

    def fits(self, given: dict[str, Any]) -> bool:
        """Tell whether the states of a step are of the width that is kept."""
        read = given["aux_hidden_states"] or [given["last_hidden_states"]]
        return self._states is None or sum(each.shape[-1] for each in read) == self._states.shape[-1]

    def keep(self, at: int, batch: Any, given: dict[str, Any]) -> bool:
        """Keep what the pass would have read in a step, from this place on."""
        if self._states is None:
            self._tokens[at : at + batch.num_tokens] = batch.input_ids[: batch.num_tokens]
        else:
            self._keep_tokens(at, batch, given)
            self._keep_states(self._states[at : at + batch.num_tokens], given)
        return True

    def _keep_tokens(self, at: int, batch: Any, given: dict[str, Any]) -> None:
        """Keep the token behind each row's own."""
        from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import prepare_prefill_inputs

        speculator = self._speculator
        prepare_prefill_inputs(
            speculator.last_token_indices, speculator.current_draft_step, speculator.input_buffers, batch,
            given["num_sampled"], given["num_rejected"], given["last_sampled"], given["next_prefill_tokens"],
            speculator.max_num_reqs,
        )  # fmt: skip
        self._tokens[at : at + batch.num_tokens] = speculator.input_buffers.input_ids[: batch.num_tokens]

    def _keep_states(self, into: Tensor, given: dict[str, Any]) -> None:
        import torch

        if given["aux_hidden_states"]:
            torch.cat([each[: len(into)] for each in given["aux_hidden_states"]], dim=-1, out=into)
        else:
            into.copy_(given["last_hidden_states"][: len(into)])

    def prepared(self, group: int, missed: Missed) -> Callable[[], bool]:
        """Put the inputs of a pass where the model reads them; return what runs it."""
        speculator, rows = self._speculator, len(missed.places)
        index, positions, slots = (self._moved(each) for each in (missed.places, missed.positions, missed.slots))
        metadata = self._metadata(group, missed, positions, slots)
        layers = dict.fromkeys(speculator.draft_attn_layer_names, slots)
        inputs: tuple[Any, ...] = (self._tokens[index], positions)
        if self._states is not None:
            states = self._states[index]
            speculator.input_buffers.input_ids[:rows], speculator.input_buffers.positions[:rows] = inputs
            speculator.hidden_states[:rows] = self._combined(states)
            inputs = (rows,)
        return partial(self._run, *inputs, metadata, layers, None)

    def _run(self, *inputs: Any) -> bool:
        self._speculator._run_model(*inputs)
        return True

    def _combined(self, states: Tensor) -> Tensor:
        if not self._runner.use_aux_hidden_state_outputs:
            return states
        combined: Tensor = self._speculator.model.combine_hidden_states(states)
        return combined

    def _metadata(self, group: int, missed: Missed, positions: Tensor, slots: Tensor) -> dict[str, Any]:
        """Build attention over the rows; by the drafter's builders: what the target's built is still in use."""
        import torch
        from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

        lengths, sequences = torch.from_numpy(missed.lengths), len(missed.lengths)
        nothing: list[Any] = [None] * len(self._runner.kv_cache_config.kv_cache_groups)
        of_groups: Any = [*nothing[:group], slots, *nothing[group + 1 :]]
        built: dict[str, Any] = build_attn_metadata(
            attn_groups=self._speculator.attn_groups,
            num_reqs=sequences,
            num_tokens=len(missed.places),
            query_start_loc_gpu=self._moved(missed.starts),
            query_start_loc_cpu=torch.from_numpy(missed.starts),
            max_query_len=int((missed.starts[1:] - missed.starts[:-1]).max()),
            seq_lens=self._moved(missed.lengths),
            max_seq_len=int(missed.lengths.max()),
            block_tables=[*nothing[:group], self._table(group, missed), *nothing[group + 1 :]],
            slot_mappings=of_groups,
            kv_cache_config=self._runner.kv_cache_config,
            seq_lens_cpu_upper_bound=lengths,
            positions=positions,
            is_prefilling=torch.ones(sequences, dtype=torch.bool),
        )
        return built

    def _table(self, group: int, missed: Missed) -> Tensor:
        """Return block tables as wide as vLLM's own, which kernels expect."""
        import torch

        rows, used = missed.blocks.shape
        width = self._runner.block_tables.input_block_tables[group].shape[1]
        table = torch.zeros(rows, width, dtype=torch.int32, device=self._speculator.device)
        table[:, :used] = self._moved(missed.blocks)
        return table

    def _moved(self, array: NDArray[np.generic]) -> Tensor:
        """Return an array on the device without waiting for it."""
        from vllm.utils.torch_utils import async_tensor_h2d

        moved: Tensor = async_tensor_h2d(array, device=self._speculator.device)
        return moved
