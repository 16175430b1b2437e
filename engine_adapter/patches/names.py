"""Every private name of vLLM's schedulers and of its V1 runner that FASER overrides, calls, reads or writes.

They are touched in the modules beside this one only; V2's are in names_v2.py and names_graphs.py. Known for vLLM 0.32
and 0.33: `python -m faser.engine_adapter.patches.compatibility` checks these tables against a vLLM tree.
"""

from __future__ import annotations

from typing import Final

_RUNNER: Final = "vllm.v1.worker.gpu_model_runner"
_BASE: Final = "vllm.v1.spec_decode.llm_base_proposer"
_PROPOSER: Final = "SpecDecodeBaseProposer"
_DRAW: Final = "vllm.v1.sample.ops.topk_topp_sampler"
_GROUPS: Final = "vllm.v1.worker.utils"
_METADATA: Final = "vllm.v1.attention.backend"
_LLAMA: Final = "vllm.model_executor.models.llama"
_MISTRAL: Final = "vllm.model_executor.models.mistral"
_QWEN2: Final = "vllm.model_executor.models.qwen2"
_QWEN3: Final = "vllm.model_executor.models.qwen3"

# (module, class, attribute, parameters after self)
SCHEDULER_NAMES: Final = (
    ("vllm.v1.core.sched.scheduler", "Scheduler", "_update_after_schedule", ("scheduler_output",)),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", "_update_after_schedule", ("scheduler_output",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "_free_request", ("request", "delay_free_blocks")),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "_preempt_request", ("request", "timestamp", "drop_stale_output")),
)

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
    (_RUNNER, "GPUModelRunner", "_input_fits_in_drafter", ("common_attn_metadata",)),
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
    (
        _RUNNER,
        "GPUModelRunner",
        "_bookkeeping_sync",
        ("scheduler_output", "sampler_output", "logits", "hidden_states", "num_scheduled_tokens"),
    ),  # from here on: draws by seed
    (_DRAW, "TopKTopPSampler", "forward_native", ("logits", "generators", "k", "p")),
    (_DRAW, "", "apply_top_k_top_p", ("logits", "k", "p")),
    (
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler",
        "forward",
        ("metadata", "draft_probs", "logits", "sampling_metadata"),
    ),
    (
        "vllm.v1.sample.rejection_sampler",
        "",
        "rejection_sample",
        (
            "draft_token_ids",
            "num_draft_tokens",
            "max_spec_len",
            "cu_num_draft_tokens",
            "draft_probs",
            "target_logits",
            "bonus_token_ids",
            "sampling_metadata",
            "synthetic_mode",
            "synthetic_conditional_rates",
            "use_fp64_gumbel",
        ),
    ),
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
    (_MISTRAL, "MistralDecoderLayer", "forward", ("positions", "hidden_states", "residual", "t_cond")),
    (_QWEN2, "Qwen2DecoderLayer", "forward", ("positions", "hidden_states", "residual")),
    (_QWEN3, "Qwen3DecoderLayer", "forward", ("positions", "hidden_states", "residual")),
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
    (_RUNNER, "GPUModelRunner", "_draft_probs"),
    (_RUNNER, "GPUModelRunner", "execute_model_state"),
    (_RUNNER, "GPUModelRunner", "attn_groups"),
    (_RUNNER, "GPUModelRunner", "effective_drafter_max_model_len"),
    *((_RUNNER, "GPUModelRunner", name) for name in ("sampler", "rejection_sampler", "query_start_loc", "positions")),
    ("vllm.v1.sample.sampler", "Sampler", "topk_topp_sampler"),
    (_DRAW, "TopKTopPSampler", "logprobs_mode"),
    *(("vllm.v1.worker.gpu_input_batch", "InputBatch", name) for name in ("generators", "random_reqs")),
    (_METADATA, "CommonAttentionMetadata", "_num_computed_tokens_cache"),
    (_METADATA, "CommonAttentionMetadata", "_token_to_req_indices_cache"),
)
