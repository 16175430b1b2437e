"""What this engine is and can do, read once from vLLM's configuration.

Called by the scheduler mixin at engine start. Reads public configuration only and changes nothing.
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import TYPE_CHECKING, Literal

from .. import __version__
from .drafter_process.choice import chosen_drafter
from .drafting.draft_rounds import told_rounds
from .graph_lengths import graph_lengths, has_graphs
from .matching.choice import match_refusal
from .operator_log import operator_log
from .overlap.splits import can_deal_groups, chosen_splits
from .patches.versions import vllm_version
from .protocol import MAX_DRAFT_LENGTH, Hello
from .pruning.exit_file import ExitFacts, usable_exits
from .settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = operator_log(__name__)


def refusal(config: VllmConfig) -> str | None:
    """Return why this configuration cannot be steered, None if it can."""
    if config.parallel_config.data_parallel_size > 1:
        return (
            f"data_parallel_size={config.parallel_config.data_parallel_size}: ranks that draft different lengths hang; "
            "run one server per rank instead"
        )
    if getattr(config, "diffusion_config", None) is not None:
        return "diffusion models do not draft"
    rule = getattr(config.speculative_config, "rejection_sample_method", "standard")
    if rule == "block" and config.use_v2_model_runner:
        return (
            "rejection_sample_method=block: on vLLM's V2 runner sampled answers leave the target's distribution; use "
            "standard instead"
        )
    return None


def describe_engine(config: VllmConfig, settings: Settings) -> Hello:
    """Return the HELLO of this engine, without its live requests."""
    from vllm.platforms import current_platform

    scheduler, cache, parallel = config.scheduler_config, config.cache_config, config.parallel_config
    drafting, exits = config.speculative_config, _exits(config, settings)
    buffers = min(config.num_speculative_tokens, MAX_DRAFT_LENGTH)
    table = list(drafting.num_speculative_tokens_per_batch_size or ()) if drafting else []
    return Hello(
        boot_id=secrets.token_hex(8),
        pid=os.getpid(),
        host=socket.gethostname()[:128],
        adapter_version=__version__,
        vllm_version=(vllm_version() or "")[:128],
        model=str(config.model_config.model)[:512],
        device=current_platform.device_type,
        runner=_runner(config),
        is_async=bool(scheduler.async_scheduling),
        method=str(drafting.method if drafting else "none"),
        drafter=str((drafting.model if drafting else None) or "")[:512],
        k_max=min(buffers, settings.draft_max),
        default_length=min(settings.default_length, config.num_speculative_tokens),
        default_table=[(int(first), int(last), int(length)) for first, last, length in table[:64]],
        max_requests=scheduler.max_num_seqs,
        max_batched_tokens=scheduler.max_num_batched_tokens,
        kv_tokens=(cache.num_gpu_blocks or 0) * (cache.block_size or 0),
        graph_sizes=_graph_sizes(config),
        splits=_splits(config, settings),
        exit_layers=list(exits.layers) if exits else [],
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        data_parallel=parallel.data_parallel_size,
        data_parallel_rank=parallel.data_parallel_rank,
        lease_steps=settings.lease_steps,
        lease_ms=settings.lease_ms,
        roster=[],
        graph_lengths=graph_lengths(config, settings.is_varlen),
        released_prune=exits.released if exits else None,
        frontier=_frontier(config, settings),
        is_adaptive=bool(getattr(drafting, "enable_adaptive_verification", False)),
        copy_max=buffers if match_refusal(config, settings) is None else 0,
        rounds=told_rounds(config),
        rest_steps=settings.rest_steps if can_rest(config, settings) else 0,
    )


def _exits(config: VllmConfig, settings: Settings) -> ExitFacts | None:
    facts, reason = usable_exits(settings.exit_heads, config)
    if facts is not None and can_deal_groups(settings, config):
        facts, reason = None, "nothing is where requests can be dealt into two groups (FASER_PING_PONG, FASER_SPLITS)"
    if reason is not None:
        logger.warning("FASER does not prune: %s", reason)
    return facts


def _frontier(config: VllmConfig, settings: Settings) -> int:
    command, _ = chosen_drafter(settings.drafter_cores, config)  # the runner says why there is none
    return min(config.num_speculative_tokens, MAX_DRAFT_LENGTH) if command else 0


def _splits(config: VllmConfig, settings: Settings) -> list[str]:
    splits = chosen_splits(settings, config)
    for line in splits.refused:
        logger.warning("FASER offers no other split: %s", line)
    return splits.names


def can_rest(config: VllmConfig, settings: Settings) -> bool:
    """Tell whether requests can be left out of steps.

    What is decided for one step must be decided before its drafts were drawn, those that waited included: neither exit
    heads nor adaptive verification know of them. The V2 runner keeps drafts by request; V1's finds them, and under
    asynchronous scheduling the drafts themselves, by the batch of the step before, in which nobody was who rested.
    Two groups and pipelines deal their own turns.
    """
    drafting = config.speculative_config
    if config.parallel_config.pipeline_parallel_size > 1 or can_deal_groups(settings, config) or settings.exit_heads:
        return False
    if drafting is None or config.use_v2_model_runner:
        return not getattr(drafting, "enable_adaptive_verification", False)
    is_greedy = getattr(drafting, "draft_sample_method", "greedy") == "greedy"
    return is_greedy and not config.scheduler_config.async_scheduling


def drafter_context(config: VllmConfig) -> int | None:
    """Return the longest sequence beside which this engine drafts for anybody; None: its runner says for whom.

    vLLM's V1 runner asks nobody for drafts while a sequence and k_max drafts are longer than that, and verifies zeros
    in their place (0.32 gpu_model_runner.py:4288). Under async scheduling they are scheduled before that is seen.
    """
    speculative = config.speculative_config
    if speculative is None or _runner(config) == "v2" or not config.scheduler_config.async_scheduling:
        return None
    drafter = speculative.draft_model_config
    longest = config.model_config.max_model_len
    return longest if drafter is None or drafter.max_model_len is None else min(longest, drafter.max_model_len)


def _runner(config: VllmConfig) -> Literal["v1", "v2"]:
    return "v2" if config.use_v2_model_runner else "v1"


def _graph_sizes(config: VllmConfig) -> list[int]:
    return sorted(config.compilation_config.cudagraph_capture_sizes or [])[:512] if has_graphs(config) else []
