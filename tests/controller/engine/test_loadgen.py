"""The load generator against a real HTTP server that streams as vLLM does, well and badly."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from faser.controller.engine import load_generator as loadgen
from faser.controller.engine.load_generator import LoadGenerator, LoadOptions
from faser.controller.engine.load_summary import LoadSummary, RequestResult
from faser.env.workload.workload import TimedRequest

pytestmark = pytest.mark.alone

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def event(tokens: int, content: str = "", finish: str | None = None, *, has_choice: bool = True) -> bytes:
    """Return a chunk as vLLM writes it with continuous usage."""
    choices = [{"index": 0, "delta": {"content": content}, "finish_reason": finish}] if has_choice else []
    usage = {"prompt_tokens": 11, "completion_tokens": tokens, "total_tokens": 11 + tokens}
    return b"data: " + json.dumps({"id": "x", "object": "chunk", "choices": choices, "usage": usage}).encode() + b"\n\n"


async def stream(request: web.Request, parts: list[bytes], pause_s: float = 0.0) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
        await asyncio.sleep(pause_s)
    return response


GOOD = [event(0), event(1, "a"), event(4, "bcd"), event(6, "ef", "length"), event(6, has_choice=False)]
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    async with TestServer(app) as running:
        yield str(running.make_url("/"))


def requests(*arrivals_s: float) -> list[TimedRequest]:
    return [TimedRequest(arrival_s, f"prompt {n}", "chat", 6) for n, arrival_s in enumerate(arrivals_s)]


def load(
    handler: Handler,
    work: list[TimedRequest],
    *,
    stop_after_s: float | None = None,
    max_connections: int = 128,
    drain_s: float = 30.0,
    request_timeout_s: float = 30.0,
) -> tuple[LoadSummary, list[RequestResult]]:
    async def run() -> tuple[LoadSummary, list[RequestResult]]:
        async with server(handler) as url:
            stop = asyncio.Event()
            if stop_after_s is not None:
                asyncio.get_running_loop().call_later(stop_after_s, stop.set)
            options = LoadOptions(
                url, "m", max_connections=max_connections, drain_s=drain_s, request_timeout_s=request_timeout_s
            )
            generator = LoadGenerator(work, options)
            return await generator.run(stop), generator.results

    return asyncio.run(run())


def test_tokens_of_chunks_with_several_tokens_are_counted_from_usage() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, [*GOOD, DONE], pause_s=0.02)

    summary, results = load(handler, requests(0.0, 0.01))
    assert (summary.finished, summary.failed, summary.output_tokens) == (2, 0, 12)
    assert results[0].token_counts == [1, 4, 6]
    assert results[0].prompt_tokens == 11
    assert results[0].finish_reason == "length"
    tpot_ms, ttft_ms, e2e_ms = results[0].tpot_ms, results[0].ttft_ms, results[0].e2e_ms
    assert tpot_ms is not None
    assert ttft_ms is not None
    assert e2e_ms is not None
    assert 40 / 5 <= tpot_ms < 40
    assert ttft_ms >= 20
    assert e2e_ms == pytest.approx(ttft_ms + 5 * tpot_ms)


def test_events_that_are_cut_across_packets_are_put_together() -> None:
    whole = b"".join([*GOOD, DONE])

    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, [whole[i : i + 37] for i in range(0, len(whole), 37)], pause_s=0.001)

    summary, results = load(handler, requests(0.0))
    assert (summary.finished, results[0].token_counts) == (1, [1, 4, 6])


def test_the_request_asks_for_streaming_with_usage() -> None:
    seen: list[dict[str, object]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        return await stream(request, [*GOOD, DONE])

    load(handler, requests(0.0))
    assert seen[0]["stream"] is True
    assert seen[0]["max_tokens"] == 6
    assert seen[0]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_requests_leave_on_time_although_none_is_answered() -> None:
    gate = asyncio.Event()
    waiting = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal waiting
        waiting += 1
        if waiting == 20:
            gate.set()
        await gate.wait()
        return await stream(request, [*GOOD, DONE])

    summary, _ = load(handler, requests(*[0.005 * n for n in range(20)]))
    assert (summary.finished, summary.peak_in_flight) == (20, 20)


def test_a_connection_that_a_server_is_about_to_close_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends a connection whose next request comes after its patience, as one does whose loop was busy."""
    monkeypatch.setattr(loadgen, "IDLE_S", 0.1)
    quiet_since: dict[object, float] = {}

    async def handler(request: web.Request) -> web.StreamResponse:
        now, line = asyncio.get_running_loop().time(), request.transport
        assert line is not None
        if now - quiet_since.get(line, now) > 0.2:
            line.close()
        response = await stream(request, [*GOOD, DONE])
        quiet_since[line] = asyncio.get_running_loop().time()
        return response

    summary, _ = load(handler, requests(0.0, 0.4, 0.45))
    assert (summary.finished, summary.failed) == (3, 0)


def test_connections_stay_bounded_and_the_wait_is_counted() -> None:
    now = peak = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal now, peak
        now += 1
        peak = max(peak, now)
        response = await stream(request, [*GOOD, DONE], pause_s=0.01)
        now -= 1
        return response

    summary, results = load(handler, requests(*[0.0] * 12), max_connections=3)
    assert (summary.finished, peak, summary.peak_in_flight) == (12, 3, 3)
    assert results[-1].ttft_ms is not None
    assert results[-1].ttft_ms > 100  # behind three rounds of 50 ms


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([event(1, "a"), DONE], "the stream ended without a finish reason"),
        ([event(1, "a"), b'data: {"error": {"message": "boom", "code": 500}}\n\n', DONE], "error in the stream.*boom"),
        ([event(1, "a"), b"data: {nonsense\n\n"], "malformed event"),
    ],
)
def test_a_broken_stream_is_a_failure_with_its_reason(parts: list[bytes], reason: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, parts)

    summary, results = load(handler, requests(0.0))
    assert (summary.finished, summary.failed) == (0, 1)
    assert len(summary.failures) == 1
    assert re.search(reason, results[0].failure)


def test_a_refusal_is_a_failure_with_status_and_text() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=400, text="context too long")

    summary, _ = load(handler, requests(0.0, 0.0))
    assert summary.failures == {"HTTP 400: context too long": 2}


def test_a_server_that_hangs_up_is_a_failure() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    summary, _ = load(handler, requests(0.0))
    assert (summary.finished, summary.failed) == (0, 1)


def test_what_is_not_finished_after_the_drain_is_a_failure() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, [event(1, "a")] * 2, pause_s=5.0)

    summary, _ = load(handler, requests(0.0), drain_s=0.2)
    assert summary.failures == {"not finished 0.2 s after the load": 1}


def test_a_request_without_an_end_times_out() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, [event(1, "a")] * 2, pause_s=5.0)

    summary, _ = load(handler, requests(0.0), request_timeout_s=0.2)
    assert summary.failures == {"no end within 0.2 s": 1}


def test_stopping_cancels_what_is_in_flight_and_keeps_what_was_measured() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        is_first = body["messages"][0]["content"] == "prompt 0"
        return await stream(request, [*GOOD, DONE], pause_s=0.0 if is_first else 5.0)

    summary, results = load(handler, requests(0.0, 0.0, 60.0), stop_after_s=0.3)
    assert [result.outcome for result in results] == ["finished", "cancelled", "cancelled"]
    assert (summary.finished, summary.failed, summary.cancelled) == (1, 0, 2)


def test_a_request_says_its_objectives_itself_and_who_was_in_time_is_counted_by_class() -> None:
    said: list[dict[str, float] | None] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        said.append(body.get("vllm_xargs"))
        slow = body["messages"][0]["content"] == "slow"
        return await stream(request, [*GOOD, DONE], pause_s=0.06 if slow else 0.0)

    work = [
        TimedRequest(0.0, "quick", "chat", 6, ttft_ms=5000.0, tpot_ms=20.0, class_name="a"),
        TimedRequest(0.0, "slow", "chat", 6, tpot_ms=20.0, class_name="a"),
        TimedRequest(0.0, "slow", "chat", 6, ttft_ms=5000.0),
        TimedRequest(0.0, "quick", "chat", 6, class_name="b"),
    ]
    summary, results = load(handler, work)
    assert len(said) == 4
    for wishes in (
        {"faser_ttft_ms": 5000.0, "faser_tpot_ms": 20.0}, {"faser_tpot_ms": 20.0}, {"faser_ttft_ms": 5000.0}, None,
    ):  # fmt: skip
        assert wishes in said
    assert [result.is_in_time for result in results] == [True, False, True, None]
    assert summary.attainment == {"a": 0.5, "own": 1.0}


def test_a_late_first_token_misses_an_objective_and_a_cancelled_request_is_not_counted() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.1)
        if (await request.json())["messages"][0]["content"] == "never":
            await asyncio.sleep(30.0)
        return await stream(request, [*GOOD, DONE])

    late = TimedRequest(0.0, "late", "chat", 6, ttft_ms=50.0, class_name="a")
    never = TimedRequest(0.0, "never", "chat", 6, ttft_ms=50.0, class_name="b")
    summary, _ = load(handler, [late, never], stop_after_s=0.5)
    assert summary.attainment == {"a": 0.0}
