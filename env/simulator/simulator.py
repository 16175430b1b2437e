"""Many simulated engines at once: reset, step, and what they show. The Python side of the compiled kernel.

Called by the gymnasium environment, the SB3 environment, replays and the benchmark. Threads share the engines out;
results do not depend on their number. Same scenario, seed and actions: the same bytes, on the same kind of processor.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from ...engine_adapter.arrays import Bools, Floats, Ints, Singles
from ..estimate.acceptance import FIRST_GUESS, LEVEL_VARIANCE
from ..layout.action_vector import outside
from ..profile.step_basis import DRAFT_BASIS, HOST_BASIS, VERIFY_BASIS
from .constants import CELLS, CHANCES, PRICED, RecordedDrafts, World
from .scenario import Scenario, build_origins, build_world
from .state import MEAN, Bytes, State, allocate
from .step import step_engines

FOREVER_S = 1e299
FIRST_LEVERAGE = 100.0  # as acceptance.Population begins


class Simulator:
    """A batch of engines; arrays of `state` have one row each."""

    def __init__(
        self,
        scenario: Scenario,
        engines: int,
        *,
        mode: int = PRICED,
        threads: int = 1,
        seed: int = 0,
        results: int = 0,
        own_rules: bool = False,
        copies: bool = False,
        recording: RecordedDrafts | None = None,
    ) -> None:
        """Build the constants (kinds and classes of the workloads' rows depend on `seed`) and empty engines.

        :param results: requests per engine whose times are kept in `state.results`
        :param own_rules: thresholds of stop rules are written to `state.rules` by the caller
        :param copies: engines that can copy drafts do so at the action's price; else only by `state.copy_rules`
        :param recording: what the mode RECORDED replays
        """
        if engines < 1 or threads < 1:
            raise ValueError(f"{engines} engines, {threads} threads; expected at least 1 of each")
        self.scenario = scenario
        settings = scenario.settings(mode, own_rules=own_rules, copies=copies)
        self.world: World = build_world(scenario, seed, settings, recording)
        self.origins = build_origins(scenario)
        self.engines = engines
        terms = len(VERIFY_BASIS) + len(DRAFT_BASIS) + len(HOST_BASIS)
        self.state: State = allocate(
            engines,
            scenario.slots,
            scenario.positions,
            CELLS,
            scenario.staleness,
            terms,
            results,
            scenario.longest_copy,
        )
        self.rewards: Floats = np.zeros(engines)
        self._seed = seed
        self._no_lengths: Bytes = np.full((engines, scenario.slots), -1, np.int8)
        self._neutral: Singles = np.repeat(outside(prune=0.0)[None], engines, axis=0)
        self._bounds = np.linspace(0, engines, min(threads, engines) + 1).astype(int).tolist()
        self._pool = ThreadPoolExecutor(len(self._bounds) - 2) if len(self._bounds) > 2 else None

    def seed(self, seed: int) -> None:
        """Make what the engines meet from the next reset on follow from `seed` alone."""
        self._seed = seed
        self.state.engines["episodes"] = 0

    def reset(self, engines: npt.ArrayLike | None = None) -> None:
        """Begin a new episode in these engines (all unless given), without taking a step.

        What they will meet follows from the seed, the engine's place and the number of its episode.
        """
        places = self._places(engines)
        episodes = self.state.engines["episodes"][places] + 1
        for array in self.state:
            array[places] = np.zeros((), array.dtype)
        self.state.engines["episodes"][places] = episodes
        for e, episode in zip(places.tolist(), episodes.tolist(), strict=True):
            self._begin(e, np.random.default_rng([self._seed, e, episode]))

    def _places(self, engines: npt.ArrayLike | None) -> Ints:
        return np.arange(self.engines) if engines is None else np.asarray(engines, np.int64).reshape(-1)

    def _begin(self, e: int, random: np.random.Generator) -> None:
        engine, world, origins, scenario = self.state.engines[e], self.world, self.origins, self.scenario
        engine["seed"], engine["draws"] = random.integers(1 << 64, size=2, dtype=np.uint64)
        engine["rate"] = engine["swing_period_s"] = 1.0
        self.state.copy_weights[e] = 1.0
        if scenario.randomises:
            profile, workload = int(random.integers(len(world.profiles))), int(random.integers(len(world.spans)))
            low, high = np.log(scenario.load)
            load = float(np.exp(random.uniform(low, high)))
            engine["profile"], engine["workload"] = profile, workload
            engine["cursor"] = random.integers(*world.spans[workload].tolist())
            engine["rate"] = load * origins.capacity[profile, workload]
            engine["swing"] = scenario.swing * random.random()
            engine["swing_period_s"] = scenario.swing_steps * random.uniform(1.0, 10.0) * origins.pace_s[profile]
            engine["swing_phase"] = random.random()
            engine["hardness"] = scenario.hardness * random.standard_normal()
            engine["hardness_swing"] = 0.5 * scenario.hardness * random.random()
        profile = int(engine["profile"])
        coefficients = origins.coefficients[profile]
        spread = scenario.coefficient_spread if scenario.randomises else 0.0
        self.state.coefficients[e] = coefficients * np.exp(spread * random.standard_normal(len(coefficients)))
        engine["free_blocks"] = world.profiles["kv_blocks"][profile]
        engine["next_arrival_s"] = world.rows["gap_s"][engine["cursor"]] / engine["rate"]
        engine["excess"], engine["leverage"] = LEVEL_VARIANCE * FIRST_LEVERAGE, FIRST_LEVERAGE
        self.state.population[e, MEAN] = FIRST_GUESS
        self.state.chances[e] = world.tables[profile, CHANCES]

    def warm(self, engines: npt.ArrayLike | None = None) -> None:
        """Take one neutral step (no drafts) in these engines: there is no observation before the first record."""
        for e in self._places(engines).tolist():
            self._run(e, e + 1, self._neutral, self._no_lengths, FOREVER_S)

    def step(
        self, vectors: npt.ArrayLike | None = None, lengths: Bytes | None = None, until_s: float = FOREVER_S
    ) -> Floats:
        """Step all engines once; return rewards, (engines,), valid until the next call.

        :param vectors: (engines, len(ACTION)) in -1..1, see env/layout/action_vector.py; neutral unless given
        :param lengths: (engines, slots) int8 in the mode NAMED; -1: not named
        :param until_s: engines whose clock is past it stay as they are
        """
        raw = self._raw(vectors)
        named = self._no_lengths if lengths is None else lengths
        if self._pool is None:
            self._run(0, self.engines, raw, named, until_s)
            return self.rewards
        jobs = [
            self._pool.submit(self._run, first, last, raw, named, until_s)
            for first, last in zip(self._bounds[1:-1], self._bounds[2:], strict=True)
        ]
        self._run(0, self._bounds[1], raw, named, until_s)  # its own share: one thread less to wake
        for job in jobs:
            job.result()
        return self.rewards

    def _raw(self, vectors: npt.ArrayLike | None) -> Singles:
        if vectors is None:
            return self._neutral
        return np.ascontiguousarray(vectors, np.float32).reshape(self._neutral.shape)

    def run(self, steps: int, vectors: npt.ArrayLike | None = None) -> None:
        """Step all engines so many times under one decision, in one call; for lengths that are recorded, or none."""
        self._run(0, self.engines, self._raw(vectors), self._no_lengths, FOREVER_S, steps)

    def _run(self, first: int, last: int, raw: Singles, lengths: Bytes, until_s: float, steps: int = 1) -> None:
        step_engines(first, last, steps, until_s, raw, lengths, self.rewards, tuple(self.state), tuple(self.world))

    @property
    def is_done(self) -> Bools:
        """Return (engines,) which have served a workload that does not repeat."""
        engines = self.state.engines
        left = engines["running"] + engines["waiting"] + engines["queue_length"]
        done: Bools = (engines["exhausted"] != 0) & (left == 0)
        return done

    def requests(self) -> Singles:
        """Return a view of the request features, (engines, slots, features)."""
        return self.state.shown.transpose(0, 2, 1)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
