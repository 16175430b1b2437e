"""The target's share of the cores, which changes from step to step.

Owned by the runner's part (overlap/frontier_runner.py), on the thread that runs the target. A pool of threads keeps
those of its largest share: fewer are woken while another process has the rest of the cores. Only the calling thread is
moved; the others sleep, or are as many as the share has cores.
"""

from __future__ import annotations

import os
from typing import Final

from .cpu import CpuPartition
from .shares import Partitions

UNSPLIT_INDEX: Final = 0


class CoreShares:
    """What this process computes on, by the index of HELLO's `splits`.

    :param partitions: of CPU cores, all of them ready.
    :param threads: what the target computes with while it has all cores.
    """

    def __init__(self, partitions: Partitions, threads: int) -> None:
        self._partitions = partitions
        self.threads = threads
        self.index = UNSPLIT_INDEX

    def at(self, index: int) -> CpuPartition:
        """Return a partition."""
        found = self._partitions.at(index)
        assert isinstance(found, CpuPartition)
        return found

    @property
    def largest_draft(self) -> CpuPartition:
        """The split that gives most to the drafter: its process is started with that, and confined to it."""
        splits = [self.at(index) for index in range(1, len(self._partitions.ready))]
        return max(splits, key=lambda split: split.allocated.draft)

    def take(self, index: int) -> int:
        """Let the target compute on its share from now on; return the index that is in force."""
        if index != self.index:
            cores = self.at(index).cores("verify")
            set_threads(min(self.threads, len(cores)))
            os.sched_setaffinity(0, cores)
            self.index = index
        return self.index


def set_threads(count: int) -> None:
    """Let this thread's parallel regions have so many threads; a pool only grows, and parks who is not asked.

    vLLM puts a function that does nothing in the place of torch's own (0.32 cpu_worker.py:138), for the sake of
    threads that it has bound to cores; here nothing is bound.
    """
    import torch

    torch._C.set_num_threads(count)
