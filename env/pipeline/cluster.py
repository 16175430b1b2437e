"""The cluster: pipelines that load, serve, change their stages while they serve, and go.

Called by env/pipeline/pipeline_serving.py and by models/pipeline. Deterministic: arrivals, constants, seed and moves
say all. It never looks at a request before it has arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ...engine_adapter.arrays import Bools, Floats, Ints
from .arrivals import Arrivals
from .constants import GIGA, SEGMENTS, STAGES, PipelineConstants
from .gpus import NOBODY, Gpus
from .refactoring import Refactoring, plan_refactoring
from .serve_kernel import live, serve, sustaining
from .view import WINDOWS_S, ClusterView

FREE, LOADING, ACTIVE, MOVING, DRAINING = range(5)  # phases of a pipeline
KEEP_UP: Final = 0.9  # ours: of a pipeline's time, from which on batches grow
PENALTY_WINDOW: Final = 1  # of WINDOWS_S: whose variation equation (9) gets


@dataclass(frozen=True, slots=True)
class PipelineMove:
    """What to change now: add (count above 0) or release pipelines of so many stages, or give others so many."""

    stages: int
    count: int = 0
    is_refactor: bool = False


STAY: Final = PipelineMove(STAGES[0])


@dataclass(slots=True)
class PipelineTotals:
    """What a run has cost so far."""

    gpu_s: float = 0.0
    moved_bytes: float = 0.0
    moves: int = 0  # pipelines added, released on purpose or given other stages
    refactored: int = 0  # those of them that were given other stages
    refused: int = 0  # moves without room
    reclaimed: int = 0
    missed: int = 0  # requests served behind their objective


class Cluster:
    """One model's pipelines on the fragments of a cluster, and the queue before them."""

    def __init__(
        self, arrivals: Arrivals, start: tuple[int, int], constants: PipelineConstants | None = None, seed: int = 0
    ) -> None:
        self.constants = constants = constants or PipelineConstants()
        self.arrivals = arrivals
        self.gpus = Gpus(constants, seed)
        self.now_s = 0.0
        self.head = 0  # first request that waits
        self.totals = PipelineTotals()
        self.reclaims = True
        count, pipelines = len(arrivals), constants.most_replicas
        self.start_s: Floats = np.zeros(count)
        self.finish_s: Floats = np.zeros(count)
        self.server: Ints = np.zeros(count, np.int64)
        self.phase: Ints = np.full(pipelines, FREE, np.int64)
        self.stages: Ints = np.full(pipelines, STAGES[0], np.int64)
        self.held: Ints = np.full((pipelines, SEGMENTS), NOBODY, np.int64)  # GPU of each stage
        self.free_s: Floats = np.zeros((pipelines, SEGMENTS))
        self.used_s: Floats = np.zeros(pipelines)
        self.ready_s: Floats = np.full(pipelines, np.inf)  # when a load, a move or a release ends
        self._plans: dict[int, Refactoring] = {}
        self._least: Ints = np.ones(pipelines, np.int64)
        self._most: Ints = np.ones(pipelines, np.int64)
        self._base_s: Floats = np.zeros((pipelines, SEGMENTS))
        self._shared: Bools = np.zeros((pipelines, SEGMENTS), np.bool_)
        self._running: Ints = np.zeros(pipelines, np.int64)
        self._tokens: Floats = np.zeros(pipelines)
        self._first_live = 0
        self._last_move = (0.0, 0.0, -np.inf)  # seconds until it served, bytes, when
        self._churned_s = 0.0
        gaps = np.diff(arrivals.arrival_s, prepend=0.0)
        self._gap_sums: Floats = np.concatenate(([0.0], np.cumsum(gaps)))
        self._gap_squares: Floats = np.concatenate(([0.0], np.cumsum(gaps**2)))
        for _ in range(start[1]):
            self._add(start[0], is_ready=True)

    # Moves

    def apply(self, move: PipelineMove) -> float:
        """Begin a move; return the bytes that it puts on links."""
        before = self.totals.moved_bytes
        if move.is_refactor:
            for replica in self._others(move.stages)[: abs(move.count)]:
                self._refactor(replica, move.stages)
        elif move.count > 0:
            for _ in range(move.count):
                self.totals.moves += self._add(move.stages)
        else:
            for replica in self._idlest(move.stages)[: -move.count]:
                if self.serving() > 1:
                    self._release(replica)
                    self.totals.moves += 1
        return self.totals.moved_bytes - before

    def serving(self) -> int:
        """Return how many pipelines take requests now."""
        return int(((self.phase == ACTIVE) | (self.phase == MOVING)).sum())

    def _others(self, stages: int) -> list[int]:
        """Return the pipelines that could get so many stages, those nearest to it first."""
        active = np.flatnonzero((self.phase == ACTIVE) & (self.stages != stages))
        apart = np.abs(np.log2(self.stages[active] / stages))
        return [int(each) for each in active[np.argsort(apart, kind="stable")]]

    def _idlest(self, stages: int) -> list[int]:
        active = np.flatnonzero((self.phase == ACTIVE) & (self.stages == stages))
        return [int(each) for each in active[np.argsort(self.used_s[active], kind="stable")]]

    def _add(self, stages: int, *, is_ready: bool = False) -> bool:
        """Load a pipeline; return False where there is no room."""
        slots = np.flatnonzero(self.phase == FREE)
        found = self.gpus.choose(stages, stages, self.now_s) if len(slots) else None
        if found is None:
            self.totals.refused += 1
            return False
        replica = int(slots[0])
        placed = self.gpus.assign(found, list(range(stages)), stages, self.now_s)
        load_s = self.gpus.load_s(placed, stages, self.now_s)
        for gpu in placed.values():
            self.gpus.reserve(gpu, replica)
        self._set_up(replica, stages, np.array([placed[stage] for stage in range(stages)], np.int64))
        self.phase[replica] = LOADING
        self.ready_s[replica] = self.now_s + (0.0 if is_ready else load_s)
        self.free_s[replica] = self.ready_s[replica]
        if is_ready:
            self._end_phase(replica)
        else:
            self._last_move = (load_s, 0.0, self.now_s)
        return True

    def _set_up(self, replica: int, stages: int, gpus: Ints) -> None:
        self.stages[replica] = stages
        self.held[replica] = NOBODY
        self.held[replica, :stages] = gpus
        self._base_s[replica] = self.constants.of(stages).compute_s
        self._most[replica] = self.constants.most_in_batch(stages)
        self._shared[replica, :stages] = self.gpus.is_shared(gpus)
        self.used_s[replica] = max(self.used_s[replica], self.now_s)

    def _release(self, replica: int) -> None:
        self.phase[replica] = DRAINING
        self.ready_s[replica] = max(self.now_s, self.free_s[replica, : self.stages[replica]].max())

    def _refactor(self, replica: int, stages: int) -> None:
        old = self.held[replica, : self.stages[replica]].copy()
        kv_bytes = self._live_tokens(replica) * self.constants.kv_bytes_per_token
        plan = plan_refactoring(self.gpus, old, stages, kv_bytes, self.now_s)
        if plan is None:
            self.totals.refused += 1
            return
        for gpu in plan.fresh:
            self.gpus.reserve(gpu, replica)
        self._plans[replica] = plan
        self.phase[replica] = MOVING
        self.ready_s[replica] = self.now_s + plan.lead_s
        self.totals.moves += 1
        self.totals.refactored += 1
        self.totals.moved_bytes += plan.moved_bytes
        self._last_move = (plan.lead_s, plan.moved_bytes, self.now_s)

    def _end_phase(self, replica: int) -> None:
        """Do what falls due: a load or a move serves, a drained pipeline is gone."""
        phase, stages = self.phase[replica], int(self.stages[replica])
        if phase == LOADING:
            self._hold(replica)
        elif phase == MOVING:
            self._switch(replica, self._plans.pop(replica))
        else:
            self._let_go(replica, stages)
        self.phase[replica] = FREE if phase == DRAINING else ACTIVE
        self.ready_s[replica] = np.inf

    def _hold(self, replica: int) -> None:
        stages = int(self.stages[replica])
        for stage in range(stages):
            self.gpus.hold(int(self.held[replica, stage]), stage, stages, self.now_s)

    def _let_go(self, replica: int, stages: int) -> None:
        for stage in range(stages):
            self.gpus.release(int(self.held[replica, stage]), stage, stages, self.now_s)

    def _switch(self, replica: int, plan: Refactoring) -> None:
        """Go over to the new stages: passes under way keep their times, each new stage waits for theirs and a pause."""
        stages, old = len(plan.gpus), int(self.stages[replica])
        fresh = set(plan.fresh)
        self._let_go(replica, old)
        for gpu in plan.gpus.tolist():
            if gpu not in fresh:
                self.gpus.reserve(gpu, replica)
        before = self.free_s[replica, :old].copy()
        self._set_up(replica, stages, plan.gpus)
        self._hold(replica)
        for stage in range(stages):
            first, last = stage * old // stages, max((stage + 1) * old // stages, stage * old // stages + 1)
            busy_s = max(float(before[first:last].max()), self.now_s)
            self.free_s[replica, stage] = busy_s + self.constants.pause_s

    # Time

    def advance(self, until_s: float) -> int:
        """Serve until a time; return how many requests were sent behind their objective."""
        self._penalise()
        self._keep_up()
        first = self.head
        while True:
            next_s = min(float(self.ready_s.min()), until_s)
            self._serve(next_s)
            if next_s >= until_s:
                break
            self._end_phase(int(self.ready_s.argmin()))
            self._penalise()  # a switch changes what stages compute
        sent = slice(first, self.head)
        late = self.finish_s[sent] - self.arrivals.arrival_s[sent] > self.constants.objective_s
        self.totals.missed += int(late.sum())
        self._reclaim()
        if self.now_s >= self._churned_s + self.constants.churn_s:
            self._churned_s = self.now_s
            self.gpus.churn()
        return int(late.sum())

    def _serve(self, until_s: float) -> None:
        is_open = (self.phase == ACTIVE) | (self.phase == MOVING)
        self.head = serve(
            until_s, self.head, self.arrivals.arrival_s, self.start_s, self.finish_s, self.server, is_open, self.stages,
            self._least, self._most, self._compute_s, self.free_s, self.used_s, self.constants.hop_s,
            self.constants.batch_slope,
        )  # fmt: skip
        self.totals.gpu_s += self.gpus_held * max(until_s - self.now_s, 0.0)
        self.now_s = max(until_s, self.now_s)

    def _penalise(self) -> None:
        """Let stages beside other models compute longer, by equation (9)."""
        penalty = self.constants.sharing_penalty(self.variation(WINDOWS_S[PENALTY_WINDOW]))
        self._compute_s = self._base_s * (1.0 + penalty * self._shared)

    def _keep_up(self) -> None:
        """Say which batches it takes to serve what has arrived of late."""
        share = self.rate(WINDOWS_S[0]) / max(self.serving(), 1)
        for replica in np.flatnonzero(self.phase != FREE).tolist():
            self._least[replica] = sustaining(
                share, float(self._compute_s[replica, 0]), int(self._most[replica]), self.constants.batch_slope, KEEP_UP
            )

    def _reclaim(self) -> None:
        """Take back pipelines that nobody has asked for long."""
        if not self.reclaims:
            return
        for replica in np.flatnonzero((self.phase == ACTIVE) & (self.used_s < self.now_s - self.constants.reclaim_s)):
            if self.serving() > 1:
                self._release(int(replica))
                self.totals.reclaimed += 1

    # What can be seen

    @property
    def gpus_held(self) -> int:
        """GPUs that hold a stage, or will."""
        return int((self.gpus.owner != NOBODY).sum())

    @property
    def is_done(self) -> bool:
        """Whether every request has been sent into a pipeline."""
        return self.head >= len(self.arrivals)

    def arrived(self, at_s: float) -> int:
        """Return how many requests have come by a time."""
        return int(np.searchsorted(self.arrivals.arrival_s, at_s, side="right"))

    def rate(self, window_s: float) -> float:
        """Return the arrivals per second of the last so many seconds."""
        span_s = max(min(window_s, self.now_s), 1e-9)
        return (self.arrived(self.now_s) - self.arrived(self.now_s - span_s)) / span_s if self.now_s > 0 else 0.0

    def _since(self, window_s: float) -> Floats:
        low, high = self.arrived(self.now_s - window_s), self.arrived(self.now_s)
        return self.arrivals.arrival_s[low:high]

    def variation(self, window_s: float) -> float:
        """Return the coefficient of variation of the gaps of the last so many seconds; 1 of fewer than three."""
        low, high = self.arrived(self.now_s - window_s) + 1, self.arrived(self.now_s)
        if high - low < 3:
            return 1.0
        mean = (self._gap_sums[high] - self._gap_sums[low]) / (high - low)
        square = (self._gap_squares[high] - self._gap_squares[low]) / (high - low)
        return float(np.sqrt(max(square - mean**2, 0.0)) / max(mean, 1e-12))

    def _live_tokens(self, replica: int) -> float:
        self._look()
        return float(self._tokens[replica])

    def _look(self) -> None:
        self._first_live = live(
            self.now_s, self._first_live, self.head, self.finish_s, self.server, self.arrivals.tokens, self._tokens,
            self._running,
        )  # fmt: skip

    def expected_load_s(self, stages: int) -> float:
        """Return how long a pipeline of so many stages would load now; infinite: there is no room."""
        found = self.gpus.choose(stages, stages, self.now_s)
        if found is None:
            return float("inf")
        placed = self.gpus.assign(found, list(range(stages)), stages, self.now_s)
        return self.gpus.load_s(placed, stages, self.now_s)

    def view(self) -> ClusterView:
        """Return what a policy sees."""
        self._look()
        waiting = self.arrived(self.now_s) - self.head
        oldest_s = self.now_s - float(self.arrivals.arrival_s[self.head]) if waiting > 0 else 0.0
        serving = (self.phase == ACTIVE) | (self.phase == MOVING)
        targets = [len(plan.gpus) for plan in self._plans.values()]
        coming = [int(((self.phase == LOADING) & (self.stages == g)).sum()) + targets.count(g) for g in STAGES]
        lead_s, moved, moved_s = self._last_move
        return ClusterView(
            now_s=self.now_s,
            rates=tuple(self.rate(window_s) for window_s in WINDOWS_S),
            variations=tuple(self.variation(window_s) for window_s in WINDOWS_S),
            waiting=max(waiting, 0),
            oldest_s=max(oldest_s, 0.0),
            running=int(self._running.sum()),
            kv_bytes=float(self._tokens.sum()) * self.constants.kv_bytes_per_token,
            serving=tuple(int((serving & (self.stages == g)).sum()) for g in STAGES),
            coming=tuple(coming),
            moving=tuple(int(((self.phase == MOVING) & (self.stages == g)).sum()) for g in STAGES),
            gpus_held=self.gpus_held,
            room=tuple(int(self.gpus.fitting(g).sum()) for g in STAGES),
            free_memory=tuple(self.gpus.free_histogram().tolist()),
            load_s=tuple(self.expected_load_s(g) for g in STAGES),
            last_move_s=lead_s,
            last_move_bytes=moved,
            since_move_s=self.now_s - moved_s,
            arrived_s=self._since(self.constants.decision_s),
        )

    @property
    def latency_s(self) -> Floats:
        """(sent,) seconds from arrival to answer of all requests sent so far."""
        return self.finish_s[: self.head] - self.arrivals.arrival_s[: self.head]

    @property
    def moved_gb(self) -> float:
        """Bytes on links so far, in GB."""
        return self.totals.moved_bytes / GIGA
