"""The decision core: bounds for any sequence of records, determinism, packing, leases and gaps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.controller.decision.decide import LeaseTerms, decide
from faser.engine_adapter.protocol import (
    ActionSet,
    MatchRule,
    Prune,
    RequestEvent,
    RequestRow,
    StepRecord,
    StopRule,
    decode_from_controller,
    encode,
)
from faser.env.estimate.engine_state import EngineState, learn, observe
from faser.env.estimate.requests import FORGOTTEN_RECORDS
from faser.env.spaces import Action, Capabilities
from faser.models.policies.baselines import FixedLength
from faser.models.registry import make_policy

CAPABILITIES = Capabilities(k_max=5, max_batched_tokens=96)


def make_record(
    counter: int,
    rows: list[RequestRow],
    events: list[RequestEvent] | None = None,
    *,
    boot_id: str = "boot",
    step: int | None = None,
    time_s: float | None = None,
    step_s: float = 0.02,
    draft_s: float = 0.004,
    sat_out: int = 0,
) -> StepRecord:
    drafts = sum(row.verified for row in rows)
    prefill = sum(row.scheduled for row in rows if row.is_prefill)
    return StepRecord(
        boot_id, counter, counter if step is None else step, counter * 0.02 if time_s is None else time_s, step_s, 0.0,
        max(step_s - draft_s, 0.0), 0.0, draft_s, 0.0, 0.0, len(rows), 0, prefill, len(rows), drafts, 0.2, None, None,
        0, 0, 0, 0, events or [], rows, sat_out=sat_out,
    )  # fmt: skip


def row(handle: int, verified: int = 3, accepted: int = 2, *, is_prefill: bool = False) -> RequestRow:
    return RequestRow(handle, 1 + verified, 3, 3, verified, 0, accepted, accepted + 1, 100, is_prefill)


big = st.integers(0, 1 << 62)
small = st.integers(0, 64)
seconds = st.floats(-1e6, 1e6, allow_nan=False) | st.just(0.0)
handles = st.integers(1, 12) | st.integers(1, 1 << 62)
rows = st.lists(
    st.builds(
        RequestRow, handles, big, small, small, small, small, small, big, big, st.booleans(),
        st.lists(st.floats(), max_size=8).map(tuple),
    ),
    max_size=10,
)  # fmt: skip
events = st.lists(
    st.builds(
        RequestEvent,
        st.sampled_from(["arrival", "first_token", "finish", "abort", "preempt"]),
        handles,
        seconds,
        big,
        st.just("r"),
        st.integers(-(1 << 63), (1 << 64) - 1),
    ),
    max_size=6,
)
records = st.builds(
    StepRecord, st.sampled_from(["a", "a", "a", "b"]), st.integers(0, 40) | big, big, seconds, seconds, seconds,
    seconds, seconds, seconds, seconds, seconds, big, big, big | small, big | small, big | small, seconds, st.none(),
    st.none(), big, big, big, big, events, rows,
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(st.lists(records, max_size=8), st.sampled_from(["price", "fixed:4", "table:1-4=3,5-=1", "off"]))
def test_any_records_give_lengths_in_bounds_and_a_frame_the_engine_accepts(
    sequence: list[StepRecord], spec: str
) -> None:
    state, policy = EngineState(CAPABILITIES), make_policy(spec, CAPABILITIES)
    for number, record in enumerate(sequence):
        decision = decide(state, record, policy, LeaseTerms(), 1, number)
        lengths = decision.action.lengths
        assert lengths.shape == state.handles().shape
        assert ((lengths >= 0) & (lengths <= 5)).all()
        decoded = decode_from_controller(bytes(encode(decision.action_set)))
        assert isinstance(decoded, ActionSet)


def steady(steps: int, seed: int = 0) -> list[StepRecord]:
    chance = np.random.default_rng(seed)
    return [
        make_record(
            counter,
            [row(h, 3, int(chance.integers(0, 4))) for h in range(1, 9)],
            step_s=float(chance.uniform(0.02, 0.03)),
        )
        for counter in range(steps)
    ]


@pytest.mark.parametrize("spec", ["price", "off", "fixed:2", "table:1-=2"])
def test_the_same_records_give_byte_identical_action_sets(spec: str) -> None:
    def run() -> list[bytes]:
        state, policy = EngineState(CAPABILITIES), make_policy(spec, CAPABILITIES)
        return [
            bytes(encode(decide(state, record, policy, LeaseTerms(), 7, number).action_set))
            for number, record in enumerate(steady(150))
        ]

    assert run() == run()


def test_the_lease_counts_from_the_record_and_is_cut_to_what_the_engine_grants() -> None:
    capabilities = Capabilities(k_max=5, lease_steps=8, lease_ms=400)
    record = make_record(3, [row(1)], step=1000, time_s=5.0)
    decision = decide(EngineState(capabilities), record, make_policy("off", capabilities), LeaseTerms(), 2, 9)
    actions = decision.action_set
    assert (actions.valid_until_step, actions.valid_until_s) == (1008, pytest.approx(5.4))
    assert (actions.boot_id, actions.epoch, actions.sequence, actions.mode) == ("boot", 2, 9, "active")


@pytest.mark.parametrize(("max_rows", "most"), [(0, 5), (18, 5), (17, 4), (6, 1), (2, 0)])
def test_copies_are_no_longer_than_everybody_can_have_in_one_batch(max_rows: int, most: int) -> None:
    capabilities = Capabilities(k_max=5, copy_max=5, max_batched_tokens=max_rows)

    class Copying:
        name = "copying"

        def act(self, state: EngineState) -> Action:
            return Action(np.zeros(state.requests.size, np.int64), 0, match=MatchRule([1.0], [0.0], [0.1], 5))

    rows = [row(h) for h in (1, 2, 3)]
    actions = decide(EngineState(capabilities), make_record(0, rows), Copying(), LeaseTerms(), 1, 0).action_set
    assert actions.match is not None
    assert actions.match.most == most


def test_only_requests_that_differ_from_the_default_are_named() -> None:
    class ByHandle:
        name = "by handle"

        def act(self, state: EngineState) -> Action:
            return Action(state.handles() % 3, 1)

    actions = decide(
        EngineState(CAPABILITIES), make_record(0, [row(h) for h in (1, 2, 3, 4)]), ByHandle(), LeaseTerms(), 1, 0
    ).action_set
    assert (actions.default_length, actions.handles, actions.lengths) == (1, [2, 3], [2, 0])


def test_an_answer_that_does_not_fit_the_requests_becomes_the_default() -> None:
    class Broken:
        name = "broken"

        def act(self, state: EngineState) -> Action:
            return Action(np.array([5]), 5)

    capabilities = Capabilities(k_max=5, default_length=1)
    decision = decide(EngineState(capabilities), make_record(0, [row(1), row(2)]), Broken(), LeaseTerms(), 1, 0)
    assert decision.action.lengths.tolist() == [1, 1]
    assert "1 lengths for 2 requests" in decision.reason
    assert decision.is_clamped


@pytest.mark.parametrize(
    ("action", "is_clamped"),
    [
        (Action(np.array([5, 0]), 5), False),
        (Action(np.array([6, 0]), 5), True),
        (Action(np.array([5, 0]), -1), True),
        (Action(np.array([5, 0]), 5, prune=Prune(3, 0.5)), True),
        (Action(np.zeros(0, np.int64), 5), True),
    ],
)
def test_what_the_engine_cannot_run_is_told_and_what_it_merely_has_no_room_for_is_not(
    action: Action, is_clamped: bool
) -> None:
    class Asking:
        name = "asking"

        def act(self, state: EngineState) -> Action:
            return action

    arrivals = [RequestEvent("arrival", 1, 0.0, 9, "a", 0, 1), RequestEvent("arrival", 2, 0.0, 9, "b")]
    tight = Capabilities(k_max=5, max_batched_tokens=3)
    decision = decide(EngineState(tight), make_record(0, [row(1), row(2)], arrivals), Asking(), LeaseTerms(), 1, 0)
    assert decision.is_clamped == is_clamped
    assert decision.action.lengths.sum() <= 1


def test_a_long_queue_takes_no_drafts_from_who_is_in_the_batch() -> None:
    state = EngineState(CAPABILITIES)
    arrivals = [RequestEvent("arrival", handle, 0.0, 10, f"r{handle}") for handle in range(1, 201)]
    observe(state, make_record(0, [row(1), row(2)], arrivals))
    decision = decide(state, make_record(1, [row(1), row(2)]), FixedLength(5), LeaseTerms(), 1, 0)
    lengths = dict(zip(state.handles().tolist(), decision.action.lengths.tolist(), strict=True))
    assert (lengths[1], lengths[2]) == (5, 5)
    crowd = [row(handle) for handle in range(1, 31)]
    decision = decide(state, make_record(2, crowd), FixedLength(5), LeaseTerms(), 1, 0)
    assert set(decision.action.lengths.tolist()) == {2}  # 30 requests x (1 + 2) rows fit 96


def test_gaps_are_counted_and_late_records_ignored() -> None:
    state = EngineState(CAPABILITIES)
    for counter in (0, 1, 5, 3, 6):
        observe(state, make_record(counter, [row(1)]))
    assert (state.link.gaps, state.link.lost_records, state.link.regressions) == (1, 3, 1)
    assert (state.link.records, state.counter) == (4, 6)


def test_another_boot_starts_with_no_requests() -> None:
    state = EngineState(CAPABILITIES)
    observe(state, make_record(9, [row(1), row(2)]))
    observe(state, make_record(0, [row(7)], boot_id="other"))
    assert state.handles().tolist() == [7]
    assert state.link.reboots == 1


def test_requests_come_by_arrival_or_row_and_leave_by_finish_or_abort() -> None:
    state = EngineState(CAPABILITIES)
    observe(state, make_record(0, [row(1), row(2)], [RequestEvent("arrival", 3, 0.0, 10, "c")]))
    assert state.handles().tolist() == [3, 1, 2]
    assert state.decoding().tolist() == [False, True, True]
    observe(state, make_record(1, [row(3, is_prefill=True)], [RequestEvent("finish", 1, 0.0, 9)]))
    assert state.decoding().tolist() == [False, True]
    observe(state, make_record(2, [row(3)], [RequestEvent("preempt", 2, 0.0, 9)]))
    assert state.decoding().tolist() == [True, False]
    observe(state, make_record(3, [], [RequestEvent("abort", h, 0.0, 9) for h in (2, 3, 99)]))
    assert state.handles().tolist() == []


def test_a_request_whose_end_was_lost_is_forgotten_in_the_end() -> None:
    state = EngineState(CAPABILITIES)
    observe(state, make_record(0, [row(1), row(2)]))
    for counter in range(1, FORGOTTEN_RECORDS + 100):
        observe(state, make_record(counter, [row(2)]))
    assert state.handles().tolist() == [2]
    assert state.link.evicted == 1


def test_evidence_stays_with_its_request_when_others_leave_and_many_come() -> None:
    state = EngineState(CAPABILITIES)
    for counter in range(40):
        observe(state, make_record(counter, [row(1, 3, 0), row(2, 3, 3), row(3, 3, 0)]))
    events = [RequestEvent("finish", 1, 0.0, 9)]
    observe(state, make_record(40, [row(h, 0, 0) for h in range(200, 2, -1)] + [row(2, 3, 3)], events))
    estimates = dict(zip(state.handles().tolist(), state.acceptance()[:, 0].tolist(), strict=True))
    assert estimates[2] > estimates[200] > estimates[3]


def test_load_follows_the_records() -> None:
    state = EngineState(CAPABILITIES)
    for counter in range(1000):
        arrival = [RequestEvent("arrival", counter + 1, counter * 0.02, 5, "r")] if counter % 25 == 0 else []
        observe(state, make_record(counter, [row(1)], arrival))
    assert state.load.arrival_rate_per_s == pytest.approx(2.0, rel=0.25)
    assert state.load.tokens_per_s == pytest.approx(3 / 0.02, rel=0.05)
    assert state.load.prefill_share == 0.0


def test_a_stop_rule_is_sent_and_remembered_by_its_sequence() -> None:
    class Stopping:
        name = "stopping"

        def act(self, state: EngineState) -> Action:
            return Action(np.full(state.requests.size, 3), 3, stop=StopRule([1.0], [0.0], [0.5], [2.0]))

    state = EngineState(CAPABILITIES)
    sent = decide(state, make_record(0, [row(1)]), Stopping(), LeaseTerms(), 1, 9).action_set
    assert sent.stop == StopRule([1.0] * 5, [0.0] * 5, [0.5] * 5, [1.0] * 5)
    assert isinstance(decode_from_controller(bytes(encode(sent))), ActionSet)
    assert state.asked_stops[9] == sent.stop
    decide(state, make_record(1, [row(1)]), Stopping(), LeaseTerms(mode="advisory"), 1, 10)
    assert 10 not in state.asked_stops


def test_tokens_that_a_stop_rule_let_through_say_nothing_about_acceptance_without_it() -> None:
    state, chosen = EngineState(CAPABILITIES), EngineState(CAPABILITIES)
    chosen.ask(3, StopRule([1.0], [0.0], [0.9], [0.9]))
    for counter in range(50):
        for one, sequence in ((state, 2), (chosen, 3)):
            record = make_record(counter, [row(1, 3, 3)])
            record.lease_epoch, record.lease_sequence = 1, sequence
            observe(one, record)
    assert state.population.trials[0] == pytest.approx(50.0, rel=0.02)
    assert chosen.population.trials[0] == pytest.approx(1.0)  # drafted before the rule
    assert state.acceptance()[0, 0] > chosen.acceptance()[0, 0]


def test_a_clients_own_limit_is_not_planned_beyond() -> None:
    arrivals = [RequestEvent("arrival", 1, 0.0, 9, "a", 0, 1), RequestEvent("arrival", 2, 0.0, 9, "b")]
    record = make_record(0, [row(1), row(2)], arrivals)
    decision = decide(EngineState(CAPABILITIES), record, make_policy("fixed:3", CAPABILITIES), LeaseTerms(), 1, 0)
    assert decision.action.lengths.tolist() == [1, 3]
    assert dict(zip(decision.action_set.handles, decision.action_set.lengths, strict=True)) == {1: 1}


@pytest.mark.parametrize(
    ("drafted", "expected"),
    [
        (0, "the drafter sits out: a sequence is longer than its context; policy fixed:2"),
        (2, "requests longer than the drafter's context get no drafts (1 now); policy fixed:2"),
    ],
)
def test_why_nobody_drafts_is_said_and_nothing_is_learnt_of_it(drafted: int, expected: str) -> None:
    """A drafter that sits out for the length of a sequence is not one that finds nothing."""
    capabilities = Capabilities(k_max=4)
    state, fresh = EngineState(capabilities), EngineState(capabilities)
    policy = make_policy("fixed:2", capabilities)
    rows = [RequestRow(handle, 1, 2, drafted, 0, 0, 0, 1, 50, False) for handle in (1, 2)]
    for counter in range(1, 40):
        decision = decide(state, make_record(counter, rows, sat_out=1), policy, LeaseTerms(), 1, counter)
    learn(state)
    assert decision.reason == expected
    assert state.population.delivery.tolist() == fresh.population.delivery.tolist()
    decision = decide(state, make_record(40, rows), policy, LeaseTerms(), 1, 40)
    assert decision.reason == "policy fixed:2"
