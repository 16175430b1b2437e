"""The policy of `faser profile`: it serves nobody well, it shows every pattern of draft lengths again and again.

For each number of requests it deals a shuffled deck: the same length for all, mixed lengths, and rests in which nobody
drafts, so that drafters have something to catch up with. Where splits are offered each has some steps, with as many on
the whole device in between. Deterministic, as every policy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from ...env.estimate.engine_state import EngineState
from ...env.spaces import Action, Capabilities, Lengths
from .policy import PolicyError

REST_STEPS = (4, 8)  # steps without drafts, the catching up follows
SPLIT_RECORDS = 24  # under a split, and as many before the next one
PRUNED_SHARE = 0.5  # of the steps, where the engine has exit heads
Pattern = tuple[int, ...]  # lengths, dealt to the requests in turn


@dataclass(slots=True)
class Deck:
    """The patterns for one number of requests, dealt in random order without repetition until all were seen."""

    patterns: tuple[Pattern, ...]
    chance: random.Random
    left: list[Pattern] = field(default_factory=list)

    def deal(self) -> Pattern:
        """Return the next pattern."""
        if not self.left:
            self.left = list(self.patterns)
            self.chance.shuffle(self.left)
        return self.left.pop()


class ProfilingPolicy:
    """Another pattern in each step."""

    def __init__(self, capabilities: Capabilities, seed: int = 0) -> None:
        self.name = f"survey:{seed}"
        self._k_max = capabilities.k_max
        self._chance = random.Random(seed)
        self._prune = capabilities.released_prune
        self._decks: dict[int, Deck] = {}
        self._rest_steps = 0
        self._splits, self._decisions = len(capabilities.splits), 0

    @classmethod
    def parse(cls, text: str, capabilities: Capabilities) -> ProfilingPolicy:
        """Read the seed of survey:SEED."""
        if not text.isdecimal() or len(text) > 9:
            raise PolicyError(f"policy 'survey:{text}': expected a number, e.g. survey:0")
        return cls(capabilities, int(text))

    def act(self, state: EngineState) -> Action:
        """Return the next pattern; requests that are still to come get one of its lengths."""
        decoding = np.flatnonzero(state.decoding())
        lengths = np.zeros(state.requests.size, np.int64)
        pattern = self._next(len(decoding))
        lengths[decoding] = dealt(pattern, len(decoding))
        split = self._split() if self._splits > 1 else None
        prune = self._prune if self._prune is not None and self._chance.random() < PRUNED_SHARE else None
        return Action(lengths, pattern[0], prune=prune, split=split, reason=f"{self.name}: {pattern}")

    def _split(self) -> int:
        turn, self._decisions = self._decisions // SPLIT_RECORDS, self._decisions + 1
        return 1 + turn // 2 % (self._splits - 1) if turn % 2 else 0

    def _next(self, requests: int) -> Pattern:
        if self._rest_steps > 0:
            self._rest_steps -= 1
            return (0,)
        if requests not in self._decks:
            self._decks[requests] = Deck(patterns(requests, self._k_max), self._chance)
        pattern = self._decks[requests].deal()
        if pattern == REST:
            self._rest_steps = self._chance.choice(REST_STEPS) - 1
            return (0,)
        return pattern


REST: Pattern = ()


def patterns(requests: int, k_max: int) -> tuple[Pattern, ...]:
    """Return the distinct patterns for this many requests, and a rest."""
    middle = (k_max + 1) // 2
    shapes: list[Pattern] = [
        *((length,) for length in range(k_max + 1)),
        (k_max, 0),
        (k_max, *(0,) * max(requests - 1, 0)),
        (middle, 0, 0, 0),
        (k_max, 1),
        tuple(range(k_max, -1, -1)),
        (1, 1, 0),
    ]
    seen: dict[tuple[int, ...], Pattern] = {}
    for pattern in shapes:
        seen.setdefault(tuple(sorted(dealt(pattern, max(requests, 1)).tolist())), pattern)
    return (*seen.values(), REST)


def dealt(pattern: Pattern, requests: int) -> Lengths:
    """Return (requests,) lengths: the pattern, repeated."""
    return np.resize(np.array(pattern, np.int64), requests)
