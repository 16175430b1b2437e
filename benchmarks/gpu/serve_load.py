"""What serve.py sends to an engine and what it measures: closed loops and a replayed trace, step by step. Pure but for
the engine's clock; the dry run's engine has one of its own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# Prompts as ShareGPT's are cut to what keeps a part short; the paper names means of 755 and 200 tokens.
PROMPT_TOKENS, ANSWER_TOKENS = 512, 128
OPEN = "azure-conv"


class Engine(Protocol):
    """What generates."""

    def now_s(self) -> float:
        """Return its clock."""

    def wait_until(self, time_s: float) -> None:
        """Let time pass while nothing runs."""

    def add(self, name: str, prompt_tokens: int, answer_tokens: int) -> None:
        """Take in a request."""

    def step(self) -> list[tuple[str, int, bool]]:
        """Run a step; return of each request that got tokens its name, its tokens so far, and whether it is done."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, due `arrival_s` after the start; in a closed loop when another one is done."""

    arrival_s: float
    prompt_tokens: int
    answer_tokens: int


@dataclass(slots=True)
class Life:
    """What became of a request. Times in seconds on the engine's clock."""

    due_s: float
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0
    is_done: bool = False
    gained: list[tuple[float, int]] = field(default_factory=list)

    def told(self) -> list[float]:
        """Return TTFT in ms, TPOT in ms (0 for a single token), and tokens."""
        assert self.first_s is not None
        each_s = (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0
        return [round(1e3 * (self.first_s - self.due_s), 3), round(1e3 * each_s, 4), float(self.tokens)]


def closed_requests(load: int, rounds: int, seed: int) -> list[Asked]:
    """Return the requests of `load` clients; the first answers are staggered, so that the batch is at once mixed."""
    dice = random.Random(seed * 1000 + load)
    first = [max(1, ANSWER_TOKENS * (place + 1) // load) for place in range(load)]
    dice.shuffle(first)
    lengths = [*first, *[ANSWER_TOKENS] * (load * rounds)]
    return [Asked(0.0, dice.randint(PROMPT_TOKENS // 2, PROMPT_TOKENS * 3 // 2), length) for length in lengths]


def drive(engine: Engine, asked: Sequence[Asked], load: int | None) -> dict[str, Any]:
    """Serve the requests, `load` at a time or, without one, as they are due; return what was measured.

    In a closed loop tokens per second are those between the end of the first `load` answers and the moment the last
    request is sent: the batch is full all the time.
    """
    waiting, lives = list(enumerate(asked)), dict[str, Life]()
    begun_s, running, done = engine.now_s(), 0, 0
    full_s: float | None = None
    last_sent_s = begun_s
    while waiting or running:
        while waiting and (running < load if load else begun_s + waiting[0][1].arrival_s <= engine.now_s()):
            number, request = waiting.pop(0)
            last_sent_s = engine.now_s()
            lives[f"{number}"] = Life(last_sent_s if load else begun_s + request.arrival_s)
            engine.add(f"{number}", request.prompt_tokens, request.answer_tokens)
            running += 1
        if not running:
            engine.wait_until(begun_s + waiting[0][1].arrival_s)
            continue
        for name, tokens, is_done in engine.step():
            life, at_s = lives[name], engine.now_s()
            life.first_s = at_s if life.first_s is None else life.first_s
            life.gained.append((at_s, tokens - life.tokens))
            life.last_s, life.tokens, life.is_done = at_s, tokens, is_done
            running -= is_done
            done += is_done
            if load and full_s is None and done >= load:
                full_s = at_s
    span = (full_s, last_sent_s) if load and full_s is not None else (begun_s, engine.now_s())
    tokens = sum(gain for life in lives.values() for at_s, gain in life.gained if span[0] < at_s <= span[1])
    told = [life.told() for life in list(lives.values())[load or 0 :]]
    return {"tokens_per_s": round(tokens / max(span[1] - span[0], 1e-9), 2), "seconds": round(span[1] - span[0], 3),
            "requests": told}  # fmt: skip


class DryEngine:
    """An engine of the dry run: times and acceptance made up, on a clock that nobody waits for."""

    ROW_S, STEP_S, ROUND_S, CHANCE = 1e-4, 8e-3, 5e-4, 0.7

    def __init__(self, arm: str, seed: int = 0) -> None:
        self._arm, self._dice, self._clock_s = arm, random.Random(seed), 0.0
        self._requests: dict[str, list[int]] = {}  # name -> tokens so far, tokens wanted

    def now_s(self) -> float:
        """Return the made-up time."""
        return self._clock_s

    def wait_until(self, time_s: float) -> None:
        """Move the clock."""
        self._clock_s = max(self._clock_s, time_s)

    def add(self, name: str, prompt_tokens: int, answer_tokens: int) -> None:
        """Take in a request."""
        self._requests[name] = [0, answer_tokens]
        self._clock_s += prompt_tokens * self.ROW_S / 10

    def length(self) -> int:
        """Return the draft length of the arm; that of the controlled arms falls with the batch."""
        if self._arm[0] == "k":
            return int(self._arm[1:])
        return 0 if self._arm == "none" else max(0, 5 - len(self._requests) // 8)

    def step(self) -> list[tuple[str, int, bool]]:
        """Give everybody its tokens."""
        length = self.length()
        self._clock_s += self.STEP_S + self.ROUND_S * length + self.ROW_S * len(self._requests) * (1 + length)
        told = []
        for name, counts in list(self._requests.items()):
            accepted = 0
            while accepted < length and self._dice.random() < self.CHANCE:
                accepted += 1
            counts[0] = min(counts[0] + 1 + accepted, counts[1])
            told.append((name, counts[0], counts[0] == counts[1]))
            if told[-1][2]:
                del self._requests[name]
        return told
