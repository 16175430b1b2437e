"""The load of `faser demo --stages`: clients that ask the same prompts again and again, each answer held to the first.

Called by controller/demo/stages.py. What one rank said without FASER is what the pipeline must say, token for token:
greedy, in float32.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from ...env.workload.prompts import held_out_prompts
from ..errors import EngineError

CLIENTS: Final = 6
PROMPTS: Final = 18
LONGEST_PROMPT: Final = 120  # tokens
ANSWER_TOKENS: Final = 64
_PATH: Final = "/v1/completions"
_REQUEST_S: Final = 120.0

Tokens = list[int]


def chosen_prompts() -> list[str]:
    """Return short held-out prompts of all kinds."""
    short = [prompt.text for prompt in held_out_prompts() if prompt.tokens <= LONGEST_PROMPT]
    return short[:: max(len(short) // PROMPTS, 1)][:PROMPTS]


@dataclass(slots=True)
class Answer:
    """One answer, and how many of its tokens one rank would not have said there."""

    ended_s: float  # since the load began
    tokens: int
    wrong: int
    ms_per_token: float


def wrong_tokens(said: Sequence[int], expected: Sequence[int]) -> int:
    """Count the tokens that differ, and those that are missing or too many."""
    return sum(one != other for one, other in zip(said, expected, strict=False)) + abs(len(said) - len(expected))


@dataclass(slots=True)
class StageClients:
    """Clients of one server; `expected` is filled in by `record`."""

    url: str
    model: str
    prompts: Sequence[str]
    expected: list[Tokens] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    began_s: float = 0.0

    async def record(self) -> list[Tokens]:
        """Return the answer to each prompt, as many at once as there will be clients."""
        slots = asyncio.Semaphore(CLIENTS)

        async def one(session: aiohttp.ClientSession, prompt: str) -> Tokens:
            async with slots:
                return await self._ask(session, prompt)

        async with self._session() as session:
            return list(await asyncio.gather(*(one(session, prompt) for prompt in self.prompts)))

    async def serve(self, duration_s: float, stop: asyncio.Event) -> None:
        """Ask until the time is over, and finish what was begun."""
        self.began_s = time.monotonic()
        async with self._session() as session:
            await asyncio.gather(*(self._client(session, number, duration_s, stop) for number in range(CLIENTS)))

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(total=_REQUEST_S))

    async def _client(
        self, session: aiohttp.ClientSession, number: int, duration_s: float, stop: asyncio.Event
    ) -> None:
        while time.monotonic() - self.began_s < duration_s and not stop.is_set():
            place = number % len(self.prompts)
            number += CLIENTS
            asked_s = time.monotonic()
            try:
                said = await self._ask(session, self.prompts[place])
            except (EngineError, TimeoutError, aiohttp.ClientError) as error:
                self.failures.append(f"{type(error).__name__}: {error}"[:200])
                return
            now_s = time.monotonic()
            wrong = wrong_tokens(said, self.expected[place])
            self.answers.append(
                Answer(now_s - self.began_s, len(said), wrong, 1e3 * (now_s - asked_s) / max(len(said), 1))
            )

    async def _ask(self, session: aiohttp.ClientSession, prompt: str) -> Tokens:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0.0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        async with session.post(_PATH, json=body) as response:
            if response.status != 200:
                text = " ".join((await response.text())[:200].split())
                raise EngineError(f"HTTP {response.status}: {text}")
            choice = (await response.json())["choices"][0]
        return list(choice["token_ids"])
