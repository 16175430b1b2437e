"""The entry point before fake engines: what is passed on, what is made again, what ends with one clear error."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from faser.controller.fleet.carrier import EngineSight
from faser.controller.fleet.fleet import MOST_WAITING
from faser.controller.fleet.front import MOST_BODY_BYTES, is_passed
from faser.controller.fleet.sizing import SizeRule

ONE, TWO = SizeRule(1, 1), SizeRule(2, 2)
Opener = Callable[..., contextlib.AbstractAsyncContextManager[Any]]


def run(body: Callable[[Any], Awaitable[None]], opener: Opener, rule: SizeRule, **options: float) -> None:
    async def main() -> None:
        async with asyncio.timeout(30.0), opener(rule, **options) as fleet:
            await body(fleet)

    asyncio.run(main())


def test_a_stream_comes_through_byte_for_byte_and_as_it_is_made(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        await fleet.serve(at_once=False)
        (engine,) = fleet.carrier.engines
        engine.may_speak.set()
        async with fleet.session.post(f"{fleet.url}/v1/completions?x=a%20b", json={"stream": True}) as response:
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert response.headers["X-Faser-Replica"] == "replica-1"
            first = await response.content.readuntil(b'word"}}]}\n\n')
            assert first.count(b"data: ") == 2, "the first word came before the second was made"
            engine.may_end.set()
            rest = await response.read()
        assert (first + rest).count(b" word") == engine.words
        assert rest.endswith(b"data: [DONE]\n\n")
        path, sent, headers = engine.seen[0]
        assert (path, json.loads(sent)) == ("/v1/completions?x=a%20b", {"stream": True})
        assert headers["Host"] == engine.url.removeprefix("http://")

    run(body, running_fleet, ONE)


def test_status_body_and_headers_of_an_answer_are_the_replicas(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        await fleet.serve()
        headers = {"Authorization": "Bearer k", "X-Request-Id": "7", "Connection": "close, X-Hop", "X-Hop": "1"}
        async with fleet.session.post(
            f"{fleet.url}/v1/chat/completions", json={"status": 422}, headers=headers
        ) as response:
            assert (response.status, await response.json()) == (422, {"said": "replica-1"})
        seen = fleet.carrier.engines[0].seen[0][2]
        assert (seen["Authorization"], seen["X-Request-Id"]) == ("Bearer k", "7")
        assert "X-Hop" not in seen

    run(body, running_fleet, ONE)


def test_requests_go_to_who_has_fewest(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        await fleet.serve(at_once=False)
        first, second = fleet.carrier.engines
        asked = []
        for count in range(1, 7):
            asked.append(fleet.ask())
            await fleet.until(lambda count=count: len(first.seen) + len(second.seen) == count)
        assert (len(first.seen), len(second.seen)) == (3, 3)
        second.may_speak.set()
        second.may_end.set()
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        await fleet.until(lambda: not fleet.fleet.replicas()[1].places)
        asked += [fleet.ask(), fleet.ask()]
        await fleet.until(lambda: len(second.seen) == 5)
        first.may_speak.set()
        first.may_end.set()
        assert [(await each)[0] for each in asked] == [200] * 8

    run(body, running_fleet, TWO)


def test_a_client_that_leaves_takes_its_request_off_the_replica(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        await fleet.serve(at_once=False)
        (engine,) = fleet.carrier.engines
        for stream in (True, False):
            asked = fleet.ask(stream=stream)
            await fleet.until(lambda: len(engine.seen) == 1)
            asked.cancel()
            await fleet.until(lambda: engine.left == 1)
            await fleet.until(lambda: not fleet.fleet.replicas()[0].places)
            engine.seen.clear()
            engine.left = 0
        engine.may_speak.set()  # and amid a stream
        async with fleet.session.post(f"{fleet.url}/v1/completions", json={"stream": True}) as response:
            await response.content.readuntil(b"word")
            response.close()
        await fleet.until(lambda: engine.left == 1)
        assert await counts(fleet) == {"finished": 0, "failed": 0, "cancelled": 3, "retried": 0}

    run(body, running_fleet, ONE)


async def counts(fleet: Any) -> dict[str, int]:
    async with fleet.session.get(f"{fleet.url}/fleet") as response:
        found: dict[str, int] = (await response.json())["requests"]
        return found


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("death", ["killed", "engine core"])
def test_what_has_not_begun_is_made_again_on_another_replica(running_fleet: Opener, stream: bool, death: str) -> None:
    async def body(fleet: Any) -> None:
        await fleet.serve(at_once=False)
        first, second = fleet.carrier.engines
        asked = fleet.ask(stream=stream)
        await fleet.until(lambda: first.seen)
        if death == "killed":
            await first.kill()
        else:
            first.is_dead = True
            first.may_speak.set()
        second.may_speak.set()
        second.may_end.set()
        code, said = await asked
        assert code == 200
        assert b"error" not in said
        assert said.count(b" word") == second.words if stream else json.loads(said) == {"said": "replica-2"}
        assert [each.name for each in fleet.fleet.replicas()] == ["replica-2"], "who failed gets no more"
        assert await counts(fleet) == {"finished": 1, "failed": 0, "cancelled": 0, "retried": 1}

    run(body, running_fleet, TWO)


async def begun_at_first(fleet: Any) -> tuple[Any, Any, Any]:
    """Return both engines of a fleet and an answer that the first one has begun and not ended."""
    await fleet.serve(at_once=False)
    first, second = fleet.carrier.engines
    first.may_speak.set()
    asked = fleet.ask()
    await fleet.until(lambda: first.seen)
    await asyncio.sleep(0.05)
    return first, second, asked


def test_what_has_begun_ends_with_one_error_in_the_form_of_an_event(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        first, second, asked = await begun_at_first(fleet)
        await first.kill()
        code, said = await asked
        *events, last = [line for line in said.split(b"\n\n") if line.strip()]
        assert (code, len(events)) == (200, 2)
        error = json.loads(last.strip().removeprefix(b"data: "))["error"]
        assert error["code"] == 502
        assert error["message"].startswith("replica-1 was lost while it answered")
        assert error["message"].endswith("send the request again")
        assert not second.seen, "another replica need not continue the answer"
        assert (await counts(fleet))["failed"] == 1

    run(body, running_fleet, TWO)


def test_requests_of_a_machine_that_vanished_do_not_hang(running_fleet: Opener) -> None:
    """Its connections stay open and are silent: only the carrier knows."""

    async def body(fleet: Any) -> None:
        first, second, begun = await begun_at_first(fleet)
        first.may_speak.clear()
        second_asked = fleet.ask()
        await fleet.until(lambda: second.seen)
        waiting = fleet.ask()
        await fleet.until(lambda: len(first.seen) == 2)
        fleet.carrier.holders[0].sight = EngineSight(is_running=False, health="dead", reason="Ray: the node is gone")
        await fleet.tick()
        second.may_speak.set()
        second.may_end.set()
        assert (await waiting)[1].count(b" word") == second.words
        assert (await second_asked)[1].count(b" word") == second.words
        assert b"replica-1 was lost while it answered: the replica is gone" in (await begun)[1]
        assert "replica-1 is lost with 2 requests in flight: Ray: the node is gone" in fleet.told

    run(body, running_fleet, TWO)


def test_an_error_of_a_replica_that_lives_is_passed_on(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        await fleet.serve()
        code, said = await fleet.ask(stream=False, status=500)
        assert (code, json.loads(said)) == (500, {"said": "replica-1"})
        assert (await counts(fleet))["retried"] == 0

    run(body, running_fleet, TWO)


def test_a_request_that_ends_engines_is_not_given_a_third(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        await fleet.serve(at_once=False)
        asked = fleet.ask()
        for engine in fleet.carrier.engines[:2]:
            await fleet.until(lambda engine=engine: engine.seen)
            await engine.kill()
        code, said = await asked
        assert code == 502
        assert json.loads(said)["error"]["message"].startswith("replica-1 and replica-2 failed")
        assert not fleet.carrier.engines[2].seen

    run(body, running_fleet, SizeRule(3, 3))


def test_requests_wait_while_nobody_serves_and_are_refused_when_it_takes_too_long(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        asked = fleet.ask(stream=False)
        await fleet.until(lambda: fleet.fleet.view().waiting == 1)
        await fleet.serve()
        assert (await asked)[0] == 200
        await fleet.carrier.engines[0].kill()
        fleet.carrier.is_slow = True
        code, said = await fleet.ask(stream=False)
        assert (code, json.loads(said)["error"]["message"]) == (
            503, "no replica within 2 s; expected one that serves; see /fleet"
        )  # fmt: skip

    run(body, running_fleet, ONE, wait_s=2.0)


def test_a_lost_replica_with_no_other_is_waited_for(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        await fleet.serve(at_once=False)
        asked = fleet.ask()
        await fleet.until(lambda: fleet.carrier.engines[0].seen)
        await fleet.carrier.engines[0].kill()
        await fleet.until(lambda: fleet.fleet.view().waiting == 1)
        await fleet.serve()
        code, said = await asked
        assert (code, said.count(b" word")) == (200, 3)
        assert fleet.carrier.engines[1].seen

    run(body, running_fleet, ONE)


def test_no_more_requests_wait_than_memory_should_hold(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        fleet.fleet._waiting = MOST_WAITING
        code, said = await fleet.ask()
        assert code == 503
        assert "1024 requests wait for a replica" in json.loads(said)["error"]["message"]
        fleet.fleet._waiting = 0

    run(body, running_fleet, ONE)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/chat/completions", True), ("/v1/models", True), ("/v1/embeddings", True), ("/v1/messages", True),
        ("/tokenize", True), ("/v2/rerank", True), ("/sleep", False), ("/v1/load_lora_adapter", False),
        ("/v1/responses", True), ("/v1/responses/resp_1", False), ("/collective_rpc", False), ("/", False),
        ("/reset_prefix_cache", False), ("/v1", False),
    ],
)  # fmt: skip
def test_what_changes_or_asks_one_replica_alone_is_not_passed_on(path: str, expected: bool) -> None:
    assert is_passed(path) == expected


def test_bad_requests_get_one_line_and_serving_goes_on(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        await fleet.serve()
        async with fleet.session.post(f"{fleet.url}/sleep") as response:
            assert response.status == 404
            message = (await response.json())["error"]["message"]
            assert message.startswith("/sleep is not for a fleet; expected /v1/...")
        large = io.BytesIO(b"x" * (MOST_BODY_BYTES + 1))
        async with fleet.session.post(f"{fleet.url}/v1/completions", data=large) as response:
            assert response.status == 413
            assert "64 MiB" in (await response.json())["error"]["message"]
        host, port = fleet.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x00nonsense\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
        assert (await fleet.ask(stream=False))[0] == 200

    run(body, running_fleet, ONE)


def test_health_status_and_metrics_say_how_the_fleet_is(running_fleet: Opener) -> None:
    async def get(fleet: Any, path: str) -> tuple[int, str]:
        async with fleet.session.get(fleet.url + path) as response:
            return response.status, await response.text()

    async def body(fleet: Any) -> None:
        assert (await get(fleet, "/health"))[0] == 503
        await fleet.serve()
        assert (await get(fleet, "/health"))[0] == 200
        await fleet.ask()
        told = json.loads((await get(fleet, "/fleet"))[1])
        assert [(each["name"], each["state"], each["where"]) for each in told["replicas"]] == [
            ("replica-1", "serving", "core 7"), ("replica-2", "serving", "core 7")
        ]  # fmt: skip
        assert told["changes"]["added"] == 2
        figures = (await get(fleet, "/metrics"))[1]
        for line in (
            'faser_fleet_replicas{state="serving"} 2.0',
            'faser_fleet_requests_total{outcome="finished"} 1.0',
            'faser_fleet_in_flight{replica="replica-2"} 0.0',
            'faser_fleet_changes_total{change="lost"} 0.0',
        ):
            assert line in figures.splitlines()

    run(body, running_fleet, TWO)


def test_an_idle_fleet_of_none_is_healthy_and_starts_with_the_first_request(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        await fleet.tick()
        async with fleet.session.get(f"{fleet.url}/health") as response:
            assert response.status == 200
        assert not fleet.carrier.engines
        asked = fleet.ask(stream=False)
        await fleet.until(lambda: fleet.fleet.view().waiting == 1)
        await fleet.serve()
        assert (await asked)[0] == 200
        await fleet.tick(30.0)
        await fleet.tick(fleet.fleet.rule.idle_s)
        await fleet.tick()
        assert fleet.fleet.replicas() == []

    run(body, running_fleet, SizeRule(0, 2, idle_s=10.0))


def test_a_connection_that_breaks_is_tried_once_more_even_on_the_only_replica(running_fleet: Opener) -> None:
    """A server closes connections that were idle, at times just as a request is sent on one."""

    async def body(fleet: Any) -> None:
        await fleet.serve()
        fleet.carrier.engines[0].drops = 1
        assert (await fleet.ask())[0] == 200
        assert (await counts(fleet))["retried"] == 1
        fleet.carrier.engines[0].drops = 2
        code, said = await fleet.ask(stream=False)
        assert code == 502
        assert json.loads(said)["error"]["message"].startswith("replica-1 failed: ")

    run(body, running_fleet, ONE)


def test_what_vllm_itself_says_of_a_dead_engine_stays_the_only_error(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        await fleet.serve()
        for engine in fleet.carrier.engines:
            engine.dies_amid = True
        code, said = await fleet.ask()
        assert code == 200
        assert said.count(b'"error"') == 1
        assert said.endswith(b"data: [DONE]\n\n")
        assert await counts(fleet) == {"finished": 0, "failed": 1, "cancelled": 0, "retried": 0}

    run(body, running_fleet, TWO)


def test_a_browsers_upgrade_is_not_passed_on(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        await fleet.serve()
        headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
        async with fleet.session.get(f"{fleet.url}/v1/models", headers=headers) as response:
            assert (response.status, await response.json()) == (200, {"data": [{"id": "replica-1"}]})

    run(body, running_fleet, ONE)
