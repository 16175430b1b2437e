"""Whether a mechanism pays, found out by measuring: seconds per emitted token with and without it, by batch size.

One gate for each mechanism: pruning (runner_pruning.py), drafting ahead (remote_drafting.py), two groups
(ping_pong.py). Pure; who steps asks before a step
and reports after it. Where the mechanism is not faster beyond chance it stays off, but for a few probing steps. With
pruning, what is asked in one step holds for the next one's verification, so that no decision can know the drafts it
cuts (a step's time depends on how long its drafts grew).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

PROBE_STEPS: Final = 8  # steps in a row with it, and without, while it is not known which is faster
EVIDENCE_STEPS: Final = 64  # of each kind before anything is believed
REPROBE_STEPS: Final = 512  # steps after which the slower kind is tried again
MEMORY_STEPS: Final = 1024.0  # older steps of a kind are forgotten
LEAST_DEVIATIONS: Final = 2.0  # by so many standard deviations it must be faster: a wrong yes costs every step


@dataclass(slots=True)
class Arm:
    """What steps of one kind took: sums over steps, fading."""

    steps: float = 0.0
    time_s: float = 0.0
    tokens: float = 0.0
    time_squared: float = 0.0
    product: float = 0.0
    tokens_squared: float = 0.0

    def add(self, time_s: float, tokens: int) -> None:
        """Take in one step."""
        keep = 1.0 - 1.0 / MEMORY_STEPS
        self.steps = keep * self.steps + 1.0
        self.time_s = keep * self.time_s + time_s
        self.tokens = keep * self.tokens + tokens
        self.time_squared = keep * self.time_squared + time_s * time_s
        self.product = keep * self.product + time_s * tokens
        self.tokens_squared = keep * self.tokens_squared + tokens * tokens

    def rate(self) -> tuple[float, float]:
        """Return seconds per token and the variance of that ratio (delta method)."""
        ratio = self.time_s / self.tokens
        spread = self.time_squared - 2.0 * ratio * self.product + ratio * ratio * self.tokens_squared
        return ratio, max(spread, 0.0) / (self.tokens * self.tokens)


@dataclass(slots=True)
class _Shape:
    """One batch size: both kinds, and how many steps were asked about."""

    asked: int = 0
    arms: tuple[Arm, Arm] = field(default_factory=lambda: (Arm(), Arm()))  # without, with it


class Gate:
    """One engine's evidence."""

    def __init__(self) -> None:
        self._shapes: dict[int, _Shape] = {}

    def ask(self, requests: int) -> bool:
        """Tell whether the next step may use it."""
        shape = self._shapes.setdefault(_octave(requests), _Shape())
        shape.asked += 1
        faster = self._faster(shape)
        if faster is None:
            return shape.asked // PROBE_STEPS % 2 == 1
        is_probing = shape.asked % REPROBE_STEPS < PROBE_STEPS
        return faster != is_probing

    def note(self, requests: int, has_used: bool, time_s: float, tokens: int) -> None:
        """Take in a step that could have used it."""
        shape = self._shapes.setdefault(_octave(requests), _Shape())
        shape.arms[has_used].add(time_s, tokens)

    def gain(self, requests: int) -> float | None:
        """Return by which share it shortens the time per token at this batch size; None while unknown."""
        shape = self._shapes.get(_octave(requests))
        if shape is None or not _is_known(shape):
            return None
        (off, _), (on, _) = (arm.rate() for arm in shape.arms)
        return 1.0 - on / off

    def _faster(self, shape: _Shape) -> bool | None:
        if not _is_known(shape):
            return None
        (off, off_variance), (on, on_variance) = (arm.rate() for arm in shape.arms)
        return off - on > LEAST_DEVIATIONS * math.sqrt(off_variance + on_variance)


def _is_known(shape: _Shape) -> bool:
    return all(arm.steps >= EVIDENCE_STEPS and arm.tokens > 0 for arm in shape.arms)


def _octave(requests: int) -> int:
    return max(requests, 1).bit_length()
