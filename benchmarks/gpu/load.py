"""What part_serve.py sends to an engine and what it measures: closed loops, step by step. Pure but for the engine's
clock.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

PROMPT_TOKENS = 64, 191  # short, so that a part fits; differing, since imposed.py tells requests apart by them


class Engine(Protocol):
    """What generates."""

    def now_s(self) -> float:
        """Return its clock."""

    def add(self, name: str, prompt_tokens: int, answer_tokens: int) -> None:
        """Take in a request."""

    def step(self) -> list[tuple[str, int, bool]]:
        """Run a step; return of each request that got tokens its name, its tokens so far, and whether it is done."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, sent when a client is free."""

    prompt_tokens: int
    answer_tokens: int


@dataclass(slots=True)
class Life:
    """What became of a request. Times in seconds on the engine's clock."""

    sent_s: float
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0
    gained: list[tuple[float, int]] = field(default_factory=list)

    def tpot_ms(self) -> float:
        """Return the mean time per token behind the first, 0 for a single token."""
        assert self.first_s is not None
        return 1e3 * (self.last_s - self.first_s) / max(self.tokens - 1, 1)


def closed_requests(load: int, rounds: int, answer_tokens: int, seed: int) -> list[Asked]:
    """Return the requests of `load` clients; the first answers are staggered, so that the batch is at once mixed."""
    dice = random.Random(seed * 1000 + load)
    first = [max(1, answer_tokens * (place + 1) // load) for place in range(load)]
    dice.shuffle(first)
    answers = [*first, *[answer_tokens] * (load * rounds)]
    return [Asked(dice.randint(*PROMPT_TOKENS), answer) for answer in answers]


def drive(engine: Engine, asked: Sequence[Asked], load: int) -> dict[str, Any]:
    """Serve the requests, `load` at a time; return what was measured.

    Tokens per second are those between the moment every client has the first token of its first answer and the moment
    the last request is sent: the batch is full all the time.
    """
    waiting, lives = list(enumerate(asked)), dict[str, Life]()
    running = 0
    begun_s = full_s = last_sent_s = engine.now_s()
    while waiting or running:
        while waiting and running < load:
            number, request = waiting.pop(0)
            last_sent_s = engine.now_s()
            lives[f"{number}"] = Life(last_sent_s)
            engine.add(f"{number}", request.prompt_tokens, request.answer_tokens)
            running += 1
        for name, tokens, is_done in engine.step():
            life, at_s = lives[name], engine.now_s()
            if life.first_s is None:
                life.first_s = at_s
                full_s = at_s if int(name) < load else full_s
            life.gained.append((at_s, tokens - life.tokens))
            life.last_s, life.tokens = at_s, tokens
            running -= is_done
    span = (full_s, last_sent_s) if full_s < last_sent_s else (begun_s, engine.now_s())
    tokens = sum(gain for life in lives.values() for at_s, gain in life.gained if span[0] < at_s <= span[1])
    each_ms = sorted(life.tpot_ms() for life in list(lives.values())[load:] or lives.values())
    return {
        "tokens_per_s": round(tokens / max(span[1] - span[0], 1e-9), 2), "seconds": round(span[1] - span[0], 3),
        "tpot_ms": round(each_ms[len(each_ms) // 2], 4), "requests": len(lives),
    }  # fmt: skip
