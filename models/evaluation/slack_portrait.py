"""What a policy does by how far a request is ahead of its objective or behind, at each load of a simulated engine.

Called by controller/cli/policy.py, which injects the decision core. A quarter of the requests are urgent, with 0.7 of
what a token takes without speculation at the same load; the others have twice that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...engine_adapter.arrays import Floats
from ...engine_adapter.protocol import ActionSet, StepRecord
from ...env.estimate.engine_state import EngineState
from ...env.simulator.simulated_engine import SimulatedEngine
from ..registry import make_policy
from .objective_worlds import BATCH_PACE, with_paces
from .portrait import FIRST_SEED, RUNS, WARM_STEPS, Explain
from .worlds import WorldSpec

EDGES: Final = (-20.0, -10.0, -5.0, -2.0, 0.0, 2.0, 5.0, 10.0, 20.0)  # tokens ahead (+) of the schedule
URGENT_SHARE, URGENT_PACE = 0.25, 0.7


@dataclass(frozen=True, slots=True)
class SlackStroke:
    """What the policy did at one load, by slack; lists of len(EDGES) + 1, None where nobody was."""

    requests: int  # running at once
    urgent: tuple[int, ...]  # steps of urgent requests
    lengths: tuple[float | None, ...]  # tokens that these handed over for verification
    values: tuple[float | None, ...]  # of their tokens, the cheapest request's being 1; None: the policy has none
    others_length: float


@dataclass(slots=True)
class _Sums:
    steps: Floats
    drafted: Floats
    values: Floats
    is_valued: bool = False  # not everybody's tokens counted alike
    others: float = 0.0
    others_drafted: float = 0.0


def portray_slack(
    spec: str, world: WorldSpec, loads: Sequence[int], steps: int, explain: Explain
) -> Iterator[SlackStroke]:
    """Yield a stroke for each load; the same arguments give the same strokes.

    :param steps: steps of each run that count, behind WARM_STEPS
    """
    for requests in loads:
        sums = _Sums(np.zeros(len(EDGES) + 1), np.zeros(len(EDGES) + 1), np.zeros(len(EDGES) + 1))
        for seed in range(FIRST_SEED, FIRST_SEED + RUNS):
            _run(spec, world, requests, steps, explain, seed, sums)
        yield SlackStroke(
            requests,
            tuple(int(count) for count in sums.steps),
            _means(sums.drafted, sums.steps),
            _means(sums.values, sums.steps) if sums.is_valued else (None,) * len(sums.steps),
            sums.others_drafted / max(sums.others, 1.0),
        )


def _means(totals: Floats, counts: Floats) -> tuple[float | None, ...]:
    return tuple(float(total / count) if count else None for total, count in zip(totals, counts, strict=True))


def _run(
    spec: str, world: WorldSpec, requests: int, steps: int, explain: Explain, seed: int, sums: _Sums
) -> None:  # fmt: skip
    scenario = with_paces(world.closed(requests), URGENT_SHARE, URGENT_PACE, BATCH_PACE)
    engine = SimulatedEngine(scenario, seed, has_confidence=world.has_confidence)
    policy, state = make_policy(spec, engine.capabilities), EngineState(engine.capabilities)
    values_of = getattr(policy, "values_of", None)
    actions: ActionSet | None = None
    for sequence in range(1, WARM_STEPS + steps + 1):
        record = engine.step(actions)
        actions, _ = explain(state, record, policy, sequence)
        if sequence > WARM_STEPS:
            _add(state, record, values_of, sums)


def _add(state: EngineState, record: StepRecord, values_of: object, sums: _Sums) -> None:
    view = state.view()
    handles, slack, priority = state.handles(), view.slack().tokens, view.table.column("priority")
    values = values_of(view) if callable(values_of) else None
    sums.is_valued |= values is not None
    drafted = {row.handle: row.drafted for row in record.rows if not row.is_prefill}
    for place in np.flatnonzero(view.decoding).tolist():
        length = drafted.get(int(handles[place]))
        if length is None:
            continue
        if priority[place] > 0:
            sums.others += 1.0
            sums.others_drafted += length
            continue
        cell = int(np.searchsorted(EDGES, slack[place], side="right"))
        sums.steps[cell] += 1.0
        sums.drafted[cell] += length
        sums.values[cell] += 1.0 if values is None else values[place] / values[view.decoding].min()
