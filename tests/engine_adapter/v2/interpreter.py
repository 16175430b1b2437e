"""vLLM's real V2 model runner on a CPU: Triton's own interpreter stands in for a compiler of kernels.

`install()` comes before the first import of vLLM, in every process. Nothing on disk is changed. What cannot be had
this way: CUDA graphs, races between streams, the fused loop of draft rounds.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def install() -> None:
    """Make vLLM believe that Triton has a back end for CPUs, so that it chooses its V2 runner there."""
    assert "vllm" not in sys.modules, "install() comes before the first import of vLLM"
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Inductor would ask Triton's back end for a compiler
    _pretend_a_backend()
    _keep_bools()


def _pretend_a_backend() -> None:
    """Interpreted kernels ask Triton's driver for very little; vLLM asks whether there is one."""
    from triton.backends import Backend, backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    class InterpretedDriver(DriverBase):
        @staticmethod
        def is_active() -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise NotImplementedError("nothing is compiled under the interpreter")

        def get_current_target(self) -> Any:
            return GPUTarget("cpu", "interpreter", 1)

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cpu")

        def get_benchmarker(self) -> Any:
            raise NotImplementedError("nothing is measured under the interpreter")

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

    backends["cpu"] = Backend(None, InterpretedDriver)  # type: ignore[arg-type]
    driver.set_active(InterpretedDriver())  # type: ignore[no-untyped-call]


def _keep_bools() -> None:
    """Triton 3.9's interpreter spreads the result of a comparison as integers, and then refuses it as a mask."""
    import numpy as np
    from triton.runtime import interpreter

    inherited = interpreter.InterpreterBuilder.create_splat

    def create_splat(builder: Any, shape: Any, scalar: Any) -> Any:
        splat = inherited(builder, shape, scalar)  # type: ignore[no-untyped-call]
        if scalar.data.dtype == np.bool_:
            splat.data = splat.data.astype(np.bool_)
        return splat

    interpreter.InterpreterBuilder.create_splat = create_splat  # type: ignore[method-assign]


def keep_async_scheduling() -> None:
    """Leave asynchronous scheduling on, which vLLM's CPU platform switches off at the end of its configuration.

    Each step is then computed when it is launched, but scheduled before the last one's tokens are known, as on a GPU.
    """
    from vllm.platforms.cpu import CpuPlatform

    inherited = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        inherited(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[method-assign,assignment]


def top_k_by_torch() -> None:
    """Let vLLM's own PyTorch code apply top-k and top-p: in its kernel the interpreter's loop variable is no tensor."""
    from vllm.v1.sample.ops import topk_topp_sampler as ops

    def apply(logits: Any, k: Any, p: Any, **_: Any) -> Any:
        return ops.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    ops.apply_top_k_top_p_triton = apply


def allow_adaptive_verification() -> None:
    """Let vLLM verify adaptively without CUDA graphs, which it asks for since it would be slow, not wrong.

    Its CPU attention reads the lengths where the device writes them, so that both may differ.
    """
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    VllmConfig._validate_adaptive_verification = lambda _: None  # type: ignore[method-assign,assignment]
    adaptive_verification.get_query_lens_mismatch_unsupported_backend = lambda *_, **__: None
    adaptive_verification.get_varlen_cudagraph_unsupported_backend = lambda *_, **__: None
    model_runner.resolve_adaptive_cudagraph_mode = lambda mode, **_: mode


def log1p_by_log() -> None:
    """Let drafts drawn at random be rejected: of libdevice's functions the interpreter has none, a call gives None."""
    from types import SimpleNamespace

    import triton.language as tl
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))
