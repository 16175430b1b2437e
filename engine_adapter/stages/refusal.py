"""Why an engine's stages cannot move, or its pipeline cannot draft; read from vLLM's configuration alone.

Called in the scheduler's process and in every worker, which must come to the same answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ON_EVERY_RANK = ("ngram",)  # drafts out of the text: no rank before the last needs to know of it


def stages_refusal(config: VllmConfig) -> str | None:
    """Return why stages cannot move under this configuration, None if they can."""
    parallel, model = config.parallel_config, config.model_config
    found = (
        _unless(parallel.distributed_executor_backend == "mp", "distributed_executor_backend", "mp", parallel),
        _unless(parallel.tensor_parallel_size == 1, "tensor_parallel_size", "1", parallel),
        _unless(parallel.data_parallel_size == 1, "data_parallel_size", "1", parallel),
        _unless(parallel.nnodes == 1, "nnodes", "1, as all ranks read the weights from one host", parallel),
        "a LoRA adapter; expected none, as its weights do not move" if config.lora_config is not None else None,
        "a KV connector; expected none, as it keeps the layers of its rank" if config.kv_transfer_config else None,
        "compiled graphs, which keep their range of layers; pass --enforce-eager" if _is_compiled(config) else None,
        _unless(model.quantization is None, "quantization", "none", model),
        _unless(not config.use_v2_model_runner, "use_v2_model_runner", "the V1 runner", config),
        _unless(_device() == "cpu", "device", "cpu", None, _device()),
        _too_few(config),
    )
    return next((reason for reason in found if reason is not None), None)


def _unless(is_fine: bool, name: str, expected: str, owner: object, seen: object = None) -> str | None:
    return None if is_fine else f"{name}={getattr(owner, name, seen)}; expected {expected}"


def _is_compiled(config: Any) -> bool:
    return not config.model_config.enforce_eager


def _device() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def _too_few(config: Any) -> str | None:
    layers, ranks = model_layers(config), config.parallel_config.pipeline_parallel_size
    return None if ranks <= layers else f"{ranks} ranks for {layers} layers; expected at most one rank for each layer"


def model_layers(config: Any) -> int:
    """Return how many layers the model has."""
    return int(config.model_config.hf_text_config.num_hidden_layers)


def drafting_refusal(config: VllmConfig) -> str | None:
    """Return why this engine cannot draft in a pipeline, None if it can or has none.

    vLLM 0.32 builds a drafter on the last rank alone and reads it on all (gpu_model_runner.py:590, :6872, :7017).
    """
    ranks, speculative = config.parallel_config.pipeline_parallel_size, config.speculative_config
    if ranks == 1 or speculative is None or config.use_v2_model_runner or speculative.method in ON_EVERY_RANK:
        return None
    return (
        f"method {speculative.method} with pipeline_parallel_size={ranks}: vLLM's V1 runner has a drafter on the last "
        f"rank only; expected method {' or '.join(ON_EVERY_RANK)}, or one rank"
    )
