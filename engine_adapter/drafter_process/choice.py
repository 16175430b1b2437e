"""Whether this engine gets a drafter process, which one, and on which cores.

Asked by the scheduler's side for HELLO and by the runner's side to start it: both must say the same. Reads public
configuration only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ..partition.cpu import CpuPartition
from ..partition.shares import PartitionError, Sizes
from ..settings import ANYWHERE, core_numbers
from .attention import shape_refusal
from .eagle import eagle_refusal, states_width

METHODS = ("draft_model", "eagle3")

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def chosen_drafter(cores: str, config: VllmConfig) -> tuple[list[str], str | None]:
    """Return the command of the drafter's process, and why there is none; neither where none is asked for."""
    if not cores:
        return [], None
    reason = _refusal(config) or _cores_refusal(cores)
    drafting = config.speculative_config
    if reason is not None or drafting is None:
        return [], reason
    dtype = _dtype(drafting.draft_model_config)
    start = [sys.executable, "-m"]
    if drafting.method == "draft_model":
        return [*start, "faser.engine_adapter.drafter_process.llama", str(drafting.model), dtype], None
    target = config.model_config
    return [
        *start, "faser.engine_adapter.drafter_process.eagle", str(drafting.model), str(target.model), dtype,
        _dtype(target),
    ], None  # fmt: skip


def states_of_target(config: VllmConfig) -> tuple[int, str] | None:
    """Return width and type of the target's states that the drafter's process reads; None: it reads none."""
    drafting = config.speculative_config
    if drafting is None or drafting.method != "eagle3":
        return None
    return states_width(str(drafting.model)), _dtype(config.model_config)


def _dtype(model: ModelConfig) -> str:
    return str(model.dtype).removeprefix("torch.")


def _cores_refusal(text: str) -> str | None:
    if text == ANYWHERE:
        return None
    missing = missing_cores(core_numbers(text))
    if not missing:
        return None
    return (
        f"cores {text} for the drafter, of which {', '.join(map(str, missing))} cannot be had here; "
        f"this process runs on {', '.join(map(str, sorted(os.sched_getaffinity(0))))}"
    )


def missing_cores(cores: Sequence[int]) -> list[int]:
    """Return which of these no process here can have: offline, or another container's. Tried on this thread alone."""
    before, found = os.sched_getaffinity(0), set[int]()
    try:
        with suppress(OSError):  # none of them
            os.sched_setaffinity(0, cores)
            found = os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, before)
    return sorted(set(cores) - found)


def _refusal(config: VllmConfig) -> str | None:
    from vllm.platforms import current_platform

    drafting, parallel = config.speculative_config, config.parallel_config
    if drafting is None or drafting.method not in METHODS:
        method = "none" if drafting is None else drafting.method
        return f"method {method}: it has no drafter that could run in a process; expected {' or '.join(METHODS)}"
    if not current_platform.is_cpu() or config.use_v2_model_runner:
        return "a drafter process is for the CPU with vLLM's V1 runner"
    if config.scheduler_config.async_scheduling:
        return "async scheduling: nobody waits for the tokens that a frontier would follow"
    if parallel.world_size > 1:
        return f"{parallel.world_size} ranks; expected one"
    if drafting.draft_sample_method != "greedy":
        return f"draft_sample_method {drafting.draft_sample_method!r}; expected 'greedy': a frontier is not drawn"
    drafter = drafting.draft_model_config
    if drafter.quantization is not None:
        return f"the draft model is quantized ({drafter.quantization}); expected plain weights"
    if drafter.get_vocab_size() != config.model_config.get_vocab_size():
        return "the draft model has another vocabulary than the target"
    if drafting.parallel_drafting:
        return "parallel drafting: the process draws one token after the other"
    if drafting.method == "eagle3":
        return eagle_refusal(str(drafting.model), str(config.model_config.model))
    return shape_refusal(str(drafting.model))


def drafter_cores(text: str, threads: int) -> CpuPartition | None:
    """Return the partition that FASER_DRAFTER_CORES asks for, None for everywhere; PartitionError if it cannot be.

    :param threads: of the target, each of which needs a core of its own beside the drafter's.
    """
    if text == ANYWHERE:
        return None
    draft = core_numbers(text)
    mine = os.sched_getaffinity(0)
    verify = sorted(mine - set(draft))
    if len(verify) < threads:
        raise PartitionError(
            f"cores {text} for the drafter leave the target {len(verify)} of cores {sorted(mine)} for its {threads} "
            f"threads; start vLLM with OMP_NUM_THREADS={max(len(verify), 1)}, or name fewer cores"
        )
    sizes = Sizes(len(draft), len(verify))
    return CpuPartition(
        name=f"{sizes.draft}:{sizes.verify}", unit="cores", asked=sizes, allocated=sizes, draft_cores=tuple(draft),
        verify_cores=tuple(verify),
    )  # fmt: skip
