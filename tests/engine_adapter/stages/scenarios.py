"""What the tests of engines with stages share: scenarios, and whether processes live on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Run = Callable[..., dict[str, Any]]  # of the fixture `stage_engine`
SHORT = {"requests": 6, "tokens": 32}
QUICK = [64 << 20, 30]  # bytes and layers a step


def alive(processes: list[int]) -> Iterator[int]:
    """Yield those of the processes that still run."""
    for number in processes:
        try:
            state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            yield number


def left_after(processes: list[int], seconds: float = 10.0) -> list[int]:
    """Wait until all of the processes have ended; return those that live on."""
    deadline = time.monotonic() + seconds
    while (left := list(alive(processes))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
