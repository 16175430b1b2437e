"""The benchmarks' statistics: paired ratios with intervals, the envelope ratio, goodput. Pure.

Called by controller/bench/result.py and the scripts in benchmarks/. docs/guide/benchmark.md has the definitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import stats

from ...engine_adapter.arrays import Floats, Ints
from ..engine.load_summary import RequestResult

Interval = Callable[[Floats], tuple[float, float]]  # of the mean of (n,) values, n >= 2

OURS: Final = "faser"
WANTED_HALF_WIDTH: Final = 0.03
LEAST_RATIO: Final = 0.99
LEAST_LOW: Final = 0.97
LEAST_PAIRS: Final = 3  # fewer undisturbed pairs than these: the disturbed ones count too, and the table says so
TTFT_FACTOR: Final = 5.0  # a request meets its objective within so many times the unloaded value
TPOT_FACTOR: Final = 2.0
_RESAMPLES: Final = 9999
_LEAST_BCA: Final = 6  # values; with fewer the correction of the bootstrap's bias is itself guesswork


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio with its 95 % interval."""

    value: float
    low: float
    high: float
    pairs: int

    @property
    def half_width(self) -> float:
        """Half of the interval's width; NaN with fewer than two pairs."""
        return (self.high - self.low) / 2

    def is_sharp(self) -> bool:
        """Return whether the ratio counts."""
        return self.half_width <= WANTED_HALF_WIDTH

    def meets_envelope(self) -> bool:
        """Return whether the ratio meets the bar of the envelope."""
        return self.is_sharp() and self.value >= LEAST_RATIO and self.low >= LEAST_LOW

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def student_interval(values: Floats) -> tuple[float, float]:
    """Return Student's 95 % interval of the mean."""
    reach = float(stats.t.ppf(0.975, len(values) - 1)) * float(values.std(ddof=1)) / math.sqrt(len(values))
    mean = float(values.mean())
    return mean - reach, mean + reach


def bootstrap_interval(values: Floats) -> tuple[float, float]:
    """Return the bootstrap's 95 % interval of the mean, seed fixed."""
    if np.ptp(values) == 0.0:
        return float(values[0]), float(values[0])
    method = "BCa" if len(values) >= _LEAST_BCA else "percentile"
    found = stats.bootstrap(
        (values,), np.mean, n_resamples=_RESAMPLES, confidence_level=0.95, method=method, random_state=0
    ).confidence_interval
    return float(found.low), float(found.high)


def wider_interval(values: Floats) -> tuple[float, float]:
    """Return the hull of the bootstrap's interval and Student's.

    The bootstrap of a handful of values never leaves their range and is too narrow; Student's trusts the bell curve.
    """
    student, bootstrap = student_interval(values), bootstrap_interval(values)
    return min(student[0], bootstrap[0]), max(student[1], bootstrap[1])


def paired_ratio(logs: Floats, interval: Interval = student_interval) -> Ratio:
    """Return the geometric mean of paired ratios, given as logarithms (n,), NaN left out."""
    logs = logs[~np.isnan(logs)]
    if not len(logs):
        return Ratio(math.nan, math.nan, math.nan, 0)
    mean = float(logs.mean())
    if len(logs) < 2:
        return Ratio(math.exp(mean), math.nan, math.nan, 1)
    low, high = interval(logs)
    return Ratio(math.exp(mean), math.exp(low), math.exp(high), len(logs))


def chained(one: Ratio, other: Ratio) -> Ratio:
    """Return the product of two ratios from different rounds: half-widths of the logarithms add as errors do."""
    value = one.value * other.value
    low, high = (
        math.hypot(*(math.log(each.value / getattr(each, name)) for each in (one, other))) for name in ("low", "high")
    )
    return Ratio(value, value * math.exp(-low), value * math.exp(high), min(one.pairs, other.pairs))


def by_start(rates: Mapping[str, Floats], starts: Ints) -> dict[str, Floats]:
    """Return a rate for each start of the servers, in units of FASER's own, geometric means over its rounds.

    What differs between two processes of one kind stays for as long as they live, and rounds of one start would not
    tell of it; `scatter` says how much that is. With a single start the rounds are all there is.
    :param rates: by arm (rounds,)
    :param starts: of each round (rounds,)
    """
    places = np.unique(starts)
    if len(places) < 2 or OURS not in rates:
        return dict(rates)
    logs = {arm: np.log(rate) - np.log(rates[OURS]) for arm, rate in rates.items()}
    return {arm: np.exp([_mean(log[starts == place]) for place in places]) for arm, log in logs.items()}


def scatter(logs: Floats, starts: Ints) -> tuple[float, float] | None:
    """Return how far starts' ratios scatter, and how far by what happens within them.

    Standard deviations of the ratios' logarithms. The second is that of rounds within starts, over the root of their
    number, if they were independent: what the first has more is what differs between processes. None with fewer than
    two starts of two rounds.
    :param logs: of a ratio in each round (rounds,), NaN where it was not measured
    """
    own = [logs[(starts == place) & ~np.isnan(logs)] for place in np.unique(starts)]
    if len(rounds := [found for found in own if len(found) > 1]) < 2:
        return None
    within = math.sqrt(float(np.mean([found.var(ddof=1) / len(found) for found in rounds])))
    return float(np.std([found.mean() for found in rounds], ddof=1)), within


def _mean(values: Floats) -> float:
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else math.nan


@dataclass(frozen=True, slots=True)
class Envelope:
    """FASER against the best rival. `rivals` were chosen on the even and on the odd rounds."""

    ratio: Ratio
    rivals: tuple[str, ...]
    is_disturbed: bool = False


def envelope(rates: Mapping[str, Floats], ours: str = OURS, interval: Interval = student_interval) -> Envelope:
    """Choose the best rival on every other round, compare with it on the rounds between; then the other way round.

    So every round is compared, and none with a rival chosen by it. An arm that was left out of most rounds had fallen
    behind, and is no rival: of a few rounds the luckiest would be chosen.
    :param rates: by arm (rounds,), higher is better; NaN where it was not measured
    """
    logs_of = {arm: np.log(rate) - np.log(rates[ours]) for arm, rate in rates.items() if arm != ours}
    most = max((int((~np.isnan(log)).sum()) for log in logs_of.values()), default=0)
    rivals = {arm: log for arm, log in logs_of.items() if 2 * int((~np.isnan(log)).sum()) >= most}
    is_even = np.arange(len(rates[ours])) % 2 == 0
    logs, chosen = [], []
    for choosing in (is_even, ~is_even):
        level = {arm: float(np.nanmean(log[choosing])) for arm, log in rivals.items() if _has_any(log[choosing])}
        if level:
            chosen.append(max(level, key=level.__getitem__))
            logs.append(-rivals[chosen[-1]][~choosing])
    return Envelope(paired_ratio(np.concatenate(logs) if logs else np.array([]), interval), tuple(chosen))


def _has_any(values: Floats) -> bool:
    return bool((~np.isnan(values)).any())


def cleanest(
    clean: Mapping[str, Floats], whole: Mapping[str, Floats], interval: Interval = student_interval
) -> Envelope:
    """Return the envelope of the undisturbed rounds if there are enough of them, else of all, marked."""
    of_clean, of_whole = envelope(clean, interval=interval), envelope(whole, interval=interval)
    if of_clean.ratio.pairs >= min(LEAST_PAIRS, of_whole.ratio.pairs):
        return of_clean
    return Envelope(of_whole.ratio, of_whole.rivals, is_disturbed=True)


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request must keep to for its tokens to count, from the unloaded values without speculation."""

    ttft_ms: float
    tpot_ms: float

    @classmethod
    def of_unloaded(cls, results: Sequence[RequestResult]) -> Objective:
        """Return the objective from requests that were served one at a time without speculation."""
        ttft_ms = [value for result in results if (value := result.ttft_ms) is not None]
        tpot_ms = [value for result in results if (value := result.tpot_ms) is not None]
        return cls(TTFT_FACTOR * float(np.median(ttft_ms)), TPOT_FACTOR * float(np.median(tpot_ms)))

    def is_met(self, result: RequestResult) -> bool:
        """Return whether a request ended within the objective; an answer of one token has no TPOT to miss."""
        if result.outcome != "finished" or (ttft_ms := result.ttft_ms) is None:
            return False
        return ttft_ms <= self.ttft_ms and (result.tpot_ms or 0.0) <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class Goodput:
    """What of a load met its objective."""

    tokens_per_s: float
    share: float  # of the requests
    mean_tpot_ms: float  # over all finished requests

    @classmethod
    def of(cls, results: Sequence[RequestResult], objective: Objective, seconds: float) -> Goodput:
        """Return the goodput of a load that took so many seconds from its start to its last token."""
        good = [result for result in results if objective.is_met(result)]
        tpot_ms = [
            value for result in results if result.outcome == "finished" and (value := result.tpot_ms) is not None
        ]
        tokens = sum(result.output_tokens for result in good)
        return cls(
            tokens / seconds if seconds > 0 else 0.0,
            len(good) / len(results) if results else 0.0,
            float(np.mean(tpot_ms)) if tpot_ms else math.nan,
        )
