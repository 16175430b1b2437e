"""The private names of CUDA graphs on vLLM's V2 runner: what is captured, which batch replays it, and its two halves.

As in names_v2.py, which has the rest of that runner.
"""

from __future__ import annotations

from typing import Final

_RUNNER: Final = "vllm.v1.worker.gpu.model_runner"
_BLOCKS: Final = "vllm.v1.worker.gpu.block_table"
_GRAPHS: Final = "vllm.v1.worker.gpu.cudagraph_utils"
_ATTENTION: Final = "vllm.v1.worker.gpu.attn_utils"
_ROUND_GRAPHS: Final = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils"

GRAPH_NAMES: Final[tuple[tuple[str, str, str, tuple[str, ...] | None], ...]] = (
    (_GRAPHS, "CudaGraphManager", "_init_candidates", ()),
    (
        _GRAPHS,
        "CudaGraphManager",
        "dispatch",
        ("num_reqs", "num_tokens", "uniform_token_count", "num_active_loras", "max_query_len", "num_ubatches"),
    ),
    (
        _GRAPHS,
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
    (_GRAPHS, "CudaGraphManager", "needs_capture", ()),
    (
        _ATTENTION,
        "",
        "get_varlen_cudagraph_unsupported_backend",
        ("attn_groups", "vllm_config", "max_query_len", "checked_layer_names"),
    ),
    (
        _ROUND_GRAPHS,
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
        _ROUND_GRAPHS,
        "SpeculatorCudaGraphManager",
        "specialize_spec_tokens",
        ("desc", "num_speculative_tokens"),
    ),
    (_ROUND_GRAPHS, "SpeculatorBatchDescriptor", "num_speculative_tokens", None),
    (_RUNNER, "GPUModelRunner", "capture_model", None),
    (_GRAPHS, "ModelCudaGraphManager", "run_fullgraph", ("desc",)),
    (
        _GRAPHS,
        "",
        "prepare_inputs_to_capture",
        (
            "num_reqs",
            "num_tokens",
            "model_state",
            "input_buffers",
            "block_tables",
            "attn_groups",
            "kv_cache_config",
            "full_cudagraph",
            "max_query_len",
        ),
    ),
    (_ATTENTION, "", "init_attn_backend", ("kv_cache_config", "vllm_config", "device", "active_layer_names")),
    ("vllm.utils.gc_utils", "", "freeze_gc_for_cudagraph_capture", ()),
    ("vllm.model_executor.offloader.base", "", "get_offloader", ()),
    ("vllm.model_executor.offloader.base", "", "NoopOffloader", None),
    (_BLOCKS, "BlockTables", "get_dummy_block_tables", ("num_reqs",)),
    (_BLOCKS, "BlockTables", "get_dummy_slot_mappings", ("num_tokens",)),
    ("vllm.compilation.cudagraph_pool", "", "capture_pool", ("pool", "vllm_config")),
    ("vllm.distributed.parallel_state", "", "graph_capture", ("device",)),
    ("vllm.utils.torch_utils", "", "current_stream", ()),
    ("vllm.model_executor.models.llama", "LlamaModel", "embed_input_ids", ("input_ids",)),
    ("vllm.model_executor.models.qwen2", "Qwen2Model", "embed_input_ids", ("input_ids",)),
    (
        "vllm.model_executor.models.interfaces",
        "EagleModelMixin",
        "_maybe_add_hidden_state",
        ("aux_hidden_states", "layer_idx", "hidden_states", "residual"),
    ),
)

GRAPH_ATTRIBUTES: Final = (
    *((_GRAPHS, "CudaGraphManager", name) for name in ("vllm_config", "compilation_config", "max_num_reqs")),
    *((_GRAPHS, "CudaGraphManager", name) for name in ("cudagraph_mode", "decode_query_len", "varlen_decode")),
    *((_GRAPHS, "CudaGraphManager", name) for name in ("lora_capture_cases", "ubatch_runner")),
    *((_GRAPHS, "CudaGraphManager", name) for name in ("_candidates", "_capture_descs", "_graphs_captured")),
    (_GRAPHS, "BatchExecutionDescriptor", "cg_mode"),
    (_GRAPHS, "CudaGraphManager", "device"),
    *((_GRAPHS, "ModelCudaGraphManager", name) for name in ("hidden_states", "aux_hidden_states")),
    (_GRAPHS, "ModelCudaGraphManager", "use_aux_hidden_state_outputs"),
    *((_GRAPHS, "CudaGraphManager", name) for name in ("graphs", "pool")),
    *((_GRAPHS, "BatchExecutionDescriptor", name) for name in ("num_tokens", "num_reqs", "uniform_token_count")),
    *((_GRAPHS, "BatchExecutionDescriptor", name) for name in ("max_query_len", "num_active_loras", "num_ubatches")),
)
