"""The pipeline world: Table 2, queueing theory where it must agree, moves by hand, nothing lost."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest

from faser.engine_adapter.errors import UsageError
from faser.env.pipeline.arrivals import GAMMAS, LOADS, OWN_CLOCK, Arrivals, draw_arrivals
from faser.env.pipeline.cluster import ACTIVE, Cluster, PipelineMove
from faser.env.pipeline.constants import GIGA, SEGMENTS, STAGES, TABLE_2, Granularity, PipelineConstants
from faser.env.pipeline.gpus import NOBODY, Gpus
from faser.env.pipeline.serve_kernel import best_batch
from faser.env.workload.request_trace import shipped_trace

ALONE = PipelineConstants(sharing_base=0.0, is_serial=True)  # nobody beside us, one request a batch


def at(*times_s: float) -> Arrivals:
    return Arrivals("given", np.array(times_s), np.full(len(times_s), 1000.0))


def poisson(rate_rps: float, count: int, seed: int = 0) -> Arrivals:
    times = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate_rps, count))
    return Arrivals("poisson", times, np.full(count, 1000.0))


def served(arrivals: Arrivals, start: tuple[int, int], constants: PipelineConstants = ALONE) -> Cluster:
    cluster = Cluster(arrivals, start, constants)
    cluster.reclaims = False
    while not cluster.is_done:
        cluster.advance(cluster.now_s + 1.0)
    return cluster


@pytest.mark.parametrize("row", TABLE_2, ids=lambda row: f"{row.stages}-stages")
def test_the_world_reproduces_table_2_within_one_per_cent(row: Granularity) -> None:
    apart = at(*np.arange(1.0, 50.0))
    cluster = served(apart, (row.stages, 1))
    assert cluster.latency_s.mean() == pytest.approx(row.stages * row.compute_s + row.communication_s, rel=0.01)
    # Saturated, a pipeline passes one batch in a stage's time.
    crowd = served(at(*np.zeros(400)), (row.stages, 1))
    finished_s = np.sort(crowd.finish_s)
    assert (finished_s[-1] - finished_s[0]) / 399 == pytest.approx(row.compute_s, rel=0.01)
    # From storage, on servers that never had it, loading takes what the table says.
    loading = Cluster(at(1000.0), (4, 1), replace(ALONE, servers=82))
    loading.apply(PipelineMove(row.stages, 1))
    loading.advance(row.load_s * 0.99)
    assert loading.view().serving[STAGES.index(row.stages)] == (row.stages == 4)
    loading.advance(row.load_s * 1.01)
    assert loading.view().serving[STAGES.index(row.stages)] == 1 + (row.stages == 4)
    # A batch is cut at its cap.
    assert PipelineConstants().most_in_batch(row.stages) == row.most_requests
    assert PipelineConstants().hop_s * (row.stages - 1) == pytest.approx(row.communication_s, rel=0.01)


@pytest.mark.parametrize("usage", [0.3, 0.6, 0.8])
def test_one_pipeline_waits_as_an_m_d_1_queue(usage: float) -> None:
    tau_s = ALONE.of(8).compute_s
    arrivals = poisson(usage / tau_s, 400_000)
    cluster = served(arrivals, (8, 1))
    expected_s = usage * tau_s / (2.0 * (1.0 - usage))
    assert (cluster.start_s - arrivals.arrival_s).mean() == pytest.approx(expected_s, rel=0.03)
    # Stages behind the first never make anybody wait: their service times are equal.
    assert cluster.latency_s.mean() == pytest.approx(expected_s + ALONE.of(8).pass_s, rel=0.03)
    busy_s = len(arrivals) * tau_s
    assert busy_s / arrivals.arrival_s[-1] == pytest.approx(usage, rel=0.01)


def test_three_pipelines_wait_as_an_m_d_c_queue() -> None:
    usage, pipelines, tau_s = 0.8, 3, ALONE.of(4).compute_s
    arrivals = poisson(usage * pipelines / tau_s, 300_000)
    cluster = served(arrivals, (4, pipelines))
    offered = usage * pipelines
    terms = [offered**k / math.factorial(k) for k in range(pipelines)]
    last = offered**pipelines / math.factorial(pipelines) / (1 - usage)
    markov_s = last / (sum(terms) + last) * tau_s / (pipelines * (1 - usage))  # M/M/c, Erlang C
    cosmetatos = 0.5 * (1 + (1 - usage) * (pipelines - 1) * (math.sqrt(4 + 5 * pipelines) - 2) / (16 * offered))
    assert (cluster.start_s - arrivals.arrival_s).mean() == pytest.approx(markov_s * cosmetatos, rel=0.05)


def test_littles_law_holds() -> None:
    arrivals = poisson(20.0, 60_000)
    cluster = served(arrivals, (4, 2), PipelineConstants())
    times = np.random.default_rng(1).uniform(0.1, 0.95, 20_000) * arrivals.arrival_s[-1]
    come = np.searchsorted(arrivals.arrival_s, times)
    gone = np.searchsorted(np.sort(cluster.finish_s), times)
    assert (come - gone).mean() == pytest.approx(20.0 * cluster.latency_s.mean(), rel=0.03)


def test_every_request_is_served_once_in_order_and_never_before_it_arrives() -> None:
    arrivals = draw_arrivals("gamma-8", 3, 120.0)
    cluster = served(arrivals, (4, 3), PipelineConstants())
    assert cluster.head == len(arrivals)
    assert (np.diff(cluster.start_s) >= 0.0).all()
    assert (cluster.start_s >= arrivals.arrival_s).all()
    assert (cluster.finish_s - cluster.start_s >= PipelineConstants().of(4).pass_s * 0.999).all()


def test_a_batch_costs_what_equation_3_says() -> None:
    constants = PipelineConstants(sharing_base=0.0)
    cluster = served(at(*np.zeros(64)), (4, 1), constants)
    assert constants.batch_factor(64) == pytest.approx(1 + math.log(64))
    sizes = np.unique(cluster.start_s, return_counts=True)[1]
    first_s = 4 * constants.of(4).compute_s * constants.batch_factor(int(sizes[0])) + 3 * constants.hop_s
    assert cluster.finish_s[0] == pytest.approx(first_s)
    with pytest.raises(ValueError, match="batch_slope"):
        PipelineConstants(batch_slope=1.5)


def test_deep_pipelines_send_a_burst_singly_and_shallow_ones_pack_it() -> None:
    assert best_batch(10, 10, 32, 1.0) == 1
    assert best_batch(64, 64, 4, 1.0) >= 16
    assert best_batch(1, 1, 4, 1.0) == 1
    assert best_batch(64, 1, 4, 1.0) == 1


def test_a_refactoring_serves_meanwhile_and_costs_its_bytes() -> None:
    arrivals = at(*np.arange(0.05, 20.0, 0.05))
    constants = replace(ALONE, servers=82)  # no server has what another GPU holds
    cluster = Cluster(arrivals, (4, 1), constants)
    cluster.advance(5.0)
    under_way = int((cluster.finish_s[: cluster.head] > 5.0).sum())
    moved = cluster.apply(PipelineMove(8, 1, is_refactor=True))
    kv = under_way * 1000.0 * constants.kv_bytes_per_token
    assert moved == pytest.approx((constants.weights_bytes + kv) / 2)  # every second eighth changes its GPU
    assert cluster.gpus_held == 8
    per_gpu = (constants.weights_bytes + kv) / 8
    lead_s = constants.start_s + per_gpu / constants.link_bytes_per_s
    assert cluster.view().last_move_s == pytest.approx(lead_s)
    cluster.advance(5.0 + lead_s * 0.99)
    assert cluster.view().serving == (1, 0, 0, 0)
    cluster.advance(5.0 + lead_s * 1.01)
    assert cluster.view().serving == (0, 1, 0, 0)
    while not cluster.is_done:
        cluster.advance(cluster.now_s + 1.0)
    assert (np.diff(cluster.start_s) >= 0).all()


def test_a_merge_gives_gpus_back_and_goes_over_links_unless_the_server_has_the_weights() -> None:
    cluster = Cluster(at(100.0), (16, 1), replace(ALONE, servers=82), seed=2)
    moved = cluster.apply(PipelineMove(4, 1, is_refactor=True))
    assert moved == pytest.approx(ALONE.weights_bytes * 12 / 16)
    cluster.advance(60.0)
    assert cluster.gpus_held == 4
    assert cluster.view().serving == (1, 0, 0, 0)
    again = cluster.apply(PipelineMove(16, 1, is_refactor=True))
    assert again < 0.3 * ALONE.weights_bytes  # the servers still have what their GPUs gave up
    assert cluster.totals.refactored == 2


def test_what_host_memory_has_loads_sooner_until_it_forgets() -> None:
    cluster = Cluster(at(2000.0), (4, 2), replace(ALONE, servers=82))  # a GPU's server is no other's
    cold_s = cluster.expected_load_s(4)
    cluster.apply(PipelineMove(4, -1))
    cluster.advance(10.0)
    assert cold_s == pytest.approx(47.14)
    assert cluster.expected_load_s(4) == pytest.approx(ALONE.warm_load_s(4))
    cluster.apply(PipelineMove(4, 1))
    assert cluster.view().last_move_s == pytest.approx(ALONE.warm_load_s(4))
    cluster.advance(20.0)
    cluster.apply(PipelineMove(4, -1))
    cluster.advance(20.0 + ALONE.host_keep_s + 10.0)
    cluster.apply(PipelineMove(4, 1))
    assert cluster.view().last_move_s == pytest.approx(cold_s)


def test_idle_pipelines_are_reclaimed_and_one_always_stays() -> None:
    cluster = Cluster(at(*np.arange(1.0, 1000.0)), (4, 3), ALONE)
    cluster.advance(ALONE.reclaim_s - 1.0)
    assert sum(cluster.view().serving) == 3
    cluster.advance(ALONE.reclaim_s + 2.0)
    cluster.advance(ALONE.reclaim_s + 4.0)
    assert sum(cluster.view().serving) == 1
    assert cluster.totals.reclaimed == 2
    cluster.apply(PipelineMove(4, -3))
    assert sum(cluster.view().serving) == 1


def test_two_stages_are_never_on_one_gpu_and_moves_without_room_are_refused() -> None:
    cluster = Cluster(at(500.0), (4, 2), ALONE, seed=5)
    random = np.random.default_rng(0)
    for _ in range(200):
        stages = int(random.choice(STAGES))
        cluster.apply(PipelineMove(stages, int(random.integers(-2, 3)), bool(random.integers(2))))
        cluster.advance(cluster.now_s + 2.0)
        taken = [gpu for each in np.flatnonzero(cluster.phase) for gpu in cluster.held[each] if gpu != NOBODY]
        assert len(taken) == len(set(taken))
        assert set(taken) <= set(np.flatnonzero(cluster.gpus.owner != NOBODY).tolist())
        held = np.zeros_like(cluster.gpus.held)
        for each in np.flatnonzero(cluster.phase >= ACTIVE):
            width = SEGMENTS // cluster.stages[each]
            for stage, gpu in enumerate(cluster.held[each, : cluster.stages[each]]):
                held[cluster.gpus.server[gpu], stage * width : (stage + 1) * width] += 1
        assert (held == cluster.gpus.held).all()
    assert cluster.totals.refused > 0


def test_fragments_are_the_papers() -> None:
    gpus = Gpus(replace(PipelineConstants(), gpus=20_000, servers=10_000), 0)
    assert (gpus.used < 0.15).mean() == pytest.approx(0.087, abs=0.01)
    assert np.median(gpus.used) == pytest.approx(0.2878, abs=0.01)
    assert np.quantile(gpus.used, 0.95) == pytest.approx(0.991, abs=0.01)
    assert gpus.used.mean() == pytest.approx(0.4348, abs=0.01)


def test_stages_beside_other_models_compute_longer_by_equation_9() -> None:
    constants = PipelineConstants(is_serial=True)
    assert constants.sharing_penalty(0.0) == pytest.approx(0.02)
    assert constants.sharing_penalty(4.0) == pytest.approx(0.02 * (1 + 0.05 * 16))
    assert constants.sharing_penalty(100.0) == 0.3
    alone, beside = (served(at(*np.arange(1.0, 9.0)), (32, 1), each).latency_s.mean() for each in (ALONE, constants))
    assert 1.005 < beside / alone < 1.03


@pytest.mark.parametrize("name", LOADS)
def test_loads_come_at_the_wanted_rate_and_repeat_by_seed(name: str) -> None:
    first, again, other = (draw_arrivals(name, seed, 600.0) for seed in (1, 1, 2))
    assert (first.arrival_s == again.arrival_s).all()
    assert len(first) != len(other) or (first.arrival_s != other.arrival_s).any()
    assert (np.diff(first.arrival_s) >= 0.0).all()
    assert first.arrival_s[-1] < 600.001
    assert len(first) == pytest.approx(12_000, rel=0.6)
    assert (first.tokens > 0).all()


def test_on_its_own_clock_a_load_is_calm_for_as_long_as_recorded() -> None:
    """Its rate is six times the recorded one, not its pace."""
    own, faster = draw_arrivals(OWN_CLOCK, 1, 3600.0), draw_arrivals("azure-code", 1, 3600.0)
    recorded_s = shipped_trace("azure-code").arrival_s
    idle = 1.0 - len(np.unique(recorded_s.astype(np.int64))) / recorded_s[-1]
    assert 1.0 - len(np.unique(own.arrival_s.astype(np.int64))) / 3600.0 == pytest.approx(idle, abs=0.05)
    assert np.diff(own.arrival_s).max() > 0.8 * np.diff(recorded_s).max()
    assert np.diff(faster.arrival_s).max() < 0.3 * np.diff(recorded_s).max()
    assert len(own) / 3600.0 == pytest.approx(20.0, rel=0.2)


def test_somebody_comes_however_short_a_run_is() -> None:
    assert all(len(draw_arrivals(OWN_CLOCK, seed, 10.0)) for seed in range(50))


@pytest.mark.parametrize("variation", GAMMAS)
def test_gamma_processes_have_their_variation(variation: int) -> None:
    arrivals = draw_arrivals(f"gamma-{variation}", 0, 20_000.0)
    assert arrivals.variation == pytest.approx(variation, rel=0.05)
    assert len(arrivals) / 20_000.0 == pytest.approx(20.0, rel=0.06)


def test_what_the_cluster_tells_of_its_load_is_what_arrived() -> None:
    arrivals = draw_arrivals("gamma-4", 5, 200.0)
    cluster = Cluster(arrivals, (4, 4))
    cluster.advance(150.0)
    inside = arrivals.arrival_s[(arrivals.arrival_s > 90.0) & (arrivals.arrival_s <= 150.0)]
    gaps = np.diff(inside)
    assert cluster.rate(60.0) == pytest.approx(len(inside) / 60.0)
    assert cluster.variation(60.0) == pytest.approx(gaps.std() / gaps.mean(), rel=1e-6)
    live = (cluster.start_s[: cluster.head] <= 150.0) & (cluster.finish_s[: cluster.head] > 150.0)
    assert cluster.view().running == live.sum()
    tokens = arrivals.tokens[: cluster.head][live].sum()
    assert cluster.view().kv_bytes / GIGA == pytest.approx(tokens * PipelineConstants().kv_bytes_per_token / GIGA)


@pytest.mark.parametrize("name", ["gamma-0", "gamma-x", "nothing"])
def test_an_unknown_load_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match="azure-code"):
        draw_arrivals(name, 0, 10.0)


@pytest.mark.alone
def test_the_world_runs_more_than_a_hundred_times_faster_than_time() -> None:
    arrivals = draw_arrivals("gamma-4", 0, 300.0)
    served(arrivals, (4, 4), PipelineConstants())  # compiles
    begun_s = time.perf_counter()
    cluster = Cluster(arrivals, (4, 4))
    while not cluster.is_done:
        cluster.view().vector()
        cluster.advance(cluster.now_s + 1.0)
    assert cluster.now_s / (time.perf_counter() - begun_s) > 100.0
