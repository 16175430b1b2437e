"""The fleet's own life with fake engines: added, drained, taken back, lost, not started, ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from faser.controller.fleet.carrier import EngineSight
from faser.controller.fleet.fleet import FIRST_PAUSE_S
from faser.controller.fleet.sizing import SizeRule

Opener = Callable[..., contextlib.AbstractAsyncContextManager[Any]]


def run(body: Callable[[Any], Awaitable[None]], opener: Opener, rule: SizeRule) -> None:
    async def main() -> None:
        async with asyncio.timeout(30.0), opener(rule) as fleet:
            await body(fleet)

    asyncio.run(main())


def states(fleet: Any) -> list[tuple[str, str]]:
    return [(each.name, each.state) for each in fleet.fleet.replicas()]


def test_no_request_fails_while_replicas_come_and_go(running_fleet: Opener) -> None:
    """A stream that runs on a replica which drains is finished there; nobody new comes to it; then it ends."""

    async def body(fleet: Any) -> None:
        await fleet.serve(at_once=False)
        asked = [fleet.ask() for _ in range(4)]
        await fleet.until(lambda: len(fleet.carrier.engines[0].seen) == 4)
        await fleet.tick(10.0)
        assert [state for _, state in states(fleet)] == ["serving", "pending"]
        await fleet.tick()
        assert [state for _, state in states(fleet)] == ["serving", "serving"]
        first, second = fleet.carrier.engines
        first.may_speak.set()
        first.may_end.set()
        await asyncio.gather(*asked)
        slow = fleet.ask()
        await fleet.until(lambda: len(first.seen) + len(second.seen) == 5)
        assert len(second.seen) == 1
        await fleet.tick(100.0)  # the mean has forgotten the four
        await fleet.tick(10.0)
        assert dict(states(fleet)) == {"replica-1": "draining", "replica-2": "serving"}, "who has nothing goes"
        await fleet.tick()
        assert states(fleet) == [("replica-2", "serving")]
        await fleet.until(lambda: fleet.carrier.holders[0].is_stopped)
        second.may_speak.set()
        second.may_end.set()
        asked.append(slow)
        assert {code for code, _ in await asyncio.gather(*asked)} == {200}
        assert (fleet.fleet.counts.added, fleet.fleet.counts.merged, fleet.fleet.counts.lost) == (2, 1, 0)

    run(body, running_fleet, SizeRule(1, 2, requests_each=2.0, idle_s=10.0))


async def drained(fleet: Any) -> tuple[Any, Any]:
    """Have two replicas with a stream each, of which one drains; return its engine and its stream."""
    await fleet.serve(at_once=False)
    streams = [fleet.ask(), fleet.ask()]
    await fleet.until(lambda: all(engine.seen for engine in fleet.carrier.engines))
    fleet.fleet.rule = SizeRule(1, 2, requests_each=4.0, idle_s=10.0)
    await fleet.tick(60.0)
    await fleet.tick(10.0)
    (name,) = [name for name, state in states(fleet) if state == "draining"]
    index = ["replica-1", "replica-2"].index(name)
    return fleet.carrier.engines[index], streams


def test_a_replica_that_drains_finishes_what_it_has_and_gets_nothing_new(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        engine, streams = await drained(fleet)
        (other,) = [each for each in fleet.carrier.engines if each is not engine]
        streams += [fleet.ask(), fleet.ask()]
        await fleet.until(lambda: len(other.seen) == 3)
        await fleet.tick()
        assert len(engine.seen) == 1
        assert len(states(fleet)) == 2, "its stream still runs"
        for each in fleet.carrier.engines:
            each.may_speak.set()
            each.may_end.set()
        assert {code for code, _ in await asyncio.gather(*streams)} == {200}
        await fleet.tick()
        assert [name for name, _ in states(fleet)] == [other.name]

    run(body, running_fleet, SizeRule(2, 2))


def test_a_replica_that_drains_is_taken_back_when_the_load_returns(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        engine, streams = await drained(fleet)
        streams += [fleet.ask() for _ in range(6)]
        await fleet.until(lambda: sum(len(each.seen) for each in fleet.carrier.engines) == 8)
        await fleet.tick(10.0)
        assert {state for _, state in states(fleet)} == {"serving"}
        assert fleet.fleet.counts.restored == 1
        assert len(fleet.carrier.holders) == 2, "no engine was started for it"
        streams.append(fleet.ask())
        await fleet.until(lambda: len(engine.seen) == 2)
        for each in fleet.carrier.engines:
            each.may_speak.set()
            each.may_end.set()
        assert {code for code, _ in await asyncio.gather(*streams)} == {200}

    run(body, running_fleet, SizeRule(2, 2))


def test_who_is_lost_is_replaced_at_once(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        await fleet.serve()
        fleet.carrier.engines[0].is_dead = True  # alive, and answers 503
        await fleet.tick()
        assert states(fleet) == [("replica-2", "pending")]
        await fleet.until(lambda: fleet.carrier.holders[0].is_stopped)
        assert "replica-1 is lost with 0 requests in flight: its engine is dead" in fleet.told
        await fleet.tick()
        assert states(fleet) == [("replica-2", "serving")]

    run(body, running_fleet, SizeRule(1, 1))


def test_a_busy_engine_that_does_not_answer_in_time_is_not_lost(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        await fleet.serve()
        holder = fleet.carrier.holders[0]
        holder.sight = EngineSight(is_running=True, health="silent", url=holder.engine.url)
        await fleet.tick()
        assert states(fleet) == [("replica-1", "serving")]
        assert (await fleet.ask())[0] == 200

    run(body, running_fleet, SizeRule(1, 1))


def test_the_first_engine_that_does_not_start_ends_the_fleet_with_its_reason(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        fleet.carrier.refusal = "vLLM ended with code 1 while starting: ValueError: no such model; see x.log"
        await asyncio.wait_for(fleet.fleet.run(), 10.0)
        assert str(fleet.fleet.failure) == f"replica-1 did not start: {fleet.carrier.refusal}"
        assert fleet.fleet.failure.exit_code == 5

    run(body, running_fleet, SizeRule(1, 2))


def test_a_later_one_is_tried_again_less_and_less_often_and_serving_goes_on(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        await fleet.serve()
        fleet.fleet.rule = SizeRule(2, 2)
        fleet.carrier.refusal = "no memory"
        await fleet.tick()
        await fleet.tick()
        assert fleet.told[-1] == "replica-2 did not start, next try in 10 s: no memory"
        for _ in range(5):
            await fleet.tick(1.0)
        assert len(fleet.carrier.holders) == 2
        await fleet.tick(FIRST_PAUSE_S)
        await fleet.tick()
        assert fleet.told[-1] == "replica-3 did not start, next try in 20 s: no memory"
        assert (await fleet.ask())[0] == 200
        fleet.carrier.refusal = ""
        await fleet.tick(20.0)
        await fleet.tick()
        assert [state for _, state in states(fleet)] == ["serving", "serving"]

    run(body, running_fleet, SizeRule(1, 2))


def test_a_carrier_that_fails_is_told_and_tried_again(running_fleet: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(fleet: Any) -> None:
        await fleet.serve()
        fleet.fleet.rule = SizeRule(2, 2)

        def fail(name: str) -> None:
            raise ConnectionError("the cluster is gone")

        with monkeypatch.context() as patch:
            patch.setattr(fleet.carrier, "hold", fail)
            await fleet.tick()
        assert fleet.told[-1] == "replica-2 did not start, next try in 10 s: the cluster is gone"
        assert (await fleet.ask())[0] == 200
        await fleet.tick(10.0)
        await fleet.tick()
        assert [name for name, _ in states(fleet)] == ["replica-1", "replica-3"]

    run(body, running_fleet, SizeRule(1, 2))


def test_who_waits_for_room_is_shown_so_and_let_go_when_it_is_needed_no_more(running_fleet: Opener) -> None:
    async def body(fleet: Any) -> None:
        await fleet.serve()
        fleet.fleet.rule = SizeRule(2, 2)
        await fleet.tick()
        fleet.carrier.holders[1].sight = EngineSight(is_running=True, is_placed=False)
        await fleet.tick()
        async with fleet.session.get(f"{fleet.url}/fleet") as response:
            (_, second) = (await response.json())["replicas"]
        assert (second["state"], second["where"]) == ("pending", "waits for room")
        fleet.fleet.rule = SizeRule(1, 2, idle_s=5.0)
        await fleet.tick(1.0)
        await fleet.tick(5.0)
        assert states(fleet) == [("replica-1", "serving")]
        assert fleet.told[-1] == "replica-2 is needed no more; it still waited for room"
        assert fleet.fleet.counts.merged == 0

    run(body, running_fleet, SizeRule(1, 2))


def test_a_failure_of_its_own_ends_neither_the_fleet_nor_serving(
    running_fleet: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(fleet: Any) -> None:
        await fleet.serve()

        def fail(*_: object) -> None:
            raise ArithmeticError("planted")

        monkeypatch.setattr("faser.controller.fleet.fleet.resize", fail)
        monkeypatch.setattr("faser.controller.fleet.fleet.TICK_S", 0.01)
        running = asyncio.create_task(fleet.fleet.run())
        await asyncio.sleep(0.2)
        assert not running.done()
        assert (await fleet.ask())[0] == 200
        running.cancel()
        assert [record.levelname for record in caplog.records] == ["ERROR"]

    run(body, running_fleet, SizeRule(1, 1))


def test_closing_ends_every_engine(running_fleet: Opener) -> None:
    kept: list[Any] = []

    async def body(fleet: Any) -> None:
        await fleet.serve()
        kept.extend(fleet.carrier.holders)

    run(body, running_fleet, SizeRule(3, 3))
    assert [holder.is_stopped for holder in kept] == [True] * 3
