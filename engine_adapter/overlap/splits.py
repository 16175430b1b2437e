"""Which splits of the cores a lease may ask for: HELLO's `splits`, what deals groups and what starts the process.

All three must say the same: they ask here. Under a split the requests are dealt into two groups, and while one is
verified on the target's cores the drafter's process drafts for the other on its own. Unsplit, the target and vLLM's own
drafter have all cores in turn, and the process sleeps. Reads public configuration only.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..drafter_process.choice import chosen_drafter
from ..partition.cpu import CpuDevice
from ..partition.shares import Partitions, opened
from ..settings import ANYWHERE, NEVER, Settings
from .late_choice import late_refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def chosen_splits(settings: Settings, config: VllmConfig) -> Partitions:
    """Return the splits of this engine, unsplit first and often alone; `refused` has a line for what cannot be had."""
    if not settings.splits:
        return opened(CpuDevice(), ())
    reason = _refusal(settings, config)
    if reason is not None:
        return Partitions(opened(CpuDevice(), ()).ready, (reason,))
    return opened(CpuDevice(), settings.splits)


def are_offered(splits: Partitions) -> bool:
    """Tell whether there is anything to choose."""
    return len(splits.ready) > 1


def can_deal_groups(settings: Settings, config: VllmConfig) -> bool:
    """Tell whether requests may be dealt into two groups: by a split, a process that drafts, or a stream of its own."""
    if are_offered(chosen_splits(settings, config)):
        return True
    return settings.ping_pong != NEVER and no_groups_reason(settings, config) is None


def no_groups_reason(settings: Settings, config: VllmConfig) -> str | None:
    """Return why nobody could draft for one group while the other is verified, None if somebody can."""
    if config.use_v2_model_runner:
        return late_refusal(config)
    command, reason = chosen_drafter(settings.drafter_cores, config)
    if command:
        return None
    return reason or "FASER_DRAFTER_CORES is not set; name the cores of the drafter's process"


def _refusal(settings: Settings, config: VllmConfig) -> str | None:
    if settings.drafter_cores:
        return "FASER_DRAFTER_CORES settles the cores when the engine starts; unset it or FASER_SPLITS"
    if os.environ.get(BINDING) != "nobind":
        return f"vLLM binds each of its threads to a core; start it with {BINDING}=nobind and OMP_NUM_THREADS"
    return chosen_drafter(ANYWHERE, config)[1]
