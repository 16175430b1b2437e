"""The target's share changes in place: so many threads, on these cores, and everything back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

USABLE = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(USABLE) < 2, reason="one core cannot be split")

# In a process of its own: the share is the calling thread's. Tells threads and cores after each change.
CODE = """
import os, torch
from faser.engine_adapter.partition.core_shares import CoreShares
from faser.engine_adapter.partition.cpu import CpuDevice
from faser.engine_adapter.partition.shares import opened
shares = CoreShares(opened(CpuDevice(), ["1:1"]), torch.get_num_threads())
torch.set_num_threads = None  # vLLM takes it away
print(shares.largest_draft.draft_cores)
for index in [1, 1, 0]:
    print(shares.take(index), torch.get_num_threads(), sorted(os.sched_getaffinity(0)))
"""


def test_a_share_is_taken_and_given_back() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": str(len(USABLE))}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    half = len(USABLE) // 2
    split = f"1 {half} {USABLE[:half]}"
    cores = tuple(USABLE[half:])
    assert done.stdout.splitlines() == [f"{cores}", split, split, f"0 {len(USABLE)} {USABLE}"]
