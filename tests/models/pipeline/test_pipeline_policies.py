"""Pipeline policies: the paper's equations by hand, moves toward a target, hindsight's plan, what is judged."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from faser.env.pipeline.arrivals import OWN_CLOCK, draw_arrivals
from faser.env.pipeline.cluster import STAY, Cluster, PipelineMove
from faser.env.pipeline.constants import STAGES, PipelineConstants
from faser.env.pipeline.view import ClusterView
from faser.models.pipeline.flexpipe import FlexPipe
from faser.models.pipeline.hindsight_plan import EPOCH_S, HindsightPlan, best_plan, switching
from faser.models.pipeline.judge import (
    PipelineCell,
    PipelineComparison,
    PipelineRun,
    Runs,
    judgement,
    run_cell,
    serve_load,
)
from faser.models.pipeline.names import DEFAULT, make_pipeline_policy
from faser.models.pipeline.pipeline_policy import LoadHint, toward
from faser.models.pipeline.rules import ReactiveScaler, StaticStages, pipelines_for
from faser.models.pipeline.shadows import SETS, day_costs
from faser.models.pipeline.weigh import Memory, Weigh, WeighSettings
from faser.models.policies.policy import PolicyError

CONSTANTS = PipelineConstants()
ARRIVALS = draw_arrivals("gamma-2", 1, 60.0)
HINT = LoadHint.of(ARRIVALS)


def view(**changes: object) -> ClusterView:
    return replace(Cluster(ARRIVALS, (4, 2)).view(), **changes)  # type: ignore[arg-type]


def test_the_way_to_a_target_refactors_first_adds_then_and_releases_last() -> None:
    assert toward(view(serving=(2, 0, 0, 0)), 8, 3) == PipelineMove(8, 2, is_refactor=True)
    assert toward(view(serving=(0, 2, 0, 0)), 8, 3) == PipelineMove(8, 1)
    assert toward(view(serving=(3, 0, 0, 0)), 8, 1) == PipelineMove(8, 1, is_refactor=True)
    under_way = view(serving=(3, 0, 0, 0), moving=(1, 0, 0, 0), coming=(0, 1, 0, 0))
    assert toward(under_way, 8, 1) == STAY  # nothing goes before the new one serves
    assert toward(view(serving=(2, 1, 0, 0)), 8, 1) == PipelineMove(4, -2)
    assert toward(view(serving=(0, 9, 0, 0)), 8, 1) == PipelineMove(8, -3)
    assert toward(view(serving=(0, 1, 0, 0)), 8, 1).count == 0


def test_equation_4_prefers_more_stages_the_burstier_the_load() -> None:
    rule = FlexPipe(CONSTANTS)
    chosen = [rule.best(variation) for variation in (0.2, 1.0, 4.0, 16.0)]
    assert chosen == sorted(chosen)
    assert chosen[0] <= 1
    assert chosen[-1] == 3
    penalty = 1 + 0.02 * (1 + 0.05)
    throughput = [1 / (row.compute_s * penalty) for row in CONSTANTS.granularities]
    latency = [row.stages * row.compute_s * penalty + row.communication_s for row in CONSTANTS.granularities]
    by_hand = (0.5 * throughput[1] / throughput[3] + 0.5 * latency[0] / latency[1]) * math.exp(0.0)
    assert rule.scores(1.0)[1] == pytest.approx(by_hand)


def test_equation_5_divides_demand_by_what_one_pipeline_serves() -> None:
    assert FlexPipe(CONSTANTS).replicas(40.0, 0) == math.floor(40.0 * 0.06994 * 1.04)
    assert FlexPipe(CONSTANTS).replicas(1.0, 3) == 1


def test_equation_11_scales_finer_the_longer_the_queue_and_the_burstier_the_load() -> None:
    rule = FlexPipe(CONSTANTS)
    assert rule.scaling_stages(1.0, 0) == 4
    assert rule.scaling_stages(4.0, 64) == 16  # 31.9 cut down
    assert rule.scaling_stages(1.0, 64) == 16
    assert rule.scaling_stages(1.0, 16) == 4
    assert rule.scaling_stages(4.0, 32) == 16


def test_equation_12_adds_what_serves_the_queue_before_the_deadline() -> None:
    rule = FlexPipe(CONSTANTS)
    crowd = view(waiting=2000, serving=(2, 0, 0, 0), load_s=(2.0, 2.0, 2.0, 2.0), variations=(1.0,) * 4)
    assert not rule.meets_deadline(crowd, 0.0)
    move = rule.decide(crowd)
    assert move.count == 3
    assert not move.is_refactor
    few = view(waiting=300, serving=(2, 0, 0, 0), load_s=(2.0, 2.0, 2.0, 2.0), variations=(1.0,) * 4)
    assert rule.decide(replace(few, now_s=10.0)).count == 1
    assert rule.decide(replace(few, now_s=12.0)) == STAY  # the interval


def test_static_sets_are_for_three_quarters_of_the_peak_and_never_move() -> None:
    policy = StaticStages(4, None, CONSTANTS)
    assert policy.start(HINT) == (4, math.ceil(0.75 * HINT.peak_rps * 0.06994))
    assert StaticStages(8, 3, CONSTANTS).start(HINT) == (8, 3)
    assert policy.decide(view(waiting=1000)) == STAY
    assert pipelines_for(0.0, 4, CONSTANTS) == 1


def test_the_autoscaler_adds_at_once_and_releases_after_its_patience() -> None:
    policy = ReactiveScaler(4, CONSTANTS)
    policy.start(HINT)
    policy.least = 1
    moves = [policy.decide(view(now_s=float(t), waiting=100, serving=(2, 0, 0, 0))) for t in range(3)]
    assert moves[0].count > 0
    policy.ongoing = 0.0
    quiet = [policy.decide(view(now_s=100.0 + t, waiting=0, running=0, serving=(3, 0, 0, 0))) for t in range(70)]
    assert all(move.count == 0 for move in quiet[:60])
    assert quiet[-1].count < 0


def test_a_plan_in_hindsight_is_the_cheapest_way_through() -> None:
    epochs, price = switching(CONSTANTS)
    small, large = SETS.index((4, 1)), SETS.index((4, 2))
    costs = np.full((len(SETS), 60), 100.0)
    costs[small], costs[large] = 1.0, 2.0
    costs[small, 40:50] = 50.0
    plan = best_plan(costs, epochs, price)
    lead = int(epochs[small, large])
    assert lead == math.ceil(47.14 / EPOCH_S)
    assert (plan[: 40 - lead] == small).all()
    assert (plan[40 - lead : 50] == large).all()
    assert plan[55] == small


def test_hindsight_is_cheaper_than_every_fixed_set_on_a_swelling_load() -> None:
    arrivals = draw_arrivals("swell", 5, 600.0)
    cluster, _ = serve_load(HindsightPlan(arrivals, CONSTANTS, 5), arrivals, LoadHint.of(arrivals), CONSTANTS, 5)

    def cost(served: Cluster) -> float:
        return served.totals.missed + 0.5 * float(served.latency_s.sum()) + 0.02 * served.totals.gpu_s

    fixed = []
    for stages, count in SETS:
        static = StaticStages(stages, count, CONSTANTS)
        fixed.append(cost(serve_load(static, arrivals, LoadHint.of(arrivals), CONSTANTS, 5)[0]))
    assert cost(cluster) < min(fixed)


def test_shadows_cost_what_the_world_costs() -> None:
    arrivals = draw_arrivals("gamma-4", 2, 300.0)
    costs = day_costs(arrivals.arrival_s, CONSTANTS, step_s=1.0)
    for stages, count in ((4, 4), (16, 1)):
        cluster = serve_load(StaticStages(stages, count, CONSTANTS), arrivals, HINT, CONSTANTS, 0)[0]
        own = cluster.totals.missed + 0.5 * float(cluster.latency_s.sum()) + 0.02 * cluster.totals.gpu_s
        assert costs[SETS.index((stages, count))] == pytest.approx(own / cluster.now_s, rel=0.1)


def test_weigh_begins_with_the_best_of_another_day_and_grows_with_the_load() -> None:
    policy = Weigh(CONSTANTS)
    calm, busy = draw_arrivals("gamma-1", 3, 300.0, rate_rps=5.0), draw_arrivals("gamma-1", 4, 300.0, rate_rps=60.0)
    start = policy.start(LoadHint.of(calm))
    assert start == SETS[int(day_costs(calm.arrival_s, CONSTANTS).argmin())]
    cluster, _ = serve_load(Weigh(CONSTANTS), busy, LoadHint.of(calm), CONSTANTS, 0)
    assert cluster.gpus_held > start[0] * start[1]
    assert cluster.totals.refused <= 5


def test_a_saving_counts_at_rates_like_it_was_seen_at_and_only_when_it_is_sure() -> None:
    random, settings = np.random.default_rng(0), WeighSettings(ahead_s=1)
    slow, fast = np.zeros(len(SETS)), np.zeros(len(SETS))
    slow[0], fast[0] = -1.0, 5.0  # the first set saves at a low rate and costs at a high one
    costs = np.vstack([np.tile(slow, (400, 1)), np.tile(fast, (400, 1))])
    memory = Memory(np.arange(-800.0, 0.0), np.repeat([1.0, 5.0], 400), costs)
    assert memory.saving(1, 0.0, 1.0, settings)[0] == pytest.approx(1.0, abs=0.01)
    assert memory.saving(1, 0.0, 5.0, settings)[0] == pytest.approx(-5.0, abs=0.01)
    memory.cost[:, 0] += random.normal(0.0, 100.0, 800)
    assert memory.saving(1, 0.0, 1.0, settings)[0] < 0.5
    assert Memory().saving(1, 0.0, 1.0, settings).max() == 0.0


def test_what_is_given_back_in_a_calm_is_missed_in_the_burst_behind_it() -> None:
    """In calm seconds a small set saves; with what follows on them it does not."""
    settings, calm, busy = WeighSettings(), -3.0, 6.0
    is_busy = np.arange(800) % 40 >= 30
    costs = np.ones((800, len(SETS)))
    costs[:, 0] = np.where(is_busy, 40.0, 0.0)
    memory = Memory(np.arange(-800.0, 0.0), np.where(is_busy, busy, calm), costs)
    assert memory.saving(1, 0.0, calm, replace(settings, ahead_s=1))[0] > 0.5
    assert memory.saving(1, 0.0, calm, settings)[0] < -1.0
    assert memory.saving(0, 0.0, calm, settings)[1] > 1.0  # and who is small grows before the burst


def test_weigh_holds_what_the_next_burst_needs() -> None:
    """Who looks at the next second alone gives it back in calms, and is late where a trace keeps its clock."""
    arrivals, day = (draw_arrivals(OWN_CLOCK, seed, 600.0) for seed in (301, 1301))
    short, far = (
        serve_load(Weigh(CONSTANTS, settings), arrivals, LoadHint.of(day), CONSTANTS, 301)[0]
        for settings in (WeighSettings(ahead_s=1), WeighSettings())
    )
    assert far.latency_s.mean() < 0.7 * short.latency_s.mean()
    assert far.totals.missed < 0.5 * short.totals.missed


def test_weigh_follows_a_swelling_load_with_fewer_gpus_than_a_fixed_set_as_fast() -> None:
    swell = run_cell(PipelineCell("swell", "weigh", 101, 600.0))
    fixed = run_cell(PipelineCell("swell", "static:4:4", 101, 600.0))
    assert swell.gpus < 0.9 * fixed.gpus
    assert swell.mean_s < 1.02 * fixed.mean_s


def test_a_day_that_begins_with_requests_at_one_time_is_remembered_in_numbers() -> None:
    policy = Weigh(CONSTANTS)
    policy.start(LoadHint(np.concatenate((np.zeros(5), np.arange(1.0, 30.0))), 5.0))
    assert np.isfinite(policy.memory.cost).all()
    assert len(policy.memory.cost) == 28


def test_a_move_without_room_is_not_asked_for_again_at_once() -> None:
    policy = Weigh(CONSTANTS)
    policy.start(HINT)
    policy.target = (4, 2)
    free = np.where(np.arange(len(SETS)) == SETS.index((16, 1)), 0.0, 1e6)
    policy.memory = Memory(np.zeros(60), np.zeros(60), np.tile(free, (60, 1)))
    first = policy.decide(view(now_s=30.0, serving=(2, 0, 0, 0)))
    assert first.is_refactor
    assert policy.decide(view(now_s=30.0, serving=(2, 0, 0, 0))) == STAY


def test_nothing_moves_before_there_is_a_rate_to_go_by() -> None:
    """However sure a saving is by another day."""
    moves = []
    for now_s in (29.0, 30.0):
        policy = Weigh(CONSTANTS)
        policy.start(HINT)
        policy.target = (4, 2)
        free = np.where(np.arange(len(SETS)) == SETS.index((16, 1)), 0.0, 1e6)
        policy.memory = Memory(np.zeros(60), np.zeros(60), np.tile(free, (60, 1)))
        moves.append(policy.decide(view(now_s=now_s, serving=(2, 0, 0, 0))))
    assert moves[0] == STAY
    assert moves[1].is_refactor


def test_who_counts_seconds_for_more_holds_more_and_is_faster() -> None:
    """Under a load that swells."""
    cheap, fast = (run_cell(PipelineCell("swell", spec, 101, 600.0)) for spec in ("weigh", "weigh:1.5"))
    assert fast.gpus > 1.1 * cheap.gpus
    assert fast.mean_s < cheap.mean_s


@pytest.mark.parametrize("name", ["weigh", "hindsight"])
@pytest.mark.parametrize("text", ["x", "-1", "nan", "101", "1:2"])
def test_what_a_second_is_worth_is_a_number_within_bounds(name: str, text: str) -> None:
    with pytest.raises(PolicyError, match="expected a number from 0 to 100"):
        make_pipeline_policy(f"{name}:{text}", CONSTANTS, ARRIVALS, 1)


def test_hindsight_that_weighs_latency_more_is_faster_and_holds_more() -> None:
    cheap, fast = (run_cell(PipelineCell("gamma-8", spec, 101, 600.0)) for spec in ("hindsight", "hindsight:5"))
    assert fast.mean_s < cheap.mean_s
    assert fast.gpus > cheap.gpus


@pytest.mark.parametrize("spec", DEFAULT)
def test_every_policy_serves_everything(spec: str) -> None:
    arrivals = draw_arrivals("azure-code", 3, 60.0)
    policy = make_pipeline_policy(spec, CONSTANTS, arrivals, 3)
    assert policy.name == spec
    cluster, _ = serve_load(policy, arrivals, LoadHint.of(arrivals), CONSTANTS, 3)
    assert cluster.is_done
    assert (cluster.latency_s > 0.28).all()


@pytest.mark.parametrize(
    "spec", ["static:5", "static", "static:4:0", "reactive:4:2", "price", "flexpipe:2", "static:4:x"]
)
def test_an_unknown_policy_is_refused_with_the_known_ones(spec: str) -> None:
    with pytest.raises(PolicyError, match="possible are static:S"):
        make_pipeline_policy(spec, CONSTANTS, ARRIVALS, 0)


def test_runs_repeat_and_ratios_are_paired_by_seed() -> None:
    cell = PipelineCell("gamma-4", "flexpipe", 101, 60.0)
    first, again = run_cell(cell), run_cell(cell)
    assert replace(first, decision_ms=0.0) == replace(again, decision_ms=0.0)


def made(policy: str, seed: int, mean_s: float, gpus: float) -> PipelineRun:
    cell = PipelineCell("load", policy, seed, 60.0)
    return PipelineRun(cell, mean_s, mean_s, mean_s, 1.0, gpus, 0.1, 0, 0, 0, 0, 0.0, 0.1)


def test_a_policy_is_compared_with_fixed_sets_at_equal_gpus_by_hand() -> None:
    runs = [made("weigh", seed, 0.5 * seed, 13.0) for seed in (1, 2)]
    runs += [made("static:4:3", seed, 1.0 * seed, 12.0) for seed in (1, 2)]
    runs += [made("static:4:4", seed, 0.8 * seed, 16.0) for seed in (1, 2)]
    runs += [made("static:8:4", seed, 0.7 * seed, 32.0) for seed in (1, 2)]
    table = judgement(PipelineComparison(("weigh",), ("load",), (1, 2)), runs)
    fixed = table["loads"]["load"]["weigh"]["fixed"]
    assert fixed["sets"] == ["static:4:3", "static:4:4"]
    assert fixed["share"] == pytest.approx(0.25)
    assert fixed["latency_ratio"] == pytest.approx(0.5 / 0.95)
    assert fixed["ci"] == pytest.approx([0.5 / 0.95] * 2)
    sorted_runs = Runs.of(runs)
    assert sorted_runs.at_equal_gpus("load", 12.0) == ("static:4:3", "static:4:3", 0.0)
    assert sorted_runs.at_equal_gpus("load", 99.0) == ("static:8:4", "static:8:4", 0.0)
    assert sorted_runs.at_equal_gpus("load", 5.0) == ("static:4:3", "static:4:3", 0.0)


@pytest.mark.alone
@pytest.mark.parametrize("spec", [name for name in DEFAULT if not name.startswith("static")])
def test_a_decision_takes_less_than_five_milliseconds(spec: str) -> None:
    run_cell(PipelineCell("azure-code", spec, 101, 30.0))  # compiles
    assert run_cell(PipelineCell("azure-code", spec, 102, 120.0)).decision_ms < 5.0


def test_every_granularity_has_a_name() -> None:
    assert {f"static:{stages}" for stages in STAGES} <= set(DEFAULT)
