"""In which number type a model whose weights are bfloat16 should be computed.

Called by `faser serve`, `faser demo`, `faser doctor`, training and the benchmarks. vLLM's CPU build (0.32,
platforms/cpu.py import_kernels) brings matrix products of its own for x86 processors with AVX512-BF16; elsewhere it
calls torch, and torch multiplies bfloat16 row after row on x86 processors without AVX-512. There a step over n tokens
costs n steps over one, so that no draft can pay.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final, Literal, get_args

DType = Literal["bfloat16", "float32"]
DTYPES: Final[tuple[DType, ...]] = get_args(DType)
_CPUINFO: Final = Path("/proc/cpuinfo")
_NEEDED: Final = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}  # what torch's oneDNN asks of x86 for bfloat16


@cache
def is_bfloat16_slow(cpuinfo: Path = _CPUINFO) -> bool:
    """Return whether this is an x86 processor that multiplies bfloat16 row by row; False where nobody can tell."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), None)
    return flags is not None and not set(flags) >= _NEEDED


def dtype_on(device: str) -> DType:
    """Return vLLM's `dtype` for bfloat16 weights on a device of this machine: `cpu` or any other."""
    return "float32" if device == "cpu" and is_bfloat16_slow() else "bfloat16"


def number_bytes(dtype: DType) -> int:
    """Return the bytes that a weight or a number of the KV cache takes."""
    return 4 if dtype == "float32" else 2
