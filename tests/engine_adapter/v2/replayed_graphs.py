"""CUDA graphs on a CPU: what would be recorded is kept as a call, and replaying a graph makes the call again.

The call has what a recorded graph has: the tensors and numbers of its capture. Only what was written into those
tensors since can reach it. vLLM's managers, dispatch and captures are its own; its Triton attention, which replays any
batch, stands in the place of the CPU's. What cannot be had this way: piecewise graphs, memory pools, races.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from jobs import Engine, prompts
from tiny_models import VOCABULARY

from faser.engine_adapter.graph_lengths import graph_lengths
from faser.engine_adapter.pruning import forward_v2, halves


def install(mode: str, sizes: list[int]) -> None:
    """Let vLLM's CPU platform keep a graph mode, choose Triton attention, and capture by calls."""
    import torch
    import vllm.v1.worker.gpu.model_runner as model_runner
    from vllm.config.compilation import CUDAGraphMode
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    inherited = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        inherited(cls, vllm_config)
        compilation = vllm_config.compilation_config
        compilation.cudagraph_mode = CUDAGraphMode[mode]
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes, max(sizes)

    def nothing(*_: Any, **__: Any) -> Any:
        return None

    changes: dict[str, Any] = {
        "check_and_update_config": check_and_update_config,
        "get_attn_backend_cls": lambda *_, **__: AttentionBackendEnum.TRITON_ATTN.get_path(),
        "get_global_graph_pool": nothing,
    }
    for name, change in changes.items():
        setattr(CpuPlatform, name, classmethod(change))
    for name in ("empty_cache", "synchronize"):
        setattr(torch.accelerator, name, nothing)
    torch.accelerator.get_memory_info = lambda *_: (0, 0)
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # vLLM's kernel that fills the KV cache asks for it
    CudaGraphManager.capture = capture  # type: ignore[method-assign]
    halves.recorded = lambda manager, call: Call(call)  # type: ignore[assignment,misc]
    forward_v2.capture_stream = lambda runner: torch.inference_mode()  # type: ignore[assignment,return-value]
    model_runner.lock_workspace = nothing


class Call:
    """A graph; no layer's hooks run where it is replayed."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def replay(self) -> None:
        """Make the call again."""
        import torch

        module, called = torch.nn.Module, torch.nn.Module.__call__
        module.__call__ = lambda layer, *args, **named: layer.forward(*args, **named)  # type: ignore[method-assign]
        try:
            self._call()
        finally:
            module.__call__ = called  # type: ignore[method-assign]


def capture(manager: Any, create_forward: Callable[..., Any], description: str = "") -> None:
    """Stand in the place of vLLM's capture; as it does, build each graph's inputs twice."""
    from vllm.config.compilation import CUDAGraphMode

    for desc in manager._capture_descs.get(CUDAGraphMode.FULL, ()):
        create_forward(desc, warmup=True)(CUDAGraphMode.NONE)
        forward = create_forward(desc, warmup=False)
        manager.graphs[desc] = Call(lambda forward=forward: forward(CUDAGraphMode.NONE))  # type: ignore[misc]
    manager._graphs_captured = True


def generate_with_graphs(given: dict[str, Any]) -> dict[str, Any]:
    """Let a handful of requests run together, greedily; tell what replayed graphs and what did not."""
    from vllm import SamplingParams

    os.environ.update(given.get("environment", {}))
    install(given["mode"], given["sizes"])
    engine = Engine(given | {"engine": {"enforce_eager": False, "compilation_config": {"mode": 0}}})
    engine.runner.capture_model()
    seen = {name: watched(manager) for name, manager in managers(engine.runner)}
    CONTROLS[given.get("break", "")](engine.runner)
    plain = SamplingParams(max_tokens=given.get("tokens", 24), temperature=0.0, ignore_eos=True, detokenize=False)
    asked = prompts(tuple(given.get("prompts", (5, 17, 40, 90))), given.get("vocabulary", VOCABULARY))
    done = engine.llm.generate(asked, plain, use_tqdm=False)
    tokens = [[list(output.token_ids) for output in request.outputs] for request in done]
    lengths = graph_lengths(engine.scheduler.vllm_config)
    return engine.facts() | {"tokens": tokens, "seen": seen, "graph_lengths": lengths}


def managers(runner: Any) -> list[tuple[str, Any]]:
    """Return the graph managers of verification, of the drafter's first pass and of its rounds."""
    named = ("first pass", "prefill_cudagraph_manager"), ("rounds", "decode_cudagraph_manager")
    of_drafter = [(name, getattr(runner.speculator, attribute, None)) for name, attribute in named]
    return [("verification", runner.cudagraph_manager), *((name, each) for name, each in of_drafter if each)]


def watched(manager: Any) -> Counter[str]:
    """Return a count, as it goes on, of what a manager chooses and which lengths it replays."""
    seen: Counter[str] = Counter()
    dispatch, run = manager.dispatch, manager.run_fullgraph

    def dispatched(*args: Any, **named: Any) -> Any:
        chosen = dispatch(*args, **named)
        seen[chosen.cg_mode.name] += 1
        return chosen

    def replayed(desc: Any) -> Any:
        seen[f"replay {getattr(desc, 'num_speculative_tokens', 'any')}"] += 1
        return run(desc)

    manager.dispatch, manager.run_fullgraph = dispatched, replayed
    return seen


def _whole(_: Any) -> None:
    """Break nothing."""


def _blank_states(runner: Any) -> None:
    """Let the drafter's rounds behind the first start from nothing."""
    manager = runner.speculator.decode_cudagraph_manager
    run = manager.run_fullgraph

    def replayed(desc: Any) -> Any:
        runner.speculator.hidden_states.zero_()
        return run(desc)

    manager.run_fullgraph = replayed


def _neighbours_rows(runner: Any) -> None:
    """Let every verification give each row the hidden states of its neighbour."""
    manager = runner.cudagraph_manager
    run = manager.run_fullgraph

    def replayed(desc: Any) -> Any:
        hidden, others = run(desc)
        return hidden.roll(1, 0), others

    manager.run_fullgraph = replayed


CONTROLS: dict[str, Callable[[Any], None]] = {
    "": _whole,
    "neighbour's rows": _neighbours_rows,
    "blank states": _blank_states,
}
