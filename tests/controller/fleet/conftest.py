"""A fleet of fake engines: real HTTP servers that answer as vLLM's does, held by a carrier without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict

from faser.controller.engine.launch import free_port
from faser.controller.fleet.carrier import EngineSight
from faser.controller.fleet.fleet import Fleet
from faser.controller.fleet.front import Front
from faser.controller.fleet.sizing import SizeRule

ROLE = b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
WORD = b'data: {"choices": [{"delta": {"content": " word"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
DEAD = b'data: {"error": {"message": "EngineCore encountered an issue.", "code": 500}}\n\ndata: [DONE]\n\n'


@dataclass
class FakeEngine:
    """One server. Events say when it goes on; what it saw is kept."""

    name: str
    words: int = 3
    is_dead: bool = False  # vLLM after its engine core has died: alive, and of no use
    may_speak: asyncio.Event = field(default_factory=asyncio.Event)  # the first word
    may_end: asyncio.Event = field(default_factory=asyncio.Event)  # the others
    seen: list[tuple[str, bytes, CIMultiDict[str]]] = field(default_factory=list)
    drops: int = 0  # so many requests more lose their connection
    dies_amid: bool = False  # behind the first word of a stream, as vLLM with a killed engine core
    left: int = 0  # requests whose client went away
    url: str = ""
    _runner: web.AppRunner | None = None

    async def open(self) -> None:
        application = web.Application()
        application.router.add_get("/health", self._health)
        application.router.add_get("/v1/models", self._models)
        application.router.add_route("*", "/v1/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        port = free_port()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{port}"

    async def kill(self) -> None:
        """Close every connection, as the kernel does for a process that is killed."""
        if (runner := self._runner) is not None:
            self._runner = None
            assert runner.server is not None
            for connection in list(runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()

    @property
    def is_running(self) -> bool:
        return self._runner is not None

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.is_dead else 200)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.name}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append((request.path_qs, body, CIMultiDict(request.headers)))
        if self.drops:
            self.drops -= 1
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(60.0)
        try:
            return await self._said(request, json.loads(body or b"{}"))
        except asyncio.CancelledError:
            self.left += 1
            raise

    async def _said(self, request: web.Request, asked: dict[str, object]) -> web.StreamResponse:
        if not asked.get("stream"):
            await self.may_speak.wait()
            if self.is_dead:
                return web.json_response({"error": {"message": "EngineCore encountered an issue."}}, status=500)
            return web.json_response({"said": self.name}, status=int(str(asked.get("status", 200))))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await self.may_speak.wait()
        if self.is_dead:
            await response.write(DEAD)
            return response
        await response.write(ROLE)
        for _ in range(self.words):
            await response.write(WORD)
            await self.may_end.wait()
            if self.dies_amid:
                self.is_dead = True
                await response.write(DEAD)
                return response
        await response.write(DONE)
        return response


@dataclass
class FakeHolder:
    """Holds a fake engine; `sight` replaces what is seen of it."""

    engine: FakeEngine
    loop: asyncio.AbstractEventLoop
    sight: EngineSight | None = None
    is_stopped: bool = False

    def look(self) -> EngineSight:
        if self.sight is not None:
            return self.sight
        state = "dead" if self.engine.is_dead else "ready"
        seen = EngineSight(is_running=self.engine.is_running, health="ready", url=self.engine.url, where="core 7")
        return replace(seen, health="dead") if state == "dead" or not seen.is_running else seen

    def stop(self) -> None:
        self.is_stopped = True


@dataclass
class FakeCarrier:
    """Starts fake engines; `refusal` is why none starts."""

    loop: asyncio.AbstractEventLoop
    holders: list[FakeHolder] = field(default_factory=list)
    refusal: str = ""
    is_slow: bool = False  # engines start and are not ready

    def hold(self, name: str) -> FakeHolder:
        engine = FakeEngine(name)
        asyncio.run_coroutine_threadsafe(engine.open(), self.loop).result(5.0)
        holder = FakeHolder(engine, self.loop)
        if self.refusal:
            holder.sight = EngineSight(is_running=False, health="dead", reason=self.refusal)
        elif self.is_slow:
            holder.sight = EngineSight(is_running=True, health="dead", url=engine.url)
        self.holders.append(holder)
        return holder

    @property
    def engines(self) -> list[FakeEngine]:
        return [holder.engine for holder in self.holders]


@dataclass
class RunningFleet:
    """A fleet whose ticks the test makes, and its entry point."""

    fleet: Fleet
    carrier: FakeCarrier
    url: str
    session: aiohttp.ClientSession
    told: list[str]
    now_s: list[float]

    async def tick(self, seconds: float = 0.0) -> None:
        """Let time pass and the fleet look and decide."""
        self.now_s[0] += seconds
        await self.fleet.tick()

    async def serve(self, *, at_once: bool = True) -> None:
        """Have every replica start and serve."""
        await self.tick()
        await self.tick()
        for engine in self.carrier.engines:
            if at_once:
                engine.may_speak.set()
                engine.may_end.set()

    def ask(self, *, stream: bool = True, **more: object) -> asyncio.Task[tuple[int, bytes]]:
        """Begin a request; its status and all of its answer come with the task."""
        return asyncio.create_task(self._ask({"stream": stream, **more}))

    async def _ask(self, body: dict[str, object]) -> tuple[int, bytes]:
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as response:
            return response.status, await response.read()

    async def until(self, probe: Callable[[], object]) -> None:
        """Wait for something to become true."""
        async with asyncio.timeout(5.0):
            while not probe():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running_fleet(rule: SizeRule, **options: float) -> AsyncIterator[RunningFleet]:
    """Open a fleet of fake engines on a free port; it decides when the test says so."""
    loop, told, now_s = asyncio.get_running_loop(), list[str](), [100.0]
    carrier = FakeCarrier(loop)
    fleet = Fleet(carrier, rule, told.append, clock=lambda: now_s[0], **options)
    front, port = Front(fleet), free_port()
    await front.open("127.0.0.1", port)
    try:
        async with aiohttp.ClientSession() as session:
            yield RunningFleet(fleet, carrier, f"http://127.0.0.1:{port}", session, told, now_s)
    finally:
        await front.close()
        await fleet.close()
        for engine in carrier.engines:
            await engine.kill()


@pytest.fixture(name="running_fleet")
def fleet_opener() -> Callable[..., contextlib.AbstractAsyncContextManager[RunningFleet]]:
    """Return `running_fleet`."""
    return running_fleet
