"""Ping-pong groups: who is verified in a step while whose drafts are made. Pure: no engine, no clock.

Called by the scheduler's part (ping_pong.py) once per step. Requests are dealt into two groups of about the same
predicted phase time, which take turns. Whoever joins does so behind its own verification, whoever changes groups does
so on its own turn, so nobody ever loses a draft to the dealing, and nobody sits out more than two steps in a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

SMOOTHING: Final = 0.1
LEAST_GAIN: Final = 1.05  # what two groups must promise at the very best before they are tried


@dataclass(frozen=True, slots=True)
class GroupTurn:
    """One step: who is left out of it, and whether its drafts are made while the next one runs."""

    held: frozenset[str] = frozenset()
    is_deferred: bool = False


class Groups:
    """Which of two groups each request is in, and whose drafts are under way."""

    def __init__(self) -> None:
        self._group: dict[str, int] = {}
        self._up = 0  # the group of the newest step
        self._is_deferred = False  # its drafts are under way
        self._moved: frozenset[str] = frozenset()  # in that step, and not verified since

    def turn(self, weights: Mapping[str, float], is_wanted: bool) -> GroupTurn:
        """Return the next step's turn.

        :param weights: predicted phase time of each request that could decode, in any unit
        :param is_wanted: whether there shall be two groups, for which it takes two requests
        """
        flying = self._flying(weights)
        if len(flying) == len(weights):
            flying = set()  # nobody else is there: they go without drafts
        self._is_deferred = is_wanted and len(weights) > 1
        if not self._is_deferred:
            self._group, self._moved = {}, frozenset()
            return GroupTurn(frozenset(flying))
        self._up = 1 - self._up if flying else self._up
        ready = [name for name in weights if name not in flying]
        moved = self._even([name for name in ready if name not in self._moved], self._excess(weights, flying), weights)
        self._group = dict.fromkeys(flying | moved, 1 - self._up) | {
            name: self._up for name in ready if name not in moved
        }
        self._moved = frozenset(moved)
        return GroupTurn(frozenset(flying | moved), is_deferred=True)

    def land(self) -> None:
        """Note that the newest step's drafts are there already: somebody else made them, or nobody does."""
        self._is_deferred = False

    def _flying(self, weights: Mapping[str, float]) -> set[str]:
        """Return whose drafts are under way; a newcomer's are, whose prompt ended in that step."""
        if not self._is_deferred:
            return set()
        return {name for name in weights if self._group.get(name, self._up) == self._up}

    @staticmethod
    def _excess(weights: Mapping[str, float], flying: set[str]) -> float:
        return sum(-weight if name in flying else weight for name, weight in weights.items())

    @staticmethod
    def _even(movable: list[str], excess: float, weights: Mapping[str, float]) -> set[str]:
        """Return who leaves a group that is ahead by `excess`: nobody while one request less would not help much."""
        moved: set[str] = set()
        if not movable or excess <= max(weights.values()):
            return moved
        for name in sorted(movable, key=lambda name: -weights[name]):
            if abs(excess - 2.0 * weights[name]) < excess:
                moved.add(name)
                excess -= 2.0 * weights[name]
        return moved


@dataclass(slots=True)
class PhasePace:
    """What a row of verification and a drafted token take, and both phases of a whole step; measured, fading."""

    row_s: float = 0.0
    token_s: float = 0.0
    verify_s: float = 0.0  # of a step of all requests
    draft_s: float = 0.0

    def note(self, verify_s: float, rows: int, draft_s: float, tokens: int) -> None:
        """Take in a step's phases."""
        if rows:
            self.row_s = _faded(self.row_s, verify_s / rows)
        if tokens:
            self.token_s = _faded(self.token_s, draft_s / tokens)

    def note_whole(self, verify_s: float, draft_s: float) -> None:
        """Take in a step in which every request was verified and drafted in turn."""
        self.verify_s, self.draft_s = _faded(self.verify_s, verify_s), _faded(self.draft_s, draft_s)

    def weight(self, rows: int, tokens: int) -> float:
        """Return a request's predicted phase time; before anything was measured a row and a token count the same."""
        is_known = self.row_s > 0.0 and self.token_s > 0.0
        return rows * self.row_s + tokens * self.token_s if is_known else float(rows + tokens)

    def may_pay(self) -> bool:
        """Tell whether two groups could win anything if a half took half as long: the shorter phase is then hidden."""
        longer_s = max(self.verify_s, self.draft_s)
        return not longer_s or self.verify_s + self.draft_s >= LEAST_GAIN * longer_s


def _faded(old: float, new: float) -> float:
    return old + SMOOTHING * (new - old) if old else new
