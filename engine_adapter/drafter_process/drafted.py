"""What a drafter process went on with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Drafted:
    """Tokens that a drafter went on with, and its probability of its own top token at each."""

    tokens: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()

    def behind(self, count: int) -> Drafted:
        """Return all but the first `count` tokens."""
        return Drafted(self.tokens[count:], self.confidences[count:])

    def first(self, count: int) -> Drafted:
        """Return the first `count` tokens."""
        return Drafted(self.tokens[:count], self.confidences[:count])
