"""The arithmetic of env/cost/cost_table.py, compiled: one table, a column per node, changed in place.

Called by that file alone. Rows and times are plain numbers; nothing here checks them.
"""

from __future__ import annotations

import math

import numpy as np

from ...engine_adapter.arrays import Floats
from ...engine_adapter.compiled import compiled

LEVEL_GAIN = 0.1  # the level follows a change of the machine within about 10 steps
NODE_GAIN = 0.02  # a node that is known follows drift within about 50 of its own steps
FIRST_STEPS = 1.5  # a new node's gain is this over visits and this: faster than a mean, so that a first outlier passes
SPREAD_GAIN = 0.1  # the usual surprise is that of about 10 steps
CLIP, LEAST_CLIP = 3.0, 0.02  # a surprise counts up to so many usual ones, and so much (log) more
LARGEST_CORRECTION = 12.0  # log: beyond lies a broken clock
LEAST_WEIGHT = 0.02  # of a step that is all prompt: its rows skip the LM head and the sampler
SEEN_VISITS = 0.05  # below: never measured, or forgotten
CONFIDENT_STEPS = 1.0  # visits at which a node counts as half known
BENT_STEPS = 0.5  # ... and at which half of its own value bends the curve
MEMORY_RECORDS = 8000.0  # visits fade by time, so that an old measurement is renewed
UNMEASURED_SHARE = 0.3  # by how much an unmeasured step may at least be off
LARGEST_SHARE = 0.9  # by how much a step may be cheaper than is known at most
ANCHOR_SLACK = 0.05  # log: below it the unit is left as it is
# A step of more rows may be faster: matrix products have kernels for some row counts and not for others (two rows take
# 12 % longer than three on the CPU build). Believed beyond DIP_DOUBT standard errors of a node's measurement.
DIP_DOUBT = 3.0

# Rows of the table, one column per node: rows of a step, their log, the prior's units, visits, the log factor on the
# prior, the usual absolute surprise (log; wide while new); and the curve, also made monotone so that it can be asked
# for rows, as of the last `bend`.
NODE, LOG_NODE, PRIOR, VISITS, CORRECTION, SPREAD, CURVE, MONOTONE, TABLE_ROWS = range(9)


@compiled
def learn(
    table: Floats, sizes: Floats, level_s: float, prompt_row: float, verify_s: float, rows: float, prefill_rows: float
) -> tuple[float, float]:
    """Take in a step's time; return by how much (log) the level follows, and then `_anchor` shifts it."""
    visits, prior, correction, spread = table[VISITS], table[PRIOR], table[CORRECTION], table[SPREAD]
    alike = max(rows - prefill_rows + prompt_row * prefill_rows, 1.0)
    low, high, share = _between(table[NODE], _padded(sizes, alike))
    weight = (1.0 - prefill_rows / rows) ** 2 + LEAST_WEIGHT
    if visits[low] < SEEN_VISITS or visits[high] < SEEN_VISITS:
        bend(table)
        for node in (low, high):
            if visits[node] < SEEN_VISITS:  # new: start from what its neighbours suggest
                correction[node] = math.log(table[CURVE, node] / prior[node])
    # Against the nodes' own values, not the monotone curve: that would wind up where the curve holds them back.
    below, above = prior[low] * math.exp(correction[low]), prior[high] * math.exp(correction[high])
    innovation = math.log(verify_s / (level_s * (below * (1.0 - share) + above * share)))
    known = visits[low] * (1.0 - share) + visits[high] * share
    limit = CLIP * (spread[low] * (1.0 - share) + spread[high] * share) + LEAST_CLIP
    surprise = min(abs(innovation), 1.0)
    innovation = min(max(innovation, -limit), limit) * weight
    for node, part in ((low, 1.0 - share), (high, share)):
        gain = max(FIRST_STEPS / (visits[node] + FIRST_STEPS), NODE_GAIN)
        moved = correction[node] + gain * part * innovation
        correction[node] = min(max(moved, -LARGEST_CORRECTION), LARGEST_CORRECTION)
        spread[node] += SPREAD_GAIN * part * weight * (surprise - spread[node])
        visits[node] += part * weight
    visits *= 1.0 - 1.0 / MEMORY_RECORDS
    return LEVEL_GAIN * known / (known + CONFIDENT_STEPS) * innovation, _anchor(table)


@compiled
def _anchor(table: Floats) -> float:
    """Let the level be what an empty step takes, as the prior's and the drafting's units assume; return the shift.

    The first record sets it, and may be off by ten times: a long prompt, a cold start.
    """
    shift = 0.0
    for node in range(table.shape[1]):
        if table[VISITS, node] > CONFIDENT_STEPS:
            shift = float(table[CORRECTION, node])
            break
    if abs(shift) <= ANCHOR_SLACK:
        return 0.0
    for node in range(table.shape[1]):
        if table[VISITS, node] > 0.0:
            table[CORRECTION, node] -= shift
    return shift


@compiled
def bend(table: Floats) -> None:
    """Bring the curves up to date: visited nodes as measured, others as their visited neighbours bend."""
    visits, correction, curve, monotone = table[VISITS], table[CORRECTION], table[CURVE], table[MONOTONE]
    seen = np.flatnonzero(visits >= SEEN_VISITS)
    places, offs = table[LOG_NODE][seen], correction[seen]
    for node in range(len(curve)):
        around = _at(places, offs, table[LOG_NODE, node]) if len(seen) else 0.0
        known = visits[node] / (visits[node] + BENT_STEPS)
        curve[node] = table[PRIOR, node] * math.exp(known * correction[node] + (1.0 - known) * around)
    monotone[:] = rising(curve, visits + 0.01)
    for node in range(len(curve)):
        off = curve[node] / monotone[node] - 1.0
        doubt = DIP_DOUBT * table[SPREAD, node] / math.sqrt(min(visits[node], 1.0 / NODE_GAIN) + 1.0)
        trust = max(1.0 - (doubt / max(abs(off), 1e-9)) ** 2, 0.0)  # Breiman's garrote
        curve[node] = monotone[node] * (1.0 + trust * off)


@compiled
def verify(table: Floats, sizes: Floats, level_s: float, rows: Floats) -> None:
    """Turn rows, (m,), into seconds in place."""
    for i in range(len(rows)):
        rows[i] = level_s * units(table, sizes, rows[i])


@compiled
def confidence(table: Floats, sizes: Floats, rows: Floats) -> None:
    """Turn rows, (m,), into 0 (a guess) .. 1 (measured often and lately) in place."""
    for i in range(len(rows)):
        rows[i] = _known(table, _padded(sizes, rows[i]))


@compiled
def time_range(
    table: Floats, sizes: Floats, level_s: float, rows: Floats, draft_s: Floats, draft_doubt: Floats
) -> None:
    """Turn drafting seconds and doubts, (m,), into the least and the most seconds of steps, in place."""
    first_s = level_s * units(table, sizes, rows[0])
    for i in range(min(len(rows), len(draft_s), len(draft_doubt))):
        verify_s, drafting_s = level_s * units(table, sizes, rows[i]), draft_s[i]
        low, high, share = _between(table[NODE], rows[i])
        chance = (1.0 - share) * _chance(table, low) + share * _chance(table, high)
        doubt = 1.0 - _known(table, _padded(sizes, rows[i]))
        guess = max(verify_s - first_s, UNMEASURED_SHARE * verify_s) * doubt
        extra = max(guess, verify_s * min(chance, UNMEASURED_SHARE))
        drafting_doubt = drafting_s * draft_doubt[i]
        draft_s[i] = verify_s - min(extra, LARGEST_SHARE * verify_s) + drafting_s - drafting_doubt
        draft_doubt[i] = verify_s + extra + drafting_s + drafting_doubt


@compiled
def units(table: Floats, sizes: Floats, rows: float) -> float:
    """Return what a step of so many rows takes, in units of the level."""
    padded, last = _padded(sizes, rows), float(table[NODE, -1])
    return _at(table[NODE], table[CURVE], padded) * (1.0 + max(padded - last, 0.0) / last)


@compiled
def rows_alike(table: Floats, units: float) -> float:
    """Return the rows of which a step takes so many units."""
    return _at(table[MONOTONE], table[NODE], units) * max(units / float(table[MONOTONE, -1]), 1.0)


@compiled
def _known(table: Floats, rows: float) -> float:
    low, high, share = _between(table[NODE], rows)
    below, above = float(table[VISITS, low]), float(table[VISITS, high])
    return (1.0 - share) * below / (below + CONFIDENT_STEPS) + share * above / (above + CONFIDENT_STEPS)


@compiled
def _chance(table: Floats, node: int) -> float:
    """Return by how much (log) a measurement at this node may be off."""
    return float(table[SPREAD, node]) / math.sqrt(table[VISITS, node] + 1.0)


@compiled
def _padded(sizes: Floats, rows: float) -> float:
    """Captured graphs run the next captured size; beyond the largest the engine runs eagerly."""
    place = _bisect(sizes, rows)
    return float(sizes[place]) if place < len(sizes) else rows


@compiled
def _at(places: Floats, values: Floats, place: float) -> float:
    """Return the values interpolated there, those at the ends beyond them."""
    low, high, share = _between(places, place)
    return (1.0 - share) * float(values[low]) + share * float(values[high])


@compiled
def _between(places: Floats, place: float) -> tuple[int, int, float]:
    """Return the entries around a place, and the share (0..1) of the way from the lower to the upper one."""
    high = min(_bisect(places, place), len(places) - 1)
    low = high if places[high] <= place or high == 0 else high - 1
    span = places[high] - places[low]
    return low, high, (place - places[low]) / span if span > 0.0 else 1.0


@compiled
def _bisect(places: Floats, place: float) -> int:
    """Return how many of the ascending places come before this one; NaN comes behind all."""
    low, high = 0, len(places)
    while low < high:
        middle = (low + high) // 2
        if places[middle] >= place:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def rising(values: Floats, weights: Floats) -> Floats:
    """Return the non-decreasing sequence nearest to `values`, (m,), in weighted least squares.

    Pool adjacent violators. A node with few visits yields to a neighbour with many.
    """
    means, heavy, ends, blocks = np.empty(len(values)), np.empty(len(values)), np.empty(len(values), np.int64), 0
    for i in range(len(values)):
        value, weight = values[i], weights[i]
        while blocks and means[blocks - 1] > value:
            blocks -= 1
            value = (means[blocks] * heavy[blocks] + value * weight) / (heavy[blocks] + weight)
            weight += heavy[blocks]
        means[blocks], heavy[blocks], ends[blocks] = value, weight, i + 1
        blocks += 1
    risen, first = np.empty(len(values)), 0
    for block in range(blocks):
        risen[first : ends[block]] = means[block]
        first = ends[block]
    return risen
