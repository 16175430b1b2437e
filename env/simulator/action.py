"""What a decision means for the simulated engine: draft lengths and stop rules, and from which step on; compiled.

Called by env/simulator/step.py. Decisions wait as long as a lease is late.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...engine_adapter.arrays import Floats, Singles
from ..layout.action_vector import DEPTH, GO_ON, KEEP, PRUNE, THRESHOLD
from ..vectorised import apart
from .constants import NAMED, RECORDED
from .state import (
    ACCEPTANCE,
    GO_ON_FROM,
    KEEP_FROM,
    LENGTH,
    MEAN,
    PHASE,
    RUNNING,
    SURVIVAL,
    Bytes,
    Shorts,
)

_ONE, _HALF = np.float32(1.0), np.float32(0.5)


@apart
def take_action(
    engine: Any, settings: Any, ints: Shorts, evidence: Singles, lengths: Bytes, vectors: Singles, rules: Singles,
    raw: Singles, named: Bytes, notes: Shorts, token: Singles,
) -> int:  # fmt: skip
    """Put this decision on its way; return the place of the one that is in force now.

    :param raw: (len(ACTION),) in -1..1, what is outside is clipped, NaN counts as -1
    :param named: (slots,) draft lengths, read in the mode NAMED; -1: not named
    :param notes: (NOTES, slots) scratch
    :param token: (TOKEN, slots) scratch
    """
    place = engine.steps % len(lengths)
    for c in range(len(raw)):  # as action_vector.meant does
        within = min(raw[c] if raw[c] >= -_ONE else -_ONE, _ONE)
        vectors[place, c] = within if c == PRUNE else (within + _ONE) * _HALF
    vector = vectors[place]
    if settings.mode == NAMED:
        for i in range(ints.shape[1]):
            lengths[place, i] = named[i] if ints[PHASE, i] == RUNNING else -1
    elif settings.mode != RECORDED:
        deepest = min(int(vector[DEPTH] * settings.positions + 0.5), settings.positions)
        bar = vector[THRESHOLD]
        survival, length, chosen = token[SURVIVAL], notes[LENGTH], lengths[place]
        survival[:], length[:] = _ONE, 0
        for j in range(deepest):
            acceptance = evidence[ACCEPTANCE, j]
            for i in range(len(survival)):
                survival[i] *= acceptance[i]
                length[i] += 1 if survival[i] >= bar else 0
        for i in range(len(chosen)):
            chosen[i] = length[i] if ints[PHASE, i] == RUNNING else -1
    place = (engine.steps + 1) % len(lengths)
    if settings.own_rules == 0:
        for j in range(settings.positions):
            rules[KEEP_FROM, j], rules[GO_ON_FROM, j] = vectors[place, KEEP], vectors[place, GO_ON]
    return int(place)


@apart
def stranger_length(settings: Any, population: Floats, vector: Singles) -> int:
    """Return the draft length of requests that an action set does not name."""
    deepest = min(int(vector[DEPTH] * settings.positions + 0.5), settings.positions)
    survival, length = _ONE, 0
    for j in range(deepest):
        survival *= np.float32(population[MEAN, j])
        length += 1 if survival >= vector[THRESHOLD] else 0
    return length
