"""The load of `faser profile`: holds a number of requests of about one context length, for a number of steps.

Called by controller/calibrate/profile.py. Every stop on the way is a batch: so many requests at once, held while the
survey policy deals lengths, with prompts thrown in; then all are ended and the next one begins. Stops come in random
order and again and again until the time is used up, so that repeats of a cell lie minutes apart.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp

from ...env.workload.prompts import held_out_prompts
from ..engine.load_generator import connector
from ..errors import EngineError
from ..progress import ShowProgress

_PATH: Final = "/v1/completions"
_CHARACTERS_PER_TOKEN: Final = 4
_BATCH_LIMIT_S: Final = 90.0
_OVERTIME_S: Final = 5.0
PROMPT_TOKENS: Final = (16, 40, 90, 180, 350)  # of those thrown in
STEPS_BETWEEN_PROMPTS: Final = 10


@dataclass(frozen=True, slots=True)
class Stop:
    """One batch: requests, tokens of each one's prompt, and steps to hold it."""

    requests: int
    context_tokens: int
    steps: int


@dataclass(frozen=True, slots=True)
class Grid:
    """Which stops there are. Tokens unless said otherwise."""

    requests: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
    contexts: tuple[int, ...] = (32, 200, 700)
    most_tokens: int = 9_000  # prompts of one stop: they take time and are prompts like any other
    steps: int = 40  # few, so that every kind comes up often: the machine's speed changes from minute to minute

    def stops(self, max_requests: int, max_context: int, kv_tokens: int) -> list[Stop]:
        """Return the stops that fit an engine."""
        room = self.steps * 3  # tokens a request adds meanwhile, at a high acceptance
        return [
            Stop(requests, context, self.steps)
            for requests in self.requests
            for context in self.contexts
            if requests <= max_requests
            and context + room < max_context
            and requests * context <= self.most_tokens
            and (not kv_tokens or requests * (context + room) < 0.85 * kv_tokens)
        ]


class SurveyLoad:
    """Drives one server; `batches` counts what was held so far."""

    def __init__(self, url: str, model: str, grid: Sequence[Stop], seed: int) -> None:
        self.batches = 0
        self.cut = 0  # of these, held for fewer steps than planned
        self.failures = 0
        self._url = url
        self._model = model
        self._grid = list(grid)
        self._chance = random.Random(seed)
        texts = [prompt.text for prompt in held_out_prompts()]
        self._chance.shuffle(texts)
        self._text = " ".join(texts)
        self._serial = 0

    async def run(self, end_s: float, progress: ShowProgress, visits: int | None = None) -> None:
        """Visit all stops again and again until the monotonic clock says `end_s`, or `visits` times."""
        begin_s = time.monotonic()
        async with aiohttp.ClientSession(
            self._url, connector=connector(), timeout=aiohttp.ClientTimeout(total=None)
        ) as session:
            visit = 0
            while visits is None or visit < visits:
                order = list(self._grid)
                self._chance.shuffle(order)
                for number, stop in enumerate(order):
                    if time.monotonic() >= end_s:
                        return
                    by_time = (time.monotonic() - begin_s) / max(end_s - begin_s, 1e-9)
                    by_visit = (visit + number / len(order)) / visits if visits else 0.0
                    progress(f"visit {visit + 1}: {stop.requests} requests", max(by_time, by_visit))
                    await self._hold(session, stop, min(end_s + _OVERTIME_S, time.monotonic() + _BATCH_LIMIT_S))
                visit += 1

    async def _hold(self, session: aiohttp.ClientSession, stop: Stop, until_s: float) -> None:
        """Run one batch, end it, and wait until the engine is rid of it."""
        counted = _Steps()
        tasks = [
            asyncio.create_task(self._stream(session, stop.context_tokens, 1 << 20, counted if index == 0 else None))
            for index in range(stop.requests)
        ]
        try:
            async with asyncio.timeout(max(until_s - time.monotonic(), 0.0)):
                thrown = 0
                while counted.steps < stop.steps and not tasks[0].done():
                    await counted.changed.wait()
                    counted.changed.clear()
                    if counted.steps >= STEPS_BETWEEN_PROMPTS * (thrown + 1):
                        tokens = PROMPT_TOKENS[self._chance.randrange(len(PROMPT_TOKENS))]
                        tasks.append(asyncio.create_task(self._stream(session, tokens, 1, None)))
                        thrown += 1
        except TimeoutError:
            self.cut += 1
        finally:
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                self.failures += isinstance(ended, Exception)
        self.batches += 1
        if self.failures > 5 + self.batches // 2:
            raise EngineError(f"{self.failures} requests of the survey failed", remedy="see the engine's log")

    async def _stream(
        self, session: aiohttp.ClientSession, tokens: int, max_tokens: int, counted: _Steps | None
    ) -> None:
        self._serial += 1
        body = {
            "model": self._model,
            "prompt": self._prompt(tokens),
            "temperature": 0.0,
            "stream": True,
            "ignore_eos": True,
            "max_tokens": min(max_tokens, 800),
        }
        try:
            async with session.post(_PATH, json=body) as response:
                if response.status != 200:
                    text = " ".join((await response.text())[:200].split())
                    raise EngineError(f"HTTP {response.status}: {text}")
                async for line in response.content:
                    if counted is not None and line.startswith(b"data:"):
                        counted.note()
        finally:
            if counted is not None:
                counted.changed.set()

    def _prompt(self, tokens: int) -> str:
        """Return a text of about `tokens` tokens that no other one begins with."""
        length = max(tokens - 4, 1) * _CHARACTERS_PER_TOKEN
        start = self._chance.randrange(max(len(self._text) - length, 1))
        return f"{self._serial:05d} {self._text[start : start + length]}"


class _Steps:
    """How many times one request was given tokens, which is how many steps it took part in."""

    def __init__(self) -> None:
        self.steps = 0
        self.changed = asyncio.Event()

    def note(self) -> None:
        self.steps += 1
        self.changed.set()
