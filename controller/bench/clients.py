"""The clients of a benchmark: a constant number that work in turns, or those of a replayed trace.

Called by controller/bench/course.py. In a closed loop the clients of every arm live at the same time; who is frozen
waits with its answers half streamed, and its clock stands still.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, Self

from ...env.workload.workload import TimedRequest
from ..engine.load_generator import LoadGenerator, LoadOptions
from ..engine.load_summary import LoadSummary, RequestResult
from ..errors import EngineError

STALL_S: Final = 120.0  # without a token
LEAST_TOKENS: Final = 8  # of an answer, to tell a time per token from
_LOOK_S: Final = 0.005
_QUIET_S: Final = 0.03
_FOREVER_S: Final = 86_400.0


class Server(Protocol):
    """What clients need of an arm."""

    name: str

    @property
    def url(self) -> str:
        """The server's address."""

    def thread_cpu_s(self) -> dict[int, float]:
        """Return the CPU time that each thread of the server has used so far, by thread id."""

    async def freeze(self) -> None:
        """End the step in flight and keep all requests."""

    async def thaw(self) -> None:
        """Go on."""


class Stopwatch:
    """A clock that runs only between `start` and `stop`."""

    def __init__(self) -> None:
        self._passed_s = 0.0
        self._since_s: float | None = None

    def __call__(self) -> float:
        """Return the seconds it ran."""
        return self._passed_s + (time.perf_counter() - self._since_s if self._since_s is not None else 0.0)

    def start(self) -> None:
        """Let it run."""
        if self._since_s is None:
            self._since_s = time.perf_counter()

    def stop(self) -> None:
        """Let it stand still."""
        self._passed_s, self._since_s = self(), None


@dataclass(slots=True)
class Times:
    """Latencies in milliseconds, each of the requests of which it could be measured."""

    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    e2e_ms: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, results: Sequence[RequestResult]) -> Self:
        """Return the latencies of the finished among some requests."""
        times = cls()
        for result in results:
            if result.outcome == "finished":
                times.add(result.ttft_ms, result.tpot_ms, result.e2e_ms)
        return times

    def add(self, ttft_ms: float | None, tpot_ms: float | None, e2e_ms: float | None) -> None:
        """Take in what is known of one request."""
        for values, value in ((self.ttft_ms, ttft_ms), (self.tpot_ms, tpot_ms), (self.e2e_ms, e2e_ms)):
            if value is not None:
                values.append(value)

    def extend(self, other: Times) -> None:
        """Take in the latencies of others."""
        self.ttft_ms += other.ttft_ms
        self.tpot_ms += other.tpot_ms
        self.e2e_ms += other.e2e_ms


@dataclass(frozen=True, slots=True)
class Served:
    """What was served between two freezes: both ends lie between two steps, so no step is counted in part."""

    tokens: int
    seconds: float
    prompt_tokens: int = 0  # of the requests whose first token came
    thread_s: Mapping[int, float] = field(default_factory=dict)  # CPU time of each of the server's threads


class Clients:
    """A constant number of clients of one arm; each sends its next request when its answer is done."""

    def __init__(
        self, server: Server, requests: Sequence[TimedRequest], load: int, model: str, temperature: float = 0.0
    ) -> None:
        self.load = load
        self._server = server
        self._watch = Stopwatch()
        options = LoadOptions(
            server.url, model, temperature, max_connections=load, ignore_eos=True, request_timeout_s=_FOREVER_S,
            drain_s=_FOREVER_S,
        )  # fmt: skip
        self._generator = LoadGenerator(requests, options, clock=self._watch)
        self._stop = asyncio.Event()
        self._run: asyncio.Task[LoadSummary] | None = None
        self._settled_s = 0.0

    @property
    def tokens(self) -> int:
        """Return the tokens received since the start."""
        return self._generator.tokens

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of the prompts that were read since the start."""
        return sum(result.prompt_tokens for result in self._generator.results if result.token_times_s)

    async def serve(self, until: int) -> Served:
        """Serve until so many tokens are received since the start, a step more at most; return what it took."""
        before, read, spent_s = self.tokens, self.prompt_tokens, self._server.thread_cpu_s()
        # Before the thaw: on a crowded machine tokens come before its answer does, and would have cost no time.
        self._watch.start()
        began_s = self._watch()
        await self._server.thaw()
        if self._run is None:
            self._run = asyncio.create_task(self._generator.run(self._stop))
        await self._reach(until)
        await self._server.freeze()
        thread_s = spent_since(spent_s, self._server)  # now: a frozen server's worker keeps looking for work
        await self._fall_silent()
        self._watch.stop()
        last_s = max((r.token_times_s[-1] for r in self._generator.results if r.token_times_s), default=0.0)
        # The generator's clock began with the watch: both count from there.
        seconds = max(last_s + self._origin_s() - began_s, 1e-9)
        return Served(self.tokens - before, seconds, self.prompt_tokens - read, thread_s)

    def settle(self) -> None:
        """Count latencies from here on."""
        self._settled_s = self._watch()

    @property
    def finished(self) -> int:
        """Return the number of requests that were answered since the start."""
        return sum(result.outcome == "finished" for result in self._generator.results)

    def times(self) -> Times:
        """Return what was measured since `settle`; in a closed loop a request is due when it is sent.

        Time per token is that of the part of an answer since then: in the steps before it all prompts came at once. The
        first answers are staggered in length and are no whole answers.
        """
        times = Times()
        since_s = self._settled_s - self._generator.started_s
        for result in self._generator.results:
            if result.sent_s is None or not result.token_times_s:
                continue
            due = replace(result, due_s=result.sent_s)
            is_whole = result.outcome == "finished" and result.index >= self.load
            times.add(
                due.ttft_ms if result.token_times_s[0] >= since_s else None,
                _time_per_token_ms(result, since_s),
                due.e2e_ms if is_whole and result.token_times_s[-1] >= since_s else None,
            )
        return times

    async def end(self) -> None:
        """Cancel what is in flight; the server must be awake and may be frozen."""
        self._stop.set()
        if self._run is not None:
            await self._run

    def _origin_s(self) -> float:
        return self._generator.started_s

    async def _reach(self, until: int) -> None:
        seen, since_s = self.tokens, time.monotonic()
        while self.tokens < until:
            await asyncio.sleep(_LOOK_S)
            self._require_sound()
            if self.tokens != seen:
                seen, since_s = self.tokens, time.monotonic()
            elif time.monotonic() - since_s > STALL_S:
                raise EngineError(f"{self._server.name} gave no token for {STALL_S:g} s")

    def _require_sound(self) -> None:
        assert self._run is not None
        if self._generator.failures:
            raise EngineError(f"{self._server.name} failed a request: {self._generator.failures[0]}")
        if self._run.done():
            raise EngineError(f"{self._server.name} served all of its requests before the turn's end")

    async def _fall_silent(self) -> None:
        """Wait until nothing arrives any more: the server streams the last step's tokens after it is frozen."""
        while True:
            seen = self.tokens
            await asyncio.sleep(_QUIET_S)
            if self.tokens == seen:
                return


def spent_since(spent_s: Mapping[int, float], server: Server) -> dict[int, float]:
    """Return the CPU time that each thread of a server has used since it was looked at."""
    return {thread: now_s - spent_s.get(thread, 0.0) for thread, now_s in server.thread_cpu_s().items()}


def _time_per_token_ms(result: RequestResult, since_s: float) -> float | None:
    """Return the time per token of what was received since a moment; None for too few tokens."""
    first = bisect_left(result.token_times_s, since_s)
    if first >= len(result.token_times_s):
        return None
    tokens = result.token_counts[-1] - result.token_counts[first]
    seconds = result.token_times_s[-1] - result.token_times_s[first]
    return 1e3 * seconds / tokens if tokens >= LEAST_TOKENS else None


async def replay(
    server: Server,
    requests: Sequence[TimedRequest],
    model: str,
    temperature: float = 0.0,
    connections: int = 256,
) -> LoadGenerator:
    """Send requests when they are due and wait for all of them; answers have their full length."""
    options = LoadOptions(
        server.url, model, temperature, max_connections=connections, ignore_eos=True, drain_s=STALL_S * 5
    )
    generator = LoadGenerator(requests, options)
    await generator.run(asyncio.Event())
    return generator


async def one_by_one(
    server: Server, requests: Sequence[TimedRequest], model: str, temperature: float = 0.0
) -> list[RequestResult]:
    """Send requests one at a time; each is due when it is sent."""
    at_once = [replace(request, arrival_s=0.0) for request in requests]
    generator = await replay(server, at_once, model, temperature, connections=1)
    return [
        replace(result, due_s=result.sent_s if result.sent_s is not None else result.due_s)
        for result in generator.results
    ]
