"""Every private name of vLLM that FASER overrides, calls, reads or writes, in the modules beside this one only.

Known for vLLM 0.32 and 0.33. `python -m faser.engine_adapter.patches.compatibility` checks these tables against a
vLLM tree.
"""

from __future__ import annotations

from typing import Final

_RUNNER: Final = "vllm.v1.worker.gpu_model_runner"
_BASE: Final = "vllm.v1.spec_decode.llm_base_proposer"
_PROPOSER: Final = "SpecDecodeBaseProposer"
_GROUPS: Final = "vllm.v1.worker.utils"
_METADATA: Final = "vllm.v1.attention.backend"
_LLAMA: Final = "vllm.model_executor.models.llama"
_MISTRAL: Final = "vllm.model_executor.models.mistral"
_QWEN2: Final = "vllm.model_executor.models.qwen2"
_QWEN3: Final = "vllm.model_executor.models.qwen3"
_RUNNER_V2: Final = "vllm.v1.worker.gpu.model_runner"
_OUTPUT_V2: Final = "vllm.v1.worker.gpu.async_utils"
_BATCH_V2: Final = "vllm.v1.worker.gpu.input_batch"
_SPECULATOR_V2: Final = "vllm.v1.worker.gpu.spec_decode.speculator"
_SPECULATORS_V2: Final = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator"
_DRAFT_MODEL_V2: Final = "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator"
_ADAPTIVE_V2: Final = "vllm.v1.worker.gpu.spec_decode.adaptive_verification"
_BLOCKS_V2: Final = "vllm.v1.worker.gpu.block_table"
_GRAPHS_V2: Final = "vllm.v1.worker.gpu.cudagraph_utils"
_ATTENTION_V2: Final = "vllm.v1.worker.gpu.attn_utils"
_ROUNDS_V2: Final = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator"
_ROUND_GRAPHS_V2: Final = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils"
_STATE_V2: Final = "vllm.v1.worker.gpu.model_states.interface"

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
    (_RUNNER, "GPUModelRunner", "execute_model_state"),
    (_RUNNER, "GPUModelRunner", "attn_groups"),
    (_RUNNER, "GPUModelRunner", "effective_drafter_max_model_len"),
    (_METADATA, "CommonAttentionMetadata", "_num_computed_tokens_cache"),
    (_METADATA, "CommonAttentionMetadata", "_token_to_req_indices_cache"),
)

# (module, class or "" for the module itself, attribute, parameters after self; None for what is not a function)
V2_NAMES: Final[tuple[tuple[str, str, str, tuple[str, ...] | None], ...]] = (
    (_RUNNER_V2, "", "GPUModelRunner", None),
    (
        _RUNNER_V2,
        "GPUModelRunner",
        "execute_model",
        (
            "scheduler_output",
            "intermediate_tensors",
            "dummy_run",
            "skip_attn_for_dummy_run",
            "is_profile",
            "context_len",
            "valid_dummy_state_slots",
            "randomize_inputs",
        ),
    ),
    (_RUNNER_V2, "GPUModelRunner", "sample_tokens", ("grammar_output",)),
    (_RUNNER_V2, "GPUModelRunner", "sample", ("hidden_states", "input_batch", "grammar_output")),
    (_OUTPUT_V2, "AsyncOutput", "get_output", ()),
    (_OUTPUT_V2, "StepTimingCollector", "forward_start", ()),
    (
        _SPECULATOR_V2,
        "BaseSpeculator",
        "propose",
        (
            "input_batch",
            "attn_metadata",
            "slot_mappings",
            "last_hidden_states",
            "aux_hidden_states",
            "num_sampled",
            "num_rejected",
            "last_sampled",
            "next_prefill_tokens",
            "temperature",
            "seeds",
            "dp_sync_state",
            "dummy_run",
            "skip_attn_for_dummy_run",
            "mm_inputs",
            "is_profile",
            "num_speculative_tokens",
        ),
    ),
    (_DRAFT_MODEL_V2, "StandaloneARSpeculator", "load_draft_model", ("target_model", "target_attn_layer_names")),
    (_SPECULATOR_V2, "DraftModelSpeculator", "load_model", ("target_model",)),
    (
        _SPECULATORS_V2,
        "TargetDependentARSpeculator",
        "_multi_step_decode",
        (
            "num_reqs",
            "skip_attn",
            "batch_desc",
            "num_tokens_across_dp",
            "seq_lens_cpu_upper_bound",
            "num_speculative_steps",
        ),
    ),
    (
        _SPECULATORS_V2,
        "TargetDependentARSpeculator",
        "_generate_draft",
        (
            "num_reqs",
            "num_tokens_padded",
            "attn_metadata",
            "slot_mappings",
            "num_tokens_across_dp",
            "cudagraph_runtime_mode",
            "num_speculative_steps",
        ),
    ),
    (
        _SPECULATOR_V2,
        "DraftModelSpeculator",
        "_build_uniform_attn_metadata",
        (
            "batch_desc",
            "num_reqs",
            "num_query_per_req",
            "seq_lens_cpu_upper_bound",
            "step",
            "causal",
            "dcp_local_seq_lens",
        ),
    ),
    (_BLOCKS_V2, "BlockTables", "gather_block_tables", ("idx_mapping", "num_reqs_padded", "out", "out_ptrs")),
    (
        _BLOCKS_V2,
        "BlockTables",
        "compute_slot_mappings",
        ("idx_mapping", "query_start_loc", "positions", "num_tokens_padded", "out"),
    ),
    ("vllm.v1.worker.gpu.attn_utils", "", "build_slot_mappings_by_layer", None),
    ("vllm.v1.worker.gpu.dp_utils", "", "dispatch_cg_and_sync_dp", None),
    ("vllm.utils.torch_utils", "", "async_tensor_h2d", None),
    (
        _ADAPTIVE_V2,
        "AdaptiveVerificationManager",
        "get_num_tokens",
        ("num_tokens_per_req", "draft_tokens"),
    ),
    (_ADAPTIVE_V2, "AdaptiveVerificationManager", "reallocate_drafts", ("req_ids", "idx_mapping")),
    (
        _ADAPTIVE_V2,
        "",
        "build_cost_tables_from_curves",
        ("draft_curve", "verify_curve", "max_num_reqs", "max_batch_tokens", "cudagraph_limit"),
    ),
    (_GRAPHS_V2, "CudaGraphManager", "_init_candidates", ()),
    (
        _GRAPHS_V2,
        "CudaGraphManager",
        "dispatch",
        ("num_reqs", "num_tokens", "uniform_token_count", "num_active_loras", "max_query_len", "num_ubatches"),
    ),
    (
        _GRAPHS_V2,
        "ModelCudaGraphManager",
        "__init__",
        (
            "vllm_config",
            "device",
            "cudagraph_mode",
            "decode_query_len",
            "lora_capture_cases",
            "varlen_decode",
            "ubatch_runner",
        ),
    ),
    (_GRAPHS_V2, "CudaGraphManager", "needs_capture", ()),
    (
        _RUNNER_V2,
        "GPUModelRunner",
        "initialize_kv_cache",
        ("kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
    ),
    (
        _ATTENTION_V2,
        "",
        "get_varlen_cudagraph_unsupported_backend",
        ("attn_groups", "vllm_config", "max_query_len", "checked_layer_names"),
    ),
    (_STATE_V2, "ModelState", "get_additional_cg_support", ()),
    (
        _ROUND_GRAPHS_V2,
        "SpeculatorCudaGraphManager",
        "capture",
        (
            "forward_fn",
            "model_state",
            "input_buffers",
            "block_tables",
            "attn_groups",
            "kv_cache_config",
            "progress_bar_desc",
            "specialize_spec_tokens",
        ),
    ),
    (
        _ROUND_GRAPHS_V2,
        "SpeculatorCudaGraphManager",
        "specialize_spec_tokens",
        ("desc", "num_speculative_tokens"),
    ),
    (_ROUND_GRAPHS_V2, "SpeculatorBatchDescriptor", "num_speculative_tokens", None),
    ("vllm.distributed.parallel_state", "", "get_tp_group", ()),
)

# Instance attributes, which no signature shows: (module, class, attribute).
V2_ATTRIBUTES: Final = (
    (_RUNNER_V2, "GPUModelRunner", "speculator"),
    (_RUNNER_V2, "GPUModelRunner", "step_timing"),
    (_RUNNER_V2, "GPUModelRunner", "num_speculative_steps"),
    (_RUNNER_V2, "GPUModelRunner", "device"),
    (_OUTPUT_V2, "AsyncOutput", "model_runner_output"),
    (_BATCH_V2, "InputBatch", "req_ids"),
    (_BATCH_V2, "InputBatch", "num_scheduled_tokens"),
    (_BATCH_V2, "InputBatch", "prefill_len_np"),
    (_BATCH_V2, "InputBatch", "num_computed_prefill_tokens_np"),
    *(
        (_SPECULATOR_V2, "DraftModelSpeculator", name)
        for name in (
            *("num_speculative_steps", "draft_tokens", "idx_mapping", "input_buffers", "block_tables", "device"),
            *("max_num_reqs", "pcp_manager", "kv_cache_config", "acceptance_estimator", "use_local_argmax_reduction"),
        )
    ),
    *(
        (_SPECULATORS_V2, "TargetDependentARSpeculator", name)
        for name in (
            *("hidden_states", "sample_src_positions", "current_draft_step", "decode_cudagraph_manager"),
            "advance_draft_positions",
        )
    ),
    *((_BATCH_V2, "InputBatch", name) for name in ("num_reqs", "idx_mapping")),
    *(
        (_ADAPTIVE_V2, "AdaptiveVerificationManager", name)
        for name in (
            *("cost_tables", "req_states", "_cudagraph_limit", "_stale_confidences", "_stale_idx"),
            *("_confidence_probs", "_batch_draft_capacity"),
        )
    ),
    (_RUNNER_V2, "GPUModelRunner", "adaptive_verification"),
    *((_BATCH_V2, "InputBuffers", name) for name in ("input_ids", "positions", "seq_lens", "query_start_loc")),
    *((_GRAPHS_V2, "CudaGraphManager", name) for name in ("vllm_config", "compilation_config", "max_num_reqs")),
    *((_GRAPHS_V2, "CudaGraphManager", name) for name in ("cudagraph_mode", "decode_query_len", "varlen_decode")),
    *((_GRAPHS_V2, "CudaGraphManager", name) for name in ("lora_capture_cases", "ubatch_runner")),
    *((_GRAPHS_V2, "CudaGraphManager", name) for name in ("_candidates", "_capture_descs", "_graphs_captured")),
    (_GRAPHS_V2, "BatchExecutionDescriptor", "cg_mode"),
    (_GRAPHS_V2, "CudaGraphManager", "device"),
    *((_RUNNER_V2, "GPUModelRunner", name) for name in ("cudagraph_manager", "attn_groups", "model_state")),
    *((_RUNNER_V2, "GPUModelRunner", name) for name in ("vllm_config", "decode_query_len")),
    *((_ROUNDS_V2, "TargetDependentARSpeculator", name) for name in ("prefill_cudagraph_manager",)),
    *((_ROUNDS_V2, "TargetDependentARSpeculator", name) for name in ("decode_cudagraph_manager", "capture")),
    (_ROUNDS_V2, "TargetDependentARSpeculator", "supports_decode_metadata_update"),
    ("vllm.v1.attention.backend", "AttentionMetadataBuilder", "_cudagraph_support"),
)
