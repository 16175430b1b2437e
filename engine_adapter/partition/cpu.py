"""Cores as shares: affinity and thread counts of the drafter's process and of the target's.

Two processes, because two threads in one are unsafe in vLLM's CPU kernels (shared scratch memory, a forward context
that is a module's global). A process takes its share before its first parallel region: how many threads its OpenMP
runtime has at most is settled then; core_shares.py wakes fewer of them, from step to step. Must never touch a process
it is not given.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .shares import STREAMS, UNSPLIT, Grain, Partition, PartitionError, Phase, Sizes

THREADS: Path = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPartition(Partition):
    """Core numbers of both phases; the same ones if not split."""

    draft_cores: tuple[int, ...]
    verify_cores: tuple[int, ...]

    def cores(self, phase: Phase) -> tuple[int, ...]:
        """Return the core numbers of a phase."""
        return self.draft_cores if phase == "draft" else self.verify_cores

    def environment(self, phase: Phase) -> dict[str, str]:
        """Return the variables to start the phase's process with: one thread per core, each on its own."""
        cores = self.cores(phase)
        listed = ",".join(str(core) for core in cores)
        return {"OMP_NUM_THREADS": str(len(cores)), "VLLM_CPU_OMP_THREADS_BIND": listed}

    def confine(self, phase: Phase, pid: int = 0) -> int:
        """Move a process, all of its threads, to the phase's cores; return how many it has then.

        :param pid: 0 is the caller's own process.
        """
        wanted = set(self.cores(phase))
        process = pid or os.getpid()
        moved: set[int] = set()
        while True:  # a thread that starts while we look inherits from one that may not have been moved yet
            threads = _threads(process)
            if threads <= moved:
                break
            for thread in threads - moved:
                _move(thread, wanted, process)
            moved |= threads
        given = os.sched_getaffinity(process)
        if given != wanted:
            raise PartitionError(f"process {process} was given cores {sorted(given)}; expected {sorted(wanted)}")
        return len(given)


class CpuDevice:
    """The cores that this process may use."""

    def __init__(self) -> None:
        self.cores = tuple(sorted(os.sched_getaffinity(0)))
        self.grain = Grain("cores", len(self.cores))

    def open(self, name: str, asked: Sizes) -> CpuPartition:
        """Return the partition: the target's cores come first, the drafter's last."""
        if name == STREAMS:
            raise PartitionError("two processes cannot share threads; expected a ratio such as 1:1")
        draft = verify = self.cores
        if name != UNSPLIT:
            verify, draft = self.cores[: asked.verify], self.cores[asked.verify :]
        return CpuPartition(
            name=name, unit=self.grain.unit, asked=asked, allocated=Sizes(len(draft), len(verify)),
            draft_cores=draft, verify_cores=verify,
        )  # fmt: skip


def _threads(process: int) -> set[int]:
    try:
        return {int(entry.name) for entry in (THREADS / str(process) / "task").iterdir()}
    except OSError as error:
        raise PartitionError(f"process {process} cannot be moved ({error.strerror})") from None


def _move(thread: int, wanted: set[int], process: int) -> None:
    try:
        os.sched_setaffinity(thread, wanted)
    except ProcessLookupError:  # it ended meanwhile
        pass
    except OSError as error:
        raise PartitionError(
            f"process {process} cannot be moved to cores {sorted(wanted)} ({error.strerror})"
        ) from None
