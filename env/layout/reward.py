"""What a step is worth. One function, its terms apart, for the simulator's kernel and for judging recorded steps alike.

Steps last unequal times, so this is a semi-Markov process. With dt seconds the step's length and rho the discount
rate, a step's terms accrue evenly over it and are discounted to its beginning:

    R = (w_good * G + w_token * T - w_request * L - w_waste * W) * (1 - exp(-rho * dt)) / (rho * dt)
    G  good tokens: emitted by requests whose first token came in time and whose mean pace so far holds
    T  tokens emitted
    L  request-seconds: requests in the system (waiting, running) times dt; its sum is the sum of all latencies
    W  wasted rows: draft tokens verified and not accepted
    V = R + exp(-rho * dt) * V'

A step cut in two of equal total work and output gives the same V, which a test shows. rho = 0: no discount; then what
counts is R - g * dt, with g the mean reward per second.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ...engine_adapter.arrays import Bools, Floats
from ..vectorised import apart

MOST_FACTOR = 700.0  # of an exponent


@apart
def reward(
    good_tokens: float,
    tokens: float,
    request_s: float,
    wasted_rows: float,
    step_s: float,
    discount_per_s: float,
    good_weight: float,
    token_weight: float,
    request_weight: float,
    waste_weight: float,
) -> float:
    """Return R of one step. Weights in reward per token, per request-second and per row; none negative."""
    value = good_weight * good_tokens + token_weight * tokens - request_weight * request_s - waste_weight * wasted_rows
    x = discount_per_s * step_s
    if x < 1e-9:
        return value
    return value * (1.0 - math.exp(-x)) / x


def discount(step_s: npt.ArrayLike, discount_per_s: float) -> Floats:
    """Return exp(-rho * dt), the factor on the value of what comes after a step."""
    factor: Floats = np.exp(-np.minimum(np.asarray(step_s, np.float64) * discount_per_s, MOST_FACTOR))
    return factor


def advantages(
    rewards: Floats, values: Floats, next_values: Floats, step_s: Floats, ends: Bools,
    discount_per_s: float, trace_decay: float,
) -> Floats:  # fmt: skip
    """Return generalised advantages (steps, engines) of a semi-Markov process, from arrays of that shape.

    :param next_values: value of the state a step led to; of the terminal state where the episode was cut off, and 0
        where nothing can come after it
    :param ends: the episode ended with this step, whichever way
    :param trace_decay: lambda of the estimator, per step
    """
    factor = discount(step_s, discount_per_s)
    errors = rewards + factor * next_values - values
    result = np.zeros_like(rewards)
    running = np.zeros(rewards.shape[1])
    for t in range(len(rewards) - 1, -1, -1):
        running = errors[t] + factor[t] * trace_decay * np.where(ends[t], 0.0, running)
        result[t] = running
    return result
