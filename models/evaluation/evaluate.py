"""Policies against rivals and hindsight: every policy in every world, at every load, with several seeds, and the table.

Called by controller/cli/evaluate.py, which injects the decision core: what is judged is what the daemon runs.
Policies that look at the number of requests alone (off, fixed, table) run on the simulator without records, to save
time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeAlias

from ...engine_adapter.protocol import ActionSet, StepRecord
from ...env.estimate.engine_state import EngineState
from ...env.layout.action_vector import outside
from ...env.simulator.scenario import Scenario
from ...env.simulator.simulated_engine import SimulatedEngine
from ...env.simulator.simulator import Simulator
from ...env.spaces import Capabilities
from ..policies.baselines import FixedLength, LengthTable, Off
from ..policies.policy import Policy
from ..registry import make_policy
from .best_table import best_table
from .hindsight import Hindsight
from .worlds import LOADS, WorldSpec, held_out

Decide: TypeAlias = Callable[[EngineState, StepRecord, Policy, int], ActionSet]
DRIFT = 0  # stands for the drifting load among the loads
SWING = -1  # ... for the swinging one
CHANGING = {DRIFT: "drift", SWING: "swing"}
TABLE = "table"  # the best table by batch size of the world, found by search
ORACLES = ("oracle:request", "oracle:uniform")  # upper bounds
RIVALS = ("goodput", "smartspec", "adaspec", "ema", "bandit", "gplcb")
OURS = ("price", "price:history")
FULL = 0.9  # of the requests that a load names
FILL_HORIZONS = 10.0  # a batch that is not full after so many times the run's length never will be: memory lacks
WARM_SHARE = 0.3  # of the time, not counted: estimates settle
DRIFT_RUNS = 4  # a drifting load is watched so many times as long
SMALL_LOAD = 8  # below it a run takes longer: its steps bring few tokens
SWING_TOKENS = 48  # emitted in one swing, for each step of a run; below 1,000 steps a batch cannot empty itself in time
SWING_PEAK = 64  # running requests


@dataclass(frozen=True, slots=True)
class Cell:
    """One run to make."""

    policy: str
    world: str
    load: int  # running requests, DRIFT or SWING
    seed: int
    steps: int  # of a full batch without speculation: sets the time


@dataclass(frozen=True, slots=True)
class CellRun:
    """What came of a cell: tokens per second, and those of requests within their objectives."""

    cell: Cell
    tokens_per_s: float
    goodput: float  # of a swing: not counted

    @property
    def score(self) -> float:
        """What is compared: goodput where the load drifts, else tokens per second."""
        return self.goodput if self.cell.load == DRIFT else self.tokens_per_s


@dataclass(slots=True)
class Meter:
    """Counts tokens behind the warm-up, which begins when the batch has once been full: filling it computes prompts."""

    simulator: Simulator
    horizon_s: float
    full: int  # requests that make the batch full; 0: it need not be
    full_s: float | None = None
    start: tuple[float, float, float] | None = None  # seconds, tokens
    good: float = 0.0

    def is_over(self) -> bool:
        """Take in the step just made; say whether the time is up."""
        engine = self.simulator.state.engines[0]
        now_s = float(engine["clock_s"])
        self.good += float(self.simulator.state.terms[0, 0])
        if self.full_s is None:
            is_full = int(engine["running"]) >= self.full
            self.full_s = now_s if is_full or now_s > FILL_HORIZONS * self.horizon_s else None
            return False
        if self.start is None and now_s >= self.full_s + WARM_SHARE * self.horizon_s:
            self.start = (now_s, float(engine["emitted"]), self.good)
        return now_s >= self.full_s + self.horizon_s

    def run(self, cell: Cell) -> CellRun:
        """Return the figures."""
        engine = self.simulator.state.engines[0]
        since_s, tokens, good = self.start or (0.0, 0.0, 0.0)
        span_s = max(float(engine["clock_s"]) - since_s, 1e-9)
        return CellRun(cell, (float(engine["emitted"]) - tokens) / span_s, (self.good - good) / span_s)


@dataclass(slots=True)
class Swing:
    """Lets the number of requests that may run swing, and counts the second swing's tokens and seconds.

    It is SWING_PEAK to the power of a squared sine over emitted tokens, so about as many requests run at the same token
    under every policy. A fifth of the tokens is emitted by one request.
    """

    simulator: Simulator
    period: int  # tokens
    start: tuple[float, float] | None = None  # seconds, tokens

    def is_over(self) -> bool:
        """Take in the step just made; say whether both swings are over."""
        engine = self.simulator.state.engines[0]
        emitted = float(engine["emitted"])
        most = round(SWING_PEAK ** math.sin(math.pi * emitted / self.period) ** 2)
        self.simulator.world.profiles["most_requests"][int(engine["profile"])] = most
        if self.start is None and emitted >= self.period:
            self.start = (float(engine["clock_s"]), emitted)
        return emitted >= 2 * self.period

    def run(self, cell: Cell) -> CellRun:
        """Return the figures."""
        engine = self.simulator.state.engines[0]
        since_s, tokens = self.start or (0.0, 0.0)
        rate = (float(engine["emitted"]) - tokens) / max(float(engine["clock_s"]) - since_s, 1e-9)
        return CellRun(cell, rate, math.nan)


def simulate(
    cell: Cell,
    decide: Decide,
    worlds: Sequence[WorldSpec] | None = None,
    seen: Callable[[StepRecord], None] = lambda record: None,
) -> CellRun:
    """Make one run.

    :param seen: takes the steps that count, of a policy that decides by records
    """
    (world,) = (each for each in worlds or held_out() if each.name == cell.world)
    scenario = scenario_of(world, cell.load)
    if cell.policy in ORACLES:
        return _bounded(cell, scenario)
    policy = make_policy(cell.policy, Capabilities(k_max=scenario.positions))
    if isinstance(policy, Off | FixedLength | LengthTable):
        return _by_requests(cell, scenario, policy)
    return _decided(cell, scenario, world.has_confidence, decide, seen)


def scenario_of(world: WorldSpec, load: int) -> Scenario:
    """Return what a load of the table is in a world."""
    if load == DRIFT:
        return world.drifting()
    return world.closed(SWING_PEAK if load == SWING else load)


def _meter(cell: Cell, simulator: Simulator) -> Meter | Swing:
    if cell.load == SWING:
        return Swing(simulator, SWING_TOKENS * cell.steps)
    return Meter(simulator, _horizon_s(cell, simulator), int(FULL * cell.load))


def _horizon_s(cell: Cell, simulator: Simulator) -> float:
    pace_s = float(simulator.origins.pace_s[int(simulator.state.engines["profile"][0])])
    return pace_s * (DRIFT_RUNS * cell.steps if cell.load == DRIFT else cell.steps * max(SMALL_LOAD // cell.load, 1))


def _decided(
    cell: Cell, scenario: Scenario, has_confidence: bool, decide: Decide, seen: Callable[[StepRecord], None]
) -> CellRun:
    engine = SimulatedEngine(scenario, cell.seed, has_confidence=has_confidence)
    policy, state = make_policy(cell.policy, engine.capabilities), EngineState(engine.capabilities)
    meter = _meter(cell, engine.simulator)
    actions: ActionSet | None = None
    sequence = 0
    while True:
        record = engine.step(actions)
        if meter.is_over():
            return meter.run(cell)
        if meter.start is not None:
            seen(record)
        sequence += 1
        actions = decide(state, record, policy, sequence)


def _by_requests(cell: Cell, scenario: Scenario, policy: Off | FixedLength | LengthTable) -> CellRun:
    simulator = Simulator(scenario, 1, seed=cell.seed)
    simulator.reset()
    meter = _meter(cell, simulator)
    lengths = [_length(policy, requests) for requests in range(scenario.slots + 1)]
    vectors = [outside(depth=length / scenario.positions) for length in lengths]
    engine = simulator.state.engines[0]
    while not meter.is_over():
        simulator.step(vectors[min(int(engine["running"]), scenario.slots)])
    return meter.run(cell)


def _length(policy: Off | FixedLength | LengthTable, requests: int) -> int:
    if isinstance(policy, LengthTable):
        return policy.length_for(max(requests, 1))
    return policy.length if isinstance(policy, FixedLength) else 0


def _bounded(cell: Cell, scenario: Scenario) -> CellRun:
    engine = Hindsight(scenario, cell.seed, is_uniform=cell.policy == ORACLES[1])
    meter = _meter(cell, engine.simulator)
    while not meter.is_over():
        engine.step()
    return meter.run(cell)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared with what."""

    policies: tuple[str, ...] = OURS
    worlds: tuple[WorldSpec, ...] = field(default_factory=held_out)
    loads: tuple[int, ...] = (*LOADS, DRIFT, SWING)
    seeds: tuple[int, ...] = (101, 102, 103)
    steps: int = 400
    rivals: tuple[str, ...] = RIVALS
    bounds: tuple[str, ...] = ORACLES  # with per-request hindsight, which gaps are measured by


@dataclass(frozen=True, slots=True)
class Table:
    """All runs by (policy, world, load): one score per seed, in the order of the plan's seeds."""

    plan: Comparison
    scores: dict[tuple[str, str, int], tuple[float, ...]]
    tables: dict[str, str]  # the best table of each world

    def rivals(self, world: WorldSpec) -> tuple[str, ...]:
        """Return everything that a policy must not fall behind."""
        fixed = tuple(f"fixed:{k}" for k in range(1, world.profile.k_max + 1))
        return ("off", *fixed, TABLE, *self.plan.rivals)


Progress: TypeAlias = Callable[[int, int], None]


def evaluate(plan: Comparison, decide: Decide, pool: Executor | None = None, progress: Progress | None = None) -> Table:
    """Run the plan; a pool's workers share the cells out. The same plan gives the same figures."""
    plain = [
        Cell(policy, world.name, load, seed, plan.steps)
        for world in plan.worlds
        for policy in ("off", *(f"fixed:{k}" for k in range(1, world.profile.k_max + 1)), *plan.bounds)
        for load in plan.loads
        for seed in plan.seeds
    ]
    # The search has seeds of its own: a table tuned on the judged runs would know their luck.
    searched = [
        Cell(f"fixed:{k}" if k else "off", world.name, load, seed + 5000, plan.steps)
        for world in plan.worlds
        for k in range(world.profile.k_max + 1)
        for load in plan.loads
        if load not in CHANGING
        for seed in plan.seeds
    ]
    decided = [
        Cell(policy, world.name, load, seed, plan.steps)
        for world in plan.worlds
        for load in sorted(plan.loads, key=lambda load: (load not in CHANGING, -load))  # the longest runs first
        for policy in (*plan.policies, *plan.rivals)
        for seed in plan.seeds
    ]
    total = len(plain) + len(searched) + len(decided) + len(plan.worlds) * len(plan.loads) * len(plan.seeds)
    counted = _counted(progress, total)
    first = list(counted(_mapped([*plain, *searched], decide, plan, pool)))
    tables = {world.name: _searched(world, plan, first[len(plain) :]) for world in plan.worlds}
    tabled = [
        Cell(tables[world.name], world.name, load, seed, plan.steps)
        for world in plan.worlds
        for load in plan.loads
        for seed in plan.seeds
    ]
    runs = [*first[: len(plain)], *counted(_mapped([*tabled, *decided], decide, plan, pool))]
    scores: dict[tuple[str, str, int], tuple[float, ...]] = {}
    for run in runs:
        name = TABLE if run.cell.policy == tables[run.cell.world] else run.cell.policy
        key = (name, run.cell.world, run.cell.load)
        scores[key] = (*scores.get(key, ()), run.score)
    return Table(plan, scores, tables)


def _mapped(cells: list[Cell], decide: Decide, plan: Comparison, pool: Executor | None) -> Iterator[CellRun]:
    jobs = [decide] * len(cells), [plan.worlds] * len(cells)
    return map(simulate, cells, *jobs) if pool is None else pool.map(simulate, cells, *jobs)


def _counted(progress: Progress | None, total: int) -> Callable[[Iterator[CellRun]], Iterator[CellRun]]:
    done = 0

    def count(runs: Iterator[CellRun]) -> Iterator[CellRun]:
        nonlocal done
        for run in runs:
            done += 1
            if progress is not None:
                progress(done, total)
            yield run

    return count


def _searched(world: WorldSpec, plan: Comparison, runs: list[CellRun]) -> str:
    rates: dict[tuple[int, int], float] = {}
    for run in runs:
        if run.cell.world == world.name:
            length = int(run.cell.policy.partition(":")[2] or 0)
            rates[run.cell.load, length] = rates.get((run.cell.load, length), 0.0) + run.tokens_per_s
    loads = sorted(load for load in plan.loads if load not in CHANGING)
    if not loads:
        return "table:1-=0"
    return best_table(lambda load, length: rates[load, length], loads, world.profile.k_max)
