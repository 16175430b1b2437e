"""Private names of vLLM's runners, models and samplers that pruning of the verification touches.

Nothing here decides anything. Imports of vLLM are lazy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from ..arrays import Ints

    Cut = Any  # pruning/cut.py stands above this folder

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

PRUNABLE_ATTENTION: Final = frozenset({"CPU_ATTN"})  # backends whose metadata can be built anew in a forward pass
# ... and of which the device alone knows where each request's rows begin. vLLM's own word for that
# (supports_device_cpu_query_lens_mismatch) is true of FlexAttention too, which masks by the host's.
PRUNABLE_ATTENTION_V2: Final = PRUNABLE_ATTENTION | {"FLASH_ATTN", "TRITON_ATTN"}


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


def attention_refusal(runner: Any, known: frozenset[str] = PRUNABLE_ATTENTION) -> str | None:
    """Return why the target's attention cannot be cut, None if it can."""
    seen = {group.backend.get_name() for groups in runner.attn_groups for group in groups}
    if unknown := sorted(seen - known):
        return f"attention backend {', '.join(unknown)}; expected {', '.join(sorted(known))}"
    return None


def attention_layer(layer: Any) -> str:
    """Return the name under which vLLM keeps a decoder layer's attention."""
    name: str = layer.self_attn.attn.layer_name
    return name


def cut_common(common: Any, index: Tensor, cut: Cut, positions: Tensor) -> Any:
    """Return a copy of CommonAttentionMetadata for the rows `index` of a cut.

    `seq_lens` shrink too: behind the cut nothing writes the KV slots of the rows that left, so nothing may read them.

    :param positions: of the rows that stay.
    """
    import torch

    count = len(cut.drafts)
    cpu_starts, gone = torch.split(torch.from_numpy(cut.starts), [count + 1, count])
    upper = common.seq_lens_cpu_upper_bound
    # Its own `replace` builds all of it anew, one field after the other.
    short = object.__new__(type(common))
    short.__dict__.update(
        common.__dict__,
        query_start_loc_cpu=cpu_starts,
        query_start_loc=cpu_starts.to(common.query_start_loc.device),
        seq_lens=common.seq_lens[:count] - gone.to(common.seq_lens.device),
        seq_lens_cpu_upper_bound=None if upper is None else upper[:count] - gone,
        num_actual_tokens=len(index),
        max_query_len=cut.most,
        slot_mapping=common.slot_mapping.index_select(0, index),
        positions=None if common.positions is None else positions,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )
    return short


def cut_attention(runner: Any, common: Any, names: frozenset[str]) -> None:
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


def shortened_speculation(metadata: Any, cut: Cut) -> Any:
    """Return SpecDecodeMetadata as if only `cut.tests[i]` draft tokens of request i had been scheduled."""
    import torch

    count, device = len(cut.tests), metadata.cu_num_draft_tokens.device
    drafts, sampled, bonus = torch.split(torch.from_numpy(cut.ends).to(device), count)
    return type(metadata)(
        draft_token_ids=metadata.draft_token_ids.index_select(0, torch.from_numpy(cut.tested).to(device)),
        num_draft_tokens=cut.tests.tolist(),
        cu_num_draft_tokens=drafts,
        cu_num_sampled_tokens=sampled,
        bonus_logits_indices=bonus,
        target_logits_indices=torch.from_numpy(cut.targets).to(device),
        logits_indices=metadata.logits_indices[
            : len(cut.tested) + count
        ],  # of the right length; the sampler does not read it
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


# --- on the V2 runner (pruning/forward_v2.py) ---


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """What V2 has made ready for a step: its batch, and where its tokens lie in the KV cache."""

    batch: Any  # vLLM's InputBatch
    tables: Any  # block tables, one for each group of KV caches
    slots: Tensor  # (groups, rows)


class PruningHooksV2:
    """Mixin in front of vLLM's V2 runners: a step as it is prepared, and what was sampled."""

    def prune_step(self, step: PreparedStep) -> None:
        """Look at a step whose forward pass comes next."""

    def prune_sample(self, sample: Callable[[], Any], batch: Any) -> Any:
        """Run the sampler; return its output, tokens sampled and tokens rejected (requests,)."""
        return sample()

    def prepare_attn(self, input_batch: Any) -> Any:
        tables, slots = super().prepare_attn(input_batch)  # type: ignore[misc]
        self.prune_step(PreparedStep(input_batch, tables, slots))
        return tables, slots

    def sample(self, hidden_states: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        inherited = super().sample  # type: ignore[misc]
        return self.prune_sample(lambda: inherited(hidden_states, input_batch, *args, **kwargs), input_batch)


def shorter_attention(runner: Any, step: PreparedStep, groups: list[list[Any]], short: ShortBatch) -> None:
    """Let the attention layers of `groups` in the forward pass under way see the rows that stay; builds first.

    As in vLLM's adaptive verification the device knows where each request's rows begin, and the host only about.
    """
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context

    batch, rows = step.batch, len(short.rows)
    shortened = replace(
        batch, num_tokens=rows, num_tokens_after_padding=rows, positions=short.positions,
        query_start_loc=short.starts, query_start_loc_np=short.guessed_starts, seq_lens=batch.seq_lens - short.left,
        max_query_len=int(batch.num_scheduled_tokens.max()),
    )  # fmt: skip
    slots = torch.index_select(step.slots, 1, short.rows)
    built = runner.model_state.prepare_attn(
        shortened, CUDAGraphMode.NONE, step.tables, slots, groups, runner.kv_cache_config
    )
    context: Any = get_forward_context()
    metadata, by_layer = dict(context.attn_metadata), dict(context.slot_mapping)
    metadata.update(built)
    by_layer.update(dict.fromkeys(built, slots[0]))
    context.attn_metadata, context.slot_mapping = metadata, by_layer


@dataclass(frozen=True, slots=True)
class ShortBatch:
    """The rows of a step that stay."""

    rows: Tensor  # (rows,) int64 of the whole batch
    positions: Tensor  # (rows,)
    starts: Tensor  # (requests + 1,) int32 on the device
    guessed_starts: Ints  # (requests + 1,) int32 on the host, of the same sum
    left: Tensor  # (requests,) int32 rows that left


@contextmanager
def narrower_logits(model: Any, rows: Tensor) -> Iterator[None]:
    """Within the block, let `compute_logits` work on `rows` of its input; the others' logits are zero."""
    whole, outer = model.compute_logits, model.__dict__.get("compute_logits")

    def compute_logits(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        narrow = whole(hidden[rows], *args, **kwargs)
        return narrow.new_zeros((len(hidden), narrow.shape[1])).index_copy_(0, rows, narrow)

    model.compute_logits = compute_logits
    try:
        yield
    finally:
        del model.compute_logits
        if outer is not None:
            model.compute_logits = outer


def capped(sampled: tuple[Any, Tensor, Tensor], most: Tensor) -> tuple[Any, Tensor, Tensor]:
    """Return a sampler's (output, tokens sampled, tokens rejected) with at most so many tokens of each request."""
    import torch

    output, counts, rejected = sampled
    output.num_sampled = torch.minimum(counts, most.to(counts.dtype))
    output.num_rejected = rejected + (counts - output.num_sampled)
    return output, output.num_sampled, output.num_rejected


def refusal_v2(runner: Any) -> str | None:
    """Return why the V2 runner's steps cannot be cut, by what is known once its model is loaded; None if they can."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    if type(runner.rejection_sampler) is not RejectionSampler:
        return f"rejection sampler {type(runner.rejection_sampler).__name__}; expected RejectionSampler"
    if runner.use_pp or runner.pcp_manager is not None or runner.ubatch_runner is not None:
        return "a batch that is split over ranks or micro-batches"
    if runner.fast_prefill is not None:
        return "layers that share their KV cache"
    return None


def on_target_device(runner: Any) -> Callable[[NDArray[Any]], Tensor]:
    """Return what takes an array to the target's device without waiting for it."""
    from vllm.utils.torch_utils import async_tensor_h2d

    def move(array: NDArray[Any]) -> Tensor:
        moved: Tensor = async_tensor_h2d(array, device=runner.device)
        return moved

    return move
