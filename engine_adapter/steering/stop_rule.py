"""The stop rule of a lease, applied token by token: pure arithmetic, no vLLM, no torch.

The lease fits a rule to the engine's buffers, the drafter asks `advance` after each drafted token, and the controller
calibrates with the same `logit`. Must never look at the drawn token: c_j is a function of the tokens before j, so
dropping d_j or what follows never depends on d_j's own value, and the output's distribution stays (DESIGN section 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from ..protocol import StopRule

# Confidence is limited to [LEAST, 1 - LEAST]: a logit of at most 13.8 in magnitude, so that no product overflows and
# float32's nearest neighbour of 1 is not infinitely sure.
LEAST: Final = 1e-6


def logit(confidence: float) -> float:
    """Return log(c / (1 - c)) of the limited confidence."""
    limited = min(max(confidence, LEAST), 1.0 - LEAST)
    return math.log(limited / (1.0 - limited))


def sigmoid(value: float) -> float:
    """Return 1 / (1 + exp(-value)) without overflow."""
    if value >= 0:
        return 1.0 / (1.0 + math.exp(-value))
    grown = math.exp(value)
    return grown / (1.0 + grown)


def fitted(rule: StopRule, length: int) -> StopRule:
    """Return the rule with one entry per position up to `length`: cut, or its last entry repeated."""
    lists = (rule.slopes, rule.intercepts, rule.keep, rule.go_on)
    return StopRule(*(fitted_to(values, length) for values in lists))


def fitted_to(values: list[float], length: int) -> list[float]:
    """Return one value per position up to `length`: cut, or the last one repeated."""
    size = max(length, 1)
    return values[:size] + values[-1:] * (size - len(values))


def advance(rule: StopRule, position: int, survival: float, confidence: float) -> tuple[float, bool, bool]:
    """Judge the token at `position` (1 is the first): (survival with it, whether it is kept, whether to go on).

    :param survival: S_{position-1}, 1.0 before the first token.
    """
    slope, intercept = _at(rule.slopes, position), _at(rule.intercepts, position)
    survival *= sigmoid(intercept + slope * logit(confidence))
    is_kept = survival >= _at(rule.keep, position)
    return survival, is_kept, is_kept and survival >= _at(rule.go_on, position)


def kept_tokens(rule: StopRule, confidences: Sequence[float]) -> int:
    """Return how many tokens of a draft with these confidences are handed to verification."""
    survival = 1.0
    for position, confidence in enumerate(confidences, start=1):
        survival, is_kept, goes_on = advance(rule, position, survival, confidence)
        if not goes_on:
            return position if is_kept else position - 1
    return len(confidences)


class DraftEnds:
    """Where the draft of each batch row ends: at its length, or earlier by the rule.

    :param longest: the length of each row's draft without the rule, tokens.
    """

    def __init__(self, longest: Sequence[int]) -> None:
        self.lengths = list(longest)
        self._survival = [1.0] * len(self.lengths)

    def judge(self, rule: StopRule, position: int, rows: Sequence[int], confidences: Sequence[float]) -> None:
        """Take in the confidences of `rows` at `position` (1 is the first)."""
        for row, confidence in zip(rows, confidences, strict=True):
            self._survival[row], is_kept, goes_on = advance(rule, position, self._survival[row], confidence)
            if not goes_on:
                self.lengths[row] = position if is_kept else position - 1


def _at(values: list[float], position: int) -> float:
    return values[min(position, len(values)) - 1]
