"""A policy sees the same, whether the simulator's kernel shows it or the state makes it of step records."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from faser.engine_adapter.protocol import Prune, StepRecord, decode_from_engine, encode
from faser.env.estimate.engine_state import EngineState, learn, look
from faser.env.layout.action_vector import (
    ACTION,
    DEPTH,
    GO_ON,
    KEEP,
    PRUNE,
    RULED_FROM,
    SPLIT,
    THRESHOLD,
    meant,
    outside,
)
from faser.env.layout.observation import GLOBAL_FEATURES, REQUEST_FEATURES, observe_vector
from faser.env.profile.engine_profile import synthetic_profile
from faser.env.profile.match_model import MatchModel
from faser.env.simulator.scenario import Scenario, ServiceClass, with_mechanisms
from faser.env.simulator.simulated_record import Recorder, hello
from faser.env.simulator.simulator import Simulator
from faser.env.simulator.state import HANDLE, PHASE, RUNNING
from faser.env.spaces import Action, Capabilities, Lengths, clamp

from ..copying import match_model

SLOTS = 24
SLACK = [feature.name for feature in REQUEST_FEATURES].index("slack")
STEPS = 500


def lengths_for(acceptance: npt.ArrayLike, threshold: float, depth: float) -> Lengths:
    """Return (n,) draft lengths from chances of acceptance (n, positions), each given that the one before was."""
    chances = np.asarray(acceptance, np.float32)
    survival = np.cumprod(chances, axis=1, dtype=np.float32)
    lengths: Lengths = (survival[:, : deepest(depth, chances.shape[1])] >= np.float32(threshold)).sum(axis=1)
    return lengths


def deepest(depth: float, k_max: int) -> int:
    """Return the draft length that a share of k_max means."""
    return min(int(depth * k_max + 0.5), k_max)


def choice(value: float, options: int) -> int:
    """Return which of `options` equal parts of 0..1 holds `value`."""
    return min(int(value * options), options - 1)


def decode(vector: npt.ArrayLike, state: EngineState) -> Action:
    """Return the action that `vector` (len(ACTION),) in -1..1 means for the live requests of `state`.

    Overlapping stays in the simulator: a real engine's own gates measure whether groups or drafting ahead pay.
    """
    means = meant(np.reshape(vector, len(ACTION)))
    capabilities = state.capabilities
    # The last row is a stranger: a request that nothing is known about.
    chances = np.concatenate([state.acceptance(), state.population.mean[None, :]])
    lengths = lengths_for(chances, float(means[THRESHOLD]), float(means[DEPTH]))
    keep, go_on = float(means[KEEP]), float(means[GO_ON])
    is_ruled = keep >= RULED_FROM and state.confidence.is_ready
    action = Action(
        lengths[:-1],
        int(lengths[-1]),
        split=choice(float(means[SPLIT]), len(capabilities.splits)),
        prune=_prune(float(means[PRUNE]), capabilities),
        stop=state.confidence.rule(keep, np.full(capabilities.k_max, go_on)) if is_ruled else None,
    )
    return clamp(action, capabilities)


def _prune(sign: float, capabilities: Capabilities) -> Prune | None:
    return capabilities.released_prune if sign > 0.0 else None


CLASSES = (
    ServiceClass("urgent", 0.3, 50.0, 0.8), ServiceClass("batch", 0.3, 50.0, 8.0, 1),
    ServiceClass("longer than anybody may ask", 0.2, 1e9, 1e9, 2),
    ServiceClass("sooner than anybody may ask", 0.2, 1e-9, 1e-9, 3),
)  # fmt: skip


def scenario(matches: MatchModel | None = None, *, tells: bool = True) -> Scenario:
    blocks = 520 if matches else 650  # with copies requests end sooner
    profile = synthetic_profile(max_requests=SLOTS, kv_blocks=blocks, k_max=5, token_budget=1024)
    profile = msgspec.structs.replace(with_mechanisms(profile), matches=matches)
    return Scenario(
        profiles=(profile,), slots=SLOTS, load=(1.3, 1.3), max_output_tokens=400, classes=CLASSES,
        tells_objectives=tells,
    )  # fmt: skip


@pytest.mark.parametrize("matches", [None, match_model()], ids=["without copies", "with copies"])
@pytest.mark.parametrize(
    ("rule", "tells"),
    [(-1.0, True), (None, True), (None, False)],
    ids=["without stop rules", "with random stop rules", "without objectives"],
)
def test_state_vectors_from_records_and_from_the_kernel_agree(
    rule: float | None, tells: bool, matches: MatchModel | None
) -> None:
    simulator = Simulator(scenario(matches, tells=tells), 1, seed=3, copies=True)
    simulator.reset()
    state = EngineState(Capabilities.from_hello(hello(simulator)))
    recorder, random = Recorder(simulator), np.random.default_rng(0)
    preempted = prefilling = copies = 0
    slacks: set[float] = set()
    for step in range(STEPS):
        vector = random.uniform(-1.0, 1.0, len(ACTION)).astype(np.float32)
        if rule is not None:
            vector[2] = rule
        live = decode(vector, state)  # what the live side would make of the same action: it learns after it answers
        learn(state)
        simulator.step(vector)
        if step > 0:
            assert_same_lengths(simulator, state, live.lengths)
        is_ruled = bool(simulator.state.engines[0]["is_ruled"])
        if is_ruled:  # the action set in force; its numbers do not matter to what is counted
            state.ask(step + 1, state.confidence.rule(0.5, np.full(5, 0.5)))
        record = decode_from_engine(bytes(encode(recorder.record(step + 1))))
        assert isinstance(record, StepRecord)
        look(state, record)
        preempted += sum(event.kind == "preempt" for event in record.events)
        prefilling += record.prefill_tokens > 0
        copies += len(record.verified_copies)
        assert_same_vector(simulator, state)
        slacks |= set(np.sign(observe_vector(state, SLOTS).requests[:, SLACK]).tolist())
    assert slacks == ({-1.0, 0.0, 1.0} if tells else {0.0})
    assert preempted > 1  # or the test says little
    assert prefilling > 25
    assert copies > 150 if matches else copies == 0
    assert state.link.gaps == state.link.regressions == 0


def assert_same_vector(simulator: Simulator, state: EngineState) -> None:
    seen = observe_vector(state, SLOTS)
    ints = simulator.state.ints[0]
    slot_of = {int(ints[HANDLE, i]): i for i in range(SLOTS) if ints[PHASE, i] == RUNNING}
    assert sorted(slot_of) == sorted(seen.handles.tolist())
    shown = simulator.requests()[0]
    for row, handle in enumerate(seen.handles.tolist()):
        for name, live, kernel in zip(REQUEST_FEATURES, seen.requests[row], shown[slot_of[handle]], strict=True):
            assert live == pytest.approx(kernel, abs=2e-4), f"{name.name} of request {handle}"
    for name, live, kernel in zip(GLOBAL_FEATURES, seen.globals, simulator.state.globals[0], strict=True):
        assert live == pytest.approx(kernel, abs=2e-4), name.name
    idle = [i for i in range(SLOTS) if ints[PHASE, i] != RUNNING]
    assert not shown[idle].any()


def assert_same_lengths(
    simulator: Simulator, state: EngineState, lengths: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> None:
    """Requests that ran before the step were given the lengths that `decode` gives them."""
    named = simulator.state.lengths[0, 0]
    ints = simulator.state.ints[0]
    length_of = dict(zip(state.handles().tolist(), lengths.tolist(), strict=True))
    pairs = [(int(named[i]), length_of[int(ints[HANDLE, i])]) for i in range(SLOTS) if named[i] >= 0]
    # A survival at the very threshold may fall on either side in single precision.
    assert sum(kernel != live for kernel, live in pairs) <= len(pairs) // 10


def test_lengths_follow_survival_and_depth() -> None:
    chances = np.array([[0.9, 0.9, 0.9], [0.5, 0.9, 0.9], [0.1, 0.9, 0.9]])
    assert lengths_for(chances, 0.42, 1.0).tolist() == [3, 2, 0]
    assert lengths_for(chances, 0.42, 0.34).tolist() == [1, 1, 0]
    assert lengths_for(chances, 0.0, 0.0).tolist() == [0, 0, 0]


def test_actions_are_clipped_and_nan_is_the_lowest() -> None:
    means = meant(np.array([np.nan, 7.0, -7.0, 0.0, np.inf, -np.inf, np.nan]))
    assert means[[THRESHOLD, DEPTH]].tolist() == [0.0, 1.0]
    assert means[2:].tolist() == [0.0, 0.5, 1.0, 0.0, -1.0]


def test_pruning_is_on_or_off_with_the_rule_that_the_heads_were_released_with() -> None:
    released = Prune(5, 0.25)
    state = EngineState(Capabilities(k_max=4, exit_layers=(5, 25), released_prune=released))
    asked = [decode(outside(prune=sign), state).prune for sign in (-1.0, 0.0, 0.01, 1.0)]
    assert asked == [None, None, released, released]
    assert decode(outside(prune=1.0), EngineState(Capabilities(k_max=4, exit_layers=(5, 25)))).prune is None


def test_the_kernel_is_deaf_to_nan_and_infinity() -> None:
    simulator = Simulator(scenario(), 2, seed=0)
    simulator.reset()
    for value in (np.nan, np.inf, -np.inf):
        simulator.step(np.full((2, len(ACTION)), value))
    assert np.isfinite(simulator.state.globals).all()
    assert np.isfinite(simulator.state.shown).all()
