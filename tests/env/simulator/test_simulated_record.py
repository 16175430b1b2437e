"""Records of a simulated engine treat confidences as the adapter does (engine_adapter/steering/record.py)."""

from __future__ import annotations

import numpy as np

from faser.env.layout.action_vector import outside
from faser.env.profile.engine_profile import synthetic_profile
from faser.env.simulator.scenario import Scenario
from faser.env.simulator.simulated_record import Recorder
from faser.env.simulator.simulator import Simulator
from faser.env.workload.request_trace import Trace


def test_confidences_wait_with_their_draft_and_end_where_the_scheduler_cut_it() -> None:
    """Twenty rows for eight requests with drafts of five: some are cut, some wait; and memory does not hold all."""
    profile = synthetic_profile(max_requests=8, k_max=5, token_budget=20, kv_blocks=40)
    trace = Trace("eight", np.arange(8) * 1e-3, np.full(8, 4), np.full(8, 200))
    simulator = Simulator(Scenario(profiles=(profile,), workloads=(trace,), slots=8, randomises=False), 1, seed=1)
    simulator.reset()
    recorder, drafted = Recorder(simulator), dict[int, tuple[int, int]]()
    cut = late = preempted = 0
    for step in range(400):
        simulator.step(outside(depth=float(step % 6 > 2)))  # all are admitted while nobody drafts
        record = recorder.record()
        for row in record.rows:
            last, kept = drafted.get(row.handle, (step, 0))
            assert len(row.confidences) == min(kept, row.verified + 1)
            assert row.verified <= kept
            cut += row.verified < kept
            late += kept > 0 and last < step - 1
            drafted[row.handle] = (step, row.drafted)
        for event in record.events:
            if event.kind == "preempt":
                preempted += drafted.pop(event.handle, (0, 0))[1] > 0
    assert preempted > 2
    assert cut > 50
    assert late > 20


def test_an_engine_without_confidences_records_none() -> None:
    simulator = Simulator(Scenario(profiles=(synthetic_profile(max_requests=8),), slots=8), 1, seed=1)
    simulator.reset()
    recorder, verified = Recorder(simulator, has_confidence=False), 0
    for _ in range(100):
        simulator.step(outside(depth=1.0))
        rows = recorder.record().rows
        assert not any(row.confidences for row in rows)
        verified += int(np.sum([row.verified for row in rows]))
    assert verified > 100
