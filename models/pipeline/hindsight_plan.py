"""`hindsight`: a dynamic programme over the whole trace, executed in the real world. A bound that nobody can serve by.

States are the homogeneous sets of models/pipeline/shadows.py, epochs two seconds. What an epoch costs in a state is
taken from a run of the whole trace in that state, so a queue is carried over by states, not by plans; a load takes as
long as it does from storage. So the plan is near the best one, not the best one: a strong bound on rules, which may be
beaten where queues, mixed sets or warm loads decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ...engine_adapter.arrays import Floats, Ints
from ...env.pipeline.arrivals import Arrivals
from ...env.pipeline.cluster import Cluster, PipelineMove
from ...env.pipeline.constants import PipelineConstants
from ...env.pipeline.view import ClusterView
from .pipeline_policy import LoadHint, toward
from .shadows import LATENCY_WEIGHT, SETS, gpus_of

EPOCH_S: Final = 2.0


@dataclass(slots=True)
class HindsightPlan:
    """Follows the plan of a trace that it was made for."""

    arrivals: Arrivals
    constants: PipelineConstants
    seed: int
    latency_weight: float = LATENCY_WEIGHT  # missed requests that a second of one request is worth
    name: str = "hindsight"
    keeps_idle: bool = True
    plan: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # (epochs,) of SETS

    def start(self, hint: LoadHint) -> tuple[int, int]:
        """Plan, and begin with the plan's first set."""
        costs = epoch_costs(self.arrivals, self.constants, self.seed, self.latency_weight)
        self.plan = best_plan(costs, *switching(self.constants))
        return SETS[int(self.plan[0])]

    def decide(self, view: ClusterView) -> PipelineMove:
        """Go toward the epoch's set."""
        epoch = min(int(view.now_s / EPOCH_S), len(self.plan) - 1)
        return toward(view, *SETS[int(self.plan[epoch])])


def epoch_costs(
    arrivals: Arrivals, constants: PipelineConstants, seed: int, latency_weight: float = LATENCY_WEIGHT
) -> Floats:
    """Return (sets, epochs) what requests of each epoch and its GPUs cost where a set serves the whole trace."""
    epoch = (arrivals.arrival_s / EPOCH_S).astype(np.int64)
    count = int(epoch[-1]) + 1
    rows = []
    for pipelines in SETS:
        cluster = Cluster(arrivals, pipelines, constants, seed)
        cluster.reclaims = False
        while not cluster.is_done:
            cluster.advance(cluster.now_s + constants.decision_s)
        latency_s = cluster.latency_s
        cost = latency_weight * latency_s + (latency_s > constants.objective_s)
        gpus = constants.gpu_weight * gpus_of(pipelines) * EPOCH_S
        rows.append(np.bincount(epoch, weights=cost, minlength=count) + gpus)
    return np.array(rows)


def switching(constants: PipelineConstants) -> tuple[Ints, Floats]:
    """Return (sets, sets) the epochs that a move takes, and its price beside what the old set costs meanwhile."""
    count = len(SETS)
    epochs, price = np.zeros((count, count), np.int64), np.zeros((count, count))
    for k, (stages, pipelines) in enumerate(SETS):
        for j, (new, wanted) in enumerate(SETS):
            if k == j:
                continue
            if new != stages and wanted > pipelines:
                price[k, j] = np.inf  # in two moves: what is added must not wait behind what is given other stages
                continue
            lead_s, moved = 0.0, 0.0
            if new != stages:
                share = 1.0 - min(new, stages) / max(new, stages)
                moved = wanted * constants.weights_bytes * share
                lead_s = constants.start_s + moved / wanted / min(new, stages) / constants.link_bytes_per_s
            elif wanted > pipelines:
                lead_s = constants.of(new).load_s
            epochs[k, j] = max(1, math.ceil(lead_s / EPOCH_S))
            more = max(gpus_of(SETS[j]) - gpus_of(SETS[k]), 0)
            seconds = float(epochs[k, j]) * EPOCH_S
            price[k, j] = constants.gpu_weight * more * seconds + moved / constants.link_bytes_per_s
    return epochs, price


def best_plan(costs: Floats, epochs: Ints, price: Floats) -> Ints:
    """Return (epochs,) the set to be in or on the way to, of least cost from the best beginning.

    :param costs: (sets, epochs) of serving in a set
    :param epochs: (sets, sets) how long a move takes; the old set serves meanwhile
    :param price: (sets, sets) of a move
    """
    count, length = costs.shape
    ahead = np.concatenate((np.zeros((count, 1)), np.cumsum(costs, axis=1)), axis=1)
    value = np.zeros((count, length + 1))
    choice = np.zeros((count, length), np.int64)
    rows = np.arange(count)
    moves = np.where(epochs == 0, 1, epochs)
    for t in range(length - 1, -1, -1):
        until = np.minimum(t + moves, length)
        through = ahead[rows[:, None], until] - ahead[:, t, None]
        total = through + price + value[rows[None, :], until]
        choice[:, t] = total.argmin(axis=1)
        value[:, t] = total.min(axis=1)
    is_release = np.array([[new[0] == old[0] and new[1] < old[1] for new in SETS] for old in SETS])
    plan, place, t = np.zeros(length, np.int64), int(value[:, 0].argmin()), 0
    while t < length:
        chosen = int(choice[place, t])
        until = min(t + int(moves[place, chosen]), length)
        # What is released goes at the end of the epoch: requests that came in it are still being served.
        plan[t:until] = place if is_release[place, chosen] else chosen
        place, t = chosen, until
    return plan
