"""FASER's worker for an unmodified vLLM: `--worker-cls faser.engine_adapter.worker.FaserWorker`.

vLLM's own worker for this platform, whose model runner carries FASER's mixin. With an unknown vLLM, on an unknown
platform or with FASER_ENABLED=0 it is exactly vLLM's own class. Imported inside vLLM's processes only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from .operator_log import operator_log
from .patches.v1 import GpuWorkerHooks, mend_expand, substituted
from .patches.versions import unsupported_reason, vllm_version
from .settings import SettingError, load_settings
from .stages.stage_worker import StagedWorker

logger = operator_log(__name__)


class CpuWorker(StagedWorker):
    """Mixin in front of vLLM's CPUWorker."""

    def init_device(self) -> None:
        """Build the device and, on the way, a runner with FASER."""
        _harmlessly("mending of sampling parameters", mend_expand)
        with _runner_for_cpu(self.use_v2_model_runner):  # type: ignore[attr-defined]
            super().init_device()


class GpuWorker(GpuWorkerHooks):
    """Mixin in front of vLLM's GPU worker."""

    def make_runner(self, make: Callable[[], Any]) -> Any:
        """Return the runner vLLM chooses, with FASER."""
        if self.use_v2_model_runner:  # type: ignore[attr-defined]
            module, with_faser = "vllm.v1.worker.gpu.model_runner", _with_v2
        else:
            module, with_faser = "vllm.v1.worker.gpu_model_runner", _with_v1
        with _substituted(module, "GPUModelRunner", with_faser):
            return make()


def _with_v1(runner_class: type) -> type:
    from .runner.v1 import with_faser

    return with_faser(runner_class)


def _with_v2(runner_class: type) -> type:
    from .runner.v2 import with_faser

    return with_faser(runner_class)


def _runner_for_cpu(is_v2: bool) -> AbstractContextManager[None]:
    if is_v2:
        return _substituted("vllm.v1.worker.cpu.model_runner", "CPUModelRunner", _with_v2)
    return _substituted("vllm.v1.worker.cpu_worker", "CPUModelRunner", _with_v1)


def _substituted(module: str, name: str, with_faser: Callable[[type], type]) -> AbstractContextManager[None]:
    def change(original: type) -> type:
        try:
            return with_faser(original)
        except Exception:
            logger.exception("FASER is off in this worker: its part of the model runner cannot be built")
            return original

    return substituted(module, name, change)


def _harmlessly(what: str, action: Callable[[], object]) -> None:
    try:
        action()
    except Exception:
        logger.exception("FASER: %s failed; vLLM goes on as it is", what)


def _off_reason() -> str | None:
    try:
        if reason := unsupported_reason(vllm_version()):
            return reason
        return None if load_settings().is_enabled else "FASER_ENABLED=0"
    except SettingError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def worker_class() -> type:
    """Return the class that vLLM shall use for its workers in this process."""
    reason = _off_reason()  # first: of a vLLM that FASER does not know only the class that is handed back is imported
    from vllm.platforms import current_platform

    base: type
    mixin: type
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        base, mixin = CPUWorker, CpuWorker
    elif current_platform.is_cuda_alike():
        from vllm.v1.worker.gpu_worker import Worker

        base, mixin = Worker, GpuWorker
    else:
        from vllm.v1.worker.xpu_worker import XPUWorker

        base, mixin, reason = XPUWorker, GpuWorker, "device is neither a CPU nor CUDA"
    if reason is not None:
        logger.warning("FASER is off in this worker: %s", reason)
        return base
    return type(
        "FaserWorker", (mixin, base), {"__doc__": f"vLLM's {base.__name__} with FASER.", "__module__": __name__}
    )


FaserWorker = worker_class()
