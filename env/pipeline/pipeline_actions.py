"""How an action's three numbers and a move of the cluster stand for each other. No gymnasium: live policies need it."""

from __future__ import annotations

from typing import Final

import numpy as np

from ...engine_adapter.arrays import Ints
from .cluster import PipelineMove
from .constants import STAGES
from .view import MOVES

MODES: Final = ("add or release", "refactor in place")
ACTION_SIZES: Final = (len(STAGES), len(MOVES), len(MODES))


def move_of(action: Ints) -> PipelineMove:
    """Return what an action means; raise ValueError for numbers out of range."""
    granularity, change, mode = (int(part) for part in np.asarray(action).reshape(-1))
    if not all(0 <= part < size for part, size in zip((granularity, change, mode), ACTION_SIZES, strict=True)):
        raise ValueError(f"action {granularity}, {change}, {mode}; expected each below {ACTION_SIZES}")
    return PipelineMove(STAGES[granularity], MOVES[change], bool(mode))


def action_of(move: PipelineMove) -> Ints:
    """Return the action that means a move; more than an action can name is cut."""
    change = MOVES.index(int(np.clip(move.count, MOVES[0], MOVES[-1])))
    return np.array([STAGES.index(move.stages), change, int(move.is_refactor)], np.int64)
