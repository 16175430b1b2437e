"""The policies that need no learning: off, one length for all, and a table by batch size.

They stand beside every other policy in every comparison. `LengthTable` counts as vLLM's Dynamic SD does: by
requests in the batch.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from ...env.estimate.engine_state import EngineState
from ...env.spaces import Action, Capabilities
from .policy import PolicyError

TURN_RECORDS: Final = 48  # of a split, then it is the next one's turn


def uniform(size: int, length: int, reason: str) -> Action:
    """Return the action that gives every request the same length."""
    return Action(np.full(size, length, np.int64), length, reason=reason)


@dataclass(slots=True)
class Off:
    """Never speculate."""

    name: str = "off"

    def act(self, state: EngineState) -> Action:
        """Return length 0 for all."""
        return uniform(state.requests.size, 0, "policy off")


@dataclass(slots=True)
class FixedLength:
    """The same length at any load."""

    length: int
    name: str = "fixed"

    @classmethod
    def parse(cls, text: str, capabilities: Capabilities) -> FixedLength:
        """Read the K of fixed:K."""
        return cls(_length(text, capabilities, f"fixed:{text}"), f"fixed:{text}")

    def act(self, state: EngineState) -> Action:
        """Return the fixed length for all."""
        return uniform(state.requests.size, self.length, f"policy {self.name}")


@dataclass(slots=True)
class LengthTable:
    """A length by the number of running requests: rows (first, last, length), last None for "and more"."""

    rows: tuple[tuple[int, int | None, int], ...]
    name: str = "table"

    @classmethod
    def parse(cls, text: str, capabilities: Capabilities) -> LengthTable:
        """Read the rows of table:1-4=3,5-16=1,17-=0; they must ascend without overlap."""
        spec = f"table:{text}"
        rows = tuple(_row(part, capabilities, spec) for part in text.split(","))
        for (_, last, _), (first, _, _) in itertools.pairwise(rows):
            if last is None or first <= last:
                raise PolicyError(f"policy {spec!r}: rows must ascend without overlap, as in table:1-4=3,5-16=1,17-=0")
        return cls(rows, spec)

    def length_for(self, requests: int) -> int:
        """Return the length for a batch of `requests`; 0 where no row applies."""
        for first, last, length in self.rows:
            if first <= requests and (last is None or requests <= last):
                return length
        return 0

    def act(self, state: EngineState) -> Action:
        """Return the row's length for all; with nobody in the batch that of one: who comes next drafts at once."""
        length = self.length_for(max(state.load.running, 1))
        return uniform(state.requests.size, length, f"{state.load.running} running: length {length} by {self.name}")


@dataclass(slots=True)
class SplitTurns:
    """The same length at any load, under each split of the engine's device in turn: serves who wants to see them."""

    length: int
    splits: int
    name: str = "turns"
    _decisions: int = 0

    @classmethod
    def parse(cls, text: str, capabilities: Capabilities) -> SplitTurns:
        """Read the K of turns:K."""
        spec = f"turns:{text}"
        return cls(_length(text, capabilities, spec), len(capabilities.splits), spec)

    def act(self, state: EngineState) -> Action:
        """Return the fixed length for all, and the split whose turn it is."""
        split = self._decisions // TURN_RECORDS % self.splits
        self._decisions += 1
        action = uniform(state.requests.size, self.length, f"split {split} by {self.name}")
        return msgspec.structs.replace(action, split=split)


def _row(part: str, capabilities: Capabilities, spec: str) -> tuple[int, int | None, int]:
    match = re.fullmatch(r"\s*(\d{1,6})(-?)(\d{0,6})=(\d{1,4})\s*", part)
    if match is None:
        raise PolicyError(f"policy {spec!r}: cannot read {part!r}, expected FIRST-LAST=LENGTH, e.g. 1-4=3 or 17-=0")
    first, dash, last, length = match.groups()
    if last and not dash:
        raise PolicyError(f"policy {spec!r}: cannot read {part!r}, expected FIRST-LAST=LENGTH")
    end = int(last) if last else (None if dash else int(first))
    if end is not None and end < int(first):
        raise PolicyError(f"policy {spec!r}: row {part!r} ends before it begins")
    return int(first), end, _length(length, capabilities, spec)


def _length(text: str, capabilities: Capabilities, spec: str) -> int:
    if not re.fullmatch(r"\d{1,4}", text) or int(text) > capabilities.k_max:
        raise PolicyError(
            f"policy {spec!r}: length {text!r}, expected 0..{capabilities.k_max} (the engine's num_speculative_tokens)"
        )
    return int(text)
