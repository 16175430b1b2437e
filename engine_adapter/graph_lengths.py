"""Which draft lengths have a full CUDA graph on vLLM's V2 runner: what HELLO says, in vLLM's own words.

Called once at engine start by hello.py. Captures nothing, touches no device and never raises; imports nothing of
vLLM for an engine without graphs or without the V2 runner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .mixed_graphs import APART, config_obstacle, graph_mode, noted_outcome
from .operator_log import operator_log
from .patches.graphs import Dispatcher, replays_any_batch
from .protocol import MAX_DRAFT_LENGTH

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = operator_log(__name__)

_MOST: Final = 64  # that HELLO holds


def graph_lengths(config: VllmConfig, is_varlen: bool = True) -> list[int]:
    """Return the draft lengths of which a batch of their own replays a full graph, at some size at least; ascending.

    By the graph mode as it stands in `config`: where the workers are processes of their own, vLLM may since have
    lowered it there for the attention backend. There it is not known either which backend vLLM chose: unless the
    operator named one, the lengths are those that vLLM captures by itself. Empty, which means that all lengths cost
    alike, where vLLM cannot be asked, and where 0..64 all have a graph.

    :param is_varlen: FASER_VARLEN_GRAPHS
    """
    if not config.use_v2_model_runner or config.speculative_config is None or not has_graphs(config):
        return []
    try:
        lengths = _asked(config, is_varlen)
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


def _asked(config: VllmConfig, is_varlen: bool) -> list[int]:
    dispatcher = Dispatcher(config, _is_mixed(config, is_varlen))
    most_rows = max(config.compilation_config.cudagraph_capture_sizes or [0])

    def has_graph(length: int) -> bool:
        most = min(config.scheduler_config.max_num_seqs, most_rows // (length + 1))
        return any(dispatcher.is_full(requests, length) for requests in range(1, most + 1))

    return [length for length in range(min(config.num_speculative_tokens, MAX_DRAFT_LENGTH) + 1) if has_graph(length)]


def _is_mixed(config: VllmConfig, is_varlen: bool) -> bool:
    """Tell whether the runner's full graphs take mixed lengths, as far as this process can know."""
    if (noted := noted_outcome(config)) is not None:
        return noted
    if not is_varlen or graph_mode(config) not in APART or config_obstacle(config) is not None:
        return False
    return replays_any_batch(config)
