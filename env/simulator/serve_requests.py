"""Serve given requests in the simulator: what their latencies would have been under other decisions, or the same ones.

Called by the fidelity check and by evaluation. Arrivals and lengths are given; acceptances are drawn from the
profile's model, never replayed. Decisions are recorded lengths, or an injected callable that sees step records only.
Beside recorded lengths the drafter's confidences may be given: what a policy decided because of them was not drawn
from all drafts alike, so acceptances are drawn at the chances that the model gives these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from ...engine_adapter.arrays import Floats, Ints, Singles
from ...engine_adapter.protocol import StepRecord, StopRule
from ...engine_adapter.steering.stop_rule import LEAST, fitted
from ..layout.action_vector import ACTION, KEEP, OVERLAP, PRUNE, outside
from ..profile.acceptance_model import AcceptanceModel
from ..profile.engine_profile import EngineProfile
from ..workload.request_trace import Trace, TraceError
from .constants import LOGITS, NAMED, RECORDED, RecordedDrafts
from .scenario import Scenario, ServiceClass
from .simulated_record import Recorder
from .simulator import Simulator
from .state import GO_ON_FROM, HANDLE, KEEP_FROM, PHASE, RUNNING

MOST_STEPS = 100_000_000  # a replay that takes more is stuck
STEPS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Orders:
    """What a decision asks for: draft lengths by handle, of all others, a stop rule, pruning and drafting ahead."""

    lengths: dict[int, int]
    default_length: int = 0
    stop: StopRule | None = None
    prunes: bool = False  # what is drafted in that step is pruned while it is verified
    goes_ahead: bool = False  # while that step verifies, the drafter goes on, if the profile's engine can


Decide = Callable[[StepRecord], Orders]


@dataclass(frozen=True, slots=True)
class ServedRequests:
    """What became of each request, in order of arrival; (n,) each, NaN for one that was turned away or never ended."""

    arrival_s: Floats
    ttft_s: Floats  # arrival to first token
    tpot_s: Floats  # per token after the first; NaN for answers of one token
    e2e_s: Floats
    tokens: Ints
    duration_s: float  # first arrival to last end
    steps: int
    step_s: Floats  # (steps,) of every step, if asked for, else empty
    preemptions: int
    drafted: int
    accepted: int

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second of the whole replay."""
        return float(self.tokens.sum()) / self.duration_s if self.duration_s > 0.0 else 0.0


def replay(
    arrival_s: npt.ArrayLike,
    prompt_tokens: npt.ArrayLike,
    output_tokens: npt.ArrayLike,
    decisions: Decide | Sequence[npt.ArrayLike] | int,
    profile: EngineProfile,
    acceptance: AcceptanceModel | None = None,
    seed: int = 0,
    *,
    limit_tokens: int | None = None,
    noise: float = 1.0,
    pruned: Sequence[npt.ArrayLike] | None = None,
    confidences: Sequence[Sequence[Sequence[float]]] | None = None,
    goes_ahead: bool = False,
    keep_steps: bool = False,
) -> ServedRequests:
    """Serve n requests by themselves and return their times.

    :param arrival_s: (n,) seconds, never decreasing
    :param decisions: a callable from each step's record to orders, in force `profile.lease_staleness` steps after the
        record's step; or one sequence of draft lengths per request, entry m for the step after which it has emitted m
        tokens (the last entry holds on); or one length for all
    :param pruned: beside recorded lengths, whether what is drafted there is pruned while it is verified
    :param confidences: beside recorded lengths, the drafter's in what is drafted there, 0..1, as many as are known:
        where fewer are known than are verified, acceptances are drawn from all drafts alike
    :param goes_ahead: beside recorded lengths, whether drafts are made ahead in every step
    :param acceptance: instead of the profile's own
    :param limit_tokens: the most that an answer may have, as requests say; as long as it is, unless given
    """
    arrivals, prompts, outputs = _checked(arrival_s, prompt_tokens, output_tokens)
    if acceptance is not None:
        profile = msgspec.structs.replace(profile, acceptance=acceptance)
    trace = Trace("replay", arrivals, prompts, outputs)
    scenario = Scenario(
        profiles=(profile,), workloads=(trace,), slots=profile.max_requests, kinds=(0.0,), noise=noise,
        classes=(ServiceClass("all", 1.0),), randomises=False,
        max_output_tokens=1 if limit_tokens is None else limit_tokens,
    )  # fmt: skip
    if callable(decisions):
        simulator = Simulator(scenario, 1, mode=NAMED, results=len(arrivals), seed=seed, own_rules=True)
        simulator.reset()
        step_s = _drive(simulator, decisions, profile.lease_staleness)
    else:
        offsets, lengths = _decision_table(decisions, len(arrivals), pruned)
        told = _acceptance_logits(profile.acceptance, confidences or (), scenario.positions)
        if confidences is not None and [len(known) for known in confidences] != np.diff(offsets).tolist():
            raise TraceError("confidences of other decisions; expected as many for each request as it has lengths")
        recording = RecordedDrafts(offsets, lengths, told)
        simulator = Simulator(scenario, 1, mode=RECORDED, results=len(arrivals), seed=seed, recording=recording)
        simulator.reset()
        step_s = _run(simulator, keep_steps, goes_ahead)
    return _served(simulator, arrivals, step_s)


def _checked(arrival_s: npt.ArrayLike, prompt_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike) -> tuple[
    Floats, Ints, Ints
]:  # fmt: skip
    arrivals = np.asarray(arrival_s, np.float64).reshape(-1)
    prompts, outputs = (np.asarray(values, np.int64).reshape(-1) for values in (prompt_tokens, output_tokens))
    if not len(arrivals) or len(arrivals) != len(prompts) or len(arrivals) != len(outputs):
        raise TraceError(f"{len(arrivals)} arrivals, {len(prompts)} prompts, {len(outputs)} answers; expected as many")
    bad = ~np.isfinite(arrivals) | (np.diff(arrivals, prepend=arrivals[0]) < 0.0) | (prompts < 1) | (outputs < 1)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise TraceError(
            f"request {row}: arrival {arrivals[row]} s, prompt {prompts[row]}, answer {outputs[row]} tokens; expected "
            "finite arrivals in order, and at least one token each"
        )
    return arrivals - arrivals[0], prompts, outputs


def _decision_table(
    decisions: Sequence[npt.ArrayLike] | int, requests: int, pruned: Sequence[npt.ArrayLike] | None
) -> tuple[Ints, npt.NDArray[np.int8]]:
    each = [[decisions]] * requests if isinstance(decisions, int) else [np.asarray(d).reshape(-1) for d in decisions]
    if len(each) != requests:
        raise TraceError(f"decisions of {len(each)} requests; expected those of {requests}")
    offsets = np.concatenate([[0], np.cumsum([len(lengths) for lengths in each])]).astype(np.int64)
    flat = np.concatenate([np.asarray(lengths, np.int64) for lengths in each]) if offsets[-1] else np.zeros(1, np.int64)
    lengths = np.clip(flat, 0, 127).astype(np.int8)
    if pruned is not None and offsets[-1]:
        lengths = np.where(np.concatenate([np.asarray(flags, np.bool_) for flags in pruned]), ~lengths, lengths)
    return offsets, lengths


def _acceptance_logits(
    model: AcceptanceModel, confidences: Sequence[Sequence[Sequence[float]]], positions: int
) -> Singles:
    """Return (decisions, positions) logits of acceptance, NaN where no confidence is known."""
    told = np.full((sum(map(len, confidences)), positions), np.nan)
    for row, known in enumerate(chain.from_iterable(confidences)):
        told[row, : len(known)] = known[:positions]
    told = np.clip(told, LEAST, 1.0 - LEAST)
    logits = np.log(told) - np.log1p(-told)
    intercepts, slopes = (np.array(values)[:positions] for values in (model.intercepts, model.slopes))
    return np.asarray(intercepts + slopes * logits, np.float32)


def _run(simulator: Simulator, keep_steps: bool, goes_ahead: bool) -> list[float]:
    vector = outside(overlap=float(goes_ahead))
    step_s: list[float] = []
    steps = 1 if keep_steps else STEPS_AT_ONCE
    for _ in range(0, MOST_STEPS, steps):
        simulator.run(steps, vector)
        if keep_steps:
            step_s.append(float(simulator.state.engines[0]["step_s"]))
        if simulator.is_done[0]:
            break
    return step_s


def _drive(simulator: Simulator, decide: Decide, staleness: int) -> list[float]:
    """Let a callable decide on records; its orders wait `staleness - 1` further steps."""
    state, positions, slots = simulator.state, simulator.scenario.positions, simulator.scenario.slots
    recorder = Recorder(simulator)
    waiting: list[Orders] = [Orders({})] * max(staleness - 1, 0)
    orders = Orders({})
    vector = np.full((1, len(ACTION)), -1.0, np.float32)
    named = np.zeros((1, slots), np.int8)
    step_s: list[float] = []
    for sequence in range(1, MOST_STEPS):
        vector[0, KEEP], vector[0, PRUNE] = -1.0, float(orders.prunes)
        vector[0, OVERLAP] = 1.0 if orders.goes_ahead else -1.0
        if orders.stop is not None:
            vector[0, KEEP] = 1.0
            _set_rule(simulator, fitted(orders.stop, positions))
        ints = state.ints[0]
        handles = np.where(ints[PHASE] == RUNNING, ints[HANDLE], 0).tolist()
        lengths = [orders.lengths.get(handle, orders.default_length) for handle in handles]
        named[0] = np.clip(lengths, 0, positions)
        _set_default(simulator, vector, orders.default_length)
        simulator.step(vector, named)
        step_s.append(float(state.engines[0]["step_s"]))
        if simulator.is_done[0]:
            break
        waiting.append(decide(recorder.record(sequence)))
        orders = waiting.pop(0)
    return step_s


def _set_default(simulator: Simulator, vector: Singles, length: int) -> None:
    """Give requests that are admitted in this step the default length: no threshold, and a share of k_max."""
    vector[0, 0] = -1.0
    vector[0, 1] = 2.0 * min(max(length, 0), simulator.scenario.positions) / simulator.scenario.positions - 1.0


def _set_rule(simulator: Simulator, rule: StopRule) -> None:
    state, logits = simulator.state, simulator.world.tables[0, LOGITS].astype(np.float64)
    slopes, intercepts = np.array(rule.slopes)[:, None], np.array(rule.intercepts)[:, None]
    state.chances[0] = 1.0 / (1.0 + np.exp(-np.clip(intercepts + slopes * logits, -40.0, 40.0)))
    state.rules[0, KEEP_FROM], state.rules[0, GO_ON_FROM] = rule.keep, rule.go_on


def _served(simulator: Simulator, arrivals: Floats, step_s: list[float]) -> ServedRequests:
    """Requests that were turned away have no result: handles count those taken in."""
    engine, results = simulator.state.engines[0], simulator.state.results[0]
    did_end = results[:, 3] > 0
    began, ended, tokens = results[:, 1], results[:, 2], results[:, 3]
    start_s = np.where(did_end, results[:, 0], np.nan)
    further = np.where(did_end & (tokens > 1), tokens - 1, np.nan)
    return ServedRequests(
        arrival_s=start_s if did_end.any() else arrivals,
        ttft_s=began - start_s,
        tpot_s=(ended - began) / further,
        e2e_s=ended - start_s,
        tokens=tokens.astype(np.int64),
        duration_s=float(ended.max()) - float(arrivals[0]),
        steps=int(engine["steps"]),
        step_s=np.array(step_s),
        preemptions=int(engine["preemptions"]),
        drafted=int(engine["drafted"]),
        accepted=int(engine["accepted"]),
    )
