"""A server of a benchmark in this process, that streams as vLLM does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from faser.controller.bench.arm import Bed, Drafting
from faser.controller.errors import EngineError


class FakeArm:
    """A server in this process: every `step_s` each request gets `burst` tokens, unless it is frozen."""

    def __init__(self, name: str, step_s: float = 0.004, burst: int = 1, lives: int | None = None) -> None:
        self.name, self.step_s, self.burst, self.lives = name, step_s, burst, lives
        self.engine: Any = self
        self.freezes, self.emitted, self.ended = 0, 0, False
        self.is_halted = False
        self.mended = 0
        self.held: list[Path] = []
        self.recorded = 0  # answers
        self.frozen_s = 0.0  # of CPU time that the only thread used while frozen
        self._running = asyncio.Event()
        self._server: TestServer | None = None

    async def open(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        self._server = TestServer(app)
        await self._server.start_server()
        self.is_halted = False
        self._running.set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return str(self._server.make_url("/"))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        wanted = body["max_tokens"]
        if body.get("return_token_ids"):
            self.recorded += 1
            return web.json_response({"prompt_token_ids": [1], "choices": [{"token_ids": [2] * wanted}]})
        response = web.StreamResponse()
        await response.prepare(request)
        done = 0
        while done < wanted:
            await self._running.wait()
            await asyncio.sleep(self.step_s)
            done = min(done + self.burst, wanted)
            self.emitted += self.burst
            choice = {"delta": {"content": "x"}, "finish_reason": "length" if done == wanted else None}
            event = {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": done}}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        return response

    async def freeze(self) -> None:
        self.freezes += 1
        if self.lives is not None and self.freezes > self.lives:
            raise EngineError("vLLM ended with code 9: out of memory")
        self._running.clear()

    async def thaw(self) -> None:
        self.is_halted = False
        self._running.set()

    async def mend_sampling(self) -> None:
        assert not self.is_halted
        self.mended += 1

    async def hold(self, path: Path) -> None:
        assert not self.is_halted
        self.held.append(path)

    def halt(self) -> None:
        self.is_halted = True

    def wake(self) -> None:
        self.is_halted = False

    def wait_ready(self, bed: Bed) -> None:
        if self.name == "ngram":
            raise EngineError("vLLM ended with code 1 while starting: no such method")

    def require_running(self) -> None:
        pass

    def cpu_s(self) -> float:
        return 0.0

    def thread_cpu_s(self) -> dict[int, float]:
        return {7: self.emitted / 1000 + self.frozen_s}

    async def drafting(self) -> Drafting:
        assert not self.is_halted  # a stopped server never answers
        return Drafting(2 * self.emitted, self.emitted)

    async def close(self) -> None:
        if self._server is not None:
            self._running.set()
            await self._server.close()
            self._server = None

    def end(self) -> None:
        self.ended = True
