"""What a policy does at each load, seen in a simulated engine: lengths, acceptance, speed beside no speculation.

Called by controller/cli/policy.py, which injects the decision core: what is shown is what the daemon would run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ...engine_adapter.protocol import ActionSet, StepRecord
from ...env.estimate.engine_state import EngineState
from ...env.simulator.simulated_engine import SimulatedEngine
from ..policies.policy import Policy
from ..registry import make_policy
from .standing import interval
from .worlds import WorldSpec

Explain: TypeAlias = Callable[[EngineState, StepRecord, Policy, int], tuple[ActionSet, str]]
WARM_STEPS = 300  # estimates settle and the batch fills; not counted
RUNS = 6  # of each load, with different requests: a run by itself is off by up to a tenth
FIRST_SEED = 401


@dataclass(frozen=True, slots=True)
class Stroke:
    """What the policy did at one load."""

    requests: int  # running at once
    shares: tuple[float, ...]  # of requests' steps with 0..k_max tokens handed over for verification
    mean_length: float
    acceptance: float | None  # accepted per verified token; None where nothing was verified
    ratio: float  # tokens per second beside no speculation, with the same requests; geometric mean of RUNS
    ratio_ci: tuple[float, float]  # 95 %, over these
    reason: str  # of the last run's last decision


def portray(spec: str, world: WorldSpec, loads: Sequence[int], steps: int, explain: Explain) -> Iterator[Stroke]:
    """Yield a stroke for each load; the same arguments give the same strokes.

    :param steps: steps of each run that count, behind WARM_STEPS
    """
    seeds = range(FIRST_SEED, FIRST_SEED + RUNS)
    for requests in loads:
        plain, ours = ([_run(each, world, requests, steps, explain, seed) for seed in seeds] for each in ("off", spec))
        lengths = np.sum([run.lengths for run in ours], axis=0)
        total = max(int(lengths.sum()), 1)
        accepted, verified = (sum(getattr(run, name) for run in ours) for name in ("accepted", "verified"))
        gain = interval([math.log(a.tokens_per_s / b.tokens_per_s) for a, b in zip(ours, plain, strict=True)])
        yield Stroke(
            requests,
            tuple((lengths / total).tolist()),
            float(np.arange(len(lengths)) @ lengths / total),
            accepted / verified if verified else None,
            math.exp(gain.mean),
            (math.exp(gain.mean - gain.half), math.exp(gain.mean + gain.half)),
            ours[-1].reason,
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


def _run(spec: str, world: WorldSpec, requests: int, steps: int, explain: Explain, seed: int) -> _Tally:
    engine = SimulatedEngine(world.closed(requests), seed, has_confidence=world.has_confidence)
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
