"""A simulated engine leaves out of steps whom an action set names, as the real one's adapter does."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from faser.engine_adapter.protocol import MOST_REST_STEPS, ActionSet, Rest, StepRecord
from faser.env.profile.engine_profile import synthetic_profile
from faser.env.simulator.scenario import Scenario
from faser.env.simulator.schedule import _can_rest
from faser.env.simulator.simulated_engine import SimulatedEngine
from faser.env.simulator.state import PREEMPTED, RUNNING
from faser.env.workload.request_trace import Trace

REQUESTS = 8
NAMED = (1, 2, 3, 77)


def engine(answer: int = 200) -> SimulatedEngine:
    profile = synthetic_profile(max_requests=REQUESTS, k_max=4)
    trace = Trace("eight", np.arange(REQUESTS) * 1e-6, np.full(REQUESTS, 4), np.full(REQUESTS, answer))
    return SimulatedEngine(Scenario(profiles=(profile,), workloads=(trace,), slots=REQUESTS, randomises=False), 1)


def asked(number: int, rest: Rest | None, length: int = 2) -> ActionSet:
    handles = list(range(1, REQUESTS + 1))
    return ActionSet("simulated", 1, number, 1 << 30, 1e9, length, handles, [length] * REQUESTS, rest=rest)


def served(one: SimulatedEngine, rests: list[Rest | None]) -> list[StepRecord]:
    """Return the records of steps under these, behind some in which all prompts are read."""
    for number in range(1, 9):
        one.step(asked(number, None))
    return [one.step(asked(number, rest)) for number, rest in enumerate(rests, start=9)]


def test_those_who_are_named_decode_in_one_of_some_steps() -> None:
    records = served(engine(), [Rest(NAMED, 2)] * 6)
    assert [record.rested for record in records] == [3, 3, 0, 3, 3, 0]
    assert [len(record.rows) for record in records] == [5, 5, 8, 5, 5, 8]
    assert all(record.running == REQUESTS for record in records)
    assert not {1, 2, 3} & {row.handle for row in records[0].rows}


def test_a_draft_waits_with_its_request() -> None:
    one = engine()
    *_, before = [one.step(asked(number, None)) for number in range(1, 9)]
    drafted = {row.handle: row.drafted for row in before.rows}
    first, second = (one.step(asked(number, Rest(NAMED, 1))) for number in (9, 10))
    assert drafted[1] == 2
    assert 1 not in {row.handle for row in first.rows}
    [back] = [row for row in second.rows if row.handle == 1]
    assert (back.verified, len(back.confidences)) == (2, 2)


def test_nobody_rests_without_anybody_else_or_any_longer_than_was_asked() -> None:
    everybody = Rest(tuple(range(1, REQUESTS + 1)), 3)
    assert [record.rested for record in served(engine(), [everybody] * 3)] == [0, 0, 0]
    changing = [Rest(NAMED, 3), Rest(NAMED, 3), Rest(NAMED, 2), Rest(NAMED, 3), None, Rest(NAMED, 1), Rest(NAMED, 1)]
    assert [record.rested for record in served(engine(), changing)] == [3, 3, 0, 3, 0, 3, 0]


def test_who_rests_says_as_much_in_the_end() -> None:
    totals = []
    for rest in (None, Rest(NAMED, 3)):
        one, tokens = engine(answer=40), dict.fromkeys(range(1, REQUESTS + 1), 0)
        number, running = 0, 1
        while running:
            record = one.step(asked(number := number + 1, rest))
            running = record.running
            for row in record.rows:
                tokens[row.handle] += row.emitted
        totals.append(tokens)
    assert totals[0] == totals[1] == dict.fromkeys(range(1, REQUESTS + 1), 40)


def test_rests_are_offered_where_a_real_engine_would() -> None:
    """Not beside two groups, exit heads or adaptive verification (engine_adapter/hello.py)."""
    plain = synthetic_profile(max_requests=REQUESTS, k_max=4)
    changed = [{}, {"is_adaptive": True}, {"splits": (*plain.splits, *plain.splits)}]
    offered = [
        SimulatedEngine(Scenario(profiles=(replace(plain, **change),), slots=REQUESTS), 1).capabilities.rest_steps
        for change in changed
    ]
    assert offered == [MOST_REST_STEPS, 0, 0]


def test_who_reads_a_prompt_for_the_first_time_or_again_does_not_rest() -> None:
    """Four tokens of a prompt, then answers: what decodes lacks one token of what is known."""
    assert _can_rest(RUNNING, 4, 5, 8, 1)
    assert not _can_rest(RUNNING, 4, 5, 3, 1)  # behind a preemption
    assert not _can_rest(RUNNING, 4, 0, 3, 1)
    assert not _can_rest(PREEMPTED, 4, 5, 8, 1)
    assert not _can_rest(RUNNING, 4, 5, 8, 0)
