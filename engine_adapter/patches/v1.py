"""Private names of vLLM's worker side: V1 runner, drafters, CPU kernels.

Hook classes translate private methods into the public hooks of FASER's mixins, the functions below them reach what a
drafter keeps to itself. Nothing here decides anything. Imports of vLLM are lazy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..operator_log import operator_log

if TYPE_CHECKING:
    from torch import Tensor

logger = operator_log(__name__)


class RunnerHooks:
    """Mixin in front of vLLM's V1 runners: the two private phases, named, and the preparation of a step."""

    speculative_config: Any

    def may_prepare_plainly(self) -> bool:
        """Tell whether a step that verifies nothing may be prepared as if there were no speculation."""
        return False

    def _prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        inherited = super()._prepare_inputs  # type: ignore[misc]
        if scheduler_output.scheduled_spec_decode_tokens or not self.may_prepare_plainly():
            return inherited(scheduler_output, *args, **kwargs)
        # vLLM works out where the drafts are that are not there (0.32 gpu_model_runner.py:2184): without a drafter it
        # leaves that out, and so does every reader of what it returns.
        configured, self.speculative_config = self.speculative_config, None
        try:
            return inherited(scheduler_output, *args, **kwargs)
        finally:
            self.speculative_config = configured

    def around_verify(self, verify: Callable[[], Any]) -> Any:
        """Run the target's forward pass."""
        return verify()

    def around_sample(self, sample: Callable[[], Any]) -> Any:
        """Run the (rejection) sampler."""
        return sample()

    def drafter_fits(self, fits: bool, metadata: Any) -> bool:
        """Tell whether the drafter runs in this step; `fits`: vLLM's word, by the longest sequence of the batch."""
        return fits

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        fits = super()._input_fits_in_drafter(common_attn_metadata)  # type: ignore[misc]
        return self.drafter_fits(fits, common_attn_metadata)

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


@dataclass(frozen=True, slots=True)
class UndraftedStep:
    """A step of the target behind which nobody drafts: what a drafter's first pass would be made of."""

    tokens: Tensor  # (rows,) the target's input, rejected drafts among them
    slots: Tensor  # (rows,) int64 where their KV went
    hidden: Tensor  # (rows, width) what the target hands to the drafter
    metadata: Any  # CommonAttentionMetadata


def undrafted_step(runner: Any, scheduled: Any, step: tuple[Any, ...]) -> UndraftedStep | None:
    """Return the step out of what vLLM gives to `propose_draft_token_ids`, None where the drafter reads other states.

    The same as vLLM gathers itself (0.32 gpu_model_runner.py:4911), without the tokens that follow. The slots of
    rejected drafts are behind the end of their requests: whatever is kept of them, the next step writes over.
    """
    import torch

    _, _, states, _, auxiliary, _, metadata, _ = step
    if hasattr(type(runner.get_model()), "get_mtp_target_hidden_states"):  # a module that lacks a name looks for long
        return None
    rows = scheduled.total_num_scheduled_tokens
    if runner.use_aux_hidden_state_outputs:
        states = torch.cat([part[:rows] for part in auxiliary], dim=-1)
    return UndraftedStep(runner.input_ids.gpu[:rows], metadata.slot_mapping[:rows].long(), states[:rows], metadata)


@dataclass(frozen=True, slots=True)
class TargetRows:
    """The target's auxiliary states of one step, and where its requests' KV is."""

    slots: Tensor  # (rows,) int64
    parts: list[Tensor]  # (rows, hidden) of each layer that an EAGLE-3 head reads
    block_table: Tensor  # (requests, blocks)


def target_rows(scheduled: Any, step: tuple[Any, ...]) -> TargetRows:
    """Return the states out of what vLLM gives to `propose_draft_token_ids`, verified drafts among them."""
    _, _, _, _, auxiliary, _, metadata, _ = step
    rows = scheduled.total_num_scheduled_tokens
    slots = metadata.slot_mapping[:rows].long()
    return TargetRows(slots, [part[:rows] for part in auxiliary], metadata.block_table_tensor)


def drafter_context(runner: Any) -> int:
    """Return the tokens of the longest sequence that the drafter takes, its drafts included."""
    context: int = runner.effective_drafter_max_model_len
    return context


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


def put_certain_drafts(runner: Any, tokens: dict[int, tuple[int, ...]]) -> None:
    """Say of these batch rows' drafts that each token was certain, where the other rows' were drawn at random."""
    probabilities = runner._draft_probs  # (requests, draft length, vocabulary); None: every draft was certain
    if probabilities is None:
        return
    rows, longest, vocabulary = probabilities.shape
    wide = probabilities.new_zeros((rows, max(longest, *map(len, tokens.values())), vocabulary))
    wide[:, :longest] = probabilities
    for row, drafted in tokens.items():
        wide[row] = 0.0
        wide[row, range(len(drafted)), list(drafted)] = 1.0
    runner._draft_probs = wide


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
