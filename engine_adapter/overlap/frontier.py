"""Frontiers: what was drafted behind a chunk before it was verified, and when that is of use. Pure: standard library.

A chain is everything the drafter assumed for a request since its last sampled token: the chunk handed to
verification, a guess of the token behind it, and the frontier. If what verification let stand is the beginning of
the chain, the rest of the chain is a draft for the next step; otherwise it is thrown away. Used by the runner's part
(frontier_runner.py). It never changes what is sampled: a frontier is a draft, and vLLM verifies drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ..drafter_process.drafted import Drafted

# A hit rate moves by a tenth with each outcome: about ten chunks are remembered, which follows a request from prose
# into a list within a few steps.
WEIGHT: Final = 0.1
PROBE_EVERY: Final = 16  # chunks of a request without frontiers before one is tried again


@dataclass(slots=True)
class Outcomes:
    """What became of frontiers; `take` of each request counts exactly one of these."""

    hits: int = 0
    rejected: int = 0  # a token of the chunk was rejected
    other_bonus: int = 0  # the chunk was accepted, and another token followed than was guessed
    late: int = 0  # not drafted in time

    @property
    def misses(self) -> int:
        """Frontiers that were drafted, or begun, for nothing."""
        return self.rejected + self.other_bonus + self.late


@dataclass(slots=True)
class Tally:
    """Tokens handed to verification, and how many of them the target accepted."""

    handed: int = 0
    accepted: int = 0

    def note(self, chunk: Sequence[int], sampled: Sequence[int]) -> None:
        """Take in what became of a chunk."""
        self.handed += len(chunk)
        differ = (place for place, pair in enumerate(zip(chunk, sampled, strict=False)) if pair[0] != pair[1])
        self.accepted += next(differ, min(len(chunk), len(sampled)))


@dataclass(slots=True)
class _Chain:
    chunk: tuple[int, ...]  # handed to verification
    ahead: Drafted | None = None  # guess first; None: not there yet


class Frontiers:
    """The chains in flight, one per request at most, and what became of earlier ones."""

    def __init__(self) -> None:
        self.outcomes = Outcomes()
        self._chains: dict[str, _Chain] = {}
        self._rates: dict[str, HitRate] = {}

    def is_wanted(self, request: str, serial_s: float, delay_s: float) -> bool:
        """Tell whether drafting ahead of this request's chunk pays on average; asked once per chunk.

        :param serial_s: what drafting after verification takes, and a hit saves.
        :param delay_s: what a miss costs: how long the drafter takes to leave a frontier for the next draft.
        """
        return self._rates.setdefault(request, HitRate()).pays(serial_s, delay_s)

    def open(self, request: str, chunk: Sequence[int]) -> None:
        """Note that a chunk went to verification and that the drafter goes on behind it."""
        self._chains[request] = _Chain(tuple(chunk))

    def fill(self, request: str, ahead: Drafted) -> None:
        """Note what was drafted behind the chunk; without effect if nobody waits for it."""
        if (chain := self._chains.get(request)) is not None and ahead.tokens:
            chain.ahead = ahead

    def is_awaited(self, request: str, sampled: Sequence[int]) -> bool:
        """Tell whether a frontier that is not there yet could be of use behind these sampled tokens."""
        chain = self._chains.get(request)
        return chain is not None and chain.ahead is None and tuple(sampled[: len(chain.chunk)]) == chain.chunk

    def take(self, request: str, sampled: Sequence[int], most: int) -> Drafted | None:
        """Return at most `most` tokens to verify next, None if the chain is of no use; either way it ends here."""
        chain = self._chains.pop(request, None)
        if chain is None:
            return None
        found = self._judge(chain, tuple(sampled))
        self._rates.setdefault(request, HitRate()).note(found is not None)
        return None if found is None else found.first(most)

    def _judge(self, chain: _Chain, sampled: tuple[int, ...]) -> Drafted | None:
        size = len(chain.chunk)
        if sampled[:size] != chain.chunk:
            self.outcomes.rejected += 1
            return None
        if chain.ahead is None:
            self.outcomes.late += 1
            return None
        told = len(sampled) - size  # tokens behind the chunk: the bonus, or none where pruning ended the step
        if sampled[size:] != chain.ahead.tokens[:told] or told >= len(chain.ahead.tokens):
            self.outcomes.other_bonus += 1
            return None
        self.outcomes.hits += 1
        return chain.ahead.behind(told)

    def clear(self) -> None:
        """End every chain: of the requests that were not in this step; not counted."""
        self._chains.clear()

    def forget(self, requests: Iterable[str]) -> None:
        """Forget requests that ended."""
        for request in requests:
            self._chains.pop(request, None)
            self._rates.pop(request, None)


class HitRate:
    """How often a request's frontiers were of use, the newest ones counting most; a new request is given credit."""

    def __init__(self) -> None:
        self.value = 1.0
        self._idle = 0

    def note(self, is_hit: bool) -> None:
        """Take in an outcome."""
        self.value += WEIGHT * (is_hit - self.value)

    def pays(self, serial_s: float, delay_s: float) -> bool:
        """Tell whether a frontier wins more by hits than it loses by misses; from time to time it is tried anyway."""
        if self.value * serial_s >= (1.0 - self.value) * delay_s:
            self._idle = 0
            return True
        self._idle += 1
        if self._idle < PROBE_EVERY:
            return False
        self._idle = 0
        return True
