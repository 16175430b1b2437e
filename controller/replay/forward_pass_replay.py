"""What another tool's forward-pass metrics can answer, and in words what they cannot.

Called by the replay. They have sums over requests and no request, no draft, no decision. Told are the load, the times
of passes, and what a policy would ask for at that load of requests that are all alike. Nothing is exact or compared.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ...engine_adapter.protocol import MAX_REQUESTS, RequestEvent, RequestRow, StepRecord
from ...env.estimate.engine_state import EngineState, observe
from ...env.spaces import Capabilities, clamp
from ...models.registry import make_policy
from ..decision.decide import guard
from .forward_pass_metrics import ForwardPass, ForwardPasses

K_MAX: Final = 8  # the drafter's longest draft, which the metrics do not tell
PREFILL_HANDLES: Final = 1 << 32  # from here on; decoding requests are 1, 2, ...

CANNOT: Final = (
    "decision replay: the input holds no decisions, so none can be made again and compared",
    "draft lengths per request: it has sums and variances over the batch, no request and no row of one",
    "acceptance and the drafter's confidence: it does not say what was drafted, verified or accepted",
    "what a draft costs: drafting is not told apart within wall_time, nor whether the engine speculated at all",
    "off-policy estimates: nothing was drawn by chance, so no probabilities were logged",
    "counterfactual speed: neither arrivals nor the lengths of answers are in it",
)
POLICY_NOTE: Final = (
    f"Asked at every pass with as many requests as decoded in it, all alike: the mean context, nothing ever accepted "
    f"or rejected, a drafter of up to {K_MAX} tokens assumed. A policy by batch size (off, fixed, table) answers as it "
    "would; one that learns from acceptance has only its prior."
)


@dataclass(slots=True)
class PassLoad:
    """Passes without prompts, by the number of decoding requests; times in ms."""

    first: int
    last: int
    passes: int
    median_ms: float
    p90_ms: float
    mean_context: float  # tokens per request
    asked: float | None = None  # mean draft length that the policy asked for


@dataclass(slots=True)
class Passes:
    """What was found. Counts of passes unless said otherwise."""

    passes: int = 0
    idle: int = 0  # heartbeats
    with_prompts: int = 0
    workers: int = 0  # workers and ranks
    lost: int = 0  # holes in the counters
    disordered: int = 0  # counters that went back
    other_versions: int = 0
    is_sampled: bool = False
    busy_s: float = 0.0  # sum of the passes' times
    span_s: float | None = None  # first to last, by the wall clock
    peak_requests: int = 0
    peak_queued: int = 0
    policy: str = ""
    lengths: dict[int, int] = field(default_factory=dict)  # request-passes by the length asked for
    loads: list[PassLoad] = field(default_factory=list)
    running: list[int] = field(default_factory=list)  # per pass that did something
    queued: list[int] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)  # mean over requests; empty without a policy


class _Worker:
    """One rank of a worker: its counter, and a state made of requests that are all alike."""

    def __init__(self, policy: str | None) -> None:
        self.counter = 0
        capabilities = Capabilities(k_max=K_MAX)
        self._state, self._policy = EngineState(capabilities), make_policy(policy, capabilities) if policy else None
        self._clock_s = 0.0
        self._records = self._live = 0

    def ask(self, one: ForwardPass) -> list[int] | None:
        """Return the lengths that the policy wants for the requests that decoded in this pass."""
        if self._policy is None:
            return None
        self._clock_s += one.wall_time
        self._records += 1
        decoding = min(one.scheduled_requests.num_decode_requests, MAX_REQUESTS)
        observe(self._state, self._record(one, decoding))
        action = clamp(guard(self._policy.act(self._state), self._state), self._state.capabilities)
        wanted = dict(zip(self._state.handles().tolist(), action.lengths.tolist(), strict=True))
        return [wanted.get(handle, action.default_length) for handle in range(1, decoding + 1)]

    def _record(self, one: ForwardPass, decoding: int) -> StepRecord:
        scheduled = one.scheduled_requests
        context = scheduled.sum_decode_kv_tokens // max(scheduled.num_decode_requests, 1)
        rows = [RequestRow(handle, 1, 0, 0, 0, 0, 0, 1, context, False) for handle in range(1, decoding + 1)]
        events = [RequestEvent("finish", handle, self._clock_s, 0) for handle in range(decoding + 1, self._live + 1)]
        self._live = decoding
        for number in range(min(scheduled.num_prefill_requests, MAX_REQUESTS - decoding)):
            share = scheduled.sum_prefill_tokens // scheduled.num_prefill_requests
            read = scheduled.sum_prefill_kv_tokens // scheduled.num_prefill_requests
            handle = PREFILL_HANDLES + number
            rows.append(RequestRow(handle, share, 0, 0, 0, 0, 0, 0, read + share, True))
            events.append(RequestEvent("finish", handle, self._clock_s, 0))
        queued = one.queued_requests
        return StepRecord(
            boot_id="fpm", counter=self._records, step=self._records, time_s=self._clock_s, step_s=one.wall_time,
            schedule_s=0.0, verify_s=one.wall_time, sample_s=0.0, draft_s=0.0, overlap_s=0.0, adapter_s=0.0,
            running=scheduled.num_decode_requests + scheduled.num_prefill_requests,
            waiting=queued.num_prefill_requests + queued.num_decode_requests,
            prefill_tokens=scheduled.sum_prefill_tokens, decode_tokens=scheduled.num_decode_requests, draft_tokens=0,
            kv_usage=0.0, split=None, frontier=None, lease_epoch=0, lease_sequence=0, dropped=0, rejected=0,
            events=events, rows=rows,
        )  # fmt: skip


def replay_passes(found: ForwardPasses, policy: str | None = None) -> Passes:
    """Summarise an input, and ask a policy at its load."""
    result = Passes(other_versions=found.other_versions, is_sampled=found.is_sampled, policy=policy or "")
    workers: dict[tuple[str, int], _Worker] = {}
    by_load: dict[int, list[tuple[ForwardPass, list[int] | None]]] = defaultdict(list)
    for one in found.passes:
        key = (one.worker_id, one.dp_rank)
        if key not in workers:
            workers[key] = _Worker(policy)
        _count(result, one, workers[key])
        if one.is_idle():
            continue
        lengths = workers[key].ask(one)
        _add(result, one, lengths)
        if not one.scheduled_requests.num_prefill_requests:
            by_load[one.scheduled_requests.num_decode_requests.bit_length()].append((one, lengths))
    result.workers = len(workers)
    times = [moment for moment in found.observed_s if moment is not None]
    result.span_s = max(times) - min(times) if times else None
    result.loads = [_load(octave, by_load[octave]) for octave in sorted(by_load)]
    result.lengths = dict(sorted(result.lengths.items()))
    return result


def _count(result: Passes, one: ForwardPass, worker: _Worker) -> None:
    result.passes += 1
    result.idle += one.is_idle()
    if one.counter_id and worker.counter:
        result.lost += max(one.counter_id - worker.counter - 1, 0)
        result.disordered += one.counter_id <= worker.counter
    worker.counter = max(one.counter_id, worker.counter)


def _add(result: Passes, one: ForwardPass, lengths: list[int] | None) -> None:
    scheduled, queued = one.scheduled_requests, one.queued_requests
    running = scheduled.num_decode_requests + scheduled.num_prefill_requests
    waiting = queued.num_prefill_requests + queued.num_decode_requests
    result.with_prompts += scheduled.num_prefill_requests > 0
    result.busy_s += one.wall_time
    result.peak_requests, result.peak_queued = max(result.peak_requests, running), max(result.peak_queued, waiting)
    result.running.append(running)
    result.queued.append(waiting)
    result.wall_ms.append(1e3 * one.wall_time)
    if lengths is not None:
        result.asked.append(sum(lengths) / max(len(lengths), 1))
        for length in lengths:
            result.lengths[length] = result.lengths.get(length, 0) + 1


def _load(octave: int, members: list[tuple[ForwardPass, list[int] | None]]) -> PassLoad:
    wall_ms = [1e3 * one.wall_time for one, _ in members]
    requests = sum(one.scheduled_requests.num_decode_requests for one, _ in members)
    asked = [length for _, lengths in members for length in lengths or ()]
    return PassLoad(
        first=1 << (octave - 1),
        last=(1 << octave) - 1,
        passes=len(members),
        median_ms=float(np.median(wall_ms)),
        p90_ms=float(np.percentile(wall_ms, 90)),
        mean_context=sum(one.scheduled_requests.sum_decode_kv_tokens for one, _ in members) / max(requests, 1),
        asked=sum(asked) / len(asked) if asked else None,
    )
