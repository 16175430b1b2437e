"""Private names of the speculators of vLLM's V2 runner: draft rounds, and what is known of each drafted token.

Imports of vLLM are lazy. Nothing here decides anything; drafting/ragged_v2.py and drafting/late_confidences.py do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Drafts all rounds behind the first, of so many requests, with bounds of their lengths, up to so many tokens each;
# False: vLLM shall do it.
Decode = Callable[[int, "Tensor", int], bool]


def is_autoregressive(speculator: Any) -> bool:
    """Tell whether this drafter reads the target's states and drafts round by round: eagle, eagle3, mtp."""
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

    return isinstance(speculator, TargetDependentARSpeculator)


def keeps_its_own_rounds(speculator: Any) -> bool:
    """Tell whether this is vLLM's draft model, which runs all its rounds whatever is asked (0.32)."""
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    return isinstance(speculator, StandaloneARSpeculator)


def bounded_rounds(speculator: Any, propose: Callable[[], Tensor], rounds: int) -> Tensor:
    """Let a draft model run no more than so many rounds; its first pass always runs and keeps its KV cache in step.

    :returns: (requests, most rounds) drafted tokens; columns behind `rounds` hold those of earlier steps
    """
    most = speculator.num_speculative_steps
    speculator.num_speculative_steps = max(rounds, 1)
    try:
        drafts = propose()
    finally:
        speculator.num_speculative_steps = most
    told: Tensor = speculator.draft_tokens[: drafts.shape[0]]
    return told


def around_decode(speculator: Any, decode: Decode) -> bool:
    """Route the rounds behind the first through `decode`; False for a speculator without rounds that can be cut."""
    if not is_autoregressive(speculator) or not speculator.advance_draft_positions:
        return False  # a drafter that writes no KV of its own is left alone
    inherited = speculator._multi_step_decode

    def multi_step(
        requests: int, skip_attn: bool, desc: Any, across_dp: Any, upper_bound: Tensor, longest: int
    ) -> None:
        if skip_attn or has_more_state(speculator) or not decode(requests, upper_bound, longest):
            inherited(requests, skip_attn, desc, across_dp, upper_bound, longest)

    speculator._multi_step_decode = multi_step
    return True


def cuts_rounds(speculator: Any) -> bool:
    """Tell whether vLLM, now that attention is set up, comes by `around_decode` in the rounds of this speculator."""
    return (
        is_autoregressive(speculator)
        and bool(speculator.advance_draft_positions)
        and not speculator.supports_decode_metadata_update
        and not has_more_state(speculator)
    )


def has_peers() -> bool:
    """Tell whether other ranks run the same rounds at the same time."""
    from vllm.distributed.parallel_state import get_tp_group

    return bool(get_tp_group().world_size > 1)


@cache
def masks_freed_blocks() -> bool:
    """Tell whether gathering block tables leaves out blocks that were freed (0.33)."""
    from vllm.v1.worker.gpu.block_table import BlockTables

    return "num_computed_tokens" in signature(BlockTables.gather_block_tables).parameters


def has_more_state(speculator: Any) -> bool:
    """Tell whether a round has state by batch row that `DecodeRounds` does not move."""
    return (
        speculator.pcp_manager is not None
        or speculator.draft_watermarker is not None
        or bool(getattr(speculator, "share_mtp_topk_indices", False))
    )


class DecodeRounds:
    """The rounds behind the first of an autoregressive speculator, over a batch that may shrink.

    The state of a round is six buffers indexed by batch row. They are changed in place, since captured graphs read
    them where they are. What a round draws is collected by row of the whole batch.
    """

    def __init__(self, runner: Any, requests: int, upper_bound: Tensor, longest: int) -> None:
        self.requests, self.longest = requests, longest
        self._speculator, self._upper_bound = runner.speculator, upper_bound[:requests]
        self._computed = runner.req_states.num_computed_tokens.gpu
        self._left = requests
        buffers = self._speculator.input_buffers
        self._moved = (
            buffers.input_ids, buffers.positions, buffers.seq_lens, self._speculator.hidden_states,
            self._speculator.idx_mapping, self._speculator.sample_src_positions,
        )  # fmt: skip
        # How everything was, and what the first pass drew.
        speculator = self._speculator
        self._before = [tensor[:requests].clone() for tensor in self._moved]
        self._starts = speculator.input_buffers.query_start_loc[: requests + 1].clone()
        # What a row does not draft is its first token again: vLLM leaves -1 there, which nothing may embed.
        self._drafts = speculator.draft_tokens[:requests, :1].expand(-1, speculator.num_speculative_steps).clone()
        self._sure = speculator.draft_token_confidence_probs[:requests].clone()

    def shrinks_to(self, rows: int) -> bool:
        """Tell whether a round of so few rows is a smaller one: graphs come in sizes."""
        return bool(self._dispatched(rows).num_tokens < self._dispatched(self._left).num_tokens)

    def _dispatched(self, rows: int) -> Any:
        from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp

        graphs = self._speculator.decode_cudagraph_manager
        return dispatch_cg_and_sync_dp(
            graphs, rows, rows, uniform_token_count=1, dp_size=1, dp_rank=0, need_eager=graphs is None
        )[0]

    def keep(self, places: list[int]) -> None:
        """Go on with the rows at these places of the batch only, in this order."""
        left = len(places)
        index = on_device(places, self._speculator.device)
        for tensor in self._moved:
            tensor[:left] = tensor[index]
        self._upper_bound = self._upper_bound[places]
        self._pad(left)

    def _pad(self, left: int) -> None:
        speculator, buffers = self._speculator, self._speculator.input_buffers
        self._left = left
        speculator.idx_mapping[left:].fill_(-1)
        buffers.seq_lens[left:].fill_(0)
        buffers.query_start_loc[left + 1 :].fill_(left)
        masked = {"num_computed_tokens": self._computed} if masks_freed_blocks() else {}
        slots = speculator.idx_mapping[:left]
        speculator.block_tables.gather_block_tables(slots, num_reqs_padded=self.requests, **masked)

    def run(self, step: int, rows: list[int]) -> None:
        """Draft the token of one round; `rows` says whose it is, by row of the whole batch."""
        from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

        speculator, left, buffers = self._speculator, self._left, self._speculator.input_buffers
        desc = self._dispatched(left)
        slots = speculator.block_tables.compute_slot_mappings(
            speculator.idx_mapping[:left], buffers.query_start_loc[: left + 1], buffers.positions[:left],
            desc.num_tokens,
        )  # fmt: skip
        metadata = speculator._build_uniform_attn_metadata(
            num_reqs=left, batch_desc=desc, num_query_per_req=1, seq_lens_cpu_upper_bound=self._upper_bound, step=step
        )
        speculator.current_draft_step.fill_(step)
        if desc.cg_mode.name == "FULL":
            speculator.decode_cudagraph_manager.run_fullgraph(desc)
        else:
            layers = build_slot_mappings_by_layer(slots, speculator.kv_cache_config)
            speculator._generate_draft(
                left, desc.num_tokens, metadata, layers, num_tokens_across_dp=None,
                cudagraph_runtime_mode=desc.cg_mode, num_speculative_steps=self.longest,
            )  # fmt: skip
        index = on_device(rows, speculator.device)
        self._drafts[index, step] = speculator.draft_tokens[:left, step]
        self._sure[index, step] = speculator.draft_token_confidence_probs[:left, step]

    def hand_over(self) -> None:
        """Put all drafted tokens where vLLM reads them."""
        speculator = self._speculator
        speculator.draft_tokens[: self.requests] = self._drafts
        speculator.draft_token_confidence_probs[: self.requests] = self._sure

    def restore(self) -> None:
        """Put everything back as it was before the first of these rounds."""
        for tensor, before in zip(self._moved, self._before, strict=True):
            tensor[: self.requests] = before
        self._pad(self.requests)
        self._speculator.input_buffers.query_start_loc[: self.requests + 1] = self._starts
        self._speculator.draft_tokens[: self.requests, 0] = self._drafts[:, 0]


def on_device(values: list[Any], device: Any, dtype: str = "int64") -> Tensor:
    """Return numbers on a device without waiting for it."""
    import torch
    from vllm.utils.torch_utils import async_tensor_h2d

    moved: Tensor = async_tensor_h2d(values, device=device, dtype=getattr(torch, dtype))
    return moved


def watch_logits(speculator: Any, note: Callable[[Tensor, Tensor, Tensor], None]) -> bool:
    """Call `note(logits, request slots, step)` with each round's logits, also while graphs are captured.

    It takes the place of vLLM's estimator of acceptance, which goes on behind it. False where no logits are there.
    """
    if not hasattr(speculator, "acceptance_estimator") or speculator.use_local_argmax_reduction:
        return False
    load_model = speculator.load_model

    def load(*args: Any, **kwargs: Any) -> None:
        load_model(*args, **kwargs)
        watched = speculator.acceptance_estimator
        if not isinstance(watched, _Watched):
            watched = speculator.acceptance_estimator = _Watched(watched)
        if note not in watched.notes:  # weights may be loaded again
            watched.notes.append(note)

    speculator.load_model = load
    return True


class _Watched:
    """vLLM's estimator of acceptance, if there is one, behind looks at the logits (0.32 speculator.py:473)."""

    def __init__(self, inner: Any) -> None:
        self.notes: list[Callable[[Tensor, Tensor, Tensor], None]] = []
        self._inner = inner

    def predict(self, logits: Tensor, slots: Tensor, step: Tensor, *rest: Any) -> None:
        for note in self.notes:
            note(logits, slots, step)
        if self._inner is not None:
            self._inner.predict(logits, slots, step, *rest)

    def step(self, *verified: Any) -> None:
        if self._inner is not None:
            self._inner.step(*verified)
