"""Tokens per second as an undisturbed machine would show them, sharper than the machine's noise. Pure.

Called by sliced_arms.py. On a shared machine a step takes its usual time or, in bursts of any length, a third more;
and which part of a text falls to which arm changes an arm's tokens by more than arms differ. So the two halves of a
rate are measured apart. What a step takes by its work comes from arms that take turns within seconds: the first
quartile at equal work (quantile regression, Koenker and Bassett 1978), which bursts do not reach. Which steps an arm
needs comes from whole answers of each arm to the same prompts: exact, and no clock is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import linprog

from faser.engine_adapter.arrays import Floats

QUARTILE: Final = 0.25


@dataclass(frozen=True, slots=True)
class Step:
    """One step: what it did, and what it took if that was measured."""

    kind: str  # steps of one kind run the same code
    turn: int
    work: tuple[float, ...]  # what the time's logarithm grows with; as many values in every step
    time_s: float = math.nan


@dataclass(frozen=True, slots=True)
class Answers:
    """How an arm answered one turn's prompts."""

    steps: tuple[Step, ...]
    tokens: int


def steady_rates(timed: Sequence[Step], answers: Mapping[str, Sequence[Answers]]) -> dict[str, list[float]]:
    """Return each arm's tokens per second in every turn, as jackknife pseudo-values.

    One fit serves all turns, so that they share its error; a pseudo-value is what its turn, steps and answers, adds to
    the whole, and the spread of pseudo-values is the error of their geometric mean.
    :param timed: the measured steps; a turn under 0 is of no answers, and always kept
    :param answers: by arm (turns,)
    :raises ValueError: if an arm's answers hold a kind of step that was not timed
    """
    turns = range(len(next(iter(answers.values()))))
    whole = _log_rates(timed, answers, set(turns))
    without = [_log_rates(timed, answers, set(turns) - {turn}) for turn in turns]
    count = len(turns)
    return {arm: [math.exp(count * whole[arm] - (count - 1) * one[arm]) for one in without] for arm in answers}


def _log_rates(timed: Sequence[Step], answers: Mapping[str, Sequence[Answers]], turns: set[int]) -> dict[str, float]:
    usual = UsualTime([step for step in timed if step.turn in turns or step.turn < 0])
    found = {}
    for arm, of_arm in answers.items():
        kept = [of_arm[turn] for turn in turns]
        time_s = math.fsum(usual.of(step) for answer in kept for step in answer.steps)
        found[arm] = math.log(sum(answer.tokens for answer in kept) / time_s)
    return found


class UsualTime:
    """What steps take by kind and work, fitted."""

    def __init__(self, timed: Sequence[Step]) -> None:
        self._kinds = sorted({step.kind for step in timed})
        logs = np.log([step.time_s for step in timed])
        self._fitted = quantile_regression(np.array([self._row(step) for step in timed]), logs, QUARTILE)

    def of(self, step: Step) -> float:
        """Return the usual time of a step, in seconds."""
        if step.kind not in self._kinds:
            raise ValueError(f"a step of the kind {step.kind!r} was answered with, and none was timed")
        return math.exp(float(np.dot(self._row(step), self._fitted)))

    def _row(self, step: Step) -> tuple[float, ...]:
        return (*(float(step.kind == kind) for kind in self._kinds), *step.work)


def quantile_regression(known: Floats, values: Floats, quantile: float) -> Floats:
    """Return the coefficients (n,) under whose line lies that share of the values.

    The dual of the usual linear program: as many variables as values, as many equations as coefficients.
    :param known: (values, n)
    """
    found = linprog(
        -values, A_eq=known.T, b_eq=(1.0 - quantile) * known.sum(axis=0), bounds=(0.0, 1.0), method="highs"
    )  # fmt: skip
    return -np.asarray(found.eqlin.marginals)
