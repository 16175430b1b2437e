"""Which draft lengths have a full CUDA graph on vLLM's V2 runner: what HELLO says, in vLLM's own words.

Called once at engine start by engine_facts.py. Captures nothing, touches no device and never raises; imports nothing of
vLLM for an engine without graphs or without the V2 runner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .operator_log import operator_log
from .patches.graphs import Dispatcher
from .protocol import MAX_DRAFT_LENGTH

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = operator_log(__name__)

_MOST: Final = 64  # that HELLO holds


def graph_lengths(config: VllmConfig) -> list[int]:
    """Return the draft lengths of which a batch of their own replays a full graph, at some size at least; ascending.

    By the graph mode as it stands in `config`: where the workers are processes of their own, vLLM may since have
    lowered it there for the attention backend. Empty, which means that all lengths cost alike, where vLLM cannot be
    asked, and where 0..64 all have a graph.
    """
    if not config.use_v2_model_runner or config.speculative_config is None or not has_graphs(config):
        return []
    try:
        lengths = _asked(config)
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        logger.warning("FASER cannot ask this vLLM which draft lengths have full CUDA graphs, and says none: %s", said)
        return []
    return lengths if len(lengths) <= _MOST else []


def has_graphs(config: VllmConfig) -> bool:
    """Return whether vLLM captures CUDA graphs of any kind."""
    compilation = config.compilation_config
    mode = compilation.cudagraph_mode
    return mode is not None and mode.name != "NONE" and bool(compilation.cudagraph_capture_sizes)


def _asked(config: VllmConfig) -> list[int]:
    dispatcher = Dispatcher(config)
    most_rows = max(config.compilation_config.cudagraph_capture_sizes or [0])

    def has_graph(length: int) -> bool:
        most = min(config.scheduler_config.max_num_seqs, most_rows // (length + 1))
        return any(dispatcher.is_full(requests, length) for requests in range(1, most + 1))

    return [length for length in range(min(config.num_speculative_tokens, MAX_DRAFT_LENGTH) + 1) if has_graph(length)]
