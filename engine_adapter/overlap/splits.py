"""Which splits of the device a lease may ask for: HELLO's `splits`, what deals groups and what drafts beside them.

All three must say the same: they ask here. Under a split the requests are dealt into two groups, and while one is
verified the other is drafted for: on a CPU by a process with cores of its own, while the target has the others; on a
GPU (V2 runner) on a stream that is confined to its share of the SMs, or to none of them, while the target's CUDA graphs
have the whole device. Unsplit, the target and vLLM's own drafter have it in turn. Reads public configuration only.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

from ..drafter_process.choice import chosen_drafter
from ..partition.cpu import CpuDevice
from ..partition.cuda import CudaDevice
from ..partition.shares import Partitions, opened
from ..settings import ANYWHERE, NEVER, Settings
from .late_choice import late_refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BINDING = "VLLM_CPU_OMP_THREADS_BIND"
_NOTE = "faser_no_late_drafts"


def chosen_splits(settings: Settings, config: VllmConfig) -> Partitions:
    """Return the splits of this engine, unsplit first and often alone; `refused` has a line for what cannot be had."""
    whole = opened(CpuDevice(), ())
    if not settings.splits:
        return whole
    is_v2 = config.use_v2_model_runner
    reason = _refusal_on_v2(config) if is_v2 else _refusal(settings, config)
    if reason is not None:
        return Partitions(whole.ready, (reason,))
    return shares_of_gpu(settings.splits) if is_v2 else opened(CpuDevice(), settings.splits)


@cache
def shares_of_gpu(names: tuple[str, ...]) -> Partitions:
    """Return splits of the GPU that this process serves on: what HELLO offers is what the runner then has."""
    import torch

    try:
        return opened(CudaDevice(torch.cuda.current_device()), names)
    except Exception as error:  # a driver or its bindings that is not as known: no split is better than no steering
        line = f"{type(error).__name__} while the GPU was split: {' '.join(str(error).split())[:200]}"
        return Partitions(opened(CpuDevice(), ()).ready, (line,))


def note_refusal(config: VllmConfig, reason: str) -> None:
    """Leave in the configuration why the runner drafts nothing beside a step, for the scheduler in the same process."""
    object.__setattr__(config, _NOTE, reason)


def are_offered(splits: Partitions) -> bool:
    """Tell whether there is anything to choose."""
    return len(splits.ready) > 1


def can_deal_groups(settings: Settings, config: VllmConfig) -> bool:
    """Tell whether requests may be dealt into two groups: by a split, a process that drafts, or a stream."""
    if are_offered(chosen_splits(settings, config)):
        return True
    return settings.ping_pong != NEVER and no_groups_reason(settings, config) is None


def no_groups_reason(settings: Settings, config: VllmConfig) -> str | None:
    """Return why nobody could draft for one group while the other is verified, None if somebody can."""
    if config.use_v2_model_runner:
        return getattr(config, _NOTE, None) or late_refusal(config)
    command, reason = chosen_drafter(settings.drafter_cores, config)
    if command:
        return None
    return reason or "FASER_DRAFTER_CORES is not set; name the cores of the drafter's process"


def _refusal_on_v2(config: VllmConfig) -> str | None:
    device, executor = config.device_config.device_type, config.parallel_config.distributed_executor_backend
    if device != "cuda":
        return f"device {device}: on vLLM's V2 runner a GPU's SMs are split; expected cuda"
    if executor != "uni":
        return f"the target runs in a process of its own (executor {executor}); expected uni"
    return getattr(config, _NOTE, None) or late_refusal(config)


def _refusal(settings: Settings, config: VllmConfig) -> str | None:
    if settings.drafter_cores:
        return "FASER_DRAFTER_CORES settles the cores when the engine starts; unset it or FASER_SPLITS"
    if os.environ.get(BINDING) != "nobind":
        return f"vLLM binds each of its threads to a core; start it with {BINDING}=nobind and OMP_NUM_THREADS"
    return chosen_drafter(ANYWHERE, config)[1]
