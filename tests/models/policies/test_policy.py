"""Names of policies, the baselines, and what the price policy prefers."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from faser.engine_adapter.protocol import Prune, RequestEvent, RequestRow, StepRecord
from faser.env.cost.cost_table import StepCost
from faser.env.estimate.engine_state import EngineState, observe
from faser.env.spaces import Action, Capabilities
from faser.models.policies.baselines import TURN_RECORDS, LengthTable
from faser.models.policies.policy import PolicyError
from faser.models.policies.price import COMPARE_SEARCHES, SETTLED_DECISIONS, Plan, PricePolicy, _lead
from faser.models.policies.probe import BUDGET_SHARE, HALVING_PROBES, LEAST_ZEAL, Chances, ProbeAccount
from faser.models.policies.stop_rules import NO_RULE, predict_stops, rule_of
from faser.models.registry import POLICIES, make_policy

COMPARE_DECISIONS = COMPARE_SEARCHES * SETTLED_DECISIONS  # within so many it has weighed both ways
K_MAX = 5
CAPABILITIES = Capabilities(k_max=K_MAX)


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("best", "possible are off, fixed:K"),
        ("", "possible are"),
        ("off:1", "possible are"),
        ("fixed", "possible are"),
        ("fixed:6", "expected 0..5"),
        ("fixed:x", "expected 0..5"),
        ("table:", "possible are"),
        ("table:1-4=9", "expected 0..5"),
        ("table:5-4=1", "ends before it begins"),
        ("table:1-4=1,4-8=2", "ascend without overlap"),
        ("table:1-=1,9-=2", "ascend without overlap"),
        ("table:1..4=2", "cannot read '1..4=2'"),
        ("price:best", "price:history"),
    ],
)
def test_a_name_that_cannot_be_used_says_what_is_possible(spec: str, hint: str) -> None:
    with pytest.raises(PolicyError, match=r".+") as caught:
        make_policy(spec, CAPABILITIES)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["off", "fixed:3", "table:1-4=3,5-16=1,17-=0", "price", "price:history"])
def test_every_documented_policy_can_be_made_and_keeps_its_name(spec: str) -> None:
    assert make_policy(spec, CAPABILITIES).name == spec
    assert spec.partition(":")[0] in {name.partition(":")[0] for name in POLICIES}


@pytest.mark.parametrize(("requests", "length"), [(1, 3), (4, 3), (5, 1), (16, 1), (17, 0), (99, 0)])
def test_the_table_answers_by_requests_in_the_batch(requests: int, length: int) -> None:
    table = LengthTable.parse("1-4=3,5-16=1,17-=0", CAPABILITIES)
    assert table.length_for(requests) == length


def test_with_nobody_in_the_batch_a_table_answers_for_who_comes_next() -> None:
    state = EngineState(CAPABILITIES)
    action = LengthTable.parse("1-4=3,5-=1", CAPABILITIES).act(state)
    assert (state.load.running, action.default_length) == (0, 3)


def make_state(
    levels: dict[int, float], row_ms: float, round_ms: float = 0.1, k_max: int = K_MAX, order: list[int] | None = None
) -> EngineState:
    """Return a state that has seen each handle accept at its level, on an engine of 10 ms + row_ms per row."""
    state = EngineState(Capabilities(k_max=k_max))
    random = {handle: np.random.default_rng(handle) for handle in levels}
    for counter in range(120):
        rows = []
        for handle in order or levels:
            hits = np.cumprod(random[handle].random(K_MAX) < levels[handle]).sum()
            rows.append(RequestRow(handle, 6, 5, 5, 5, 0, int(hits), int(hits) + 1, 50, False))
        draft_s = round_ms * 5e-3
        step_s = 0.01 + row_ms * 1e-3 * 6 * len(rows) + draft_s
        record = StepRecord(
            "b", counter, counter, counter * 1.0, step_s, 0.0, 0.0, 0.0, draft_s, 0.0, 0.0, len(rows), 0, 0, len(rows),
            5 * len(rows), 0.1, None, None, 0, 0, 0, 0, [], rows,
        )  # fmt: skip
        observe(state, record)
        for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
            state.unsplit_cost.learn(StepCost(n, 0, n, 0, 0, 0, 0.01 + row_ms * 1e-3 * n, 0.0, 0.0))
    return state


def lengths_of(state: EngineState) -> dict[int, int]:
    policy = make_policy("price", state.capabilities)
    policy.act(state)  # may be a probe; the next one waits for newer records
    action = policy.act(state)
    assert "probing" not in action.reason
    return dict(zip(state.handles().tolist(), action.lengths.tolist(), strict=True))


def test_high_acceptance_and_cheap_rows_draft_deep() -> None:
    assert min(lengths_of(make_state(dict.fromkeys(range(1, 5), 0.9), row_ms=0.01)).values()) >= 4


def everybody_ends(state: EngineState) -> None:
    """Let one more step end all requests."""
    gone = [RequestEvent("finish", int(handle), state.time_s + 1.0, 50) for handle in state.handles()]
    rows = [RequestRow(event.handle, 6, 5, 5, 5, 0, 2, 3, 50, False) for event in gone]
    counter = state.counter + 1
    record = StepRecord(
        "b", counter, counter, state.time_s + 1.0, 0.01, 0.0, 0.0, 0.0, 5e-4, 0.0, 0.0, 0, 0, 0, len(rows),
        5 * len(rows), 0.1, None, None, 0, 0, 0, 0, gone, rows,
    )  # fmt: skip
    observe(state, record)
    assert not state.handles().size


@pytest.mark.parametrize("spec", ["price", "price:history"])
def test_who_comes_next_drafts_from_its_prompt_on_as_the_last_one_did(spec: str) -> None:
    state = make_state({1: 0.9}, row_ms=0.01)
    policy = make_policy(spec, state.capabilities)
    while "probing" in (planned := policy.act(state)).reason:
        pass
    everybody_ends(state)
    action = policy.act(state)
    assert action.default_length == planned.default_length >= 4
    assert action.stop == planned.stop
    assert action.lengths.size == 0


def test_who_comes_alone_behind_a_crowd_drafts_at_the_price_of_one_alone() -> None:
    alone, crowd = make_state({1: 0.9}, row_ms=1.0), make_state(dict.fromkeys(range(1, 65), 0.7), row_ms=1.0)
    policy = make_policy("price", alone.capabilities)
    while "probing" in (planned := policy.act(alone)).reason:
        pass
    while "probing" in (crowded := policy.act(crowd)).reason:
        pass
    assert crowded.default_length == 0 < planned.default_length
    everybody_ends(crowd)
    assert policy.act(crowd).default_length > 0  # by the crowd's acceptance, at what one alone asked of it


def test_before_anybody_was_planned_for_nobody_drafts() -> None:
    action = make_policy("price", CAPABILITIES).act(EngineState(CAPABILITIES))
    assert (action.default_length, action.reason) == (0, "nothing to speculate on")


def test_past_the_knee_nobody_drafts() -> None:
    assert set(lengths_of(make_state(dict.fromkeys(range(1, 65), 0.7), row_ms=1.0)).values()) == {0}


def test_a_request_that_accepts_little_gets_less_than_one_that_accepts_much() -> None:
    lengths = lengths_of(make_state({1: 0.9, 2: 0.15, 3: 0.9, 4: 0.15}, row_ms=0.6))
    assert min(lengths[1], lengths[3]) > max(lengths[2], lengths[4])


def test_dear_rounds_keep_one_eager_request_from_drafting_deep() -> None:
    levels = {1: 0.95} | dict.fromkeys(range(2, 9), 0.2)
    cheap = lengths_of(make_state(levels, row_ms=0.2, round_ms=0.01))
    dear = lengths_of(make_state(levels, row_ms=0.2, round_ms=6.0))
    assert cheap[1] > dear[1]


def drafting_state(levels: dict[int, float], token_ms: float, is_ragged: bool) -> EngineState:
    """Return the state of an engine of 10 ms a step on which a drafted token costs so much."""
    state = make_state(levels, row_ms=0.01)
    state.capabilities = replace(state.capabilities, is_ragged=is_ragged)
    for _ in range(100):
        for drafted in (8, 16, 24, 32, 40):
            rows, draft_s = 8 + drafted, token_ms * 1e-3 * drafted
            total_s = 0.01 + 1e-5 * rows + draft_s
            state.unsplit_cost.learn(StepCost(rows, 0, 8, 0, drafted // 8, drafted, total_s, draft_s, 0.0))
    return state


FEW_EAGER = dict.fromkeys(range(1, 4), 0.95) | dict.fromkeys(range(4, 9), 0.05)


def test_where_all_draft_the_longest_a_few_eager_requests_do_not_make_everybody_draft() -> None:
    assert lengths_of(drafting_state(FEW_EAGER, 0.5, is_ragged=True))[1] > 1
    assert set(lengths_of(drafting_state(FEW_EAGER, 0.5, is_ragged=False)).values()) == {0}


def test_where_drafts_are_there_anyway_more_of_them_are_verified() -> None:
    own, longest = (lengths_of(drafting_state(FEW_EAGER, 0.1, is_ragged)) for is_ragged in (True, False))
    assert own[1] == longest[1] == K_MAX
    assert all(longest[handle] > own[handle] for handle in range(4, 9))


def test_where_all_draft_alike_it_does_not_matter_who_leaves() -> None:
    even = dict.fromkeys(range(1, 9), 0.8)
    assert lengths_of(drafting_state(even, 0.1, True)) == lengths_of(drafting_state(even, 0.1, False))


def test_lengths_move_with_the_requests_when_these_are_permuted() -> None:
    levels = {handle: 0.1 * handle for handle in range(1, 10)}
    order = list(levels)
    np.random.default_rng(5).shuffle(order)
    straight = lengths_of(make_state(levels, row_ms=0.4))
    assert len(set(straight.values())) > 1
    assert lengths_of(make_state(levels, row_ms=0.4, order=order)) == straight


def test_an_engine_without_drafter_gets_zeros() -> None:
    state = make_state({1: 0.9}, row_ms=0.1, k_max=0)
    assert lengths_of(state) == {1: 0}


def test_lengths_do_not_flap_when_nothing_changes() -> None:
    state = make_state(dict.fromkeys(range(1, 9), 0.6), row_ms=0.5)
    policy = make_policy("price", state.capabilities)
    policy.act(state)
    assert len({tuple(policy.act(state).lengths.tolist()) for _ in range(50)}) == 1


@pytest.mark.parametrize("spec", ["price", "price:history"])
@pytest.mark.parametrize(("missed", "drafts"), [(0, True), (400, True), (200_000, False)])
def test_drafting_begins_only_where_what_was_skipped_pays_back(spec: str, missed: int, drafts: bool) -> None:
    state = make_confident_state(row_ms=0.15)
    state.has_skipped = True
    state.requests.column("context")[:] = 50 + missed
    state.requests.column("drafter")[:] = 50
    beside_s = float(state.unsplit_cost.draft_time_s(8, 1, 8))
    for _ in range(40):
        state.unsplit_cost.learn_drafting(StepCost(8, 0, 8, 0, 1, 8, 0.1, beside_s + 5e-5 * 600, 0.0, caught_up=600))
    assert state.view().catch_up_s() == pytest.approx(8 * missed * 5e-5, rel=0.05)
    policy = make_policy(spec, state.capabilities)
    actions = [policy.act(state) for _ in range(4 * COMPARE_DECISIONS)]
    assert "probing" not in actions[-1].reason
    assert (actions[-1].lengths.max() > 0) == drafts


@pytest.mark.parametrize("spec", ["price", "price:history"])
@pytest.mark.parametrize(("prompt_rows", "drafts"), [(0, True), (10, True), (10_000, False)])
def test_nobody_drafts_where_reading_every_new_prompt_costs_more_than_drafts_bring(
    spec: str, prompt_rows: int, drafts: bool
) -> None:
    state = make_confident_state(row_ms=0.15)
    beside_s = float(state.unsplit_cost.draft_time_s(8, 1, 8))
    for _ in range(40):
        step = StepCost(608, 600, 8, 0, 1, 8, 0.1, beside_s + 5e-5 * 600, 0.0, all_draft=True)
        state.unsplit_cost.learn_drafting(step)
    state.load.steady_prefill_rows = prompt_rows
    assert state.view().keep_up_s() == pytest.approx(prompt_rows * 5e-5, rel=0.05)
    policy = make_policy(spec, state.capabilities)
    actions = [policy.act(state) for _ in range(4 * COMPARE_DECISIONS)]
    assert "probing" not in actions[-1].reason
    assert (actions[-1].lengths.max() > 0) == drafts


def test_a_request_is_up_to_date_once_it_drafts() -> None:
    state = EngineState(CAPABILITIES)

    def seen(counter: int, limit: int, drafted: int, context: int, caught_up: int = 0) -> int:
        row = RequestRow(1, 1, limit, drafted, 0, 0, 0, 1, context, False)
        record = StepRecord(
            "b", counter, counter, counter * 0.1, 0.05, 0.0, 0.0, 0.0, 0.01, 0.0, 0.0, 1, 0, 0, 1,
            0, 0.1, None, None, 0, 0, 0, 0, [], [row], caught_up=caught_up,
        )  # fmt: skip
        observe(state, record)
        return state.requests.missed(state.decoding())

    assert seen(0, 0, 0, 700) == 700
    assert state.view().catch_up_s() == 0.0  # no engine that skips, as far as is known
    assert seen(1, 2, 0, 701, caught_up=512) == 701  # under way
    assert state.view().catch_up_s() > 0.0
    assert seen(2, 2, 2, 702, caught_up=190) == 0
    assert seen(3, 2, 0, 703) == 0  # drafted nothing that was kept, but followed
    assert seen(4, 0, 0, 704) == 1


def make_confident_state(row_ms: float, round_ms: float = 0.2, batch: int = 8) -> EngineState:
    """Return a state that has seen calibrated confidences around 0.6, on an engine of 10 ms + row_ms per row."""
    random, state = np.random.default_rng(0), EngineState(CAPABILITIES)
    for counter in range(300):
        depth, following = counter % (K_MAX + 1), (counter + 1) % (K_MAX + 1)  # every depth, to tell the costs apart
        chance = random.beta(1.8, 1.2, (batch, K_MAX))
        hits = np.minimum((random.random((batch, K_MAX)) < chance).cumprod(axis=1).sum(axis=1), depth)
        rows = [
            RequestRow(
                i, 1 + depth, following, following, depth, 0, int(hit), int(hit) + 1, 50, False, tuple(sure[:depth])
            )
            for i, (hit, sure) in enumerate(zip(hits, chance.tolist(), strict=True), start=1)
        ]
        draft_s = round_ms * 1e-3 * following
        step_s = 0.01 + row_ms * 1e-3 * batch * (1 + depth) + draft_s
        record = StepRecord(
            "b", counter, counter, counter * 1.0, step_s, 0.0, 0.0, 0.0, draft_s, 0.0, 0.0, batch, 0, 0, batch,
            depth * batch, 0.1, None, None, 0, 0, 0, 0, [], rows,
        )  # fmt: skip
        observe(state, record)
    return state


def stop_of(state: EngineState) -> tuple[int, float, list[float]]:
    """Return depth, threshold to keep, thresholds to go on that the price policy settles on."""
    policy = make_policy("price", CAPABILITIES)
    for _ in range(2 * COMPARE_DECISIONS):
        action = policy.act(state)
    if action.stop is None:
        return action.default_length, 1.0 if action.default_length == 0 else 0.0, [0.0] * K_MAX
    return action.default_length, action.stop.keep[0], action.stop.go_on


def test_the_dearer_a_row_the_surer_a_token_must_be() -> None:
    keep = [stop_of(make_confident_state(row_ms))[1] for row_ms in (0.02, 0.1, 0.3, 1.0)]
    assert keep == sorted(keep)
    assert keep[0] < keep[-1]


def test_thresholds_to_go_on_are_at_least_those_to_keep_and_rise_with_the_price_of_a_round() -> None:
    _, keep, cheap = stop_of(make_confident_state(0.1, round_ms=0.05))
    _, _, dear = stop_of(make_confident_state(0.1, round_ms=0.5))
    assert min(cheap[:-1]) >= keep
    assert cheap[:-1] == sorted(cheap[:-1])
    assert dear[0] > cheap[0]


def test_drafts_without_a_rule_are_in_the_table_of_stop_rules() -> None:
    state = make_confident_state(0.3, batch=3)
    forecast = state.confidence.forecast
    assert forecast is not None
    found = predict_stops(state.view(), forecast, 100.0)
    drafted, tokens, rows, rounds = found.table[:, NO_RULE]
    depths = np.arange(K_MAX + 1)
    assert drafted == pytest.approx(3.0 * depths)
    assert rows == pytest.approx(3.0 * (depths + 1))
    assert rounds == pytest.approx(depths)
    assert tokens == pytest.approx(3.0 * (1.0 + np.append(0.0, forecast.gain[:, -1, -1].cumsum())))
    assert found.verify_s is not None
    assert found.verify_s[NO_RULE] == pytest.approx(state.unsplit_cost.verify_time_s(3.0 * (depths + 1)))
    assert rule_of(found.go_on, state.confidence, NO_RULE, K_MAX) is None
    assert (tokens >= found.table[1, :NO_RULE] - 1e-9).all(), "a rule only ever takes tokens away"


def test_stop_rules_are_not_weighed_by_how_lucky_the_requests_are_that_run_now() -> None:
    def plan(rate: float, even: float) -> Plan:
        return Plan(Action(np.zeros(1, np.int64), 0), rate, 0, 2, 2.0, np.array([50.0, even, 0.9 * even]))

    assert _lead(plan(110.0, 100.0), plan(120.0, 120.0)) == pytest.approx(0.1)
    assert _lead(plan(110.0, 100.0), plan(88.0, 80.0)) == pytest.approx(0.0)
    assert _lead(plan(50.0, 40.0), plan(50.0, 40.0)) == 0.0, "nothing drafted is best for all"


def test_each_way_tells_what_one_length_for_all_would_bring() -> None:
    state = make_confident_state(0.3, batch=3)
    policy = make_policy("price", CAPABILITIES)
    assert isinstance(policy, PricePolicy)
    requests, rows = 3, 3.0 * np.arange(1, K_MAX + 2)
    for _ in range(2 * COMPARE_DECISIONS):
        policy.act(state)
    forecast = state.confidence.forecast
    assert forecast is not None
    assert policy.plan is not None
    tokens = requests * (1.0 + np.append(0.0, forecast.gain[:, -1, -1].cumsum()))
    rounds, drafted = np.arange(K_MAX + 1.0), rows - requests
    step_s = state.view().verify_s(rows) + state.unsplit_cost.draft_time_s(rows, rounds, drafted)
    assert policy.plan.even_rates == pytest.approx(tokens / step_s, rel=1e-6)


def test_a_splits_promise_is_of_who_runs_now_and_of_the_better_way() -> None:
    state = make_confident_state(1.0)
    policies = [make_policy(name, CAPABILITIES) for name in ("price", "price:history")]
    for policy in policies:
        for _ in range(2 * COMPARE_DECISIONS):
            policy.act(state)
    confident, history = (
        policy._rate_at(state.view(), 0)  # type: ignore[attr-defined]
        for policy in policies
    )
    assert policies[0].plan.action.stop is not None  # type: ignore[attr-defined]
    assert confident > 1.01 * history
    before = policies[0]._held  # type: ignore[attr-defined]
    policies[0]._rate_at(state.view(), 0)  # type: ignore[attr-defined]
    assert policies[0]._held is before, "asking moves nothing"  # type: ignore[attr-defined]


def test_an_operating_point_outlives_a_short_time_with_another_number_of_requests() -> None:
    many, few = make_confident_state(0.3, batch=8), make_state({1: 0.6}, 0.3)
    policy = make_policy("price", CAPABILITIES)
    for _ in range(2 * COMPARE_DECISIONS):
        before = policy.act(many)
    assert before.stop is not None
    for _ in range(3):
        assert policy.act(few).stop is None, "it has no confidences: its lengths come from history"
    after = policy.act(many)
    assert after.stop is not None
    assert (after.stop.keep, after.stop.go_on) == (before.stop.keep, before.stop.go_on)


def test_without_confidence_in_the_name_or_with_steps_in_flight_nothing_stops() -> None:
    state = make_confident_state(0.1)
    assert max(stop_of(state)[2]) > 0.0
    in_flight = Capabilities(k_max=K_MAX, is_async=True)
    for policy in (make_policy("price:history", CAPABILITIES), make_policy("price", in_flight)):
        assert all(policy.act(state).stop is None for _ in range(2 * COMPARE_DECISIONS))


@pytest.mark.parametrize("confident", [False, True], ids=["by history", "by confidence"])
@pytest.mark.parametrize("released", [None, Prune(5, 0.25)], ids=["without heads", "with heads"])
def test_price_asks_for_pruning_where_there_are_exit_heads(confident: bool, released: Prune | None) -> None:
    state = make_confident_state(0.05) if confident else make_state(dict.fromkeys(range(1, 5), 0.7), row_ms=0.05)
    state.capabilities = replace(state.capabilities, released_prune=released)
    policy = make_policy("price" if confident else "price:history", state.capabilities)
    actions = [policy.act(state) for _ in range(3 * COMPARE_DECISIONS)]
    assert {action.prune for action in actions if "probing" not in action.reason} == {released}
    assert any(action.stop is not None for action in actions) is confident


def test_a_probe_pays_for_what_the_drafter_must_make_up_for() -> None:
    state = make_state(dict.fromkeys(range(1, 9), 0.6), row_ms=0.05)
    free = ProbeAccount().choose(state.view(), 1.0, 0, Chances(np.full(K_MAX, 0.5), np.full(K_MAX, 0.4)))
    dear = ProbeAccount().choose(state.view(), 1.0, 0, Chances(np.full(K_MAX, 0.5), np.full(K_MAX, 0.4)), begin_s=1e3)
    assert free is not None
    assert dear is None


def test_nothing_is_probed_that_reading_prompts_would_eat_up() -> None:
    def probe(prompt_rows: float) -> int | None:
        state = make_state(dict.fromkeys(range(1, 9), 0.6), row_ms=0.05)
        for _ in range(40):
            state.unsplit_cost.learn_drafting(StepCost(608, 600, 8, 0, 1, 8, 0.1, 5e-5 * 600, 0.0, all_draft=True))
        state.load.steady_prefill_rows = prompt_rows
        chances = Chances(np.full(K_MAX, 0.5), np.full(K_MAX, 0.4))
        return ProbeAccount().choose(state.view(), 8 / 0.0105, 0, chances)

    assert probe(10.0) is not None
    assert probe(10_000.0) is None


def test_amid_prompts_most_of_the_credit_for_probes_waits() -> None:
    def probe(prefill_share: float) -> int | None:
        state = make_state(dict.fromkeys(range(1, 9), 0.6), row_ms=0.05)
        state.load.prefill_share = prefill_share
        chances = Chances(np.full(K_MAX, 0.5), np.full(K_MAX, 0.4))
        return ProbeAccount().choose(state.view(), 1.0, 0, chances, begin_s=5.0 * state.load.step_s)

    assert probe(0.0) is not None
    assert probe(0.9) is None


def test_batches_of_a_new_size_are_probed_at_once() -> None:
    def probe(requests: int) -> int | None:
        account._next_record = 0
        view = msgspec.structs.replace(state.view(), requests=requests)
        return account.choose(view, 1.0, 0, chances, begin_s=2.0 * state.load.step_s)

    state = make_state(dict.fromkeys(range(1, 9), 0.6), row_ms=0.05)
    account, chances = ProbeAccount(), Chances(np.full(K_MAX, 0.5), np.full(K_MAX, 0.4))
    assert probe(8) is not None
    account._credit_s = 0.0
    assert probe(9) is None, "of the same size as eight"
    assert probe(32) is not None
    account._credit_s = 0.0
    assert probe(33) is None
    assert probe(8) is None, "not new any more"


def test_probes_that_change_nothing_get_rarer_and_one_that_does_brings_the_budget_back() -> None:
    def earned_s(account: ProbeAccount, depth: int) -> float:
        """Return what a second of steps adds to the credit, with nothing to spend it on."""
        state.time_s += 1e-3
        before = account._credit_s
        account.choose(state.view(), 1e9, depth)
        return (account._credit_s - before) / 1e-3

    state = make_state(dict.fromkeys(range(1, 9), 0.6), row_ms=0.05)
    account, chances = ProbeAccount(), Chances(np.full(K_MAX, 0.5), np.full(K_MAX, 0.4))
    account.choose(state.view(), 1e9, 0)
    account._credit_s = 0.0
    assert earned_s(account, 0) == pytest.approx(BUDGET_SHARE, rel=0.01)
    for _ in range(HALVING_PROBES):
        account._credit_s, account._next_record = 1e3, 0
        assert account.choose(state.view(), 1.0, 0, chances) is not None
    account._credit_s = 0.0
    assert earned_s(account, 0) == pytest.approx(BUDGET_SHARE / 2, rel=0.01)
    assert earned_s(account, 2) == pytest.approx(BUDGET_SHARE, rel=0.01), "another depth is in force now"
    for _ in range(100):
        account._credit_s, account._next_record = 1e3, 0
        account.choose(state.view(), 1.0, 0, chances)
    account._credit_s = 0.0
    assert earned_s(account, 0) == pytest.approx(BUDGET_SHARE * LEAST_ZEAL, rel=0.01), "never nothing"


def test_turns_show_every_split_and_one_alone_where_none_is_offered() -> None:
    state = make_state({1: 0.5, 2: 0.5}, row_ms=0.1)
    policy = make_policy("turns:3", replace(state.capabilities, splits=("unsplit", "1:3", "1:1")))
    asked = [policy.act(state) for _ in range(4 * TURN_RECORDS)]
    assert [action.split for action in asked[TURN_RECORDS // 2 :: TURN_RECORDS]] == [0, 1, 2, 0]
    assert {action.default_length for action in asked} == {3}
    alone = make_policy("turns:3", state.capabilities)
    assert {alone.act(state).split for _ in range(2 * TURN_RECORDS)} == {0}
    with pytest.raises(PolicyError, match="length 'x'"):
        make_policy("turns:x", state.capabilities)
