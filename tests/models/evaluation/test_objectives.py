"""Objectives in simulation: paces are those of an engine without speculation, and who is in time is counted right."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import faser
from faser.controller.cli.evaluate import decided
from faser.env.simulator.simulated_engine import SimulatedEngine
from faser.models.evaluation.attainment import Attained, serve
from faser.models.evaluation.objective_table import (
    A_THIRD,
    BOUNDS,
    RULES,
    UNAWARE,
    ObjectivePlan,
    Runs,
    compare,
    frontier,
    summary,
)
from faser.models.evaluation.objective_worlds import ObjectiveWorld, knee_worlds, plain_pace_s
from faser.models.evaluation.worlds import WorldSpec, held_out
from faser.models.learned.learned import RELEASED
from faser.models.learned.network import load_network
from faser.models.registry import make_policy

EMBEDDED = next(world for world in held_out() if world.name == "cpu-embedded")


def attained(world: ObjectiveWorld, policy: str, steps: int = 1200) -> Attained:
    """Return who is in time under a policy."""
    engine = SimulatedEngine(world.scenario(), 1, has_confidence=world.world.has_confidence)
    return serve(engine, make_policy(policy, engine.capabilities), decided, steps)


@pytest.mark.parametrize(("pace", "urgent"), [(0.8, (0.0, 0.1)), (1.3, (0.9, 1.0))], ids=["tight", "easy"])
def test_a_pace_of_one_is_what_an_engine_without_speculation_just_keeps(
    pace: float, urgent: tuple[float, float]
) -> None:
    """Well below nobody is in time without drafts, well above everybody."""
    run = attained(ObjectiveWorld(EMBEDDED, 8, 0.5, pace), "off")
    assert run.ended[0] > 10
    assert urgent[0] <= run.in_time(0) <= urgent[1]
    assert run.in_time(1) == 1.0


def test_the_pace_is_that_of_the_tokens_per_second() -> None:
    """Of so many requests that run at once."""
    run = attained(ObjectiveWorld(EMBEDDED, 8, 0.5, 1.0), "off")
    assert plain_pace_s(EMBEDDED.closed(8)) == pytest.approx(8 * run.seconds / run.tokens, rel=0.1)


def test_price_follows_objectives_where_the_even_price_does_not() -> None:
    """At the knee, urgent requests are in time that would not be, and the others keep theirs."""
    world = ObjectiveWorld(EMBEDDED, 8, 0.25, 0.75)
    even, price = attained(world, "price:even", 2500), attained(world, "price", 2500)
    assert price.in_time(0) > even.in_time(0) + 0.3
    assert price.in_time(1) > 0.95
    assert price.goodput > even.goodput


def test_the_table_holds_every_policy_and_the_same_plan_gives_the_same_figures() -> None:
    """One world, one seed."""
    plan = ObjectivePlan(("price",), (ObjectiveWorld(EMBEDDED, 4, 0.5, 0.7),), (101, 102), 200, rules=("urgent:2",))
    first, again = (summary(plan, compare(plan, decided)) for _ in range(2))
    assert first == again
    (rows,) = first["runs"].values()
    assert {"price", "price:even", "off", "fixed:1", "urgent:2"} <= set(rows)
    assert all(0.0 <= share <= 1.0 for row in rows.values() for share in row["in_time"].values())
    assert first["standing"]["price"]["goodput_over_unaware_half_urgent"]["ratio"] > 0.0


def test_a_frontier_chooses_for_each_world_by_what_violations_cost() -> None:
    """Two worlds, in each a policy that is fast and late and one that is slow and in time."""
    worlds = tuple(ObjectiveWorld(EMBEDDED, 8, share, 0.7) for share in (0.25, 0.5))
    plan = ObjectivePlan(("price",), worlds, (101,), 100)

    def run(goodput: int, late: int) -> list[Attained]:
        return [Attained(1.0, goodput, goodput, [100, 0], [100 - late, 0])]

    runs: Runs = {(rival, world.name): run(100, 40) for rival in UNAWARE for world in worlds}
    for world, fast, slow in zip(worlds, (130, 110), (90, 105), strict=True):
        runs["fast", world.name], runs["slow", world.name] = run(fast, 40), run(slow, 10)
    points = frontier(plan, runs, ("fast", "slow"))
    fastest, between, latest = (1.3 * 1.1) ** 0.5, (1.3 * 1.05) ** 0.5, (0.9 * 1.05) ** 0.5
    assert [violations for violations, _ in points] == [0.25, 0.625, 1.0]
    assert [goodput for _, goodput in points] == pytest.approx([latest, between, fastest], abs=1e-3)


def test_a_policy_stands_beside_price_where_price_was_judged_too() -> None:
    """Everybody has 100 tokens/s in time but price, which has 120, and another, which has 150."""
    world = ObjectiveWorld(EMBEDDED, 8, 0.25, 0.7)
    for policies, expected in ((("price", "fixed:4"), 1.25), (("fixed:4",), None)):
        plan = ObjectivePlan(policies, (world,), (101, 102), 100)
        runs: Runs = {(name, world.name): [Attained(1.0, 100, 100, [10, 10], [5, 10])] * 2 for name in plan.everybody}
        for name, goodput in (("price", 120), ("fixed:4", 150)):
            runs[name, world.name] = [Attained(1.0, goodput, goodput, [10, 10], [5, 10])] * 2
        standing = summary(plan, runs)["standing"]
        beside = standing["fixed:4"]["goodput_over_price"]
        assert (None if beside is None else beside["ratio"]) == expected
        assert "price" not in standing or standing["price"]["goodput_over_price"] is None


def test_worlds_are_held_out_ones() -> None:
    """Each once."""
    names = [world.name for world in knee_worlds()]
    assert len(set(names)) == len(names)
    assert {world.world.name for world in knee_worlds()} <= {world.name for world in held_out()}
    assert all(isinstance(world.world, WorldSpec) for world in knee_worlds())


def test_what_is_said_of_the_trained_choice_is_its_file() -> None:
    root = Path(faser.__file__).parent
    standing = json.loads((root / "benchmarks" / "results" / "attainment_learned.json").read_text())["standing"]
    section = (root / "docs" / "results.md").read_text().partition("#### A trained choice")[2].partition("**On the")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith(("| price", "| learned"))]
    assert [name for name, *_ in rows] == ["price", "learned"]
    keys = ("goodput_over_unaware", "goodput_over_best_rule", "goodput_over_price")
    for name, violations, *figures in rows:
        own = standing[name]
        assert violations == f"{own['violations_over_unaware']:.2f}"
        assert [each.strip(" |") for each in figures if each.strip(" |")] == [
            f"{own[key]['ratio']:.3f}" for key in keys if own[key] is not None
        ]


def test_what_is_said_of_the_released_networks_judgements_is_its_manifest() -> None:
    training: Any = load_network(RELEASED).manifest.training
    page = (Path(faser.__file__).parent / "docs" / "results.md").read_text()
    said = " ".join(page.partition("#### A trained choice")[2].split())
    first, *judged = training["judgements"]
    assert f"{training['steps']:,} pieces of advice ({training['seconds']:.0f} s" in said
    assert (
        f"six judgements on unseen engines are {-100 * max(judged):.1f} to {-100 * min(judged):.1f} % below it" in said
    )
    assert (first, len(judged)) == (0.0, 6)


def test_where_price_stands_is_told_as_the_committed_runs_say() -> None:
    root = Path(faser.__file__).parent
    found = json.loads((root / "benchmarks" / "results" / "attainment.json").read_text())
    standing, known = found["standing"]["price"], found["frontier"]["known"]
    told = " ".join((root / "docs" / "results.md").read_text().partition("`attainment.json`")[2].split())
    over = {
        name: "{ratio:.3f} ({low:.3f} to {high:.3f})".format(**each)
        for name, each in standing.items()
        if type(each) is dict
    }
    assert f"over all {standing['violations_over_unaware']:.2f}: at most a third was wanted" in told
    assert f"**Goodput** is {over['goodput_over_unaware']} of the best unaware policy's, " in told
    assert f"{over['goodput_over_unaware_half_urgent']} where half is urgent" in told
    assert f"in hindsight {over['goodput_over_best_rule']}: one policy for all" in told
    assert f"at most {known[-1][1]:.3f} with {known[-1][0]:.2f} of them" in told
    half = over_unaware(found, ("price", *RULES, *UNAWARE), ", 50%")
    ((late, even),), clairvoyant = found["frontier"]["even_clairvoyant"], found["frontier"]["clairvoyant"]
    kept, gained = next((late, gain) for late, gain in clairvoyant if late > A_THIRD)
    assert f"where half is urgent, {half:.3f} at most" in told
    assert f"has {even:.3f} of the best unaware policy's goodput without following objectives, with {late:.2f}" in told
    assert f"keeps {kept:.2f} of the violations at {gained:.3f}, and has {clairvoyant[-1][1]:.3f} at most" in told


def over_unaware(found: dict[str, Any], names: tuple[str, ...], among: str) -> float:
    """Return the goodput of whoever of these is best in each such world over the best unaware policy's."""
    worlds = [{name: row["goodput"] for name, row in rows.items()} for at, rows in found["runs"].items() if among in at]
    logs = [math.log(max(rows[name] for name in names) / max(rows[name] for name in UNAWARE)) for rows in worlds]
    return math.exp(sum(logs) / len(logs))


def test_the_documents_table_is_the_committed_runs() -> None:
    root = Path(faser.__file__).parent
    runs = json.loads((root / "benchmarks" / "results" / "attainment.json").read_text())["runs"]
    section = (root / "docs" / "results.md").read_text().partition("`attainment.json`")[2]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if " x" in line.partition(", ")[0]]
    told = {name: figures for name, *figures in lines if name in runs}
    assert told.keys() == runs.keys()
    for name, rows in runs.items():
        urgent = {policy: row["in_time"]["urgent"] for policy, row in rows.items()}
        goodput = {policy: row["goodput"] for policy, row in rows.items()}
        shares = [urgent["price"], *(max(urgent[policy] for policy in names) for names in (UNAWARE, RULES, BOUNDS))]
        unaware, rule, bound = (max(goodput[policy] for policy in names) for names in (UNAWARE, RULES, BOUNDS))
        ratios = [goodput["price"] / unaware, goodput["price"] / rule, bound / unaware]
        assert told[name] == [*(f"{share:.0%}" for share in shares), *(f"{ratio:.2f}" for ratio in ratios)]
