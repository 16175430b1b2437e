"""The target's share changes in place: so many threads, on these cores, and everything back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from faser.engine_adapter.partition.core_shares import KERNELS, CoreShares
from faser.engine_adapter.partition.cpu import CpuDevice
from faser.engine_adapter.partition.shares import opened

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
for index, rows in [(1, 0), (1, 9), (1, 9), (0, 9)]:
    print(shares.take(index, rows), torch.get_num_threads(), sorted(os.sched_getaffinity(0)))
"""


def test_a_share_is_taken_and_given_back() -> None:
    # A test before may have given children one thread for their arithmetic.
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(len(USABLE)))
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    half = len(USABLE) // 2
    split, new_rows = (f"1 {threads} {USABLE[:half]}" for threads in (half, len(USABLE)))
    whole = f"0 {len(USABLE)} {USABLE}"
    assert done.stdout.splitlines() == [f"{tuple(USABLE[half:])}", split, new_rows, split, whole]


def test_as_many_numbers_of_rows_are_remembered_as_vllm_has_kernels() -> None:
    """Also those that were made while nothing was split."""
    shares = CoreShares(opened(CpuDevice(), ["1:1"]), 2)
    assert [shares._note("rows", rows) for rows in (1, 1, 0)] == [True, False, False]
    assert not any(shares._note("rows", 1) or not shares._note("rows", rows) for rows in range(2, KERNELS + 20))
    assert not shares._note("rows", 1)
    assert shares._note("rows", 2)
    assert shares._note("logits", 1)
