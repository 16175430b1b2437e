"""Invariants of the simulated engine: conservation, clocks, determinism, queueing theory, what a policy cannot see."""

from __future__ import annotations

import copy
import dataclasses
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from faser.engine_adapter.protocol import StepRecord, StopRule
from faser.env.layout.action_vector import ACTION, outside
from faser.env.profile.acceptance_model import AcceptanceModel, default_acceptance
from faser.env.profile.engine_profile import Ahead, EngineProfile, Exit, synthetic_profile
from faser.env.simulator.constants import NAMED
from faser.env.simulator.scenario import Scenario, with_mechanisms
from faser.env.simulator.serve_requests import Orders, ServedRequests, replay
from faser.env.simulator.simulator import Simulator
from faser.env.simulator.state import (
    BLOCKS,
    COMPUTED,
    EMITTED,
    FREE,
    HANDLE,
    KEPT,
    OUTPUT,
    PHASE,
    PREEMPTED,
    RUNNING,
    SCHEDULED,
    VERIFIED,
)
from faser.env.workload.request_trace import TraceError

Vectors = np.ndarray[tuple[int, int], np.dtype[np.float32]]


def short_of_blocks(staleness: int = 0) -> Scenario:
    profile = with_mechanisms(synthetic_profile(max_requests=16, kv_blocks=600, k_max=5, token_budget=900))
    return Scenario(profiles=(profile,), slots=16, load=(1.4, 1.4), staleness=staleness)


def actions(random: np.random.Generator, engines: int) -> Vectors:
    return random.uniform(-1.0, 1.0, (engines, len(ACTION))).astype(np.float32)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 32), staleness=st.integers(0, 3), policy=st.integers(0, 1 << 16))
def test_requests_blocks_and_time_are_conserved(seed: int, staleness: int, policy: int) -> None:
    simulator = Simulator(short_of_blocks(staleness), 3, seed=seed)
    simulator.reset()
    random, clock_s = np.random.default_rng(policy), np.zeros(3)
    profile = simulator.scenario.profiles[0]
    for _ in range(120):
        simulator.step(actions(random, 3))
        engines, ints = simulator.state.engines, simulator.state.ints
        in_batch = (ints[:, PHASE] != FREE).sum(axis=1)
        assert (engines["arrived"] == engines["finished"] + engines["queue_length"] + in_batch).all()
        assert (engines["running"] == (ints[:, PHASE] == RUNNING).sum(axis=1)).all()
        assert (engines["waiting"] == engines["queue_length"] + (ints[:, PHASE] == PREEMPTED).sum(axis=1)).all()
        held = np.where(ints[:, PHASE] == RUNNING, ints[:, BLOCKS], 0).sum(axis=1)
        assert (engines["free_blocks"] + held == profile.kv_blocks).all()
        assert (engines["free_blocks"] >= 0).all()
        assert (ints[:, BLOCKS] * profile.block_size >= np.where(ints[:, PHASE] == RUNNING, ints[:, COMPUTED], 0)).all()
        assert (ints[:, SCHEDULED].sum(axis=1) <= profile.token_budget).all()
        assert (ints[:, SCHEDULED].sum(axis=1) > 0).all()  # work-conserving: a step always has work
        assert (ints[:, EMITTED] <= np.maximum(ints[:, OUTPUT], 0)).all()
        assert (engines["clock_s"] > clock_s).all()
        passed_s = engines["clock_s"] - clock_s
        assert engines["elapsed_s"] == pytest.approx(passed_s)
        assert engines["busy_s"] + engines["idle_s"] == pytest.approx(engines["clock_s"])
        clock_s = engines["clock_s"].copy()


def test_requests_are_preempted_newest_first_and_still_served() -> None:
    simulator = Simulator(short_of_blocks(), 1, seed=1)
    simulator.reset()
    random = np.random.default_rng(0)
    for _ in range(1500):
        simulator.step(actions(random, 1))
        ints = simulator.state.ints[0]
        out, running = ints[:, ints[PHASE] == PREEMPTED], ints[:, ints[PHASE] == RUNNING]
        if out.size and running.size:
            assert out[1].min() > running[1].max()  # by handle: older requests stay
    engine = simulator.state.engines[0]
    assert engine["preemptions"] > 5
    assert engine["finished"] > 20


def test_nothing_waits_while_slots_tokens_and_blocks_suffice() -> None:
    profile = synthetic_profile(max_requests=64, kv_blocks=100_000, token_budget=8192)
    simulator = Simulator(Scenario(profiles=(profile,), load=(0.5, 0.9)), 4, seed=2)
    simulator.reset()
    for _ in range(800):
        simulator.step()
        engines = simulator.state.engines
        full = (engines["running"] >= 60) | (engines["prefill_tokens"] > 8192 - 64 - 4096)
        assert ((engines["waiting"] == 0) | full).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_seed_gives_the_same_bytes_whatever_the_threads(threads: int) -> None:
    def run(threads: int, seed: int) -> tuple[bytes, bytes]:
        simulator = Simulator(short_of_blocks(1), 5, seed=seed, threads=threads)
        simulator.reset()
        random = np.random.default_rng(0)
        for _ in range(150):
            simulator.step(actions(random, 5))
        simulator.reset([1, 3])
        for _ in range(30):
            simulator.step(actions(random, 5))
        simulator.close()
        return simulator.state.shown.tobytes() + simulator.state.globals.tobytes(), simulator.state.engines.tobytes()

    assert run(threads, 7) == run(1, 7)
    assert run(threads, 8)[1] != run(1, 7)[1]


def test_a_request_is_as_lucky_under_any_policy() -> None:
    def traits(vector: Vectors) -> dict[int, bytes]:
        simulator = Simulator(short_of_blocks(), 1, seed=5)
        simulator.reset()
        seen: dict[int, bytes] = {}
        for _ in range(200):
            simulator.step(vector)
            ints = simulator.state.ints[0]
            for i in np.flatnonzero(ints[PHASE] == RUNNING):
                seen[int(ints[1, i])] = simulator.state.traits[0, :, i].tobytes()
        return seen

    off, deep = traits(outside()[None]), traits(outside(depth=1.0, threshold=0.1)[None])
    common = set(off) & set(deep)
    assert len(common) > 5
    assert all(off[handle] == deep[handle] for handle in common)


def test_how_sure_a_draft_begins_does_not_depend_on_how_the_one_before_ended() -> None:
    """Else rules that end drafts where the drafter is unsure would meet a worse drafter than fixed lengths do."""

    def first_cells(vector: Vectors) -> dict[tuple[int, int], int]:
        simulator = Simulator(dataclasses.replace(short_of_blocks(), hardness=0.0), 1, seed=5)
        simulator.reset()
        seen: dict[tuple[int, int], int] = {}
        for _ in range(200):
            simulator.step(vector)
            ints = simulator.state.ints[0]
            for i in np.flatnonzero((ints[PHASE] == RUNNING) & (ints[KEPT] > 0)):
                seen[int(ints[HANDLE, i]), int(ints[EMITTED, i])] = int(simulator.state.cells[0, i, 0])
        return seen

    short, deep = first_cells(outside(depth=0.2)[None]), first_cells(outside(depth=1.0, threshold=0.1)[None])
    common = set(short) & set(deep)
    assert len(common) > 50
    assert len({short[place] for place in common}) > 20
    assert all(short[place] == deep[place] for place in common)


def test_observations_do_not_depend_on_what_the_future_holds() -> None:
    """Oracle boundary: other true lengths and other luck to come change nothing that is seen up to now."""
    for place in (0, 60, 200):
        simulator, other = (Simulator(short_of_blocks(), 2, seed=9) for _ in range(2))
        random = np.random.default_rng(1)
        plan = [actions(random, 2) for _ in range(place + 20)]
        for each in (simulator, other):
            each.reset()
            for vector in plan[:place]:
                each.step(vector)
        ints = other.state.ints
        ints[:, OUTPUT] = np.where(ints[:, PHASE] != FREE, ints[:, EMITTED] + 3000, ints[:, OUTPUT])
        other.state.keys[:] ^= np.uint64(0xDEADBEEF)  # acceptances to come
        other.world.rows["output"][:] = 77  # answers of requests that have not come yet
        assert simulator.state.shown.tobytes() == other.state.shown.tobytes()
        for array in (simulator, other):  # one more step: only what was drafted before is verified in it
            array.step(plan[place])
        before = [s.state.ints[:, VERIFIED].copy() for s in (simulator, other)]
        assert (before[0] == before[1]).all()
        if place:
            for vector in plan[place + 1 :]:
                simulator.step(vector)
                other.step(vector)
            assert simulator.state.shown.tobytes() != other.state.shown.tobytes()  # it is felt later


def test_lucky_drafts_and_true_lengths_are_not_in_the_observation() -> None:
    simulator = Simulator(short_of_blocks(), 1, seed=4)
    simulator.reset()
    random = np.random.default_rng(2)
    for _ in range(80):
        simulator.step(actions(random, 1))
    shown = simulator.state.shown.tobytes() + simulator.state.globals.tobytes()
    state = copy.deepcopy(simulator.state)
    for column in (OUTPUT, 11):  # 11: lucky
        state.ints[:, column] += 5
    assert shown == state.shown.tobytes() + state.globals.tobytes()


def little(simulator: Simulator) -> tuple[float, float]:
    """Return the integral of requests in the system, and the sum of the times they spent there, ended or not."""
    engine = simulator.state.engines[0]
    phase, now_s = simulator.state.ints[0, PHASE], float(engine["clock_s"])
    spent_s = float(engine["e2e_sum_s"]) + float((now_s - simulator.state.times[0, 0])[phase != FREE].sum())
    head, length = int(engine["queue_head"]), int(engine["queue_length"])
    places = (head + np.arange(length)) % simulator.state.queue_s.shape[1]
    return float(engine["in_system_s"]), spent_s + float((now_s - simulator.state.queue_s[0, places]).sum())


@pytest.mark.parametrize("seed", range(3))
def test_littles_law(seed: int) -> None:
    simulator = Simulator(short_of_blocks(), 1, seed=seed)
    simulator.reset()
    random = np.random.default_rng(seed)
    for _ in range(700):
        simulator.step(actions(random, 1))
    integral_s, spent_s = little(simulator)
    assert simulator.state.engines[0]["finished"] > 10
    assert integral_s == pytest.approx(spent_s, rel=1e-9)


def constant_step(step_s: float, servers: int) -> EngineProfile:
    """A server of `servers` requests at a time, one token per step of constant length, prompts for nothing."""
    return synthetic_profile(
        step_s=step_s, row_s=0.0, kv_token_s=0.0, round_s=0.0, host_s=0.0, noise=0.0, kv_blocks=1 << 20,
        token_budget=8192, max_requests=servers,
    )  # fmt: skip


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (1, 0.7), (4, 0.7), (4, 0.85)])
def test_waiting_times_are_those_of_an_m_m_k_queue(servers: int, load: float) -> None:
    random = np.random.default_rng(11)
    requests, step_s, mean_tokens = 20_000, 1e-3, 60.0
    tokens = np.maximum(random.exponential(mean_tokens, requests).round(), 1).astype(int)
    served_per_s = 1.0 / (tokens.mean() * step_s)
    arrival_s = np.cumsum(random.exponential(1.0 / (load * servers * served_per_s), requests))
    served = replay(arrival_s, np.ones(requests), tokens, 0, constant_step(step_s, servers))
    waited_s = served.e2e_s - tokens * step_s
    expected_s = erlang_c(servers, load * servers) / (servers * served_per_s * (1.0 - load))
    assert np.nanmean(waited_s) == pytest.approx(expected_s, rel=0.15)


def erlang_c(servers: int, offered: float) -> float:
    """Return the chance to wait."""
    terms = [offered**k / math.factorial(k) for k in range(servers)]
    last = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return last / (sum(terms) + last)


def some_requests(count: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    random = np.random.default_rng(seed)
    return (
        np.cumsum(random.exponential(0.05, count)), random.integers(5, 300, count), random.integers(1, 120, count)
    )  # fmt: skip


def test_plain_decoding_takes_as_long_as_a_hand_computes() -> None:
    """The synthetic profile's milliseconds; no pause of the host goes before a step of an engine that was idle."""
    step_s, row_s, host_s = 5.886e-3, 21e-6, 1.207e-3
    profile = synthetic_profile(noise=0.0, kv_token_s=0.0, round_s=0.0)
    served = replay([0.0, 50.0], [100, 10], [5, 1], 0, profile)
    assert served.ttft_s == pytest.approx([step_s + 100 * row_s, step_s + 10 * row_s])
    assert served.e2e_s[0] == pytest.approx(served.ttft_s[0] + 4 * (step_s + row_s + host_s))
    assert served.steps == 5 + 1
    in_chunks = replay([0.0, 50.0], [150, 10], [1, 1], 0, synthetic_profile(noise=0.0, token_budget=64))
    assert in_chunks.steps == 3 + 1


@pytest.mark.parametrize("mean_logit", [-40.0, 40.0], ids=["never accepted", "always accepted"])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_speculation_as_a_table(mean_logit: float, length: int) -> None:
    """With free drafts, rejected ones change nothing, and accepted ones give 1 + k tokens per step."""
    acceptance = msgspec.structs.replace(
        synthetic_profile().acceptance, intercepts=(mean_logit,) * 8, slopes=(0.0,) * 8, hidden=0.0
    )
    profile = constant_step(1e-3, 8)
    requests = some_requests()
    plain = replay(*requests, 0, profile, acceptance)
    served = replay(*requests, length, profile, acceptance)
    assert served.tokens.tolist() == plain.tokens.tolist() == requests[2].tolist()
    if length == 0 or mean_logit < 0:
        assert served.e2e_s == pytest.approx(plain.e2e_s)
        assert served.accepted == 0
    else:
        assert served.accepted == served.drafted
        long = requests[2] > 60
        # Within a step or two: a draft never reaches beyond an answer's end.
        assert served.tpot_s[long] == pytest.approx(plain.tpot_s[long] / (1 + length), rel=0.12)


def test_a_stop_rule_that_keeps_nothing_is_plain_decoding() -> None:
    requests, profile = some_requests(), constant_step(1e-3, 8)
    never = StopRule([1.0], [0.0], [1.0], [1.0])
    plain = replay(*requests, 0, profile)
    served = replay(*requests, lambda record: Orders({}, 4, never), profile)
    assert served.drafted == 0
    assert served.e2e_s == pytest.approx(plain.e2e_s)


def test_a_recorded_length_and_the_same_from_a_callable_agree() -> None:
    requests, profile = some_requests(), synthetic_profile(noise=0.0)
    seen: list[StepRecord] = []

    def decide(record: StepRecord) -> Orders:
        seen.append(record)
        return Orders({}, 3)

    injected = replay(*requests, decide, profile)
    recorded = replay(*requests, 3, profile)
    assert len(seen) > 100
    # The callable cannot decide before the first record, so the very first steps differ.
    assert injected.tokens_per_s == pytest.approx(recorded.tokens_per_s, rel=0.02)
    assert np.median(injected.e2e_s) == pytest.approx(np.median(recorded.e2e_s), rel=0.05)


def test_recorded_decisions_hold_by_tokens_emitted() -> None:
    requests, profile = some_requests(20), synthetic_profile(noise=0.0)
    off_later = [[4] * 10 + [0]] * 20
    served = replay(*requests, off_later, profile)
    assert 0 < served.drafted < replay(*requests, 4, profile).drafted / 2


def fair_model() -> AcceptanceModel:
    """Accept with the drafter's confidence, whosever the draft is."""
    size = synthetic_profile().k_max
    return replace(default_acceptance(size), intercepts=(0.0,) * size, slopes=(1.0,) * size, hidden=0.0)


def told(confidences: list[float], model: AcceptanceModel, ahead: Ahead | None = None) -> ServedRequests:
    """Serve twenty requests with drafts of 4 and these confidences at every token."""
    requests, profile = some_requests(20), replace(synthetic_profile(noise=0.0), acceptance=model, ahead=ahead)
    lengths, known = ([[each] * (output + 1) for output in requests[2]] for each in (4, confidences))
    return replay(*requests, lengths, profile, confidences=known, goes_ahead=ahead is not None)


def test_a_replay_accepts_by_recorded_confidences() -> None:
    """What a policy drafts only where its drafter is sure is accepted more often than other drafts."""
    fair = fair_model()
    sure, hopeless, mixed = (told(c, fair) for c in ([1.0] * 4, [0.0] * 4, [1.0, 1.0, 0.0, 1.0]))
    assert sure.accepted == sure.drafted > 0
    assert hopeless.accepted == 0
    assert mixed.accepted == pytest.approx(mixed.drafted / 2, rel=0.05)  # shorter at the end of an answer
    half = told([0.5] * 4, fair)
    assert half.accepted / half.drafted == pytest.approx((0.5 + 0.25 + 0.125 + 0.0625) / 4, rel=0.15)
    part, unknown = told([0.0, 0.0], fair), told([], fair)  # only what an answer's end cuts short is known as a whole
    assert part.accepted / part.drafted == pytest.approx(unknown.accepted / unknown.drafted, rel=0.1)


@pytest.mark.parametrize("ahead", [None, Ahead(ready=0.6, hidden=0.8, verify_factor=1.2, acceptance=0.7)])
def test_recorded_confidences_change_chances_and_no_luck(ahead: Ahead | None) -> None:
    size = synthetic_profile().k_max
    deaf = replace(default_acceptance(size), intercepts=(0.3,) * size, slopes=(0.0,) * size, hidden=0.5)
    assert told([0.2] * 4, deaf, ahead).e2e_s.tobytes() == told([], deaf, ahead).e2e_s.tobytes()


def test_confidences_belong_to_a_request_and_to_the_tokens_it_had_emitted() -> None:
    profile = replace(synthetic_profile(noise=0.0), acceptance=fair_model())
    lengths = [[4] * 41] * 2

    def served(*known: dict[int, list[float]]) -> ServedRequests:
        everywhere = [[each.get(emitted, [0.0] * 4) for emitted in range(41)] for each in known]
        return replay([0.0, 1e-3], [10, 10], [40, 40], lengths, profile, confidences=everywhere)

    sure = [1.0] * 4
    assert served({1: sure}, {}).accepted == 4  # what is drafted behind the first token
    assert served({2: sure}, {}).accepted == 4
    assert served({1: sure, 2: sure}, {}).accepted == 4  # from 1 to 6: nobody drafts at 2
    first, second = served(dict.fromkeys(range(41), sure), {}).tpot_s
    assert first < 0.5 * second


@pytest.mark.parametrize("confidences", [[[[0.5]]] * 20, [[[0.5]] * 3, [[0.5]]] + [[[0.5]] * 2] * 18])
def test_confidences_of_other_decisions_are_refused(confidences: list[list[list[float]]]) -> None:
    with pytest.raises(TraceError, match="confidences of other decisions"):
        replay(*some_requests(20), [[4, 4]] * 20, synthetic_profile(), confidences=confidences)


def test_replays_differ_by_seed_only() -> None:
    def run(seed: int) -> ServedRequests:
        return replay(*some_requests(), 3, synthetic_profile(), seed=seed)

    assert run(1).e2e_s.tobytes() == run(1).e2e_s.tobytes()
    assert run(1).e2e_s.tobytes() != run(2).e2e_s.tobytes()


@pytest.mark.parametrize(
    ("arrivals", "prompts", "outputs", "words"),
    [
        ([0.0, -1.0], [1, 1], [1, 1], "request 1: arrival -1.0"),
        ([0.0, math.nan], [1, 1], [1, 1], "request 1: arrival nan"),
        ([0.0, 1.0], [1, 0], [1, 1], "request 1: .*prompt 0"),
        ([0.0, 1.0], [1, 1], [1], "2 arrivals, 2 prompts, 1 answers"),
        ([], [], [], "0 arrivals"),
    ],
)
def test_bad_requests_are_named(arrivals: list[float], prompts: list[int], outputs: list[int], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        replay(arrivals, prompts, outputs, 0, synthetic_profile())


def test_decisions_come_as_late_as_their_staleness() -> None:
    def first_draft(staleness: int) -> int:
        scenario = Scenario(profiles=(synthetic_profile(),), load=(1.0, 1.0), staleness=staleness)
        simulator = Simulator(scenario, 1, seed=0)
        simulator.reset()
        for _ in range(30):
            simulator.step()
        for step in range(20):
            simulator.step(outside(depth=1.0))
            if simulator.state.engines[0]["drawn"] > 0:
                return step
        return -1

    assert [first_draft(staleness) for staleness in (0, 1, 5)] == [0, 1, 5]


@pytest.mark.parametrize(("component", "value"), [("overlap", 0.5), ("overlap", 1.0), ("split", 0.5), ("prune", 0.5)])
def test_mechanisms_without_a_profile_for_them_change_nothing_but_two_passes(component: str, value: float) -> None:
    """No exit heads, one split, nothing ahead: all are neutral; two half-batches only read the weights twice."""

    def run(**means: float) -> tuple[float, float]:
        simulator = Simulator(Scenario(profiles=(synthetic_profile(),), load=(0.8, 0.8)), 2, seed=6)
        simulator.reset()
        for _ in range(200):
            simulator.step(np.tile(outside(depth=0.5, threshold=0.2, **means), (2, 1)))
        return float(simulator.state.engines["clock_s"][0]), float(simulator.state.engines["overlap_s"].sum())

    plain, moved = run(), run(**{component: value})
    assert moved[1] == 0.0
    assert moved[0] > plain[0] if (component, value) == ("overlap", 0.5) else moved == plain


def test_mechanisms_help_where_a_profile_has_them() -> None:
    plain = with_mechanisms(synthetic_profile(step_s=1e-4, row_s=1e-4, round_s=1e-4, draft_row_s=1e-4))

    def served(false_alarm: float = 0.0, look_s: float = 0.0, **means: float) -> float:
        exits = (Exit(16, 0.5, recall=0.9, false_alarm=false_alarm, look_s=look_s),)
        profile = msgspec.structs.replace(plain, exits=exits)
        scenario = Scenario(profiles=(profile,), load=(1.4, 1.4), noise=0.0)
        simulator = Simulator(scenario, 4, seed=6)
        simulator.reset()
        for _ in range(300):
            simulator.step(np.tile(outside(depth=0.5, **means), (4, 1)))
        engines = simulator.state.engines
        return float(engines["emitted"].sum() / engines["busy_s"].sum())

    assert served(prune=1.0) > served()
    assert served(prune=0.1) == served(prune=1.0)  # on or off
    assert served(prune=1.0, false_alarm=0.5) < served(prune=1.0)
    assert served(prune=1.0, look_s=0.1) < served()
    assert served(look_s=0.1) == served()
    assert served(overlap=0.5) > served() * 1.01


def test_drafting_ahead_hides_what_is_of_use_and_slows_what_it_runs_beside() -> None:
    plain = synthetic_profile(step_s=1e-2, row_s=1e-6, round_s=5e-3)  # drafting takes more than half of a step

    def served(ahead: Ahead | None, overlap: float = 1.0) -> tuple[float, float, int, float]:
        profile = msgspec.structs.replace(plain, ahead=ahead)
        simulator = Simulator(Scenario(profiles=(profile,), load=(6.0, 6.0), noise=0.0), 4, seed=6)
        simulator.reset()
        hits = 0
        for _ in range(300):
            simulator.step(np.tile(outside(depth=0.4, overlap=overlap), (4, 1)))
            hits += int(simulator.state.engines["frontier_hits"].sum())
        engines = simulator.state.engines
        rate = float(engines["emitted"].sum() / engines["busy_s"].sum())
        return (
            rate,
            float(engines["accepted"].sum() / engines["drafted"].sum()),
            hits,
            float(engines["overlap_s"].sum()),
        )

    in_turn = served(None)
    assert in_turn == served(Ahead(), overlap=0.0)
    assert in_turn[2:] == (0, 0.0)
    at_best = served(Ahead(acceptance=1.0))
    assert at_best[0] > in_turn[0] * 1.05
    assert at_best[1] == pytest.approx(in_turn[1], abs=0.02)
    assert at_best[2] > 1000
    assert at_best[3] > 0.0
    assert 0.3 < served(Ahead(ready=0.5, acceptance=1.0))[2] / at_best[2] < 0.7
    assert served(Ahead(hidden=0.5, acceptance=1.0))[0] == pytest.approx((at_best[0] + in_turn[0]) / 2.0, rel=0.03)
    assert served(Ahead(acceptance=0.5))[1] < in_turn[1] - 0.03
    useless = served(Ahead(ready=0.0, verify_factor=1.5))
    assert useless[2] == 0
    assert useless[0] < in_turn[0] * 0.9


def test_lengths_can_be_named_slot_by_slot() -> None:
    simulator = Simulator(short_of_blocks(), 1, mode=NAMED, seed=0)
    simulator.reset()
    lengths = np.array([[i % 6 for i in range(16)]], np.int8)
    for _ in range(40):
        simulator.step(lengths=lengths)
    ints = simulator.state.ints[0]
    busy = (ints[PHASE] == RUNNING) & (simulator.state.lengths[0, 0] >= 0)
    assert busy.sum() > 2
    assert (ints[VERIFIED][busy] <= lengths[0][busy]).all()
    assert ints[VERIFIED].max() > 1


def test_wrong_scenarios_are_refused() -> None:
    with pytest.raises(ValueError, match="expected finite"):
        Scenario(load=(0.0, 1.0))
    with pytest.raises(ValueError, match=r"expected 1\.\.4096"):
        Scenario(slots=0)
    with pytest.raises(ValueError, match="can speculate"):
        Scenario(profiles=(synthetic_profile(k_max=0),))
    with pytest.raises(ValueError, match="expected at least 1"):
        Simulator(Scenario(), 0)
