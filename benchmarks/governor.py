"""What mode, guard and envelope add to a record of 64 requests, beside the policy: microseconds, p50.

    python benchmarks/governor.py

The bound is 10 us per record before the answer is sent; `measure` runs after it. Run on an otherwise idle core.
"""

from __future__ import annotations

import statistics
import time

from faser.controller.decide import LeaseTerms
from faser.controller.governor import Governor
from faser.engine_adapter.protocol import Hello, RequestRow, StepRecord
from faser.env.spaces import Action, Capabilities
from faser.env.state import EngineState, observe

REQUESTS = 64
RECORDS = 5000
BOUND_US = 10.0


def hello() -> Hello:
    """Return an engine like the demo's."""
    return Hello(
        "boot", 1, "host", "0", "0.32.0", "target", "cpu", "v1", False, "eagle3", "drafter", 6, 0, [], 256, 8192, 10**5,
        [], ["unsplit"], [], 1, 1, 1, 0, 32, 1000, [],
    )  # fmt: skip


def record(counter: int) -> StepRecord:
    """Return a step in which every request verified three tokens."""
    rows = [RequestRow(handle, 4, 3, 3, 3, 0, 2, 3, 100, False) for handle in range(1, REQUESTS + 1)]
    return StepRecord(
        "boot", counter, counter, counter * 0.02, 0.02, 1e-4, 0.015, 1e-4, 4e-3, 0.0, 5e-5, REQUESTS, 0, 0, REQUESTS,
        3 * REQUESTS, 0.3, None, None, 7, counter, 0, 0, [], rows,
    )  # fmt: skip


def main() -> None:
    """Print the table."""
    state = EngineState(Capabilities.from_hello(hello()))
    for counter in range(1, 50):
        observe(state, record(counter))
    governor = Governor(hello(), LeaseTerms())
    action = Action(state.requests.column("handle") * 0 + 3, 3)
    before_us, after_us = [], []
    for counter in range(50, 50 + RECORDS):
        newest = record(counter)
        started = time.perf_counter()
        governor.hear(newest, newest.time_s)
        governor.may_decide(newest)
        governor.amend(action, state)
        governor.succeed(is_sent=True)
        governor.owes_release()
        sent = time.perf_counter()
        governor.measure(newest, state, is_under_lease=True)
        after_us.append((time.perf_counter() - sent) * 1e6)
        before_us.append((sent - started) * 1e6)
    print(f"before the answer {statistics.median(before_us):.1f} us (bound {BOUND_US:.0f})")
    print(f"after it {statistics.mean(after_us):.1f} us, mean (one record in four is measured)")


if __name__ == "__main__":
    main()
