"""The private names of vLLM that pipelines and their stages touch; compatibility.py checks them."""

from __future__ import annotations

from typing import Final

_RUNNER: Final = "vllm.v1.worker.gpu_model_runner"
_WORKER: Final = "vllm.v1.worker.gpu_worker"
_GROUPS: Final = "vllm.distributed.parallel_state"
_LOADING: Final = "vllm.model_executor.model_loader"
_MODELS: Final = "vllm.model_executor.models.utils"
_SCHEDULER: Final = "vllm.v1.core.sched.scheduler"
_OUTPUT: Final = "vllm.v1.core.sched.output"

# (module, class or "" for the module itself, attribute, parameters after self; None for what is not a function)
PIPELINE_NAMES: Final[tuple[tuple[str, str, str, tuple[str, ...] | None], ...]] = (
    ("vllm.distributed.utils", "", "get_pp_indices", ("num_hidden_layers", "pp_rank", "pp_size")),
    (_LOADING, "", "get_model_loader", ("load_config",)),
    (f"{_LOADING}.base_loader", "BaseModelLoader", "load_weights", ("model", "model_config")),
    (
        f"{_LOADING}.default_loader",
        "DefaultModelLoader",
        "_prepare_weights",
        ("model_name_or_path", "subfolder", "revision", "fall_back_to_pt", "allow_patterns_overrides"),
    ),
    (f"{_LOADING}.utils", "", "process_weights_after_loading", ("model", "model_config", "target_device")),
    (_MODELS, "", "extract_layer_index", None),
    ("vllm.model_executor.layers.utils", "", "dispatch_cpu_unquantized_gemm", ("layer", "remove_weight")),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner", "load_model", ("load_dummy_weights",)),
    (_WORKER, "Worker", "load_model", ("load_dummy_weights",)),
    (_WORKER, "Worker", "execute_model", ("scheduler_output",)),
    (_WORKER, "AsyncIntermediateTensors", "__init__", ("tensors", "comm_handles", "comm_postprocess")),
    (_RUNNER, "GPUModelRunner", "_update_states", ("scheduler_output",)),
    (_RUNNER, "GPUModelRunner", "synchronize_input_prep", ()),
    (_GROUPS, "", "get_pp_group", ()),
    (
        _GROUPS,
        "GroupCoordinator",
        "isend_tensor_dict",
        ("tensor_dict", "dst", "all_gather_group", "all_gather_tensors"),
    ),
    (_GROUPS, "GroupCoordinator", "irecv_tensor_dict", ("src", "all_gather_group", "all_gather_tensors")),
    (_SCHEDULER, "Scheduler", "schedule", ("throttle_prefills",)),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager", "get_block_ids", ("request_id",)),
    ("vllm.config.vllm", "VllmConfig", "max_concurrent_batches", ()),
)

# Instance attributes and module variables, which no signature shows: (module, class, attribute).
PIPELINE_ATTRIBUTES: Final = (
    (_GROUPS, "", "_PP"),
    *((_GROUPS, "GroupCoordinator", name) for name in ("ranks", "rank", "rank_in_group", "first_rank", "last_rank")),
    (_GROUPS, "GroupCoordinator", "use_cpu_custom_send_recv"),
    *((_MODELS, "", name) for name in ("PPMissingLayer", "_model_to_pp_missing_layer_names")),
    *((_RUNNER, "GPUModelRunner", name) for name in ("intermediate_tensors", "kv_cache_config", "max_num_tokens")),
    (_RUNNER, "GPUModelRunner", "drafter"),
    ("vllm.config.compilation", "CompilationConfig", "static_forward_context"),
    *((_SCHEDULER, "Scheduler", name) for name in ("kv_cache_manager", "max_num_scheduled_tokens", "num_spec_tokens")),
    (_SCHEDULER, "Scheduler", "adaptive_long_prefill_threshold"),
    ("vllm.config.scheduler", "SchedulerConfig", "long_prefill_token_threshold"),
    *((_OUTPUT, "SchedulerOutput", name) for name in ("scheduled_new_reqs", "scheduled_cached_reqs")),
    *((_OUTPUT, "SchedulerOutput", name) for name in ("total_num_scheduled_tokens", "kv_cache_block_copies")),
    *((_OUTPUT, "CachedRequestData", name) for name in ("req_ids", "num_computed_tokens")),
    *((_OUTPUT, "NewRequestData", name) for name in ("req_id", "num_computed_tokens")),
    *(("vllm.v1.kv_cache_interface", "KVCacheConfig", name) for name in ("num_blocks", "kv_cache_groups")),
    *(("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", name) for name in ("layer_names", "kv_cache_spec")),
)
