"""Whether a mechanism pays, found out by measuring: seconds per emitted token with and without it, by batch size.

One gate for each mechanism: pruning (pruning/runner.py), drafting ahead (overlap/remote_drafting.py), two groups
(ping_pong.py), rows that leave V2's draft batch (drafting/rounds_gate.py). Pure; who steps asks before a step and
reports after it. A few steps with the mechanism are compared with the few without it just before: a text that gets
easier, or a machine that gets slower, lasts for more steps than that, and would make step after step look like
evidence. Where it is not faster beyond chance it stays off, but for a few probing steps. With pruning, what is asked
in one step holds for the next one's verification, so that no decision can know the drafts it cuts (a step's time
depends on how long its drafts grew).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

PROBE_STEPS: Final = 8  # steps in a row with it, and without, while it is not known which is faster
LEAST_STEPS: Final = 4  # told of such a row; with fewer it is no evidence
EVIDENCE_PAIRS: Final = 12  # of such rows before anything is believed
EVIDENCE_STEPS: Final = EVIDENCE_PAIRS * PROBE_STEPS  # of each kind
REPROBE_STEPS: Final = 512  # steps after which the slower kind is tried again; doubled while that changes nothing,
LAST_REPROBE_STEPS: Final = 4096  # ... up to so many,
DOUBT_STEPS: Final = 64  # ... and few behind a row that surprises
SURPRISE: Final = 3.0  # standard deviations of the pairs
MEMORY_PAIRS: Final = 32.0  # older ones are forgotten
LEAST_DEVIATIONS: Final = 2.5  # by so many standard errors it must be faster: a wrong yes costs every step


@dataclass(slots=True)
class Pairs:
    """Logarithms of the time per token with the mechanism over that without, of neighbouring rows of steps; fading."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, log_ratio: float) -> None:
        """Take in one pair."""
        keep = 1.0 - 1.0 / MEMORY_PAIRS
        self.count = keep * self.count + 1.0
        self.total = keep * self.total + log_ratio
        self.squares = keep * self.squares + log_ratio * log_ratio

    def mean(self) -> float:
        """Return their mean."""
        return self.total / self.count

    def deviation(self) -> float:
        """Return the standard deviation of one of them."""
        variance = self.squares / self.count - self.mean() ** 2
        return math.sqrt(max(variance, 0.0) * self.count / (self.count - 1.0))

    def error(self) -> float:
        """Return the mean's standard error."""
        return self.deviation() / math.sqrt(self.count)


@dataclass(slots=True)
class _BatchShape:
    """One batch size: what was compared, and the steps that are to be."""

    asked: int = 0
    pairs: Pairs = field(default_factory=Pairs)
    compared: int = 0  # pairs, none forgotten
    is_on: bool = False  # the kind of the newest steps
    steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=PROBE_STEPS))  # seconds, tokens
    before: float | None = None  # seconds per token of the row before, which is of the other kind
    probe_at: int | None = None  # of `asked`, once it is known which kind is faster
    wait: int = REPROBE_STEPS  # steps from a probe to the next one

    def turn(self) -> None:
        """Compare the row of steps that has just ended with the one before it, or keep it for that."""
        row = _time_per_token(self.steps)
        self.steps.clear()
        if row is None or self.before is None:
            self.before = row
            return
        log_ratio = math.log(row / self.before)
        self._compare(log_ratio if self.is_on else -log_ratio)
        self.before = None

    def _compare(self, log_ratio: float) -> None:
        if (faster := self.is_faster()) is not None:
            is_surprise = abs(log_ratio - self.pairs.mean()) > SURPRISE * self.pairs.deviation()
            is_doubted = self.wait == DOUBT_STEPS and (log_ratio < 0.0) != faster
            longer = min(max(2 * self.wait, REPROBE_STEPS), LAST_REPROBE_STEPS)
            self.wait = DOUBT_STEPS if is_surprise or is_doubted else longer
            self.probe_at = self.asked + self.wait
        self.pairs.add(log_ratio)
        self.compared += 1

    def is_faster(self) -> bool | None:
        """Return whether the mechanism makes steps faster beyond chance; None while too little was compared."""
        if self.compared < EVIDENCE_PAIRS:
            return None
        return -self.pairs.mean() > LEAST_DEVIATIONS * self.pairs.error()

    def is_probing(self) -> bool:
        """Return whether the step that is asked about tries the slower kind."""
        if self.probe_at is None or self.asked >= self.probe_at + PROBE_STEPS:
            self.probe_at = self.asked + self.wait
        return self.asked >= self.probe_at


class Gate:
    """One engine's evidence."""

    def __init__(self) -> None:
        self._shapes: dict[int, _BatchShape] = {}

    def ask(self, requests: int) -> bool:
        """Tell whether the next step may use it."""
        shape = self._shapes.setdefault(_octave(requests), _BatchShape())
        shape.asked += 1
        faster = shape.is_faster()
        if faster is None:
            return shape.asked // PROBE_STEPS % 2 == 1
        return faster != shape.is_probing()

    def note(self, requests: int, has_used: bool, time_s: float, tokens: int) -> None:
        """Take in a step that could have used it."""
        shape = self._shapes.setdefault(_octave(requests), _BatchShape())
        if has_used != shape.is_on:
            shape.turn()
            shape.is_on = has_used
        shape.steps.append((time_s, tokens))

    def gain(self, requests: int) -> float | None:
        """Return by which share it shortens the time per token at this batch size; None while unknown."""
        shape = self._shapes.get(_octave(requests))
        return None if shape is None or shape.is_faster() is None else 1.0 - math.exp(shape.pairs.mean())


def _time_per_token(steps: deque[tuple[float, int]]) -> float | None:
    """Return seconds per token over a row of steps; None where that says nothing."""
    time_s, tokens = sum(time_s for time_s, _ in steps), sum(tokens for _, tokens in steps)
    return time_s / tokens if len(steps) >= LEAST_STEPS and tokens and time_s > 0.0 else None


def _octave(requests: int) -> int:
    return max(requests, 1).bit_length()
