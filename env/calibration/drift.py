"""How the machine's own speed drifted while it was measured: equal steps, minutes apart, tell.

Called by env/calibration/profile_fit.py. On a shared host a step may take a tenth longer for some minutes,
whatever it does; left in, that is in every cell of those minutes. It is found by a median polish in two directions,
kinds of steps and time, from steps of cells that are fitted: held-out ones have no say in it, and no model either.
"""

from __future__ import annotations

import numpy as np

from ...engine_adapter.arrays import Floats, Ints

WINDOW_S = 60.0  # the level of a moment is the median over so long
KNOT_S = 15.0
LEAST_STEPS = 30  # in a window, before its level is believed
ROUNDS = 4


def drift(time_s: Floats, step_s: Floats, kind: Ints) -> Floats:
    """Return (n,) by what factor the machine was slower than its median around each step.

    :param time_s: (n,) when each step ended, never decreasing
    :param step_s: (n,) what it took; NaN: not known
    :param kind: (n,) equal numbers for equal work; less than 0: has no say
    """
    says = (kind >= 0) & np.isfinite(step_s) & (step_s > 0.0)
    level = np.zeros(len(time_s))
    if not says.any():
        return np.exp(level)
    own_s, log_s = time_s[says], np.log(step_s[says])
    names, group = np.unique(kind[says], return_inverse=True)
    spans = np.array([np.ptp(own_s[group == index]) for index in range(len(names))])
    tells = (spans > WINDOW_S)[group]  # repeats within one window would only say that nothing changed
    knots = np.arange(time_s[0], time_s[-1] + KNOT_S, KNOT_S)
    at_knots = np.zeros(len(knots))
    for _ in range(ROUNDS):
        rest = log_s - np.interp(own_s, knots, at_knots)
        usual = np.array([np.median(rest[group == index]) for index in range(len(names))])
        at_knots = _levels(own_s[tells], (log_s - usual[group])[tells], knots)
    level = np.interp(time_s, knots, at_knots)
    return np.exp(level - np.median(level))


def _levels(time_s: Floats, excess: Floats, knots: Floats) -> Floats:
    """Return the median excess around each knot; between those that are known, and flat beyond, where it is not."""
    first = np.searchsorted(time_s, knots - WINDOW_S / 2.0)
    last = np.searchsorted(time_s, knots + WINDOW_S / 2.0)
    known = last - first >= LEAST_STEPS
    if not known.any():
        return np.zeros(len(knots))
    found = [float(np.median(excess[a:b])) for a, b in zip(first[known], last[known], strict=True)]
    levels: Floats = np.interp(knots, knots[known], found)
    return levels
