"""Whether the V2 runner can draft beside the next step's verification.

Asked by the scheduler's side, which deals two groups then, for HELLO, and by the runner: all must say the same. Reads
public configuration only. What the runner finds besides, once attention is set up, it tells step by step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LATE_METHODS: Final = ("eagle", "eagle3", "mtp", "draft_model")


def late_refusal(config: VllmConfig) -> str | None:
    """Return why drafts cannot be made beside the next step on the V2 runner, None if they can."""
    drafting, parallel = config.speculative_config, config.parallel_config
    if drafting is None or drafting.method not in LATE_METHODS:
        method = "none" if drafting is None else drafting.method
        return f"method {method}: there is no drafter to run beside the target; expected {', '.join(LATE_METHODS)}"
    if getattr(drafting, "enable_adaptive_verification", False):
        return "adaptive verification chooses among drafts before these are there"
    if drafting.draft_sample_method != "greedy":
        return f"draft_sample_method {drafting.draft_sample_method!r}; expected 'greedy'"
    if parallel.world_size > 1 or parallel.data_parallel_size > 1:
        ranks = max(parallel.world_size, parallel.data_parallel_size)
        return f"{ranks} ranks; expected one: collectives of drafter and target would meet"
    if config.lora_config is not None:
        return "LoRA: its adapters are those of the newest step"
    if config.kv_transfer_config is not None:
        return "a KV connector sends blocks away before the drafter has written them"
    for model in (config.model_config, drafting.draft_model_config):
        if model.is_moe or model.use_mla or model.quantization is not None:
            return (
                f"{model.model}: kernels of experts, MLA or quantized weights share scratch memory with the other model"
            )
    return None
