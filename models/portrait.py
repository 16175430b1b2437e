"""What a policy does at each load, seen in a simulated engine: lengths, acceptance, speed beside no speculation.

Called by controller/policy.py, which injects the decision core: what is shown is what the daemon would run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..engine_adapter.protocol import ActionSet, StepRecord
from ..env.state import EngineState
from .policy import Policy, make_policy
from .simulated import SimulatedEngine
from .worlds import WorldSpec

Explain: TypeAlias = Callable[[EngineState, StepRecord, Policy, int], tuple[ActionSet, str]]
WARM_STEPS = 300  # estimates settle and the batch fills; not counted
SEED = 401


@dataclass(frozen=True, slots=True)
class Stroke:
    """What the policy did at one load."""

    requests: int  # running at once
    shares: tuple[float, ...]  # of requests' steps with 0..k_max tokens handed over for verification
    mean_length: float
    acceptance: float | None  # accepted per verified token; None where nothing was verified
    ratio: float  # tokens per second beside no speculation, with the same requests
    reason: str  # of the last decision


def portray(spec: str, world: WorldSpec, loads: Sequence[int], steps: int, explain: Explain) -> Iterator[Stroke]:
    """Yield a stroke for each load; the same arguments give the same strokes.

    :param steps: steps that count, behind WARM_STEPS
    """
    for requests in loads:
        plain = _run("off", world, requests, steps, explain)
        ours = _run(spec, world, requests, steps, explain)
        total = max(int(ours.lengths.sum()), 1)
        yield Stroke(
            requests,
            tuple((ours.lengths / total).tolist()),
            float(np.arange(len(ours.lengths)) @ ours.lengths / total),
            ours.accepted / ours.verified if ours.verified else None,
            ours.tokens_per_s / plain.tokens_per_s,
            ours.reason,
        )


@dataclass(slots=True)
class _Tally:
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]]
    verified: int = 0
    accepted: int = 0
    emitted: int = 0
    span_s: float = 0.0
    reason: str = ""

    @property
    def tokens_per_s(self) -> float:
        return self.emitted / max(self.span_s, 1e-9)


def _run(spec: str, world: WorldSpec, requests: int, steps: int, explain: Explain) -> _Tally:
    engine = SimulatedEngine(world.closed(requests), SEED, has_confidence=world.has_confidence)
    policy, state = make_policy(spec, engine.capabilities), EngineState(engine.capabilities)
    tally = _Tally(np.zeros(engine.capabilities.k_max + 1, np.int64))
    actions: ActionSet | None = None
    began_s = 0.0
    for sequence in range(1, WARM_STEPS + steps + 1):
        record = engine.step(actions)
        actions, tally.reason = explain(state, record, policy, sequence)
        if sequence <= WARM_STEPS:
            began_s = record.time_s
            continue
        for row in record.rows:
            tally.emitted += row.emitted
            tally.verified += row.verified
            tally.accepted += row.accepted
            if not row.is_prefill:
                tally.lengths[row.drafted] += 1
    tally.span_s = record.time_s - began_s
    return tally
