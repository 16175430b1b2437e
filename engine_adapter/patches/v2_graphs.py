"""Private names of the CUDA graph managers of vLLM's V2 runner: what is captured, and which batch replays it.

Called by runner/v2_graphs.py between the managers' making and the first capture. A manager is made whole before it
takes the place of vLLM's own. Imports of vLLM are lazy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .speculators.rounds import is_autoregressive


def unsupported_backend(runner: Any) -> str | None:
    """Name an attention backend, of target or drafter, whose full graphs cannot replay mixed lengths; None: all can."""
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend

    found = get_varlen_cudagraph_unsupported_backend(runner.attn_groups, runner.vllm_config, runner.decode_query_len)
    if found is not None:
        return str(found[0])
    support, name = runner.model_state.get_additional_cg_support()
    return None if support is AttentionCGSupport.ALWAYS else str(name)


def least(value: int) -> int:
    """Return the smallest value that a rank of this engine has: ranks that replay different graphs would hang."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return value
    import torch

    said = torch.tensor([value])
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(said)


class VarlenManagers:
    """Managers whose decode graphs take 1 to K+1 tokens of each request: the target's, and its drafter's first pass.

    An autoregressive drafter's first pass reads the attention metadata that was built for the target's graph, so
    both must be of one shape, and change together.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._target = _varlen(runner.cudagraph_manager)
        self._first_pass = None
        if is_autoregressive(runner.speculator):
            self._first_pass = _varlen(runner.speculator.prefill_cudagraph_manager, self._target)
            if self._first_pass.decode_query_len != self._target.decode_query_len:
                raise ValueError("target and drafter count the tokens of a decode differently")

    def install(self) -> None:
        """Put them in the place of vLLM's own."""
        self._runner.cudagraph_manager = self._target
        if self._first_pass is not None:
            self._runner.speculator.prefill_cudagraph_manager = self._first_pass


class _Varlen:
    """In front of a manager of vLLM's: says how long the batch's longest request is where vLLM does not say it."""

    leader: Any = None  # manager of the pass whose metadata this one's graphs read
    longest: int | None = None  # tokens of the longest request of the last batch; None: with a prompt, or followed

    def dispatch(
        self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, num_active_loras: int,
        max_query_len: int | None = None, num_ubatches: int = 1,
    ) -> Any:  # fmt: skip
        """Choose a graph; a follower finds the leader's shape, since both capture the same sizes."""
        if self.leader is not None:
            max_query_len, self.leader.longest = self.leader.longest, None
        elif max_query_len is None:  # a prompt: its last token alone may run as a decode, in a uniform batch
            max_query_len = uniform_token_count
        self.longest = max_query_len
        return super().dispatch(  # type: ignore[misc]
            num_reqs, num_tokens, uniform_token_count, num_active_loras, max_query_len, num_ubatches
        )


def _varlen(manager: Any, leader: Any = None) -> Any:
    kind = type(f"Varlen{type(manager).__name__}", (_Varlen, type(manager)), {})
    made: Any = kind(
        manager.vllm_config, manager.device, manager.cudagraph_mode, manager.decode_query_len,
        lora_capture_cases=manager.lora_capture_cases, varlen_decode=True,
    )  # fmt: skip
    made.leader = leader
    return made


def has_fused_rounds(speculator: Any) -> bool:
    """Tell whether this drafter's rounds behind the first are captured together, as one graph."""
    return (
        is_autoregressive(speculator)
        and bool(speculator.supports_decode_metadata_update)
        and speculator.decode_cudagraph_manager.needs_capture()
    )


def capture_lengths(speculator: Any, lengths: Sequence[int]) -> None:
    """Let the fused rounds be captured once for each of these draft lengths, ascending; others replay the next one.

    vLLM does the same for the lengths of a table, which cannot hold more than it has batch sizes.
    """
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorBatchDescriptor

    manager = speculator.decode_cudagraph_manager
    descs = {
        mode: [
            SpeculatorBatchDescriptor(**vars(desc), num_speculative_tokens=length)
            for desc in each
            for length in sorted(lengths, reverse=True)
        ]
        for mode, each in manager._capture_descs.items()
    }
    manager.__class__ = type(f"PerLength{type(manager).__name__}", (_PerLength, type(manager)), {})
    manager._capture_descs, manager.lengths = descs, tuple(lengths)


class _PerLength:
    """In front of vLLM's manager of the drafter's rounds: descriptors name their length from the start."""

    lengths: tuple[int, ...] = ()

    def capture(self, *args: Any, specialize_spec_tokens: bool = False, **kwargs: Any) -> None:
        """Capture the graphs, by no table."""
        super().capture(*args, **kwargs)  # type: ignore[misc]

    def specialize_spec_tokens(self, desc: Any, num_speculative_tokens: int) -> Any:
        """Return the graph of a draft length, or of the next longer one."""
        length = next((each for each in self.lengths if each >= num_speculative_tokens), num_speculative_tokens)
        return super().specialize_spec_tokens(desc, length)  # type: ignore[misc]
