"""What the benchmarks of the engine's end of the link share: an inbox that can be waited for, and turns summed up.

Called by adapter.py and round_trip.py.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from faser.engine_adapter.link.engine_link import INBOX_LIMIT
from faser.engine_adapter.protocol import FromController


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
