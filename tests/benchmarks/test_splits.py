"""Price asks for a split where it pays and for none where it does not, on simulated engines that offer some."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

import faser
from faser.controller.cli.evaluate import decided
from faser.env.estimate.engine_state import EngineState
from faser.env.simulator.simulated_engine import SimulatedEngine
from faser.models.evaluation.worlds import WorldSpec, side_by_side
from faser.models.policies.price import PricePolicy
from faser.models.registry import make_policy


@pytest.fixture(scope="module")
def splits(load_script: Callable[[str], ModuleType]) -> Any:
    """Return the benchmark's choice."""
    return load_script("worth").SPLITS


@pytest.fixture(params=side_by_side(), ids=lambda world: world.name)
def world(request: pytest.FixtureRequest) -> WorldSpec:
    """Return each world that offers splits."""
    spec: WorldSpec = request.param
    return spec


def test_a_heavy_drafter_is_hidden_at_many_requests(splits: Any) -> None:
    """The control is the same engine without splits. When a trial first tells anything is luck, hence long runs."""
    heavy, _ = side_by_side()
    shown, plain = ([splits.run(world, 128, seed, 3000) for seed in (7, 8)] for world in (heavy, splits.without(heavy)))
    gains = [ours / theirs for (ours, _), (theirs, _) in zip(shown, plain, strict=True)]
    assert min(gains) > 1.03
    assert np.mean([under[0] for _, under in shown]) < 0.5
    assert [none for _, none in plain] == [[1.0], [1.0]]


def test_nothing_is_split_where_it_does_not_pay(splits: Any, world: WorldSpec) -> None:
    """Few requests pay for the weights twice; trials are all that it costs."""
    rate, under = splits.run(world, 4, 7, 1200)
    assert under[0] > 0.9
    assert rate > 0.98 * splits.run(splits.without(world), 4, 7, 1200)[0]


@pytest.mark.parametrize("until", [0, 600])
def test_a_split_that_the_engine_does_not_show_is_not_kept(until: int) -> None:
    """Its records say unsplit, whatever was asked: an engine that does not act on splits, or not any more."""
    heavy, _ = side_by_side()
    engine = SimulatedEngine(heavy.closed(128), 3)
    policy, state = make_policy("price", engine.capabilities), EngineState(engine.capabilities)
    actions, asked = None, []
    for sequence in range(1, 1800):
        obeys = actions is not None and sequence < until
        carried = actions if obeys or actions is None else msgspec.structs.replace(actions, split=None)
        actions = decided(state, engine.step(carried), policy, sequence)
        asked.append(actions.split or 0)
    assert np.count_nonzero(asked[until:]) < 260
    assert np.count_nonzero(asked[-500:]) < 100  # trials
    if until:
        assert np.count_nonzero(asked[:until]) > 200  # it paid while it lasted


def test_a_batch_that_swings_at_an_octaves_border_keeps_its_split() -> None:
    """A device that changes its shares with every request that ends would do little else."""
    heavy, _ = side_by_side()
    engine = SimulatedEngine(heavy.closed(33), 3)
    policy, state = make_policy("price", engine.capabilities), EngineState(engine.capabilities)
    actions, asked = None, []
    for sequence in range(1, 2000):
        actions = decided(state, engine.step(actions), policy, sequence)
        asked.append(actions.split or 0)
    assert np.count_nonzero(np.diff(asked)) < 60


def test_what_is_only_asked_about_moves_nothing_that_is_followed() -> None:
    heavy, _ = side_by_side()
    engine = SimulatedEngine(heavy.closed(16), 3)
    policy, state = make_policy("price", engine.capabilities), EngineState(engine.capabilities)
    assert isinstance(policy, PricePolicy)
    actions = None
    for sequence in range(1, 80):
        actions = decided(state, engine.step(actions), policy, sequence)
    held, plans = policy._held, dict(policy._plans)
    assert policy._promised(state, state.view(), 0)
    policy._promised_at_best(state.view())
    assert policy._held is held
    assert policy._plans.keys() == plans.keys()
    assert all(policy._plans[key] is plan for key, plan in plans.items())


@pytest.mark.slow  # `make proof`: starts an engine and a drafter's process
@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each phase")
def test_a_dry_run_of_the_cores_splits_measures_both_and_what_the_gate_does(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    script = Path(faser.__file__).parent / "benchmarks" / "core_splits.py"
    command = [sys.executable, str(script), "--quick", "--json", str(file)]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, timeout=800)
    (load,) = json.loads(file.read_text())["loads"]
    assert set(load["tokens_per_s"]) == {"unsplit", "1:1", "gated"}
    assert load["kinds"]["1:1"]["1:1"] > 0.8
    assert load["kinds"]["unsplit"] == {"unsplit": 1.0}
    assert min(load["phases"][kind]["draft_ms"] for kind in ("unsplit", "1:1")) > 0.0
