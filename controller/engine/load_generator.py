"""An open-loop load generator over the OpenAI streaming chat API: requests leave when they are due, ready or not.

Called by the demo and the benchmarks. It never retries (a retry would hide a failure), never opens more than
`max_connections` connections, and shares its core with the engine: one thread, typed JSON decoding.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec

from ...engine_adapter.steering.extra_args import CLIENT_TPOT, CLIENT_TTFT
from ...env.estimate.objectives import TimeObjective
from ...env.workload.workload import TimedRequest
from .load_summary import LoadSummary, RequestResult

_PATH: Final = "/v1/chat/completions"
_FAILURE_CHARACTERS: Final = 200
_EVENT_LIMIT_BYTES: Final = 1 << 20
IDLE_S: Final = 2.0


def connector() -> aiohttp.TCPConnector:
    """Return as many connections as are asked for; one that was idle for longer than IDLE_S is not used again.

    vLLM closes those that were for 5 s (0.32 envs.py, VLLM_HTTP_TIMEOUT_KEEP_ALIVE), a busy server a little later: a
    request sent just then would fail.
    """
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Where to send and how."""

    base_url: str
    model: str
    temperature: float = 0.0
    seed: int | None = None
    max_connections: int = 128  # requests beyond wait at the client, and their wait counts
    request_timeout_s: float = 300.0
    drain_s: float = 120.0  # after the last arrival; what is left then is a failure
    keep_text: bool = False
    ignore_eos: bool = False  # answer to the limit, so that every answer is the same amount of work
    has_chunk_usage: bool = True  # ask for token counts on each chunk: with speculation one chunk is several tokens


class _Delta(msgspec.Struct):
    content: str | None = None


class _StreamChoice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_StreamChoice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class _RequestFailed(Exception):
    """Ends one request; the text is the reason that is counted."""


class LoadGenerator:
    """One run over a list of requests. Counters may be read while it runs, for a live view.

    :param clock: seconds; one that stands still while the server is frozen leaves that time out of all that is measured
    """

    def __init__(
        self, requests: Sequence[TimedRequest], options: LoadOptions, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.options = options
        self.started_s = 0.0  # on the clock
        self.failures: list[str] = []
        self.results = [
            RequestResult(
                index, request.kind, request.prompt_id, request.arrival_s,
                class_name=request.class_name, objective=objective_of(request),
            )
            for index, request in enumerate(requests)
        ]  # fmt: skip
        self.arrived = 0
        self.in_flight = 0
        self.peak_in_flight = 0
        self.tokens = 0
        self._requests = requests
        self._decoder = msgspec.json.Decoder(_Chunk)
        self._clock = clock
        self._cpu_share = 0.0

    @property
    def elapsed_s(self) -> float:
        """Return the time since the run's start."""
        return self._clock() - self.started_s

    def summary(self) -> LoadSummary:
        """Sum up what was measured so far."""
        return LoadSummary.of(self.results, self.peak_in_flight, self._cpu_share)

    async def run(self, stop: asyncio.Event) -> LoadSummary:
        """Send all requests and wait for them; when `stop` is set, cancel what is in flight and return."""
        timeout = aiohttp.ClientTimeout(total=self.options.request_timeout_s)
        slots = asyncio.Semaphore(self.options.max_connections)
        cpu_s, self.started_s = time.thread_time(), self._clock()
        async with aiohttp.ClientSession(self.options.base_url, connector=connector(), timeout=timeout) as session:
            tasks: list[asyncio.Task[None]] = []
            try:
                await self._dispatch(session, slots, tasks, stop)
                await self._drain(tasks, stop)
            finally:
                await self._cancel(tasks)
        self._cpu_share = (time.thread_time() - cpu_s) / max(self.elapsed_s, 1e-9)
        return self.summary()

    async def _dispatch(
        self,
        session: aiohttp.ClientSession,
        slots: asyncio.Semaphore,
        tasks: list[asyncio.Task[None]],
        stop: asyncio.Event,
    ) -> None:
        for request, result in zip(self._requests, self.results, strict=True):
            if await _is_set_within(stop, request.arrival_s - self.elapsed_s):
                return
            self.arrived += 1
            tasks.append(asyncio.create_task(self._guarded(session, slots, request, result)))

    async def _drain(self, tasks: list[asyncio.Task[None]], stop: asyncio.Event) -> None:
        stopped = asyncio.create_task(stop.wait())
        waiting: set[asyncio.Task[None]] = set(tasks)
        deadline_s = self.elapsed_s + self.options.drain_s
        try:
            while waiting and not stop.is_set() and (left_s := deadline_s - self.elapsed_s) > 0:
                done, _ = await asyncio.wait([*waiting, stopped], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                waiting.difference_update(done)
        finally:
            stopped.cancel()
        if waiting and not stop.is_set():
            for result in self.results:
                if result.outcome == "pending":
                    result.outcome, result.failure = "failed", f"not finished {self.options.drain_s:g} s after the load"

    async def _cancel(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for result in self.results:
            if result.outcome == "pending":
                result.outcome = "cancelled"

    async def _guarded(
        self, session: aiohttp.ClientSession, slots: asyncio.Semaphore, request: TimedRequest, result: RequestResult
    ) -> None:
        async with slots:
            self.in_flight += 1
            self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
            try:
                await self._ask(session, request, result)
                result.outcome = "finished"
            except _RequestFailed as error:
                self._fail(result, str(error))
            except TimeoutError:
                self._fail(result, f"no end within {self.options.request_timeout_s:g} s")
            except aiohttp.ClientError as error:
                self._fail(result, f"{type(error).__name__}: {error}")
            finally:
                self.in_flight -= 1

    def _fail(self, result: RequestResult, reason: str) -> None:
        result.outcome, result.failure = "failed", reason[:_FAILURE_CHARACTERS]
        self.failures.append(result.failure)

    async def _ask(self, session: aiohttp.ClientSession, request: TimedRequest, result: RequestResult) -> None:
        result.sent_s = self.elapsed_s
        async with session.post(_PATH, json=self._body(request, result.index)) as response:
            if response.status != 200:
                text = " ".join((await response.text())[:_FAILURE_CHARACTERS].split())
                raise _RequestFailed(f"HTTP {response.status}: {text}")
            await self._read(response.content, result)
        if not result.finish_reason:
            raise _RequestFailed("the stream ended without a finish reason")

    def _body(self, request: TimedRequest, index: int) -> dict[str, object]:
        usage = {"include_usage": True, "continuous_usage_stats": self.options.has_chunk_usage}
        body: dict[str, object] = {
            "model": self.options.model,
            "messages": [{"role": "user", "content": request.prompt}],
            "max_tokens": request.max_tokens,
            "temperature": self.options.temperature,
            "stream": True,
            "stream_options": usage,
        }
        if self.options.ignore_eos:
            body["ignore_eos"] = True
        if self.options.seed is not None:
            body["seed"] = self.options.seed + index
        if objectives := client_objectives(request):
            body["vllm_xargs"] = objectives
        return body

    async def _read(self, stream: aiohttp.StreamReader, result: RequestResult) -> None:
        """Read server-sent events until [DONE] or the stream's end."""
        buffer = b""
        async for data in stream.iter_any():
            now_s = self.elapsed_s
            *lines, buffer = (buffer + data).split(b"\n")
            if len(buffer) > _EVENT_LIMIT_BYTES:
                raise _RequestFailed(f"an event of more than {_EVENT_LIMIT_BYTES} bytes")
            for line in lines:
                payload = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and payload != b"[DONE]":
                    self._take(payload, now_s, result)

    def _take(self, payload: bytes, now_s: float, result: RequestResult) -> None:
        try:
            chunk = self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise _RequestFailed(f"malformed event ({error})") from None
        if chunk.error:
            raise _RequestFailed(f"error in the stream: {bytes(chunk.error).decode(errors='replace')}")
        content = ""
        for choice in chunk.choices:
            content = choice.delta.content or ""
            result.finish_reason = choice.finish_reason or result.finish_reason
        if chunk.usage:
            total = chunk.usage.completion_tokens
            result.prompt_tokens = chunk.usage.prompt_tokens
        else:
            total = result.output_tokens + bool(content)  # until the usage at the end corrects it
        if chunk.choices and total > result.output_tokens:
            result.token_times_s.append(now_s)
            result.token_counts.append(total)
        self.tokens += total - result.output_tokens
        result.output_tokens = total
        if self.options.keep_text:
            result.text.append(content)


def client_objectives(request: TimedRequest) -> dict[str, float]:
    """Return what a request says of its objectives, as docs/guide/objectives.md has it."""
    said = {CLIENT_TTFT: request.ttft_ms, CLIENT_TPOT: request.tpot_ms}
    return {name: value for name, value in said.items() if value is not None}


def objective_of(request: TimedRequest) -> TimeObjective:
    """Return what a request is to keep; infinite where it says nothing."""
    times_ms = (request.ttft_ms, request.tpot_ms)
    return TimeObjective(*(math.inf if value is None else value / 1e3 for value in times_ms))


async def _is_set_within(event: asyncio.Event, wait_s: float) -> bool:
    """Wait until the event is set, at most so long; say whether it is."""
    if wait_s > 0 and not event.is_set():
        try:
            await asyncio.wait_for(event.wait(), wait_s)
        except TimeoutError:
            return False
    return event.is_set()
