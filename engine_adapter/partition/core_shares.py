"""The target's share of the cores, which changes from step to step.

Owned by the runner's part (overlap/frontier_runner.py), on the thread that runs the target. A pool of threads keeps
those of its largest share: fewer are woken while another process has the rest of the cores. Only the calling thread is
moved; the others sleep, or are as many as the share has cores.

vLLM keeps a oneDNN kernel for each number of rows (0.32 _custom_ops.py:create_onednn_mm, 32 of them for each shape of
weights), which never uses more threads than there were when it was made, but goes on with fewer. So a number of rows
that is new gets all threads once, whatever the split.
"""

from __future__ import annotations

import os
from typing import Final

from .cpu import CpuPartition
from .shares import Partitions

UNSPLIT_INDEX: Final = 0
KERNELS: Final = 32


class CoreShares:
    """What this process computes on, by the index of HELLO's `splits`.

    :param partitions: of CPU cores, all of them ready.
    :param threads: what the target computes with while it has all cores.
    """

    def __init__(self, partitions: Partitions, threads: int) -> None:
        self._partitions = partitions
        self.threads = threads
        self.index = UNSPLIT_INDEX
        # Numbers of rows whose kernels were made with all threads, the one not used for longest first.
        self._made: dict[str, dict[int, None]] = {"rows": {}, "logits": {}}

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

    def take(self, index: int, rows: int = 0, logits: int = 0) -> int:
        """Let the target compute on its share from now on; return the index that is in force.

        :param rows: of the step's forward pass.
        :param logits: rows of them that the target's head computes.
        """
        is_new = self._note("rows", rows) | self._note("logits", logits)
        cores = self.at(index).cores("verify")
        threads = self.threads if is_new else min(self.threads, len(cores))
        if threads != running_threads():
            set_threads(threads)
        if index != self.index:
            os.sched_setaffinity(0, cores)
            self.index = index
        return self.index

    def _note(self, of: str, rows: int) -> bool:
        """Tell whether a kernel for so many rows has to be made; vLLM forgets the one that was not used for longest."""
        if not rows:
            return False
        made = self._made[of]
        is_new = rows not in made
        made.pop(rows, None)
        made[rows] = None
        if len(made) > KERNELS:
            del made[next(iter(made))]
        return is_new


def running_threads() -> int:
    """Return how many threads this thread's parallel regions have."""
    import torch

    return torch.get_num_threads()


def set_threads(count: int) -> None:
    """Let this thread's parallel regions have so many threads; a pool only grows, and parks who is not asked.

    vLLM puts a function that does nothing in the place of torch's own (0.32 cpu_worker.py:138), for the sake of
    threads that it has bound to cores; here nothing is bound.
    """
    import torch

    torch._C.set_num_threads(count)
