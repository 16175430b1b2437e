"""The only place that touches vLLM's private worker-side names (V1 runner, drafters, CPU kernels); all are in NAMES.

Known for vLLM 0.32 and 0.33. Hook classes translate private methods into the public hooks of FASER's mixins, the
functions below them reach what a drafter keeps to itself. Nothing here decides anything. Imports of vLLM are lazy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(f"vllm.{__name__}")  # below "vllm", whose handler shows the operator INFO lines too

_RUNNER: Final = "vllm.v1.worker.gpu_model_runner"
_BASE: Final = "vllm.v1.spec_decode.llm_base_proposer"
_PROPOSER: Final = "SpecDecodeBaseProposer"
_GROUPS: Final = "vllm.v1.worker.utils"
_LLAMA: Final = "vllm.model_executor.models.llama"
_QWEN2: Final = "vllm.model_executor.models.qwen2"

# (module, class or "" for the module itself, attribute, parameters after self; None for what is not a function)
WORKER_NAMES: Final[tuple[tuple[str, str, str, tuple[str, ...] | None], ...]] = (
    ("vllm.v1.worker.cpu_worker", "", "CPUModelRunner", None),
    ("vllm.v1.worker.cpu_worker", "CPUWorker", "init_device", ()),
    ("vllm.v1.worker.gpu_worker", "Worker", "_make_model_runner", ()),
    (_RUNNER, "", "GPUModelRunner", None),
    (_RUNNER, "GPUModelRunner", "_sample", ("logits", "spec_decode_metadata")),
    (
        _RUNNER,
        "GPUModelRunner",
        "_model_forward",
        ("input_ids", "positions", "intermediate_tensors", "inputs_embeds", "model_kwargs"),
    ),
    (_RUNNER, "GPUModelRunner", "execute_model", ("scheduler_output", "intermediate_tensors")),
    (_RUNNER, "GPUModelRunner", "sample_tokens", ("grammar_output",)),
    (
        _RUNNER,
        "GPUModelRunner",
        "initialize_kv_cache",
        ("kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
    ),
    (_RUNNER, "GPUModelRunner", "take_draft_token_ids", ()),
    (
        _RUNNER,
        "GPUModelRunner",
        "propose_draft_token_ids",
        (
            "scheduler_output",
            "sampled_token_ids",
            "sampling_metadata",
            "hidden_states",
            "sample_hidden_states",
            "aux_hidden_states",
            "spec_decode_metadata",
            "common_attn_metadata",
            "slot_mappings",
        ),
    ),
    (
        "vllm.v1.spec_decode.ngram_proposer",
        "NgramProposer",
        "propose",
        ("num_speculative_tokens", "sampled_token_ids", "num_tokens_no_spec", "token_ids_cpu", "slot_mappings"),
    ),
    (
        _BASE,
        _PROPOSER,
        "propose",
        (
            "num_speculative_tokens",
            "target_token_ids",
            "target_positions",
            "target_hidden_states",
            "next_token_ids",
            "token_indices_to_sample",
            "common_attn_metadata",
            "sampling_metadata",
            "mm_embed_inputs",
            "num_rejected_tokens_gpu",
            "slot_mappings",
        ),
    ),
    (
        _BASE,
        _PROPOSER,
        "set_inputs_first_pass",
        (
            "target_token_ids",
            "next_token_ids",
            "target_positions",
            "target_hidden_states",
            "token_indices_to_sample",
            "cad",
            "num_rejected_tokens_gpu",
        ),
    ),
    (
        _BASE,
        _PROPOSER,
        "build_per_group_and_layer_attn_metadata",
        ("common_attn_metadata", "draft_index"),
    ),
    (_BASE, _PROPOSER, "model_returns_tuple", ()),
    (_BASE, _PROPOSER, "take_last_draft_probs", ()),
    (_BASE, _PROPOSER, "_greedy_sample", ("hidden_states",)),
    (_BASE, _PROPOSER, "_sample_draft_tokens", ("hidden_states", "sampling_metadata")),
    (_BASE, _PROPOSER, "_sample_from_logits", ("logits", "sampling_metadata")),
    (_BASE, _PROPOSER, "_determine_batch_execution_and_padding", ("num_tokens", "use_cudagraphs")),
    (
        _BASE,
        _PROPOSER,
        "_update_positions_dependent_metadata",
        ("positions", "common_attn_metadata", "batch_size", "input_batch_size", "block_size"),
    ),
    (_BASE, _PROPOSER, "_get_slot_mapping", ("num_tokens", "slot_mapping")),
    (_BASE, _PROPOSER, "_get_positions", ("num_tokens",)),
    ("vllm.forward_context", "", "set_forward_context", None),
    ("vllm.forward_context", "", "get_forward_context", None),  # from here on: pruned verification
    (_RUNNER, "GPUModelRunner", "_prepare_inputs", ("scheduler_output", "num_scheduled_tokens")),
    (
        _RUNNER,
        "GPUModelRunner",
        "_build_attention_metadata",
        (
            "num_tokens",
            "num_reqs",
            "max_query_len",
            "num_tokens_padded",
            "num_reqs_padded",
            "ubatch_slices",
            "logits_indices",
            "max_num_sampled_tokens",
            "use_spec_decode",
            "for_cudagraph_capture",
            "num_scheduled_tokens",
            "slot_mappings",
        ),
    ),
    (
        _GROUPS,
        "AttentionGroup",
        "build_metadata",
        ("common_attn_metadata", "ubatch_idx", "common_prefix_len", "kwargs"),
    ),
    (_LLAMA, "LlamaDecoderLayer", "forward", ("positions", "hidden_states", "residual")),
    (_QWEN2, "Qwen2DecoderLayer", "forward", ("positions", "hidden_states", "residual")),
    (
        "vllm.v1.sample.rejection_sampler",
        "",
        "expand_batch_to_tokens",
        ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
    ),
)

# Instance attributes, which no signature shows: (module, class, attribute).
WORKER_ATTRIBUTES: Final = (
    (_RUNNER, "AsyncGPUModelRunnerOutput", "_model_runner_output"),
    (_BASE, _PROPOSER, "_last_draft_probs"),
    (_RUNNER, "GPUModelRunner", "execute_model_state"),
    (_RUNNER, "GPUModelRunner", "attn_groups"),
)


class RunnerHooks:
    """Mixin in front of vLLM's V1 runners: the two private phases, named."""

    def around_verify(self, verify: Callable[[], Any]) -> Any:
        """Run the target's forward pass."""
        return verify()

    def around_sample(self, sample: Callable[[], Any]) -> Any:
        """Run the (rejection) sampler."""
        return sample()

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        inherited = super()._model_forward  # type: ignore[misc]
        return self.around_verify(lambda: inherited(*args, **kwargs))

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        inherited = super()._sample  # type: ignore[misc]
        # A step without a single draft needs no rejection sampler, which costs more than the plain one and, on the CPU,
        # raises on a request with top_k (0.32 topk_topp_sampler.py:529, max() of no rows).
        is_plain = spec_decode_metadata is not None and not any(spec_decode_metadata.num_draft_tokens)
        verified = None if is_plain else spec_decode_metadata
        return self.around_sample(lambda: inherited(logits, verified))


class DrafterHooks:
    """Mixin in front of vLLM's model drafters: the two ways to choose a draft token, named."""

    def greedy_tokens(self, hidden: Tensor, inherited: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the most likely token of each row of `hidden` (rows, hidden size)."""
        return inherited(hidden)

    def _greedy_sample(self, hidden_states: Tensor) -> Tensor:
        return self.greedy_tokens(hidden_states, super()._greedy_sample)  # type: ignore[misc]

    def before_draw(self, logits: Tensor) -> None:
        """Called before tokens are drawn at random from `logits` (rows, vocabulary), which drawing overwrites."""

    def _sample_from_logits(self, logits: Tensor, sampling_metadata: Any) -> Any:
        self.before_draw(logits)
        return super()._sample_from_logits(logits, sampling_metadata)  # type: ignore[misc]


class GpuWorkerHooks:
    """Mixin in front of vLLM's GPU worker: the place where it chooses its runner, named."""

    def make_runner(self, make: Callable[[], Any]) -> Any:
        """Return the worker's model runner."""
        return make()

    def _make_model_runner(self) -> Any:
        return self.make_runner(super()._make_model_runner)  # type: ignore[misc]


@contextmanager
def substituted(module: str, name: str, change: Callable[[type], type]) -> Iterator[None]:
    """Let vLLM find `change(class)` under a module-global class name, for the length of the block."""
    home = import_module(module)
    original = getattr(home, name)
    setattr(home, name, change(original))
    try:
        yield
    finally:
        setattr(home, name, original)


def inner_output(output: Any) -> Any:
    """Return the ModelRunnerOutput that will reach the scheduler, also out of an asynchronous wrapper."""
    return getattr(output, "_model_runner_output", output)


def pad_batch(drafter: Any, size: int) -> tuple[Any, int, Any]:
    """Return (graph mode, padded size, sizes across ranks) for a drafting pass over `size` rows."""
    mode, padded, across = drafter._determine_batch_execution_and_padding(size)
    return mode, padded, across


def advance_positions(drafter: Any, positions: Tensor, metadata: Any, size: int, padded: int) -> Tensor:
    """Move every row one token on: positions, KV slots and lengths in `metadata`, which is changed in place."""
    advanced: Tensor = drafter._update_positions_dependent_metadata(
        positions, metadata, size, padded, drafter.block_size
    )
    return advanced


def draft_inputs(drafter: Any, padded: int) -> dict[str, Any]:
    """Return the model's arguments from the drafter's own buffers."""
    inputs = {
        "input_ids": drafter.input_ids[:padded],
        "positions": drafter._get_positions(padded),
        "inputs_embeds": None,
    }
    if drafter.pass_hidden_states_to_model:
        inputs["hidden_states"] = drafter.hidden_states[:padded]
    return inputs


def draft_context(drafter: Any, metadata: Any, mode: Any, padded: int, across: Any) -> Any:
    """Return vLLM's forward context for one drafting pass, as a context manager."""
    from vllm.forward_context import set_forward_context

    return set_forward_context(
        metadata,
        drafter.vllm_config,
        num_tokens=padded,
        num_tokens_across_dp=across,
        cudagraph_runtime_mode=mode,
        slot_mapping=drafter._get_slot_mapping(padded),
    )


def draft_logits(model: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return logits (rows, draft vocabulary) and what to add to an index to get its token id, None for nothing.

    An EAGLE-3 head's own `compute_logits` spreads them over the target's vocabulary, which costs more than the head
    itself where the draft vocabulary is small (0.32 llama_eagle3.py:373, the same in its siblings).
    """
    offsets = getattr(model, "draft_id_to_target_id", None)
    if offsets is None or not all(hasattr(model, name) for name in ("logits_processor", "lm_head")):
        return model.compute_logits(hidden), None
    return model.logits_processor(model.lm_head, hidden), offsets


def sample_draft(drafter: Any, hidden: Tensor, sampling: Any) -> tuple[Tensor, Tensor | None]:
    """Return draft tokens (rows,) and, if they were drawn at random, their distributions (rows, vocabulary)."""
    tokens, probabilities = drafter._sample_draft_tokens(hidden, sampling)
    return tokens, probabilities


def keep_draft_probabilities(drafter: Any, probabilities: Tensor | None) -> None:
    """Leave the drafts' distributions (rows, draft length, vocabulary) where the runner fetches them."""
    drafter._last_draft_probs = probabilities


def shared_cache(runner: Any) -> tuple[int, int] | None:
    """Return (blocks, tokens per block) of the KV cache if target and drafter share one group that keeps every token.

    None too where KV may arrive from elsewhere, or where block tables count in other blocks than the cache.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    cache = runner.kv_cache_config
    if len(cache.kv_cache_groups) != 1 or runner.vllm_config.kv_transfer_config is not None:
        return None
    spec = cache.kv_cache_groups[0].kv_cache_spec
    layers = getattr(spec, "kv_cache_specs", {"all": spec}).values()
    table, tokens = runner.input_batch.block_table[0], spec.block_size
    is_plain = all(isinstance(layer, FullAttentionSpec) and layer.block_size == tokens for layer in layers)
    if not is_plain or table.block_size != tokens or runner.drafter.block_size != tokens:
        return None
    return cache.num_blocks, tokens


def is_expand_broken() -> bool:
    """Tell whether this vLLM loses per-request sampling parameters when it expands them to tokens.

    vLLM 0.32 on a CPU without Triton lets its kernel write into a converted copy (utils/cpu_triton_utils.py,
    `_expand_kernel_impl`), so that temperature, top-k and top-p of speculating requests are uninitialised memory.
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    for dtype, values in ((torch.float32, [0.75, 0.5]), (torch.int32, [7, 3])):
        given = torch.tensor(values, dtype=dtype)
        seen = rejection_sampler.expand_batch_to_tokens(given, torch.tensor([4, 6], dtype=torch.int32), 6)
        if seen.tolist() != [values[0]] * 4 + [values[1]] * 2:
            return True
    return False


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat each request's value once per token; same contract as vLLM's function of this name."""
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(replaced, counts, output_size=num_tokens)


def mend_expand() -> bool:
    """Replace vLLM's broken function by a right one; False if there was nothing to mend."""
    from vllm.v1.sample import rejection_sampler

    if not is_expand_broken():
        return False
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    logger.info("FASER mended vLLM's expansion of sampling parameters on the CPU (wrong at temperature > 0)")
    return True


# --- pruned verification (pruning.py) ---

# Decoders whose forward pass is layer(positions, hidden_states, residual) for each layer, then the norm; read in
# vLLM 0.32. A class that only inherits from them may do more, so the exact names are asked for.
PRUNABLE_DECODERS: Final = frozenset(
    {
        ("vllm.model_executor.models.llama", "LlamaModel"),
        ("vllm.model_executor.models.mistral", "MistralModel"),
        ("vllm.model_executor.models.qwen2", "Qwen2Model"),
        ("vllm.model_executor.models.qwen3", "Qwen3Model"),
    }
)


class PruningHooks:
    """Mixin in front of vLLM's V1 runners: what a step will verify, as it is prepared."""

    verified: Any = None  # SpecDecodeMetadata of the step under way, None without drafts
    common: Any = None  # its CommonAttentionMetadata

    def prune_forward(self, forward: Callable[[], Any]) -> Any:
        """Run the target's forward pass."""
        return forward()

    def prune_sample(self, sample: Callable[[Any, Any], Any], logits: Any, metadata: Any) -> Any:
        """Run the (rejection) sampler over `logits`."""
        return sample(logits, metadata)

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        self.verified = prepared[1]
        return prepared

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        built = super()._build_attention_metadata(*args, **kwargs)  # type: ignore[misc]
        self.common = built[1]
        return built

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        inherited = super()._model_forward  # type: ignore[misc]
        return self.prune_forward(lambda: inherited(*args, **kwargs))

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        return self.prune_sample(super()._sample, logits, spec_decode_metadata)  # type: ignore[misc]


def decoder_of(model: Any) -> Any:
    """Return the decoder inside a causal language model; raise ValueError if pruning does not know it."""
    decoder = getattr(model, "model", None)
    seen = type(decoder).__module__, type(decoder).__name__
    if seen not in PRUNABLE_DECODERS:
        known = ", ".join(sorted(name for _, name in PRUNABLE_DECODERS))
        raise ValueError(f"{type(model).__name__} with {seen[1]} cannot be pruned; known are {known}")
    return decoder


def attention_layer(layer: Any) -> str:
    """Return the name under which vLLM keeps a decoder layer's attention."""
    name: str = layer.self_attn.attn.layer_name
    return name


def cut_common(common: Any, index: Tensor, removed: Any) -> Any:
    """Return a copy of CommonAttentionMetadata for the rows `index`, without the last `removed[i]` of request i.

    `seq_lens` shrink too: behind the cut nothing writes the KV slots of the rows that left, so nothing may read them.
    """
    import torch

    count = len(removed)
    gone = torch.from_numpy(removed)
    starts = common.query_start_loc_cpu[: count + 1].clone()
    starts[1:] -= gone.cumsum(0).to(starts.dtype)
    lengths = starts[1:] - starts[:-1]

    def shorter(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[:count] - gone.to(values)

    return common.replace(
        query_start_loc_cpu=starts,
        query_start_loc=starts.to(common.query_start_loc.device),
        seq_lens=shorter(common.seq_lens),
        seq_lens_cpu_upper_bound=shorter(common.seq_lens_cpu_upper_bound),
        num_actual_tokens=len(index),
        max_query_len=int(lengths.max()),
        slot_mapping=common.slot_mapping[index],
        positions=None if common.positions is None else common.positions[index],
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


def cut_attention(runner: Any, common: Any, names: set[str]) -> None:
    """Let the attention layers `names` of the forward pass under way see `common`; the others keep what they have."""
    from vllm.forward_context import get_forward_context

    context: Any = get_forward_context()
    metadata, slots = dict(context.attn_metadata), dict(context.slot_mapping)
    for groups in runner.attn_groups:
        for group in groups:
            found = names.intersection(group.layer_names)
            built = group.build_metadata(common) if found else None
            metadata.update(dict.fromkeys(found, built))
            slots.update(dict.fromkeys(found, common.slot_mapping))
    context.attn_metadata, context.slot_mapping = metadata, slots


def narrowed_logits(model: Any, rows: Tensor) -> None:
    """Let the next call of `compute_logits` work on `rows` of its input only."""
    whole = model.compute_logits

    def compute_logits(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        del model.compute_logits
        return whole(hidden[rows], *args, **kwargs)

    model.compute_logits = compute_logits


def spread_logits(runner: Any, rows: Tensor, count: int) -> None:
    """Put the logits that wait for the sampler back to their `rows` among `count`; the others are zero."""
    state = runner.execute_model_state
    whole = state.logits.new_zeros((count, state.logits.shape[1]))
    whole[rows] = state.logits
    runner.execute_model_state = state._replace(logits=whole)


def shortened_speculation(metadata: Any, tests: Any, places: Any) -> Any:
    """Return SpecDecodeMetadata as if only `tests[i]` draft tokens of request i had been scheduled.

    :param places: which of all draft tokens those are.
    """
    import torch

    def tensor(values: Any) -> Tensor:
        return torch.from_numpy(values.astype("int32")).to(metadata.cu_num_draft_tokens.device)

    ends = (tests + 1).cumsum()
    within_all = torch.ones(int(ends[-1]), dtype=torch.bool)
    within_all[ends - 1] = False
    device = metadata.target_logits_indices.device
    return type(metadata)(
        draft_token_ids=metadata.draft_token_ids[torch.from_numpy(places).to(device)],
        num_draft_tokens=tests.tolist(),
        cu_num_draft_tokens=tensor(tests.cumsum()),
        cu_num_sampled_tokens=tensor(ends),
        target_logits_indices=within_all.nonzero()[:, 0].to(metadata.target_logits_indices),
        bonus_logits_indices=tensor(ends - 1),
        logits_indices=metadata.logits_indices[: int(ends[-1])],  # of the right length; the sampler does not read it
    )


@contextmanager
def shortened_drafts(runner: Any, tests: list[int]) -> Iterator[None]:
    """Let penalties and bad words see the first `tests[i]` draft tokens of request i, within the block."""
    sampling = runner.input_batch.sampling_metadata
    whole = sampling.spec_token_ids
    if whole is not None:
        sampling.spec_token_ids = [tokens[:count] for tokens, count in zip(whole, tests, strict=False)]
    try:
        yield
    finally:
        sampling.spec_token_ids = whole


def forget_bonus(output: Any, rows: Tensor, columns: Tensor) -> None:
    """Remove the token behind the last test from the sampled tokens of `rows`."""
    output.sampled_token_ids[rows, columns] = -1


def tracks_thinking(runner: Any) -> bool:
    """Tell whether a request has a thinking budget, which counts along the scheduled drafts."""
    holder = runner.input_batch.sampling_metadata.thinking_budget_state_holder
    return holder is not None and bool(holder.has_tracked_requests())


def forget_narrowing(model: Any) -> None:
    """Undo `narrowed_logits` if a step ended before it was used."""
    model.__dict__.pop("compute_logits", None)
