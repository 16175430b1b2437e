"""What the scheduler's part of stages reads of vLLM's scheduler and its output, and the one thing it changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV cache of a rank."""

    layers: int  # of all that the rank has built
    blocks: int
    block_tokens: int
    block_bytes: int  # of one layer

    @classmethod
    def of(cls, kv_cache_config: Any) -> KvShape:
        """Return the shape of a cache with one group of layers; ValueError for any other."""
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError(f"{len(kv_cache_config.kv_cache_groups)} KV cache groups; expected one for all layers")
        (group,) = kv_cache_config.kv_cache_groups
        spec = group.kv_cache_spec
        return cls(len(group.layer_names), kv_cache_config.num_blocks, spec.block_size, spec.page_size_bytes)


def blocks_of(scheduler: Any, request_id: str) -> list[int]:
    """Return the blocks of a request, in the order of its tokens."""
    (blocks,) = scheduler.kv_cache_manager.get_block_ids(request_id)
    return list(blocks)


def held_blocks(scheduler: Any) -> list[list[int]]:
    """Return the blocks of each request that has some; one that waits for its client to go on keeps them, too."""
    found = (blocks_of(scheduler, request_id) for request_id in scheduler.requests)
    return [blocks for blocks in found if blocks]


def computed_tokens(output: Any) -> dict[str, int]:
    """Return how many tokens each request of a step had before it."""
    found = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    return found | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


def copied_blocks(output: Any) -> list[tuple[int, int]]:
    """Return (source, target) of the blocks that every rank copies at the beginning of a step."""
    return [(copy[0], copy[1]) for copy in output.kv_cache_block_copies or ()]


@contextmanager
def thin_chunks(scheduler: Any, is_thin: bool) -> Iterator[None]:
    """Let prompts go on by one token only, for the steps that are scheduled in the block."""
    if not is_thin:
        yield
        return
    config, requests = scheduler.scheduler_config, sum(scheduler.get_request_counts())
    threshold, adaptive = config.long_prefill_token_threshold, scheduler.adaptive_long_prefill_threshold
    budget = scheduler.max_num_scheduled_tokens
    config.long_prefill_token_threshold, scheduler.adaptive_long_prefill_threshold = 1, False
    # For a request that is alone the threshold does not hold (0.32 scheduler.py:645), the budget does.
    scheduler.max_num_scheduled_tokens = min(budget, max(1, requests) * (1 + scheduler.num_spec_tokens))
    try:
        yield
    finally:
        config.long_prefill_token_threshold, scheduler.adaptive_long_prefill_threshold = threshold, adaptive
        scheduler.max_num_scheduled_tokens = budget


def one_batch_at_a_time(config: Any) -> None:
    """Let the engine wait for each step before it schedules the next one.

    With several in flight, vLLM 0.32 takes the drafts of the step just scheduled before it has digested the one before
    (core.py:1611), and rank 0 fails at the first draft. The engine core asks after it has made its scheduler.
    """
    owner = type(config)
    inherited = owner.max_concurrent_batches.fget
    owner.max_concurrent_batches = property(lambda self: 1 if self is config else inherited(self))
