"""An engine that does not exist: what it says, the inbox that it waits at, and turns of it summed up.

Called by adapter.py, decide.py, round_trip.py and store.py.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from faser.engine_adapter.link.engine_link import INBOX_LIMIT
from faser.engine_adapter.protocol import FromController, Hello, RequestEvent, RequestRow, StepRecord


def hello(boot_id: str, k_max: int = 6, method: str = "eagle3") -> Hello:
    """Return a plausible introduction."""
    return Hello(
        boot_id=boot_id, pid=os.getpid(), host="", adapter_version="", vllm_version="0.32.0", model="none",
        device="cpu", runner="v1", is_async=False, method=method, drafter="", k_max=k_max, default_length=0,
        default_table=[], max_requests=256, max_batched_tokens=8192, kv_tokens=1 << 20, graph_sizes=[],
        splits=["unsplit"], exit_layers=[], tensor_parallel=1, pipeline_parallel=1, data_parallel=1,
        data_parallel_rank=0, lease_steps=32, lease_ms=1000, roster=[],
    )  # fmt: skip


def record(
    boot_id: str,
    counter: int,
    time_s: float,
    lengths: Sequence[int],
    accepted: Sequence[int],
    confidences: Sequence[tuple[float, ...]] = (),
    handles: Sequence[int] = (),
) -> StepRecord:
    """Return a step of decoding requests, which arrived with the first one.

    :param lengths: draft tokens verified (requests,); `accepted` likewise
    :param confidences: of each request's draft tokens; none: the drafter tells none
    :param handles: none: 1, 2, ...
    """
    requests, drafts = len(lengths), sum(lengths)
    rows = [
        RequestRow(
            handle, 1 + length, length, length, length, 0, kept, kept + 1, 100 + counter % 3000, False, tuple(sure),
        )
        for handle, length, kept, sure in zip(
            handles or range(1, requests + 1), lengths, accepted, confidences or [()] * requests, strict=True
        )
    ]  # fmt: skip
    step_s = 0.015 + 0.0007 * (requests + drafts)
    events = [RequestEvent("arrival", row.handle, time_s, 90, f"r{row.handle}") for row in rows if counter == 1]
    return StepRecord(
        boot_id, counter, counter, time_s, step_s, 1e-4, 0.8 * step_s, 1e-3, 0.1 * step_s, 0.0, 5e-5, requests, 0, 0,
        requests, drafts, 0.3, None, None, 0, 0, 0, 0, events, rows,
    )  # fmt: skip


class Inbox(deque[FromController]):
    """An inbox that can be waited for, and notes when its newest message arrived, perf_counter seconds."""

    arrived_s = 0.0

    def __init__(self) -> None:
        super().__init__(maxlen=INBOX_LIMIT)
        self.arrived = threading.Event()

    def append(self, message: FromController) -> None:
        """Take a message in, on the link's thread."""
        self.arrived_s = time.perf_counter()
        super().append(message)
        self.arrived.set()


def summed_up(turns_us: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the median of the turns' medians with their quartiles, and the p99 of all: microseconds."""
    low, p50, high = statistics.quantiles(map(statistics.median, turns_us), n=4)
    return {
        "p50_us": p50, "p50_quartiles_us": [low, high], "p99_us": float(np.percentile(np.concatenate(turns_us), 99)),
    }  # fmt: skip
