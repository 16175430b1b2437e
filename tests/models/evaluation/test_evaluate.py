"""The evaluation: simulated engines tell what a real one would, hindsight is a bound, the summary counts rightly."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from faser.controller.cli.evaluate import decided, loads_of
from faser.controller.cli.main import app
from faser.controller.errors import FaserError
from faser.engine_adapter.protocol import StepRecord
from faser.env.estimate.engine_state import EngineState
from faser.env.profile.engine_profile import check, shipped_profile
from faser.env.simulator.constants import LOGITS
from faser.env.simulator.simulated_engine import SimulatedEngine
from faser.env.simulator.state import (
    ACCEPTED,
    CONTEXT,
    DRAFT_LIMIT,
    FINISHED,
    FRESH,
    GO_ON_FROM,
    HANDLE,
    IS_PREFILL,
    KEPT,
    PRUNED,
    SCHEDULED,
    VERIFIED,
)
from faser.models.evaluation.evaluate import (
    DRIFT,
    ORACLES,
    SWING,
    SWING_PEAK,
    TABLE,
    Cell,
    Comparison,
    Swing,
    Table,
    evaluate,
    scenario_of,
    simulate,
)
from faser.models.evaluation.standing import interval, point, summary
from faser.models.evaluation.worlds import (
    K_MAX,
    LOADS,
    WorldSpec,
    acceptance,
    confidence_auc,
    going_ahead,
    held_out,
    training,
)
from faser.models.registry import make_policy

WORLDS = {world.name: world for world in held_out()}
NGRAM = WORLDS["gpu-ngram"]


@pytest.mark.parametrize("world", [WORLDS["gpu-small-knee"], going_ahead()[0]], ids=lambda world: world.name)
def test_records_tell_what_the_simulator_did_under_a_policy_with_stop_rules(world: WorldSpec) -> None:
    engine = SimulatedEngine(world.closed(8), 5)
    policy, state, actions, stops = make_policy("price", engine.capabilities), EngineState(engine.capabilities), None, 0
    hits, was_ahead, told = 0, set(), dict[int, tuple[float, ...]]()
    for sequence in range(1, 301):
        record = engine.step(actions)
        assert_rows_are_those_of_the_slots(record, engine)
        for row in record.rows:
            assert row.confidences == pytest.approx(told.get(row.handle, ())[: row.verified + 1])
        told = confidences_drawn(engine, is_ruled=actions is not None and actions.stop is not None)
        # As from an engine with a gate of its own: what was asked for, not what the gate made of it.
        assert record.frontier == (None if actions is None else actions.frontier or None)
        assert record.lease_sequence == (0 if actions is None else actions.sequence)
        hits += record.frontier_hits
        was_ahead |= {record.overlap_s > 0.0} if record.frontier and record.draft_tokens else set()
        actions = decided(state, record, policy, sequence)
        stops += actions.stop is not None
    assert stops > 50
    assert (hits > 50, len(was_ahead)) == ((True, 2) if engine.capabilities.frontier else (False, 0))


def assert_rows_are_those_of_the_slots(record: StepRecord, engine: SimulatedEngine) -> None:
    """Row by row, and their sums; handles ascend."""
    ints = engine.simulator.state.ints[0]
    handles = [row.handle for row in record.rows]
    assert handles == sorted(int(ints[HANDLE, i]) for i in np.flatnonzero(ints[SCHEDULED]))
    for row in record.rows:
        (i,) = np.flatnonzero((ints[HANDLE] == row.handle) & (ints[SCHEDULED] > 0)).tolist()
        columns = (SCHEDULED, DRAFT_LIMIT, KEPT, VERIFIED, PRUNED, ACCEPTED, FRESH, CONTEXT, IS_PREFILL)
        assert ints[list(columns), i].tolist() == [
            row.scheduled, row.draft_limit, row.drafted, row.verified, row.pruned, row.accepted, row.emitted,
            row.context, row.is_prefill,
        ]  # fmt: skip
        assert not (row.is_prefill and row.confidences)
    decoding = [row for row in record.rows if not row.is_prefill]
    assert (record.decode_tokens, record.draft_tokens) == (len(decoding), sum(row.verified for row in decoding))
    assert record.prefill_tokens == sum(row.scheduled for row in record.rows if row.is_prefill)
    ended = {event.handle for event in record.events if event.kind == "finish"}
    assert ended == {int(ints[HANDLE, i]) for i in np.flatnonzero(ints[FINISHED] & (ints[SCHEDULED] > 0))}


def confidences_drawn(engine: SimulatedEngine, *, is_ruled: bool) -> dict[int, tuple[float, ...]]:
    """Return what the drafter told by request: of each token that was kept, and of one that a stop rule dropped."""
    state, found = engine.simulator.state, {}
    logits = engine.simulator.world.tables[0, LOGITS]
    for i in np.flatnonzero(state.ints[0, SCHEDULED]).tolist():
        kept, cells = int(state.ints[0, KEPT, i]), state.cells[0, i].tolist()
        survival = [float(state.chances[0, at, cell]) for at, cell in enumerate(cells)]
        went_on = kept == 0 or math.prod(survival[:kept]) >= float(state.rules[0, GO_ON_FROM, kept - 1]) - 1e-6
        is_dropped = is_ruled and kept < min(int(state.ints[0, DRAFT_LIMIT, i]), len(cells)) and went_on
        sure = [1.0 / (1.0 + math.exp(-float(logits[at, cell]))) for at, cell in enumerate(cells)]
        found[int(state.ints[0, HANDLE, i])] = tuple(sure[: kept + is_dropped])
    return found


def test_an_engine_without_confidences_tells_none() -> None:
    engine = SimulatedEngine(NGRAM.closed(4), 5, has_confidence=False)
    state, policy, actions = EngineState(engine.capabilities), make_policy("fixed:3", engine.capabilities), None
    for sequence in range(1, 60):
        record = engine.step(actions)
        assert not any(row.confidences for row in record.rows)
        actions = decided(state, record, policy, sequence)
    assert sum(row.verified for row in record.rows) > 0


@pytest.mark.parametrize("load", [4, 32])
def test_the_fast_way_and_the_decision_core_give_a_fixed_length_the_same(load: int) -> None:
    class ByTheCore:
        """fixed:3 under a name that the fast way does not know."""

        name = "core"

        def __init__(self) -> None:
            self._policy = make_policy("fixed:3", SimulatedEngine(NGRAM.closed(1), 0).capabilities)
            self.act = self._policy.act

    fast = simulate(Cell("fixed:3", NGRAM.name, load, 7, 40), decided)
    policy = ByTheCore()
    slow = simulate(
        Cell("price", NGRAM.name, load, 7, 40), lambda state, record, _, n: decided(state, record, policy, n)
    )
    assert slow.tokens_per_s == pytest.approx(fast.tokens_per_s, rel=0.03)


def test_hindsight_is_above_every_length_and_each_request_above_all_alike() -> None:
    cells = [
        Cell(policy, "gpu-8b-eagle", 16, 3, 150) for policy in (*ORACLES, "off", *(f"fixed:{k}" for k in range(1, 7)))
    ]
    request, uniform, *fixed = (simulate(cell, decided).tokens_per_s for cell in cells)
    assert request > uniform >= 0.99 * max(fixed)
    assert request > 1.01 * max(fixed)


def test_worlds_to_judge_in_are_none_of_those_to_train_in_and_cover_the_loads() -> None:
    trained = {tuple(profile.verify.coefficients) for profile in training(64, 0)}
    assert not trained & {tuple(world.profile.verify.coefficients) for world in WORLDS.values()}
    assert LOADS == (1, 2, 4, 8, 16, 32, 64, 128)
    assert {world.profile.k_max for world in WORLDS.values()} == {K_MAX, shipped_profile().k_max}


def test_a_batch_that_memory_never_lets_fill_is_judged_all_the_same() -> None:
    world = WORLDS["cpu-embedded"]
    profile = msgspec.structs.replace(world.profile, kv_blocks=20)  # of 128 tokens
    small = type(world)("small", "", profile)
    assert simulate(Cell("fixed:1", "small", 32, 1, 20), decided, (small,)).tokens_per_s > 0.0


def test_some_engines_to_train_in_have_exit_heads_and_the_others_stay_what_they_were() -> None:
    plain, some = training(64, 0), training(64, 0, 0.5)
    assert 15 < sum(bool(profile.exits) for profile in some) < 49
    assert [msgspec.structs.replace(profile, exits=()) for profile in some] == list(plain)
    for profile in some:
        check(profile, profile.name)  # rates and times that can be


def auc(world: WorldSpec, position: int = 0) -> float:
    """Return the chance that an accepted draft token had more confidence than a rejected one."""
    engine = SimulatedEngine(world.closed(32), 1)
    state, policy, actions = EngineState(engine.capabilities), make_policy("fixed:1", engine.capabilities), None
    hits: list[float] = []
    misses: list[float] = []
    for sequence in range(1, 200):
        record = engine.step(actions)
        for row in record.rows:
            if row.verified > position:
                (hits if row.accepted > position else misses).append(row.confidences[position])
        actions = decided(state, record, policy, sequence)
    return float((np.array(hits)[:, None] > np.array(misses)).mean())


def test_the_worlds_with_confidence_have_the_sharpness_they_say() -> None:
    for name in ("gpu-8b-eagle", "cpu-weak-drafter"):
        assert auc(WORLDS[name]) == pytest.approx(confidence_auc(WORLDS[name]), abs=0.02)
    assert confidence_auc(WORLDS["gpu-8b-eagle"]) == pytest.approx(0.88, abs=0.01)


def test_what_is_said_of_the_sharpness_is_what_it_is() -> None:
    told = {name: re.findall(r"AUC about (\d\.\d+)", world.note) for name, world in WORLDS.items()}
    assert sum(map(len, told.values())) == 2
    for name, values in told.items():
        assert all(float(value) == round(confidence_auc(WORLDS[name]), 2) for value in values), name
    said = re.findall(r"(\d\.\d) (?:gives an AUC of about|one of) (\d\.\d+)", acceptance.__doc__ or "")
    assert len(said) == 2
    for spread, value in said:
        profile = msgspec.structs.replace(NGRAM.profile, acceptance=acceptance(K_MAX, 0.5, float(spread), 0.15))
        assert round(confidence_auc(replace(NGRAM, profile=profile)), 2) == float(value)


# --- the summary, on figures made by hand ---


def make_table(scores: dict[str, tuple[float, ...]]) -> Table:
    world = replace(NGRAM)
    plan = Comparison(policies=("price",), worlds=(world,), loads=(4,), seeds=(1, 2, 3), rivals=("smartspec",))
    base = {f"fixed:{k}": (1.0, 1.0, 1.0) for k in range(1, K_MAX + 1)}
    base |= {"off": (1.0,) * 3, TABLE: (1.0,) * 3, ORACLES[1]: (1.0,) * 3}
    return Table(plan, {(name, world.name, 4): values for name, values in (base | scores).items()}, {world.name: ""})


def test_intervals_are_students() -> None:
    assert interval([1.0, 2.0, 3.0]).half == pytest.approx(4.303 / math.sqrt(3.0), rel=1e-3)
    assert math.isinf(interval([1.0]).half)


def test_the_rival_of_a_seed_is_chosen_on_the_other_seeds() -> None:
    # fixed:1 is lucky once: a maximum over the same seed would be 10.
    table = make_table(
        {"price": (2.0,) * 3, "fixed:1": (10.0, 0.1, 0.1), "smartspec": (1.5,) * 3, ORACLES[0]: (4.0,) * 3}
    )
    envelope = point(table, "price", table.plan.worlds[0], 4).envelope
    # Seed 1: the others say smartspec; seeds 2 and 3: fixed:1 looks best (mean 5.05) and gives 0.1.
    assert envelope.mean == pytest.approx((2.0 / 1.5 + 20.0 + 20.0) / 3.0)


def test_the_gap_closed_counts_from_the_best_fixed_length_to_hindsight() -> None:
    table = make_table(
        {"price": (math.sqrt(2.0),) * 3, "smartspec": (1.0,) * 3, ORACLES[0]: (2.0,) * 3, "fixed:2": (1.0,) * 3}
    )
    policies = summary(table)["policies"]
    assert isinstance(policies, dict)
    assert policies["price"]["gap_closed"] == pytest.approx(0.5)
    assert policies[ORACLES[0]]["gap_closed"] == pytest.approx(1.0)
    assert policies["price"]["over_price_ci"] == pytest.approx([1.0, 1.0])
    row = policies["price"]["worlds"][NGRAM.name]["4"]
    assert row["over_best_fixed_ci"] == pytest.approx([math.sqrt(2.0)] * 2)
    flat = make_table({"price": (1.0,) * 3, "smartspec": (1.0,) * 3, ORACLES[0]: (1.0,) * 3})
    policies = summary(flat)["policies"]
    assert isinstance(policies, dict)
    assert policies["price"]["gap_closed"] is None


def test_each_seeds_score_and_the_interval_over_the_best_fixed_length_are_told() -> None:
    table = make_table({"price": (2.0, 3.0, 4.0), "smartspec": (1.0,) * 3, ORACLES[0]: (5.0,) * 3})
    result = summary(table)
    row = result["policies"]["price"]["worlds"][NGRAM.name]["4"]  # type: ignore[index]
    assert (row["scores"], result["seed_numbers"]) == ([2.0, 3.0, 4.0], [1, 2, 3])
    assert result["steps"] == table.plan.steps
    half = interval([2.0, 3.0, 4.0]).half
    assert (row["over_best_fixed"], row["over_best_fixed_ci"]) == (3.0, pytest.approx([3.0 - half, 3.0 + half]))


def test_a_swings_requests_go_from_one_to_the_peak_and_back_at_the_same_tokens_however_long_the_drafts() -> None:
    def running(length: int) -> list[int]:
        """Return the requests that ran, at every 3,000 tokens of two swings."""
        engine = SimulatedEngine(scenario_of(NGRAM, SWING), 5)
        meter, seen = Swing(engine.simulator, 48_000), []
        state, policy, actions = (
            EngineState(engine.capabilities), make_policy(f"fixed:{length}", engine.capabilities), None,
        )  # fmt: skip
        for sequence in range(1, 1_000_000):
            record = engine.step(actions)
            if meter.is_over():
                break
            if int(engine.simulator.state.engines["emitted"][0]) >= 3000 * len(seen):
                seen.append(len(record.rows))
            actions = decided(state, record, policy, sequence)
        return seen

    most = [SWING_PEAK ** math.sin(math.pi * place / 16) ** 2 for place in range(32)]
    assert (most[0], max(most)) == (1.0, SWING_PEAK)
    for length in (1, 4):
        assert np.abs(np.log2(running(length)) - np.log2(most)).max() < 0.3


def test_only_the_second_swing_counts() -> None:
    engine = SimulatedEngine(scenario_of(NGRAM, SWING), 5)
    meter, engines = Swing(engine.simulator, 1000), engine.simulator.state.engines
    told = []
    for clock_s, emitted in ((1.0, 400.0), (9.0, 1010.0), (10.0, 1500.0), (11.0, 2010.0)):
        engines["clock_s"], engines["emitted"] = clock_s, emitted
        told.append(meter.is_over())
    assert told == [False, False, False, True]
    assert meter.run(Cell("", "", SWING, 5, 1)).score == 1000.0 / 2.0


def test_a_plan_gives_every_cell_and_the_same_figures_twice() -> None:
    plan = Comparison(("price",), (NGRAM,), (2, DRIFT, SWING), (1, 2), 20, ("smartspec",), ORACLES)
    counted: list[tuple[int, int]] = []
    first = evaluate(plan, decided, progress=lambda done, total: counted.append((done, total)))
    assert first.scores == evaluate(plan, decided).scores
    assert counted[-1][0] == counted[-1][1]
    expected = {"price", "smartspec", TABLE, "off", *ORACLES, *(f"fixed:{k}" for k in range(1, K_MAX + 1))}
    assert {name for name, _, _ in first.scores} == expected
    assert all(len(values) == 2 and min(values) > 0.0 for values in first.scores.values())
    assert summary(first)["policies"]["price"]["worlds"][NGRAM.name].keys() == {"2", "drift", "swing"}  # type: ignore[index]


# --- the command ---


def test_loads_are_told_by_number_or_by_name() -> None:
    assert loads_of("1,64,swing,drift") == (1, 64, SWING, DRIFT)
    assert loads_of(" drift, 256") == (DRIFT, 256)


def test_the_command_ends_with_one_object_and_workers_change_nothing(tmp_path: object) -> None:
    arguments = [
        "evaluate", "--json", "--worlds", "gpu-ngram", "--loads", "2", "--seeds", "2", "--steps", "20", "--policies",
        "price", "--rivals", "smartspec", "--bounds", "oracle:request",
    ]  # fmt: skip
    alone, together = (CliRunner().invoke(app, [*arguments, "--workers", workers]) for workers in ("1", "2"))
    assert alone.exit_code == together.exit_code == 0, together.output
    result = json.loads(alone.stdout.splitlines()[-1])
    assert result == json.loads(together.stdout.splitlines()[-1])
    assert result["worlds"] == 1
    assert result["seeds"] == 2
    assert "oracle:request" in result["policies"]
    assert "oracle:uniform" not in result["policies"]
    assert result["commit"]
    assert {"Python", "faser-vllm"} <= set(result["versions"])
    assert set(result["policies"]["price"]) >= {
        "goodput",
        "ci",
        "envelope_ratio_min",
        "envelope_ratio_mean",
        "gap_closed",
    }


def test_workers_end_with_the_command_that_started_them() -> None:
    code = (
        "import os\n"
        "from faser.controller.cli.evaluate import pool\n"
        "if __name__ == '__main__':\n"
        "    with pool(2) as executor:\n"
        "        print(executor.submit(os.getpid).result(), flush=True)\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd="/", timeout=60)
    # Workers hold the pipe of stdout too: that `run` came back within its time says that they are gone.
    assert int(killed.stdout) > 0
    assert killed.returncode == -9


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--worlds", "mars"], "gpu-ngram"),
        (["--loads", "4,4"], "different ones"),
        (["--loads", "many"], "drift, swing"),
        (["--loads", "0"], "drift, swing"),
        (["--loads", "1,swng"], "'1,swng'"),
        (["--loads", "257"], "1..256"),
        (["--loads", "swing,drift,swing"], "different ones"),
        (["--policies", "best"], "possible are"),
        (["--policies", "price bandit"], "as rival"),
        (["--bounds", "oracle:request clairvoyance"], "some of oracle:request oracle:uniform"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_runs(arguments: list[str], hint: str) -> None:
    result = CliRunner().invoke(app, ["evaluate", *arguments])
    assert isinstance(result.exception, FaserError)
    assert hint in str(result.exception)
