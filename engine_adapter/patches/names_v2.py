"""Every private name of vLLM's V2 runner that FASER overrides, calls, reads or writes; names.py says the rest."""

from __future__ import annotations

from typing import Final

_RUNNER: Final = "vllm.v1.worker.gpu.model_runner"
_OUTPUT: Final = "vllm.v1.worker.gpu.async_utils"
_BATCH: Final = "vllm.v1.worker.gpu.input_batch"
_SPECULATOR: Final = "vllm.v1.worker.gpu.spec_decode.speculator"
_SPECULATORS: Final = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator"
_DRAFT_MODEL: Final = "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator"
_ADAPTIVE: Final = "vllm.v1.worker.gpu.spec_decode.adaptive_verification"
_COMPARISON: Final = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
_BLOCKS: Final = "vllm.v1.worker.gpu.block_table"
_ATTENTION: Final = "vllm.v1.worker.gpu.attn_utils"
_EAGLE_LAYERS: Final = "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils"
_REQUESTS: Final = "vllm.v1.worker.gpu.states"
_CACHE: Final = "vllm.v1.kv_cache_interface"
_SCHEDULED: Final = "vllm.v1.core.sched.output"
_STATE: Final = "vllm.v1.worker.gpu.model_states.interface"

# (module, class or "" for the module itself, attribute, parameters after self; None for what is not a function)
V2_NAMES: Final[tuple[tuple[str, str, str, tuple[str, ...] | None], ...]] = (
    (_RUNNER, "", "GPUModelRunner", None),
    (
        _RUNNER,
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
    (_RUNNER, "GPUModelRunner", "sample_tokens", ("grammar_output",)),
    (_RUNNER, "GPUModelRunner", "sample", ("hidden_states", "input_batch", "grammar_output")),
    (_RUNNER, "GPUModelRunner", "prepare_attn", ("input_batch",)),
    (_RUNNER, "GPUModelRunner", "get_model", ()),
    (_RUNNER, "GPUModelRunner", "reload_weights", ("weights_iterator", "weights_path", "is_checkpoint_format")),
    (
        _STATE,
        "ModelState",
        "prepare_attn",
        (
            "input_batch",
            "cudagraph_mode",
            "block_tables",
            "slot_mappings",
            "attn_groups",
            "kv_cache_config",
            "for_capture",
            "ubatch_idx",
        ),
    ),
    (_OUTPUT, "AsyncOutput", "get_output", ()),
    (_OUTPUT, "StepTimingCollector", "forward_start", ()),
    (
        _SPECULATOR,
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
    (_DRAFT_MODEL, "StandaloneARSpeculator", "load_draft_model", ("target_model", "target_attn_layer_names")),
    (_SPECULATOR, "DraftModelSpeculator", "load_model", ("target_model",)),
    (
        _SPECULATORS,
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
        _SPECULATORS,
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
        _SPECULATOR,
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
    (
        _SPECULATORS,
        "",
        "prepare_prefill_inputs",
        (
            "last_token_indices",
            "current_draft_step",
            "input_buffers",
            "input_batch",
            "num_sampled",
            "num_rejected",
            "last_sampled",
            "next_prefill_tokens",
            "max_num_reqs",
        ),
    ),
    (
        _SPECULATORS,
        "TargetDependentARSpeculator",
        "_run_model",
        (
            "num_tokens",
            "attn_metadata",
            "slot_mappings",
            "num_tokens_across_dp",
            "cudagraph_runtime_mode",
            "mm_inputs",
        ),
    ),
    (
        _DRAFT_MODEL,
        "StandaloneARSpeculator",
        "_run_model",
        ("input_ids", "positions", "attn_metadata", "slot_mappings", "num_tokens_across_dp"),
    ),
    (_EAGLE_LAYERS, "", "get_eagle3_aux_layers_from_config", ("spec_config",)),
    (_ATTENTION, "", "build_attn_metadata", None),
    (_REQUESTS, "RequestState", "remove_request", ("req_id",)),
    (_CACHE, "FullAttentionSpec", "block_size", None),
    (_CACHE, "UniformTypeKVCacheSpecs", "kv_cache_specs", None),
    (_BLOCKS, "BlockTables", "append_block_ids", ("req_index", "new_block_ids", "overwrite")),
    ("vllm.v1.worker.workspace", "", "use_workspace_lane", ("lane",)),
    (_BLOCKS, "BlockTables", "init_block_table_layout_tensors", ()),
    (_BATCH, "InputBuffers", "__init__", ("max_num_reqs", "max_num_tokens", "device")),
    (_BLOCKS, "BlockTables", "gather_block_tables", ("idx_mapping", "num_reqs_padded", "out", "out_ptrs")),
    (
        _BLOCKS,
        "BlockTables",
        "compute_slot_mappings",
        ("idx_mapping", "query_start_loc", "positions", "num_tokens_padded", "out"),
    ),
    ("vllm.v1.worker.gpu.attn_utils", "", "build_slot_mappings_by_layer", None),
    ("vllm.v1.worker.gpu.dp_utils", "", "dispatch_cg_and_sync_dp", None),
    ("vllm.utils.torch_utils", "", "async_tensor_h2d", None),
    (
        _ADAPTIVE,
        "AdaptiveVerificationManager",
        "get_num_tokens",
        ("num_tokens_per_req", "draft_tokens"),
    ),
    (_ADAPTIVE, "AdaptiveVerificationManager", "reallocate_drafts", ("req_ids", "idx_mapping")),
    (
        _ADAPTIVE,
        "",
        "build_cost_tables_from_curves",
        ("draft_curve", "verify_curve", "max_num_reqs", "max_batch_tokens", "cudagraph_limit"),
    ),
    (
        _RUNNER,
        "GPUModelRunner",
        "initialize_kv_cache",
        ("kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
    ),
    (_STATE, "ModelState", "get_additional_cg_support", ()),
    ("vllm.distributed.parallel_state", "", "get_tp_group", ()),
    (
        _COMPARISON,
        "RejectionSampler",
        "_verify",
        (
            "logits",
            "draft_logits",
            "draft_sampled",
            "pos",
            "cu_num_logits",
            "idx_mapping",
            "idx_mapping_np",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
            "verify_draft_sampled",
        ),
    ),
    (
        "vllm.v1.worker.gpu.sample.gumbel",
        "",
        "gumbel_sample",
        (
            "logits",
            "expanded_idx_mapping",
            "temperature",
            "seed",
            "pos",
            "apply_temperature",
            "is_drafting",
            "logits_cache",
            "logits_cache_col",
            "use_fp64",
            "logits_cache_source",
        ),
    ),
    ("vllm.v1.worker.gpu.sample.states", "SamplingStates", "any_explicit_seed", ("idx_mapping_np",)),
)

# Instance attributes, which no signature shows: (module, class, attribute).
V2_ATTRIBUTES: Final = (
    (_RUNNER, "GPUModelRunner", "rejection_sampler"),
    *((_COMPARISON, "RejectionSampler", name) for name in ("sampler", "watermark_key", "synthetic_conditional_rates")),
    *(("vllm.v1.worker.gpu.sample.sampler", "Sampler", name) for name in ("sampling_states", "use_fp64_gumbel")),
    *(("vllm.v1.worker.gpu.sample.states", "SamplingStates", name) for name in ("temperature", "seeds", "seeds_set")),
    (_RUNNER, "GPUModelRunner", "speculator"),
    (_RUNNER, "GPUModelRunner", "step_timing"),
    (_RUNNER, "GPUModelRunner", "num_speculative_steps"),
    (_RUNNER, "GPUModelRunner", "device"),
    (_OUTPUT, "AsyncOutput", "model_runner_output"),
    (_BATCH, "InputBatch", "req_ids"),
    (_BATCH, "InputBatch", "num_scheduled_tokens"),
    (_BATCH, "InputBatch", "prefill_len_np"),
    (_BATCH, "InputBatch", "num_computed_prefill_tokens_np"),
    *(
        (_SPECULATOR, "DraftModelSpeculator", name)
        for name in (
            *("num_speculative_steps", "draft_tokens", "idx_mapping", "input_buffers", "block_tables", "device"),
            *("hidden_size", "dtype", "speculative_config", "eplb_state", "dcp_size", "draft_attn_layer_names"),
            *("attn_groups", "max_num_tokens", "model"),
            *("max_num_reqs", "pcp_manager", "kv_cache_config", "acceptance_estimator", "use_local_argmax_reduction"),
        )
    ),
    *(
        (_SPECULATORS, "TargetDependentARSpeculator", name)
        for name in (
            *("hidden_states", "sample_src_positions", "current_draft_step", "decode_cudagraph_manager"),
            *("advance_draft_positions", "last_token_indices"),
        )
    ),
    *((_BATCH, "InputBatch", name) for name in ("num_reqs", "idx_mapping", "idx_mapping_np", "input_ids")),
    *((_BATCH, "InputBatch", name) for name in ("num_tokens", "num_draft_tokens", "num_computed_tokens_np")),
    *((_BLOCKS, "BlockTables", name) for name in ("input_block_tables", "block_sizes")),
    *((_BLOCKS, "BlockTables", name) for name in ("num_blocks", "slot_mappings", "max_num_reqs", "device")),
    *((_BATCH, "InputBatch", name) for name in ("has_structured_output_reqs", "has_prefill")),
    (_BATCH, "InputBatch", "num_reqs_after_padding"),
    ("vllm.v1.worker.utils", "AttentionGroup", "backend"),
    (_REQUESTS, "RequestState", "draft_tokens"),
    *((_SCHEDULED, "SchedulerOutput", name) for name in ("finished_req_ids", "preempted_req_ids")),
    (_SCHEDULED, "SchedulerOutput", "new_block_ids_to_zero"),
    (_REQUESTS, "RequestState", "num_computed_tokens_np"),
    *((_RUNNER, "GPUModelRunner", name) for name in ("req_states", "block_tables", "kv_cache_config")),
    *((_RUNNER, "GPUModelRunner", name) for name in ("use_aux_hidden_state_outputs", "model", "model_config")),
    *(
        (_ADAPTIVE, "AdaptiveVerificationManager", name)
        for name in (
            *("cost_tables", "req_states", "_cudagraph_limit", "_stale_confidences", "_stale_idx"),
            *("_confidence_probs", "_batch_draft_capacity"),
        )
    ),
    (_RUNNER, "GPUModelRunner", "adaptive_verification"),
    *((_BATCH, "InputBuffers", name) for name in ("input_ids", "positions", "seq_lens", "query_start_loc")),
    *((_RUNNER, "GPUModelRunner", name) for name in ("cudagraph_manager", "attn_groups", "model_state")),
    *((_RUNNER, "GPUModelRunner", name) for name in ("vllm_config", "decode_query_len")),
    *((_RUNNER, "GPUModelRunner", name) for name in ("use_pp", "pcp_manager", "ubatch_runner", "fast_prefill")),
    *((_BATCH, "InputBatch", name) for name in ("num_tokens_after_padding", "query_start_loc", "query_start_loc_np")),
    *((_BATCH, "InputBatch", name) for name in ("num_draft_tokens_per_req", "logits_indices", "positions")),
    *((_BATCH, "InputBatch", name) for name in ("seq_lens", "max_query_len")),
    *(("vllm.v1.worker.gpu.sample.output", "SamplerOutput", name) for name in ("num_sampled", "num_rejected")),
    *((_SPECULATORS, "TargetDependentARSpeculator", name) for name in ("prefill_cudagraph_manager",)),
    (_SPECULATORS, "TargetDependentARSpeculator", "capture"),
    (_SPECULATORS, "TargetDependentARSpeculator", "supports_decode_metadata_update"),
    ("vllm.v1.attention.backend", "AttentionMetadataBuilder", "_cudagraph_support"),
    *((_RUNNER, "GPUModelRunner", name) for name in ("input_buffers", "max_num_reqs", "uses_inputs_embeds")),
)
