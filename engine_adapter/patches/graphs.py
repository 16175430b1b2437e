"""Private names of the CUDA graph manager of vLLM's V2 runner: which batch replays which graph.

Called by graph_lengths.py at engine start, in the scheduler's process. No graph is captured, no device and no process
group is asked for anything. Imports of vLLM are lazy.
"""

from __future__ import annotations

from typing import Any


class Dispatcher:
    """vLLM's own choice of a graph for each batch of one configuration, as it is once all graphs are captured.

    Raises whatever a vLLM raises whose manager is another one.
    """

    def __init__(self, config: Any, is_mixed: bool = False) -> None:
        """Take whether the manager is one whose decode graphs take mixed lengths, adaptive verification aside."""
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

        # Without its __init__, which asks for the worker's process groups and for a memory pool of the device.
        self._manager: Any = CudaGraphManager.__new__(CudaGraphManager)
        vars(self._manager).update(
            vllm_config=config,
            compilation_config=config.compilation_config,
            max_num_reqs=config.scheduler_config.max_num_seqs,
            cudagraph_mode=config.compilation_config.cudagraph_mode,
            decode_query_len=config.num_speculative_tokens
            + 1,  # 0.32 model_runner.py:435, models that sample one token
            varlen_decode=is_mixed or bool(getattr(config.speculative_config, "enable_adaptive_verification", False)),
            lora_capture_cases=[0],
            ubatch_runner=None,
            _candidates={},
            _capture_descs={},
            _graphs_captured=True,
        )
        self._manager._init_candidates()

    def is_full(self, requests: int, length: int) -> bool:
        """Tell whether a batch whose requests all verify `length` drafts replays a full graph."""
        rows = length + 1
        chosen = self._manager.dispatch(requests, requests * rows, rows, 0, max_query_len=rows)
        return bool(chosen.cg_mode.name == "FULL")


def replays_any_batch(config: Any) -> bool:
    """Tell whether the attention backend that the operator named replays mixed lengths; False where none is named.

    vLLM chooses a backend for each layer while it builds the model, in the workers.
    """
    from vllm.v1.attention.backend import AttentionCGSupport

    named = config.attention_config.backend
    if named is None or config.attention_config.backend_per_kind:
        return False
    support = named.get_class().get_builder_cls()._cudagraph_support
    return bool(support is AttentionCGSupport.ALWAYS)
