"""What a benchmark measures: the order of turns, what is repeated, the table, the work."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from faser.controller.bench.bench import BenchOptions, speed_of_cores
from faser.controller.bench.best_table import best_table, described, longest, worth_sweeping
from faser.controller.bench.plan import (
    FULL_RIVALS,
    PAPERS,
    POLICIES,
    Progress,
    arm_of,
    contenders,
    groups,
    length_of,
    parse_rivals,
    turn_order,
)
from faser.controller.bench.ratio import Ratio
from faser.controller.bench.workload import PEAK_PARTS, TRACES, Mix, Replay, closed_stream
from faser.controller.decision.session import check_policy
from faser.controller.engine.machine import Noise, OwnLoad, Processor
from faser.controller.errors import UsageError
from faser.env.workload.held_out import is_held_out_prompt
from faser.env.workload.prompts import KINDS

ARMS = ("none", "k1", "k3", "table", "faser")
BLUNT, SHARP = Ratio(1.0, 0.9, 1.1, 5), Ratio(1.0, 0.99, 1.01, 5)


def test_every_arm_has_one_turn_a_round_and_is_first_equally_often() -> None:
    rounds = [turn_order(ARMS, round_) for round_ in range(2 * len(ARMS))]
    assert all(sorted(order) == sorted(ARMS) for order in rounds)
    assert set(Counter(order[0] for order in rounds).values()) == {2}
    assert turn_order(("none", "faser"), 0) + turn_order(("none", "faser"), 2) == ("none", "faser") * 2


def test_arms_that_do_not_fit_together_are_split_and_meet_through_the_reference() -> None:
    arms = ("none", "k1", "k2", "k3", "k4", "k6", "k8", "table", "ngram", "faser")
    assert groups(arms, "faser", 10) == [arms]
    parts = groups(arms, "faser", 7)
    assert all(len(part) <= 7 and part[-1] == "faser" for part in parts)
    assert sorted(arm for part in parts for arm in part if arm != "faser") == sorted(set(arms) - {"faser"})
    assert groups(("none",), "none", 1) == [("none",)]
    with pytest.raises(UsageError, match="memory for 1"):
        groups(arms, "faser", 1)


def test_a_disturbed_round_is_repeated_but_not_for_ever() -> None:
    progress = Progress(pairs=3, minutes=0.0)
    for is_disturbed in (False, True, False):
        progress.add(is_disturbed)
        assert progress.wants_more(BLUNT, 0.0)
    progress.add(False)
    assert not progress.wants_more(BLUNT, 0.0)
    hopeless = Progress(pairs=3, minutes=0.0)
    for _ in range(5):
        assert hopeless.wants_more(BLUNT, 0.0)
        hopeless.add(True)
    assert not hopeless.wants_more(BLUNT, 0.0)


def test_a_blunt_ratio_has_its_minutes() -> None:
    progress = Progress(pairs=1, minutes=2.0)
    progress.add(False)
    assert progress.wants_more(BLUNT, 119.0)
    assert not progress.wants_more(BLUNT, 121.0)
    assert not progress.wants_more(SHARP, 1.0)
    assert progress.wants_more(Ratio(1.0, math.nan, math.nan, 1), 1.0)


def test_only_arms_near_the_best_are_measured_on() -> None:
    rates = {
        "none": np.array([50.0, 50.0]), "k1": np.array([95.0, np.nan]), "k3": np.array([80.0, 80.0]),
        "table": np.array([100.0, 100.0]), "faser": np.array([60.0, 60.0]),
    }  # fmt: skip
    assert contenders(rates, ARMS) == ("none", "k1", "table", "faser")
    assert contenders({}, ARMS) == ARMS


@pytest.mark.parametrize(
    ("own_s", "busy_s", "steal_s", "excess", "seen"),
    [
        (2.0, 2.1, 0.0, 0.0, ""),
        (2.0, 1.9, 0.0, 0.0, ""),  # ticks are coarse: never below nothing
        (1.0, 1.5, 0.0, 0.0, "0.25 cores used by others"),
        (2.0, 2.0, 0.2, 0.0, "5.0% of the time stolen"),
        (2.0, 2.0, 0.0, 2.5, "load average 2.5 above our own"),
    ],
)
def test_a_turn_is_disturbed_by_other_work_stolen_time_or_a_queue(
    own_s: float, busy_s: float, steal_s: float, excess: float, seen: str
) -> None:
    before, after = Processor(100.0, 7.0), Processor(100.0 + busy_s, 7.0 + steal_s)
    reason = Noise.between(before, after, own_s, 2.0, 2, excess).reason(2)
    assert seen in reason
    assert bool(reason) == bool(seen)


def test_our_own_part_of_the_load_average_rises_and_fades_as_the_kernels() -> None:
    own = OwnLoad()
    assert own.add(120.0, 60.0) == pytest.approx(2.0 * (1 - math.exp(-1)))
    assert own.add(0.0, 60.0) == pytest.approx(2.0 * (1 - math.exp(-1)) * math.exp(-1))
    assert own.add(5.0, 0.0) == own.cores


def test_the_table_has_the_best_length_of_each_load_and_covers_every_batch_size() -> None:
    levels = {1: {0: 1.0, 3: 1.8, 4: 1.8}, 8: {0: 1.0, 1: 1.1, 3: 0.9}, 32: {0: 1.0, 1: 0.9}, 64: {0: 1.0, 1: 0.7}}
    table = best_table(levels, 64)
    assert table == ((1, 2, 3), (3, 16, 1), (17, 64, 0))
    assert described(table) == "1-2=3,3-16=1,17-64=0"
    assert longest(table) == 3
    assert longest(best_table({4: {0: 1.0, 1: 0.5}}, 64)) == 1
    adjacent = best_table({1: {1: 1.0}, 2: {2: 1.0}, 3: {3: 1.0}}, 8)
    assert adjacent == ((1, 1, 1), (2, 2, 2), (3, 8, 3))
    with pytest.raises(ValueError, match="no load"):
        best_table({}, 64)


def test_a_length_far_behind_a_shorter_one_is_not_swept_where_more_requests_run() -> None:
    log = math.log
    assert worth_sweeping({0: 0.0, 1: log(1.2), 2: log(1.5), 3: log(1.45), 4: log(1.1)}) == {0, 1, 2, 3}
    assert worth_sweeping({0: 0.0, 1: log(0.9), 3: log(0.7)}) == {0, 1}
    assert worth_sweeping({0: log(0.5), 4: 0.0}) == {0, 4}, "the shorter ones may come to be the best"
    assert worth_sweeping({}) == set()


def test_lengths_and_arms_name_each_other() -> None:
    assert [length_of(arm) for arm in ("none", "k1", "k8", "table", "ngram", "faser")] == [0, 1, 8, None, None, None]
    assert all(length_of(arm_of(length)) == length for length in range(9))


def test_a_quick_run_is_what_it_promises() -> None:
    plan = BenchOptions(quick=True).plan()
    assert (plan.loads, plan.rivals, plan.pairs) == ((1, 8, 32), ("none", "k1", "k3", "table"), 3)
    assert (plan.minutes, plan.replays, [mix.name for mix in plan.mixes]) == (0.0, (), ["all"])
    assert (plan.max_prompt_tokens, plan.least_per_client) == (150, 12)
    full = BenchOptions().plan()
    assert (full.learn_s, plan.learn_s, BenchOptions(turn_s=0.5).plan().learn_s) == (20.0, 8.0, 0.0)
    assert full.loads == (1, 2, 4, 8, 16, 32, 64)
    assert (full.max_prompt_tokens, full.least_per_client) == (300, 16)
    assert BenchOptions(traces=("mooncake",)).plan().loads == ()


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"loads": "0"}, "--loads 0"),
        ({"loads": "1,x"}, "--loads 1,x"),
        ({"loads": "65"}, "--loads 65"),
        ({"loads": ""}, "nothing to measure"),
        ({"rivals": "k9"}, "--rivals k9"),
        ({"rivals": "faser"}, "--rivals faser"),
        ({"rivals": ""}, "without a rival"),
        ({"pairs": 0}, "--pairs 0"),
        ({"kinds": "chat+poems"}, "--kinds poems"),
        ({"traces": ("nosuch",)}, "--trace nosuch"),
        ({"traces": ("mooncake",), "rivals": "k1"}, "without the rival none"),
        ({"turn_s": math.nan}, "--turn-seconds nan"),
        ({"trace_s": 0.5, "traces": ("mooncake",)}, "--trace-seconds 0.5"),
        ({"warp": 0.5, "traces": ("mooncake",)}, "--warp 0.5"),
        ({"peak_rps": 0.0, "traces": ("mooncake",)}, "--peak-rps 0"),
        ({"max_tokens": 1}, "--max-tokens 1"),
        ({"temperature": 2.1}, "--temperature 2.1"),
        ({"temperature": math.nan}, "--temperature nan"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(options: dict[str, object], seen: str) -> None:
    with pytest.raises(UsageError, match=seen):
        BenchOptions(**options).plan()  # type: ignore[arg-type]


def test_one_table_is_tuned_for_all_kinds_that_are_measured() -> None:
    named = {
        kinds: BenchOptions(kinds=kinds).plan().sweep_mix for kinds in ("tools+chat", "tools,chat", ",".join(KINDS))
    }
    assert [mix.name for mix in named.values()] == ["tools+chat", "chat+tools", "all"]
    assert named["tools,chat"].kinds == ("chat", "tools")


def test_rivals_may_be_written_as_people_do() -> None:
    assert parse_rivals("k=3, none,k1") == ("none", "k1", "k3")


def test_a_closed_loop_asks_every_arm_the_same_in_turns_of_kinds_with_staggered_first_answers() -> None:
    stream = closed_stream(8, Mix.parse("all"), 96, 300, seed=4)
    assert stream == closed_stream(8, Mix.parse("all"), 96, 300, seed=4)
    assert stream != closed_stream(8, Mix.parse("all"), 96, 300, seed=5)
    assert Counter(request.kind for request in stream[:50]) == dict.fromkeys(KINDS, 10)
    assert sorted(request.max_tokens for request in stream[:8]) == [12 * (place + 1) for place in range(8)]
    assert {request.max_tokens for request in stream[8:]} == {96}
    assert all(is_held_out_prompt(request.prompt) and request.prompt_tokens <= 300 for request in stream[:100])
    alone = closed_stream(2, Mix.parse("code+tools"), 96, 300, seed=4)
    assert {request.kind for request in alone} == {"code", "tools"}


@pytest.mark.parametrize("trace", TRACES)
def test_a_replay_keeps_to_its_length_and_peak(trace: str) -> None:
    replay = Replay(trace, 60.0, 3.0, warp=20.0)
    requests = replay.requests(Mix.parse("all"), seed=1)
    assert requests == replay.requests(Mix.parse("all"), seed=1)
    arrivals_s = np.array([request.arrival_s for request in requests])
    assert (np.diff(arrivals_s) >= 0).all()
    assert arrivals_s[-1] <= 60.0
    peak = np.histogram(arrivals_s, PEAK_PARTS, (0.0, 60.0))[0].max() / (60.0 / PEAK_PARTS)
    assert peak == pytest.approx(3.0, abs=0.25)


def test_a_trace_too_thin_for_the_peak_is_refused_and_a_swell_swings() -> None:
    with pytest.raises(UsageError, match="a peak of 500/s asked for, at warp 1"):
        Replay("mooncake", 60.0, 500.0, warp=1.0).requests(Mix.parse("all"), seed=0)
    swell = Replay("azure-conv", 60.0, 3.0, low_rps=0.5)
    counts = np.histogram([r.arrival_s for r in swell.requests(Mix.parse("all"), seed=0)], 6, (0.0, 60.0))[0]
    assert counts[2:4].min() > 2 * counts[[0, 5]].max()
    assert swell.name == "azure-conv swell"


def test_every_rival_that_the_full_run_names_is_an_arm_and_policies_can_be_named_too() -> None:
    assert parse_rivals(",".join(FULL_RIVALS)) == FULL_RIVALS
    assert {"suffix", *PAPERS} <= set(FULL_RIVALS)
    assert parse_rivals("price:history,none") == ("none", "price:history")
    for policy in POLICIES:
        check_policy(policy)


@pytest.mark.parametrize("trace", TRACES)
def test_the_default_peak_is_past_the_knee_and_not_past_everything(trace: str) -> None:
    """The knee and what can be served at all, tokens/s without speculation, are those of docs/results.md."""
    replay = BenchOptions(traces=(trace,), threads=1).plan().replays[0]
    answer = np.mean([request.max_tokens for request in replay.requests(Mix.parse("all"), 0)])
    speed = speed_of_cores()
    assert replay.peak_rps * answer / speed < 200.0
    if trace != "azure-code":  # its answers are short: prompts are most of the work
        assert replay.peak_rps * answer / speed > 115.0
    assert BenchOptions(traces=(trace,), peak_rps=1.0).plan().replays[0].peak_rps == 1.0
