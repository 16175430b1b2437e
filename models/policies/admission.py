"""What an engine with adaptive verification is told of its own steps: seconds by rows, as they were measured. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np

from ...engine_adapter.arrays import Floats, Ints
from ...engine_adapter.protocol import Admission
from ...env.estimate.planning_view import PlanningView

POINTS: Final = 48  # rows that are told of at most; vLLM takes the time of the next one that is
TAIL: Final = 4  # ... beyond what the batch can draft, for steps with prompts: each twice the one before
LEAST_S: Final = 1e-6  # the wire's bound is above 0


def admission(view: PlanningView, depth: int) -> Admission:
    """Return the seconds of whole steps whose drafts have `depth` rounds, by the rows that the target is given."""
    rows = row_points(view.requests, depth, view.capabilities.graph_sizes)
    drafted = float(view.requests * depth)
    told: Floats = rows.astype(np.float64)
    seconds = view.verify_s(told) + view.cost.draft_time_s(told, float(depth), drafted)
    rising: Floats = np.maximum.accumulate(np.maximum(seconds, LEAST_S))
    return Admission(rows.tolist(), rising.tolist())


def row_points(requests: int, depth: int, graph_sizes: tuple[int, ...]) -> Ints:
    """Return rising row counts from one a request to what all would verify, and some beyond.

    Captured sizes where there are such: a step takes as long as the next of them.
    """
    most = requests * (depth + 1)
    within = [size for size in graph_sizes if requests <= size < most]
    points = within or np.linspace(requests, most, min(POINTS, most - requests + 1)).astype(np.int64).tolist()
    tail = [most << power for power in range(TAIL + 1)]
    return np.unique(np.array([requests, *points[: POINTS - 1], *tail], np.int64))
