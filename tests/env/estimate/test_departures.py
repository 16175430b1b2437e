"""A request that ends is gone at once, although the record that ends it still carries its last row."""

from __future__ import annotations

import numpy as np

from faser.engine_adapter.protocol import MAX_REQUESTS, RequestEvent, RequestRow, StepRecord
from faser.env.estimate.engine_state import EngineState, observe
from faser.env.spaces import Capabilities


def record(counter: int, handles: list[int], events: list[RequestEvent]) -> StepRecord:
    rows = [RequestRow(handle, 1, 0, 0, 0, 0, 0, 1, 50, False) for handle in handles]
    return StepRecord(
        "boot", counter, counter, 0.02 * counter, 0.02, 1e-4, 0.015, 1e-3, 0.0, 0.0, 5e-5,
        len(handles), 0, 0, len(handles), 0, 0.1, None, None, 0, 0, 0, 0, events, rows,
    )  # fmt: skip


def test_a_finished_request_no_longer_decodes() -> None:
    state = EngineState(Capabilities(k_max=4))
    arrivals = [RequestEvent("arrival", handle, 0.0, 10, f"r{handle}") for handle in (1, 2)]
    observe(state, record(1, [1, 2], arrivals))
    assert int(np.count_nonzero(state.decoding())) == 2
    observe(state, record(2, [1, 2], [RequestEvent("finish", 1, 0.04, 5)]))
    assert state.handles().tolist() == [2]
    observe(state, record(3, [2], [RequestEvent("abort", 2, 0.06, 5)]))
    assert state.handles().tolist() == []


def test_requests_whose_end_is_never_reported_do_not_pile_up() -> None:
    state = EngineState(Capabilities(k_max=4))
    for counter in range(1, 8):
        first = counter * MAX_REQUESTS
        observe(state, record(counter, list(range(first, first + MAX_REQUESTS)), []))
    assert state.requests.size <= 2 * MAX_REQUESTS
