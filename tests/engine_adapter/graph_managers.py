"""vLLM's real CUDA graph managers on a machine without a GPU: a runner that has just made them, and what they choose.

Configuration and runner are plain namespaces; managers, dispatch, and an EAGLE speculator's capture are vLLM's own.
What is captured is noted, not recorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SIZES = [1, 2, 4, 8, 16, 24, 32, 40]
FIRST_PASS = "prefill_cudagraph_manager"


def vllm_module(name: str) -> ModuleType:
    """Import a module of vLLM, without torch's warnings."""
    from importlib import import_module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(f"vllm.{name}")


def configured(
    mode: str, table: Any = None, is_adaptive: bool = False, k_max: int = 4, requests: int = 8,
    sizes: list[int] = SIZES, backend: Any = None,
) -> Any:  # fmt: skip
    """Return what is read of a VllmConfig."""
    return SimpleNamespace(
        use_v2_model_runner=True,
        num_speculative_tokens=k_max,
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
        compilation_config=SimpleNamespace(
            cudagraph_mode=vllm_module("config.compilation").CUDAGraphMode[mode],
            cudagraph_capture_sizes=sizes,
            max_cudagraph_capture_size=max(sizes),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, data_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1, use_ubatching=False,
        ),
        cache_config=SimpleNamespace(use_kda_recoverssm=False, kv_sharing_fast_prefill=False),
        model_config=SimpleNamespace(is_encoder_decoder=False),
        attention_config=SimpleNamespace(backend=backend, backend_per_kind={}),
        lora_config=None,
        speculative_config=SimpleNamespace(
            num_speculative_tokens=k_max,
            num_speculative_tokens_per_batch_size=table,
            enable_adaptive_verification=is_adaptive,
            uses_dynamic_speculative_decoding=lambda: table is not None,
        ),
    )  # fmt: skip


def without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let managers be made where there are no process groups and no pool of graphs, and note what they capture."""
    module = vllm_module("v1.worker.gpu.cudagraph_utils")
    rounds = vllm_module("v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils")
    monkeypatch.setattr(module, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True))
    monkeypatch.setattr(module, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))
    monkeypatch.setattr(module, "is_breakable_cudagraph_enabled", lambda: False)
    monkeypatch.setattr(module.CudaGraphManager, "capture", noted_capture)
    monkeypatch.setattr(rounds, "prepare_inputs_to_capture", lambda *_, **__: (None, None))


def noted_capture(manager: Any, create_forward: Callable[..., Any], description: str = "") -> None:
    """Stand for vLLM's capture: a graph is what its forward pass returns."""
    for mode, descs in manager._capture_descs.items():
        for desc in descs:
            ran = create_forward(desc, warmup=False)(mode)
            if mode.name == "FULL":
                assert desc not in manager.graphs
                manager.graphs[desc] = ran
    manager._graphs_captured = True


class Builder:
    """An attention backend, as far as it says which graphs it replays."""

    def __init__(self, support: str, bound: int | None) -> None:
        self._support, self._bound = support, bound

    def get_cudagraph_support(self, *_: Any) -> Any:
        return vllm_module("v1.attention.backend").AttentionCGSupport[self._support]

    def get_varlen_cudagraph_max_query_len(self, *_: Any) -> int | None:
        return self._bound


def eagle(config: Any, is_fused: bool = True) -> Any:
    """Return vLLM's EAGLE speculator without a model; its rounds say how many they are."""
    kind = vllm_module("v1.worker.gpu.spec_decode.eagle.speculator").EagleSpeculator
    speculator = object.__new__(kind)
    buffer = SimpleNamespace(zero_=lambda: None)
    vars(speculator).update(
        vllm_config=config, speculative_config=config.speculative_config, device="cpu", model=None, model_state=None,
        num_speculative_steps=config.num_speculative_tokens, supports_decode_metadata_update=is_fused,
        max_num_reqs=config.scheduler_config.max_num_seqs, last_token_indices=buffer, idx_mapping=buffer,
        input_buffers=None, target_input_buffers=None, block_tables=None, attn_groups=[], target_attn_groups=[],
        kv_cache_config=None,
        _prefill=lambda *_, **__: 1,
        _generate_draft=lambda *_, **__: 1,
        _generate_fused_drafts=lambda *_, num_speculative_steps, **__: num_speculative_steps - 1,
    )  # fmt: skip
    return speculator


class Runner:
    """What vLLM's V2 runner has right after it made its graph managers."""

    def __init__(
        self, config: Any, support: str = "ALWAYS", bound: int | None = None, is_fused: bool = True,
        speculator: Any = None, additional: str = "ALWAYS",
    ) -> None:  # fmt: skip
        module = vllm_module("v1.worker.gpu.cudagraph_utils")
        level = vllm_module("v1.attention.backend").AttentionCGSupport[additional]
        mode = config.compilation_config.cudagraph_mode
        builder = Builder(support, bound)
        group = SimpleNamespace(
            backend=SimpleNamespace(__name__="SomeBackend"), layer_names=["0"], kv_cache_spec=None,
            get_metadata_builder=lambda place: builder,
        )  # fmt: skip
        self.vllm_config, self.speculative_config = config, config.speculative_config
        self.num_speculative_steps = config.num_speculative_tokens
        self.decode_query_len = self.num_speculative_steps + 1
        self.attn_groups = [[group]]
        self.model_state = SimpleNamespace(get_additional_cg_support=lambda: (level, "CrossAttention"))
        self.cudagraph_manager = module.ModelCudaGraphManager(
            config,
            "cpu",
            mode,
            self.decode_query_len,
            varlen_decode=self.speculative_config.enable_adaptive_verification,
        )
        self.speculator = eagle(config, is_fused) if speculator is None else speculator
        self.speculator.init_cudagraph_manager(mode)

    def captured(self) -> Runner:
        """Capture all graphs, by vLLM's own code where it needs no model."""
        self.cudagraph_manager._graphs_captured = True
        if hasattr(self.speculator, "capture"):
            self.speculator.capture()
        return self

    def verify(self, lengths: list[int], has_prompt: bool = False) -> Any:
        """Return the graph that a batch of such draft lengths replays, as `execute_model` asks for it."""
        rows = [length + 1 for length in lengths]
        uniform = rows[0] if len(set(rows)) == 1 and not has_prompt else None
        return self.ask(self.cudagraph_manager, len(rows), sum(rows), uniform, None if has_prompt else max(rows))

    def first_pass(self, verified: Any, lengths: list[int], has_prompt: bool = False) -> Any:
        """Return the graph of the drafter's first pass behind that verification, as `propose` asks for it."""
        uniform = lengths[0] + 1 if len(set(lengths)) == 1 and not has_prompt else None
        return self.ask(getattr(self.speculator, FIRST_PASS), len(lengths), verified.num_tokens, uniform, None)

    def rounds(self, requests: int, length: int) -> Any:
        """Return the graph of the drafter's rounds behind the first, for a draft of that length."""
        manager = self.speculator.decode_cudagraph_manager
        return manager.specialize_spec_tokens(self.ask(manager, requests, requests, 1, None), length)

    def ask(self, manager: Any, requests: int, tokens: int, uniform: int | None, longest: int | None) -> Any:
        """Return what a manager chooses, through vLLM's own call."""
        dispatch = vllm_module("v1.worker.gpu.dp_utils").dispatch_cg_and_sync_dp
        return dispatch(manager, requests, tokens, uniform, dp_size=1, dp_rank=0, max_query_len=longest)[0]
