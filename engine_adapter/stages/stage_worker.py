"""The worker's part: a mixin in front of vLLM's CPU worker that mends its pipelines and, if asked to, moves stages.

engine_adapter/worker.py puts it in front of CPUWorker. With one rank it leaves everything as it is.
"""

from __future__ import annotations

import os
import select
import signal
import time
from multiprocessing import parent_process
from threading import Thread
from typing import Any, Final

from ..operator_log import operator_log
from ..patches.pipeline.loading import every_layer_built, forget_layers
from ..patches.pipeline.ranks import PipelineRank, make_receive_buffers, note_missing_drafter
from ..settings import load_settings
from .refusal import drafting_refusal, stages_refusal
from .shelf import ImmovableModelError
from .stage_rank import StageRank

logger = operator_log(__name__)

GRACE_S: Final = 2.0  # for vLLM's own way to end a worker


class StagedWorker:
    """Mixin in front of vLLM's CPUWorker; `stages` is None where they stay as vLLM cut them."""

    stages: StageRank | None = None
    vllm_config: Any
    model_runner: Any

    def init_device(self) -> None:
        """Refuse what would crash, tie this process to its engine, and join the ranks."""
        ranks = self.vllm_config.parallel_config.pipeline_parallel_size
        if ranks > 1:
            if reason := drafting_refusal(self.vllm_config):
                raise ValueError(f"FASER: {reason}")
            _end_with_parent()
        super().init_device()  # type: ignore[misc]
        if ranks > 1 and load_settings().has_stages:
            self.stages = self._join()

    def _join(self) -> StageRank | None:
        if reason := stages_refusal(self.vllm_config):
            logger.warning("FASER's stages are off: %s", reason)
            return None
        from torch.distributed import new_group

        pipeline = PipelineRank()
        return StageRank(pipeline, new_group(pipeline.ranks, backend="gloo"))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load this rank's layers, movable if that can be."""
        if self.stages is None or not self._load_movable(self.stages, args, kwargs):
            self.stages = None
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self.vllm_config.parallel_config.pipeline_parallel_size > 1 and not self.use_v2_model_runner:  # type: ignore[attr-defined]
            make_receive_buffers(self.model_runner)
            note_missing_drafter(self.model_runner)

    def _load_movable(self, stages: StageRank, args: Any, kwargs: Any) -> bool:
        try:
            with every_layer_built(lambda model: stages.adopt(model, self.vllm_config)):
                super().load_model(*args, **kwargs)  # type: ignore[misc]
        except ImmovableModelError as error:
            logger.warning("FASER's stages are off: %s", error)
            forget_layers(self.vllm_config)
            return False
        stages.loaded()
        return True

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step."""
        if self.stages is None:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        return self.stages.execute(self.model_runner, scheduler_output)

    def stages_report(self) -> dict[str, Any] | None:
        """Return what this rank counted; for tests and measurements, over vLLM's collective_rpc."""
        return None if self.stages is None else self.stages.report()


def _end_with_parent() -> None:
    """End this process when the one that started it has died: vLLM's workers would wait for each other for ever.

    The kernel's own signal for this (PR_SET_PDEATHSIG) comes when the parent's thread ends, not when it dies.
    """
    parent = parent_process()
    if parent is None or parent.pid is None:
        return
    try:
        descriptor = os.pidfd_open(parent.pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    except OSError as error:
        logger.warning("FASER cannot watch the engine's process (%s): kill its workers by hand if it dies", error)
        return
    Thread(target=_wait_for_end, args=(descriptor,), daemon=True, name="faser-engine-watch").start()


def _wait_for_end(descriptor: int) -> None:
    select.select([descriptor], [], [])
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
