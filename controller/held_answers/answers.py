"""The answers that all arms of a benchmark are held to: recorded by the first server that is up, given to every one.

Called by controller/bench/arms.py; inside the servers controller/held_answers/engine.py does the holding.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import aiohttp
import msgspec

from ...models.embedded.pair import TARGET_NAME
from ..errors import EngineError

AT_ONCE: Final = 32  # answers that are recorded together
ANSWER_S: Final = 600.0  # for one of them, on a crowded machine
TOLD_EVERY: Final = 100  # answers: minutes pass until all are there

Answer = tuple[list[int], list[int]]  # tokens of the prompt with its template, tokens of the answer


class HeldServer(Protocol):
    """What recording and holding need of an arm."""

    name: str

    @property
    def url(self) -> str:
        """The server's address."""

    async def hold(self, path: Path) -> None:
        """Hold the server to the answers of a file."""


class _Choice(msgspec.Struct):
    token_ids: list[int]


class _Reply(msgspec.Struct):
    prompt_token_ids: list[int]
    choices: list[_Choice]


@dataclass(slots=True)
class Answers:
    """The recorded answers, in a file."""

    prompts: Sequence[str]
    max_tokens: int  # of each answer
    path: Path
    tell: Callable[[str], None]
    temperature: float = 0.0  # at which they are sampled
    is_recorded: bool = field(default=False, init=False)

    async def hold(self, server: HeldServer) -> None:
        """Hold a server to the answers; the first one has to give them."""
        if not self.is_recorded:
            self.tell(f"{server.name} answers {len(self.prompts)} prompts, to which all are then held")
            answers = await record(server, self.prompts, self.max_tokens, self.temperature, self.tell)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(answers))
            self.is_recorded = True
        await server.hold(self.path)


async def record(
    server: HeldServer, prompts: Sequence[str], max_tokens: int, temperature: float = 0.0,
    tell: Callable[[str], None] | None = None,
) -> list[Answer]:  # fmt: skip
    """Return a server's own answers to prompts, all of the same length; raise EngineError if it gives none."""
    body = {
        "model": TARGET_NAME, "max_tokens": max_tokens, "temperature": temperature, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    slots, timeout = asyncio.Semaphore(AT_ONCE), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session:
        bodies = [body | {"messages": [{"role": "user", "content": text}]} for text in prompts]
        count = itertools.count(1)

        async def told(body: Mapping[str, object]) -> Answer:
            answer = await _answer(session, slots, server.name, body)
            if (done := next(count)) % TOLD_EVERY == 0 and tell is not None:
                tell(f"{server.name} has answered {done} of {len(prompts)}")
            return answer

        return list(await asyncio.gather(*map(told, bodies)))


async def _answer(
    session: aiohttp.ClientSession, slots: asyncio.Semaphore, name: str, body: Mapping[str, object]
) -> Answer:
    async with slots, asyncio.timeout(ANSWER_S), session.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise EngineError(f"{name} answered {response.status} to a prompt to record", "200")
        try:
            reply = msgspec.json.decode(await response.read(), type=_Reply)
        except msgspec.DecodeError as error:
            raise EngineError(f"{name} gave an answer without its tokens: {error}") from None
    return reply.prompt_token_ids, reply.choices[0].token_ids
