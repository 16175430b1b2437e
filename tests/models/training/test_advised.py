"""Advice on what tokens are worth: neutral advice changes nothing, leanings lean, earnings are over a baseline run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("stable_baselines3")

import gymnasium
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3

from faser.controller.cli.evaluate import decided
from faser.engine_adapter.protocol import ActionSet
from faser.env.estimate.engine_state import EngineState
from faser.env.layout.observation import GLOBAL_FEATURES
from faser.env.simulator.simulated_engine import SimulatedEngine
from faser.env.spaces import Capabilities
from faser.models.evaluation.objective_worlds import ObjectiveWorld
from faser.models.evaluation.worlds import held_out
from faser.models.learned.advice import FACTORS, NEUTRAL, SPAN_DECISIONS, Advice
from faser.models.learned.learned import LearnedPolicy
from faser.models.learned.network import Manifest, Network, load_network, shapes
from faser.models.policies.policy import Policy
from faser.models.policies.price import PricePolicy
from faser.models.policies.token_values import VALUES
from faser.models.registry import make_policy
from faser.models.training.advised import ENV_ID, AdvisedServing
from faser.models.training.baseline_run import KV_BLOCKS, KV_ROOM, BaselineRun, BaselineTask, Course, tasks
from faser.models.training.config import TrainConfig
from faser.models.training.train import train

TINY = TrainConfig(
    worlds=3, slots=8, engines=2, rollout_steps=4, total_steps=16, minibatch=8, judge_every=1, hidden=8, spans=4,
)  # fmt: skip
EAGLE = held_out()[0]
KNEE = ObjectiveWorld(held_out()[1], 32, 0.25, 0.7)
LOUD = (1.0, 1.0, 1.0, 1.0)


def make_network(bias: Sequence[float] = (0.0,) * 4) -> Network:
    """Return a network that gives the same advice whatever it sees."""
    tensors = {}
    for name, (inputs, outputs) in shapes(8).items():
        tensors[f"{name}.weight"] = np.zeros((inputs, outputs), np.float32)
        tensors[f"{name}.bias"] = np.zeros(outputs, np.float32)
    tensors["head.bias"] = np.array(bias, np.float32)
    size = len(GLOBAL_FEATURES)
    return Network(Manifest(8, 6, "", {}, {}, (-9.0,) * size, (9.0,) * size), tensors)


def served(policy: Policy, world: ObjectiveWorld = KNEE, steps: int = 300, *, tells: bool = True) -> list[ActionSet]:
    scenario = replace(world.scenario(), tells_objectives=tells)
    engine = SimulatedEngine(scenario, 5, has_confidence=world.world.has_confidence)
    state, found = EngineState(engine.capabilities), list[ActionSet]()
    for sequence in range(1, steps):
        found.append(decided(state, engine.step(found[-1] if found else None), policy, sequence))
    return found


CAPABILITIES = SimulatedEngine(KNEE.scenario(), 5).capabilities


def test_a_silent_network_does_what_price_does_and_a_loud_one_does_not() -> None:
    price = served(PricePolicy(CAPABILITIES))
    assert served(LearnedPolicy(make_network(), CAPABILITIES)) == price
    assert served(LearnedPolicy(make_network((1.0, 0.0, 0.0, 0.0)), CAPABILITIES)) != price


def test_advice_is_renewed_when_objectives_come_back() -> None:
    """Requests with objectives, none at all, and requests with objectives again: nobody waits for a span to end."""
    engine = SimulatedEngine(KNEE.scenario(), 5)
    policy, state = LearnedPolicy(make_network((0.5, 0.0, 0.0, 0.0)), CAPABILITIES), EngineState(CAPABILITIES)
    decided(state, engine.step(None), policy, 1)
    assert policy.act(state).reason.startswith("learned: urgency +0.50")
    wanted = state.requests.column("tpot_s")
    kept = wanted.copy()
    wanted[:] = np.inf
    assert "learned" not in policy.act(state).reason
    wanted[:] = kept
    policy._network = make_network((-0.5, 0.0, 0.0, 0.0))
    assert policy.act(state).reason.startswith("learned: urgency -0.50")


def test_without_objectives_the_loudest_network_does_what_price_does() -> None:
    price = served(PricePolicy(CAPABILITIES), tells=False)
    assert served(LearnedPolicy(make_network(LOUD), CAPABILITIES), tells=False) == price


def test_leanings_lean_as_told() -> None:
    assert NEUTRAL.values() == VALUES
    most, least = Advice(*LOUD).values(), Advice(*(-each for each in LOUD)).values()
    for factor, name in zip(FACTORS, Advice._fields, strict=True):
        settled = getattr(VALUES, name)
        assert getattr(most, name) == pytest.approx(factor * settled)
        assert getattr(least, name) == pytest.approx(settled / factor)
    assert Advice.of(np.array([5.0, -5.0, 0.25, 0.0], np.float32)) == Advice(1.0, -1.0, 0.25, 0.0)


@pytest.mark.parametrize("place", range(4), ids=Advice._fields)
def test_each_leaning_changes_what_is_drafted(place: int) -> None:
    found = []
    for lean in (-1.0, 1.0):
        bias = [0.0] * 4
        bias[place] = lean
        found.append(served(LearnedPolicy(make_network(bias), CAPABILITIES)))
    assert found[0] != found[1]


def test_an_engine_unlike_training_is_left_to_price_and_every_decision_counted() -> None:
    engine = SimulatedEngine(KNEE.scenario(), 5)
    network = make_network(LOUD)
    network.manifest = replace(network.manifest, low=(0.98,) * len(GLOBAL_FEATURES))
    policy, state = LearnedPolicy(network, engine.capabilities), EngineState(engine.capabilities)
    decided(state, engine.step(None), policy, 1)
    before = policy.handed_over
    for _ in range(2 * SPAN_DECISIONS):
        assert "unlike training: price decides; " in policy.act(state).reason
    assert policy.handed_over == before + 2 * SPAN_DECISIONS
    assert policy._price._values == VALUES


def test_the_reason_names_the_advice() -> None:
    engine = SimulatedEngine(KNEE.scenario(), 5)
    state = EngineState(engine.capabilities)
    policy = LearnedPolicy(make_network((0.5, -0.25, 0.0, 0.0)), engine.capabilities)
    decided(state, engine.step(None), policy, 1)
    assert policy.act(state).reason.startswith("learned: urgency +0.50, horizon -0.25, reserve +0.00, patience +0.00; ")


# --- what is earned ---


def test_a_baseline_run_knows_what_was_earned_by_when() -> None:
    task = BaselineTask(KNEE.scenario(), KNEE.requests, 7)
    baseline, course = BaselineRun.of(task, TINY, decided), Course(task, TINY, decided)
    policy = PricePolicy(course.engine.capabilities)
    course.begin(policy)
    before = course.engine.clock_s, course.worth
    for _ in range(TINY.spans * SPAN_DECISIONS):
        course.step(policy)
        assert baseline.by(course.engine.clock_s) == pytest.approx(course.worth)
    assert baseline.gain(course, before) == pytest.approx(0.0)
    last_s = float(baseline.seconds[-1])
    assert baseline.by(last_s + 2.0) == pytest.approx(float(baseline.worths[-1]) + 2.0 * baseline.worth_rate)


@pytest.mark.parametrize("late_cost", [0.0, 1.0, 4.0])
def test_late_tokens_cost_as_the_recipe_says(late_cost: float) -> None:
    """Half of the requests want a tenth of a step, and never get it."""
    task = BaselineTask(ObjectiveWorld(EAGLE, 8, 0.5, 0.1).scenario(), 8, 7)
    course = Course(task, replace(TINY, late_cost=late_cost), decided)
    policy, good = make_policy("off", course.engine.capabilities), 0.0
    for _ in range(400):
        course.step(policy)
        good += float(course.engine.simulator.state.terms[0, 0])
    assert 0.2 < good / course.tokens < 0.8
    assert course.worth == pytest.approx(good - late_cost * (course.tokens - good))


def test_what_one_span_may_gain_or_lose_is_bounded() -> None:
    """A baseline run that emits next to nothing would decide the mean of all."""
    course = Course(BaselineTask(KNEE.scenario(), KNEE.requests, 7), TINY, decided)
    policy = make_policy("off", course.engine.capabilities)
    for _ in range(50):
        course.step(policy)
    idle = BaselineRun(np.array([0.0, 1.0]), np.zeros(2), 0.0, 1e-6)
    assert idle.gain(course, (0.0, course.worth - 10.0)) == 2.0
    assert idle.gain(course, (0.0, course.worth + 10.0)) == -2.0


def test_engines_are_full_or_not_and_their_caches_large_or_not() -> None:
    found = tasks(replace(TINY, worlds=8, slots=64), 1, 40)
    arrivals = [task.scenario.load[0] for task in found]
    assert 10 < sum(rate > 2.0 for rate in arrivals) < 30
    assert min(arrivals) < 0.8
    rooms = [task.scenario.profiles[0].kv_blocks / (KV_BLOCKS * task.load) for task in found if task.load >= 16]
    assert len(rooms) > 8
    assert all(KV_ROOM[0] - 0.1 < room < KV_ROOM[1] for room in rooms)
    assert max(rooms) > 4.0 * min(rooms)


def test_gymnasium_and_sb3_accept_the_environment() -> None:
    environment = gymnasium.make(ENV_ID, config=replace(TINY, spans=2), decide=decided).unwrapped
    check_env(environment)
    with warnings.catch_warnings():
        # Advice to use a policy made for rows per request, which is what these are for.
        warnings.filterwarnings("ignore", "Your observation requests has an unconventional shape")
        check_env_for_sb3(environment)


def test_no_advice_earns_nothing_and_advice_something_else() -> None:
    def earned(action: Sequence[float]) -> list[float]:
        course = AdvisedServing(replace(TINY, spans=12, slots=32), decided)
        seen, _ = course.reset()
        rewards, is_over = [], False
        while not is_over:
            assert course.observation_space.contains(seen)
            seen, reward, _, is_over, _ = course.step(np.array(action, np.float32))
            rewards.append(reward)
        return rewards

    assert earned((0.0,) * 4) == pytest.approx([0.0] * 12)
    assert sum(map(abs, earned(LOUD))) > 0.01


def test_a_silent_network_is_judged_as_level_with_price() -> None:
    course = AdvisedServing(TINY, decided)
    assert course.judged(make_network()) == pytest.approx([0.0])
    loud = [course.judged(make_network(advice)) for advice in (LOUD, (-1.0, 1.0, -1.0, -1.0))]
    assert any(found != pytest.approx([0.0], abs=1e-6) for found in loud)  # one of them at least asks for other lengths


def test_a_run_begins_level_with_price_and_leaves_a_policy_that_the_daemon_can_load(tmp_path: Path) -> None:
    found = train(TINY, tmp_path, decided)
    assert found.first == pytest.approx(0.0)
    assert found.best >= found.first
    network = load_network(found.manifest)
    assert network.tensors["head.bias"].shape == (len(Advice._fields),)
    assert make_policy(f"learned:{found.manifest}", Capabilities(k_max=3)).act(EngineState(Capabilities(k_max=3)))
    again = train(replace(TINY, total_steps=32), tmp_path, decided, resume=True)
    assert again.steps == 32
