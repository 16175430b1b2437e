"""When requests come and how long they are: the shipped traces and gamma processes at one mean rate, by a seed.

Called by env/pipeline/pipeline_serving.py and models/pipeline. Shipped traces last half an hour at 3 to 6 requests/s;
they are run faster until they come at the wanted rate, and blocks of them are drawn with replacement, so that a run may
be longer than the trace and seeds differ. Inside a block every burst is as recorded, on the faster clock. ServeGen's
clients keep their clock. So does azure-code-own-clock: there bursts and calms last as long as recorded, and it is the
rate that is higher.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...engine_adapter.arrays import Floats
from ...engine_adapter.errors import UsageError
from ..workload.request_trace import SHIPPED, Trace, shipped_trace
from ..workload.servegen import WINDOW_S, ClientWindow, draw_trace, shipped_windows
from ..workload.workload import Swell

RATE_RPS: Final = 20.0  # the paper's
BLOCK_S: Final = 30.0
OWN_CLOCK_BLOCK_S: Final = 180  # longer than the longest calm, 174 s
GAMMAS: Final = (1, 2, 4, 8)
SERVEGEN: Final = "servegen"
SWELL: Final = "swell"
OWN_CLOCK: Final = "azure-code-own-clock"
WEEK_S: Final = 604_200.0  # of ServeGen's windows
LOADS: Final = (*SHIPPED, OWN_CLOCK, SERVEGEN, SWELL, *(f"gamma-{cv}" for cv in GAMMAS))


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """Requests in order of arrival.

    :param arrival_s: (n,) float64, seconds, never decreasing
    :param tokens: (n,) float64, prompt and answer: what a request's KV holds at its end
    """

    name: str
    arrival_s: Floats
    tokens: Floats

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def variation(self) -> float:
        """The coefficient of variation of the gaps between arrivals."""
        gaps = np.diff(self.arrival_s)
        return float(gaps.std() / gaps.mean()) if len(gaps) else 1.0

    def peak_rps(self, window_s: float = 5.0) -> float:
        """Return the largest rate in windows of so many seconds."""
        if not len(self):
            return 0.0
        return float(np.bincount((self.arrival_s / window_s).astype(np.int64)).max() / window_s)


def draw_arrivals(name: str, seed: int, duration_s: float, rate_rps: float = RATE_RPS) -> Arrivals:
    """Draw the arrivals of a load, one of LOADS or gamma-CV; raise UsageError for others."""
    random = np.random.default_rng([seed, *name.encode()])
    if name in SHIPPED:
        return _blocks(name, _shipped(name), duration_s, rate_rps, random)
    if name == OWN_CLOCK:
        return _own_clock(duration_s, rate_rps, random)
    if name == SERVEGEN:
        return _servegen(seed, duration_s, rate_rps, random)
    if name == SWELL:
        return _swell(duration_s, rate_rps, random)
    variation = _variation(name)
    if variation is None:
        raise UsageError(f"load {name!r}", f"one of {', '.join(LOADS)}")
    return _gamma(name, variation, duration_s, rate_rps, random)


def _variation(name: str) -> float | None:
    head, _, number = name.partition("-")
    try:
        value = float(number)
    except ValueError:
        return None
    return value if head == "gamma" and 0.0 < value <= 20.0 else None


def _gamma(name: str, variation: float, duration_s: float, rate_rps: float, random: np.random.Generator) -> Arrivals:
    """Draw gaps with the wanted coefficient of variation; lengths are those of azure-conv in random order."""
    shape = 1.0 / variation**2
    gaps = random.gamma(shape, 1.0 / (rate_rps * shape), math.ceil(1.5 * duration_s * rate_rps) + 4096)
    times = np.cumsum(gaps)
    times = times[times < duration_s]
    lengths = _tokens(_shipped("azure-conv"))
    return Arrivals(name, times, lengths[random.integers(len(lengths), size=len(times))])


def _blocks(name: str, trace: Trace, duration_s: float, rate_rps: float, random: np.random.Generator) -> Arrivals:
    """Join blocks of a trace that is run at the wanted mean rate."""
    span_s = float(trace.arrival_s[-1])
    times = trace.arrival_s * (len(trace) / span_s / rate_rps)
    last_s = max(float(times[-1]) - BLOCK_S, 0.0)
    tokens, parts = _tokens(trace), []
    for block in range(math.ceil(duration_s / BLOCK_S)):
        start_s = random.uniform(0.0, last_s)
        low, high = np.searchsorted(times, (start_s, start_s + BLOCK_S))
        parts.append((times[low:high] - start_s + block * BLOCK_S, tokens[low:high]))
    joined, lengths = (np.concatenate(each) for each in zip(*parts, strict=True))
    inside = joined < duration_s
    return Arrivals(name, joined[inside], lengths[inside])


def _own_clock(duration_s: float, rate_rps: float, random: np.random.Generator) -> Arrivals:
    """Join blocks of azure-code's rate by the second, on its own clock; requests come at random within a second.

    The rate is as many times the recorded one as gives the wanted mean: so many more people doing the same at the same
    time. Independent ones would not be calm together.
    """
    trace = _shipped("azure-code")
    span_s = float(trace.arrival_s[-1])
    recorded = np.bincount(trace.arrival_s.astype(np.int64))[: int(span_s)]
    faster, size = rate_rps * span_s / len(trace), (math.ceil(duration_s / OWN_CLOCK_BLOCK_S), 1)
    counts = np.zeros(0, np.int64)
    while not counts.any():  # a calm may be longer than a short run
        starts = random.integers(len(recorded) - OWN_CLOCK_BLOCK_S + 1, size=size)
        rates = recorded[starts + np.arange(OWN_CLOCK_BLOCK_S)].ravel()[: math.ceil(duration_s)]
        counts = random.poisson(faster * rates)
    second = np.repeat(np.arange(len(counts)), counts)
    times = np.sort(second + random.random(len(second)))
    times = times[times < duration_s]
    lengths = _tokens(trace)
    return Arrivals(OWN_CLOCK, times, lengths[random.integers(len(lengths), size=len(times))])


def _servegen(seed: int, duration_s: float, rate_rps: float, random: np.random.Generator) -> Arrivals:
    """Draw clients of a part of the week that together come at about the wanted rate; their clock makes up the rest."""
    start_s = float(random.uniform(0.0, WEEK_S - duration_s))
    inside = [each for each in _windows() if start_s - WINDOW_S < each.start_s < start_s + duration_s]
    clients = sorted({each.client for each in inside})
    chosen: list[ClientWindow] = []
    total = 0.0
    for client in random.permutation(clients).tolist():
        theirs = [each for each in inside if each.client == client]
        own = sum(each.rate_rps * _overlap_s(each, start_s, duration_s) for each in theirs) / duration_s
        if total + own <= 1.2 * rate_rps:
            chosen, total = chosen + theirs, total + own
        if total >= 0.9 * rate_rps:
            break
    trace = draw_trace(chosen, start_s, duration_s, _shipped("azure-conv"), seed)
    times = trace.arrival_s * (len(trace) / max(float(trace.arrival_s[-1]), 1e-9) / rate_rps)
    inside_s = times < duration_s
    return Arrivals(SERVEGEN, times[inside_s], _tokens(trace)[inside_s])


def _overlap_s(window: ClientWindow, start_s: float, duration_s: float) -> float:
    return max(min(window.start_s + WINDOW_S, start_s + duration_s) - max(window.start_s, start_s), 0.0)


def _swell(duration_s: float, rate_rps: float, random: np.random.Generator) -> Arrivals:
    """Draw a Poisson process whose rate swells once from a fifth of the mean to 2.3 times the mean and back."""
    low = 0.2 * rate_rps
    swell = Swell(low_rps=low, peak_rps=low + (rate_rps - low) * 8 / 3, duration_s=duration_s, sharpness=2.0)
    time_s, expected = swell.cumulative()
    count = random.poisson(expected[-1])
    times = np.interp(np.sort(random.uniform(0.0, expected[-1], count)), expected, time_s)
    lengths = _tokens(_shipped("azure-conv"))
    return Arrivals(SWELL, times, lengths[random.integers(len(lengths), size=count)])


@functools.cache
def _shipped(name: str) -> Trace:
    return shipped_trace(name)


@functools.cache
def _windows() -> tuple[ClientWindow, ...]:
    return tuple(shipped_windows())


def _tokens(trace: Trace) -> Floats:
    return (trace.input_tokens + trace.output_tokens).astype(np.float64)
