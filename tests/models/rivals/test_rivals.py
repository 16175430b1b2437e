"""Each rival does what its paper's rule says, on states made by hand."""

from __future__ import annotations

import sys

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from faser.engine_adapter.arrays import Floats
from faser.engine_adapter.protocol import RequestEvent, RequestRow, StepRecord
from faser.env.cost.cost_table import StepCost
from faser.env.estimate.confidence import EDGES, Forecast
from faser.env.estimate.engine_state import EngineState, learn, look
from faser.env.spaces import Capabilities
from faser.models.evaluation.best_table import best_table
from faser.models.policies.policy import PolicyError
from faser.models.registry import make_policy
from faser.models.rivals.bandit import BLOCK_STEPS, ArmBlocks, Bandit
from faser.models.rivals.ema import AcceptanceEma
from faser.models.rivals.goodput import AdaptiveVerification, AdaSpec, SmartSpec
from faser.models.rivals.gp_lcb import FIT_BLOCKS, LEVELS, GaussianProcessBound
from faser.models.rivals.watch import StepWatch

K_MAX = 5
CAPABILITIES = Capabilities(k_max=K_MAX)
RIVALS = ("goodput", "smartspec", "adaspec", "adaspec:50", "ema", "bandit", "gplcb")


class Costs:
    """A cost table with a fixed price of a row and of a round, seconds."""

    def __init__(self, row_s: float, round_s: float = 0.0, free_rows: float = 0.0) -> None:
        self.row_s, self.round_s, self.free_rows = row_s, round_s, free_rows

    def verify_time_s(self, rows: npt.ArrayLike) -> Floats:
        return 0.01 + self.row_s * np.maximum(np.asarray(rows, np.float64) - self.free_rows, 0.0)

    def draft_time_s(self, rows: npt.ArrayLike, rounds: npt.ArrayLike, drafted: npt.ArrayLike) -> Floats:
        return self.round_s * np.asarray(rounds, np.float64)

    def learn(self, step: StepCost) -> None:
        """Stay as it is."""


def record(counter: int, verified: int, accepted: list[int], time_s: float) -> StepRecord:
    rows = [
        RequestRow(i, 1 + verified, K_MAX, K_MAX, verified, 0, hits, hits + 1, 50, False)
        for i, hits in enumerate(accepted, start=1)
    ]
    n = len(accepted)
    return StepRecord(
        "b", counter, counter, time_s, 0.01, 0.0, 0.0, 0.0, 0.002, 0.0, 0.0, n, 0, 0, n, verified * n, 0.1, None, None,
        0, 0, 0, 0, [], rows,
    )  # fmt: skip


def make_state(accepted: list[int], costs: Costs | None = None, steps: int = 300) -> EngineState:
    """Return a state in which each request has so many of K_MAX drafts accepted in every step."""
    state = EngineState(CAPABILITIES)
    for counter in range(steps):
        look(state, record(counter, K_MAX, accepted, 0.01 * counter))
        if counter < steps - 1:
            learn(state)
    if costs is not None:
        state.unsplit_cost = costs  # type: ignore[assignment]
    return state


def confident(state: EngineState, survival: list[list[float]]) -> None:
    """Give the state a forecast from drafts with this survival, (drafts, K_MAX), for a threshold on each token."""
    values = np.array(survival)[:, :, None]
    passes = values >= EDGES
    kept, gain = passes.mean(axis=0), (values * passes).mean(axis=0)
    shape = (K_MAX, len(EDGES), len(EDGES))
    blank = np.zeros((K_MAX, len(EDGES)))
    cube = [np.broadcast_to(part[:, None, :], shape).copy() for part in (kept, gain)]
    state.confidence.forecast = Forecast(blank, cube[0], cube[1], np.zeros(shape), 0.5)
    state.confidence.is_ready = True


@pytest.mark.parametrize("spec", RIVALS)
def test_with_nobody_decoding_every_rival_answers_for_who_comes_next(spec: str) -> None:
    state = make_state([K_MAX], Costs(row_s=1e-5))
    policy = make_policy(spec, CAPABILITIES)
    before = policy.act(state)
    assert before.default_length > 0 or spec == "bandit"  # which begins with any arm
    gone = msgspec.structs.replace(
        record(state.counter + 1, 0, [0], state.time_s + 0.01), running=0,
        events=[RequestEvent("finish", 1, state.time_s + 0.01, 50)],
    )  # fmt: skip
    look(state, gone)
    assert not state.decoding().any()
    assert policy.act(state).default_length == before.default_length


@pytest.mark.parametrize("spec", RIVALS)
def test_every_rival_can_be_named_and_answers_an_empty_and_a_crowded_engine(spec: str) -> None:
    policy = make_policy(spec, CAPABILITIES)
    assert policy.name == spec
    assert policy.act(EngineState(CAPABILITIES)).lengths.size == 0
    crowd = make_state([1] * 300, steps=2)
    action = policy.act(crowd)
    assert action.lengths.shape == (300,)
    assert 0 <= action.lengths.min() <= action.lengths.max() <= K_MAX
    assert action.reason


@pytest.mark.parametrize("spec", RIVALS)
def test_no_rival_falls_over_an_engine_that_cannot_speculate(spec: str) -> None:
    state = EngineState(Capabilities(k_max=0))
    look(state, record(0, 0, [0, 0], 0.01))
    assert make_policy(spec, Capabilities(k_max=0)).act(state).lengths.tolist() == [0, 0]


@pytest.mark.parametrize("spec", ["adaspec:0", "adaspec:fast", "goodput:1", "gplcb:x", "bandit:2"])
def test_arguments_that_mean_nothing_are_refused(spec: str) -> None:
    with pytest.raises(PolicyError):
        make_policy(spec, CAPABILITIES)


def test_without_scikit_learn_gplcb_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.gaussian_process", None)
    with pytest.raises(PolicyError, match=r"pip install 'faser-vllm\[train\]'"):
        make_policy("gplcb", CAPABILITIES)


def test_the_watch_shows_each_step_once_and_leaves_idle_time_out() -> None:
    watch, state = StepWatch(), EngineState(CAPABILITIES)
    look(state, record(0, 2, [1, 2], 0.01))
    first = watch.look(state)
    assert first is not None
    assert (first.emitted, first.accepted.tolist(), first.is_pure) == (5, [1, 2], True)
    assert watch.look(state) is None
    look(state, record(1, 2, [0, 0], 9.0))  # nine seconds of idling
    second = watch.look(state)
    assert second is not None
    assert second.elapsed_s < 0.1


# --- adaptive verification ---


def test_goodput_verifies_the_best_tokens_of_all_requests_up_to_the_budget() -> None:
    survival = np.array([[0.9, 0.8, 0.7, 0.6, 0.5], [0.3, 0.1, 0.05, 0.01, 0.01]])
    # A row costs 0.4 of what an empty step's token is worth: the marginal gain falls below the rate at 0.5.
    state = make_state([1, 1], Costs(row_s=0.004), steps=2)
    lengths = AdaptiveVerification(CAPABILITIES).ranked(state, survival)
    rates = {
        (a, b): (2 + survival[0, :a].sum() + survival[1, :b].sum()) / (0.01 + 0.004 * (2 + a + b))
        for a in range(6)
        for b in range(6)
    }
    assert tuple(lengths) == max(rates, key=lambda pair: rates[pair])
    assert 0 < lengths[0] <= K_MAX
    assert lengths[1] == 0


def test_goodput_verifies_everything_while_rows_are_free() -> None:
    state = make_state([1, 1], Costs(row_s=0.01, free_rows=64), steps=2)
    assert AdaptiveVerification(CAPABILITIES).act(state).lengths.tolist() == [K_MAX, K_MAX]


def test_goodput_takes_drafting_as_given() -> None:
    cheap, dear = (
        AdaptiveVerification(CAPABILITIES).act(make_state([3, 1], Costs(0.004, round_s), steps=40)).lengths.tolist()
        for round_s in (0.0, 1.0)
    )
    assert cheap == dear
    assert sum(cheap) > 0


def test_goodput_with_confidence_drafts_all_and_cuts_by_threshold() -> None:
    state = make_state([2] * 8, Costs(row_s=0.0008), steps=2)
    sure, unsure = [0.95, 0.9, 0.85, 0.8, 0.75], [0.2, 0.04, 0.01, 0.0, 0.0]
    confident(state, [sure, unsure])
    action = AdaptiveVerification(CAPABILITIES).act(state)
    assert set(action.lengths.tolist()) == {K_MAX}
    assert action.stop is not None
    assert 0.2 < action.stop.keep[0] <= 0.75
    assert set(action.stop.go_on) == {0.0}


# --- SmartSpec ---


@pytest.mark.parametrize(("acceptance", "round_s"), [(0.9, 0.001), (0.5, 0.001), (0.2, 0.002), (0.9, 0.05)])
def test_smartspec_maximises_generated_tokens_over_time(acceptance: float, round_s: float) -> None:
    state = make_state([1] * 4, Costs(row_s=0.0005, round_s=round_s), steps=2)
    policy = SmartSpec(CAPABILITIES)
    state.lesson = None
    policy.acceptance = acceptance
    expected = [
        sum(acceptance**j for j in range(k + 1)) / (0.01 + 0.0005 * 4 * (k + 1) + round_s * k) for k in range(K_MAX + 1)
    ]
    assert set(policy.act(state).lengths.tolist()) == {int(np.argmax(expected))}


def test_smartspec_learns_acceptance_from_tested_tokens_only() -> None:
    policy, state = SmartSpec(CAPABILITIES), EngineState(CAPABILITIES)
    for counter in range(400):  # the first is accepted, the second rejected, the others never tested
        look(state, record(counter, 5, [1, 1], 0.01 * counter))
        policy.act(state)
    assert policy.acceptance == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("spec", ["smartspec", "adaspec"])
def test_the_longer_the_batch_the_shorter_the_drafts_of_goodput_rules(spec: str) -> None:
    """What both papers claim: speculation fades as load grows, until rows cost more than they bring."""
    lengths = []
    for requests in (5, 20, 80, 250):
        state = make_state([5, 4, 2, 1, 0] * (requests // 5), Costs(row_s=0.0001, round_s=0.0005), steps=40)
        lengths.append(make_policy(spec, CAPABILITIES).act(state).default_length)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 3 > 1 >= lengths[-1]


# --- AdaSpec ---


def test_adaspec_drafts_for_the_batch_as_deep_as_goodput_rises() -> None:
    state = make_state([5, 5], Costs(row_s=0.0, round_s=0.004), steps=60)
    gain = state.population.mean.cumprod()
    expected = [(1 + gain[:k].sum()) / (0.01 + 0.004 * k) for k in range(K_MAX + 1)]
    assert set(AdaSpec(CAPABILITIES).act(state).lengths.tolist()) == {int(np.argmax(expected))}
    state.unsplit_cost = Costs(row_s=0.0, round_s=1.0)  # type: ignore[assignment]
    assert set(AdaSpec(CAPABILITIES).act(state).lengths.tolist()) == {0}


def test_adaspec_verifies_the_surest_tokens_where_rows_are_dear() -> None:
    state = make_state([2] * 8, Costs(row_s=0.0008), steps=2)
    confident(state, [[0.95, 0.9, 0.85, 0.8, 0.75], [0.2, 0.04, 0.01, 0.0, 0.0]])
    stop = AdaSpec(CAPABILITIES).act(state).stop
    assert stop is not None
    assert 0.2 < stop.keep[0] <= 0.75


def test_adaspec_keeps_to_its_objective_where_it_can() -> None:
    state = make_state([5] * 4, Costs(row_s=0.0001, round_s=0.003), steps=60)
    free = AdaSpec(CAPABILITIES).act(state)
    strict = AdaSpec.parse("0.001", CAPABILITIES).act(state)  # out of reach: as without one
    assert strict.lengths.tolist() == free.lengths.tolist()
    assert AdaSpec.parse("1000", CAPABILITIES).act(state).lengths.tolist() == free.lengths.tolist()


# --- the EMA of accepted tokens ---


def test_ema_climbs_and_falls_through_its_tiers() -> None:
    policy = AcceptanceEma(Capabilities(k_max=7))
    assert policy.tiers == (1, 3, 7)
    state = EngineState(Capabilities(k_max=7))
    for _ in range(60):
        policy.learn(6.5)
    assert policy.act(state).default_length == 7
    for _ in range(60):
        policy.learn(2.5)  # above 3 - 0.5 - 0.25: it stays
    assert policy.act(state).default_length == 7
    for _ in range(60):
        policy.learn(1.0)
    assert policy.act(state).default_length == 3
    for _ in range(60):
        policy.learn(0.1)
    assert policy.act(state).default_length == 1


def test_ema_is_blind_to_cost() -> None:
    lengths = [
        AcceptanceEma(CAPABILITIES).act(make_state([5] * 4, Costs(row_s), steps=30)).default_length
        for row_s in (0.0, 1.0)
    ]
    assert lengths[0] == lengths[1] > 0


# --- the bandit ---


def test_the_bandit_tries_every_arm_then_settles_on_the_best_and_keeps_looking() -> None:
    arms, best = ArmBlocks(4), np.array([1.0, 2.0, 4.0, 3.0])
    chosen = []
    for _ in range(300):
        arm = arms.choose()
        arms.learn(arm, float(best[arm]))
        chosen.append(arm)
    assert sorted(chosen[:4]) == [0, 1, 2, 3]
    assert chosen[-100:].count(2) > 50
    assert set(chosen[-200:]) > {2}


def test_the_bandit_keeps_a_table_for_each_octave_and_holds_an_arm_for_a_block() -> None:
    policy, state = Bandit(CAPABILITIES), EngineState(CAPABILITIES)
    lengths = []
    for counter in range(6 * BLOCK_STEPS):
        look(state, record(counter, 2, [1, 1], 0.01 * counter))
        lengths.append(policy.act(state).default_length)
    changes = np.flatnonzero(np.diff(lengths))
    assert len(changes) >= 4
    assert (np.diff(changes) == BLOCK_STEPS).all()
    look(state, record(counter + 1, 2, [1] * 20, 0.01 * counter))
    policy.act(state)
    assert sorted(policy.arms) == [1, 4]


# --- GP-LCB ---


def test_gplcb_finds_each_acceptances_length_from_noisy_blocks() -> None:
    policy, random = GaussianProcessBound(CAPABILITIES), np.random.default_rng(0)
    for block in range(3 * FIT_BLOCKS):
        length, acceptance = block % (K_MAX + 1), float(random.choice([0.2, 0.9]))
        tokens = sum(acceptance**j for j in range(length + 1))
        policy.learn(8, length, acceptance, (0.01 + 0.002 * length) / tokens * float(np.exp(random.normal(0.0, 0.02))))
    policy.choose(8)
    low, high = policy._best[round(0.2 * LEVELS)], policy._best[round(0.9 * LEVELS)]
    assert low <= 1
    assert high >= 4


def test_gplcb_prefers_what_it_does_not_know() -> None:
    policy = GaussianProcessBound(CAPABILITIES)
    for block in range(FIT_BLOCKS + 2):
        policy.learn(8, block % 2, 0.5, 0.01 + 0.001 * (block % 3))  # 0 and 1 cost the same, nobody tried the others
    policy.choose(8)
    assert policy._best[LEVELS // 2] > 1


# --- the table by search ---


def test_the_best_table_takes_the_best_length_of_each_load_and_can_be_read_back() -> None:
    best = {1: 4, 4: 4, 16: 1, 64: 0}
    spec = best_table(lambda load, length: -abs(length - best[load]), [1, 4, 16, 64], K_MAX)
    assert spec == "table:1-8=4,9-32=1,33-=0"
    make_policy(spec, CAPABILITIES)


def test_a_search_over_no_loads_is_refused() -> None:
    with pytest.raises(ValueError, match="ascending"):
        best_table(lambda load, length: 0.0, [4, 1], K_MAX)
