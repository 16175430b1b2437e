"""Whether decode batches of mixed draft lengths replay full CUDA graphs on vLLM's V2 runner.

vLLM captures such graphs for its adaptive verification alone. The worker's mixin acts on what stands here and notes
what came of it; graph_lengths.py reads that in the scheduler's process. Reads configuration only, imports nothing of
vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

SWITCH: Final = "FASER_VARLEN_GRAPHS"
APART: Final = ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY")  # decode batches have graphs of their own, of one length each
_NOTE: Final = "faser_mixed_graphs"
_FULL_MODE: Final = "cudagraph_mode FULL, where the attention backend replays any batch"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why mixed lengths have no full graphs."""

    seen: str
    expected: str
    remedy: str

    def line(self) -> str:
        """Return it as one line of the log."""
        return (
            f"steps that mix draft lengths replay no full CUDA graph: {self.seen}; expected {self.expected}; "
            f"do: {self.remedy}"
        )


def backend_obstacle(backend: str) -> Obstacle:
    """Return the obstacle that an attention backend is."""
    return Obstacle(
        f"full graphs of the attention backend {backend} replay one length",
        "FlashAttention 3 (Hopper GPUs) or Triton",
        "--attention-backend TRITON_ATTN, if the model can use it",
    )


def graph_mode(config: Any) -> str:
    """Return the name of the graph mode as it stands in the configuration."""
    mode = config.compilation_config.cudagraph_mode
    return "NONE" if mode is None else str(mode.name)


def config_obstacle(config: Any) -> Obstacle | None:
    """Return what in the configuration is against mixed lengths in full graphs; the attention backend is not asked.

    None also where there is nothing to do: without any graphs, and with FULL, whose graphs take every batch.
    """
    if graph_mode(config) == "PIECEWISE":
        return Obstacle("cudagraph_mode PIECEWISE", APART[0], f"-cc.cudagraph_mode={APART[0]}")
    if graph_mode(config) not in APART:
        return None
    seen = next((what for what, is_so in _untried(config) if is_so), None)
    return None if seen is None else Obstacle(seen, "an engine without it", _FULL_MODE)


def _untried(config: Any) -> tuple[tuple[str, bool], ...]:
    """Name what vLLM itself never runs together with such graphs, or what decides on graphs by itself."""
    parallel, model = config.parallel_config, config.model_config
    return (
        ("pipeline parallelism", parallel.pipeline_parallel_size > 1),
        ("data parallelism", parallel.data_parallel_size > 1),
        (
            "context parallelism",
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        ),
        ("microbatches", bool(parallel.use_ubatching)),
        ("LoRA", config.lora_config is not None),
        ("an encoder-decoder model", bool(model.is_encoder_decoder)),
        ("fast prefill by shared KV caches", bool(config.cache_config.kv_sharing_fast_prefill)),
    )


def note_outcome(config: Any, is_mixed: bool) -> None:
    """Leave in the worker's configuration whether its full graphs take mixed lengths."""
    object.__setattr__(config, _NOTE, is_mixed)


def noted_outcome(config: Any) -> bool | None:
    """Return what the worker noted; None where it has a copy of the configuration in a process of its own."""
    noted: bool | None = getattr(config, _NOTE, None)
    return noted
