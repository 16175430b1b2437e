"""A request's place: what waits at it ends as soon as its replica is lost."""

from __future__ import annotations

import asyncio

import pytest

from faser.controller.fleet.place import Place


def test_what_waits_ends_with_the_replica_and_nothing_begins_afterwards() -> None:
    async def main() -> None:
        place = Place("replica-1", "http://x", 0)
        waiting = asyncio.create_task(place.wait(asyncio.Event().wait()))
        await asyncio.sleep(0)
        place.abandon()
        with pytest.raises(ConnectionError, match="the replica is gone"):
            await waiting
        with pytest.raises(ConnectionError, match="the replica is gone"):
            await place.wait(asyncio.sleep(60.0))

    asyncio.run(main())


def test_it_passes_on_what_comes_and_timeouts_that_are_not_its_own() -> None:
    async def late() -> None:
        raise TimeoutError("theirs")

    async def main() -> None:
        place = Place("replica-1", "http://x", 0)
        assert await place.wait(asyncio.sleep(0, "word")) == "word"
        with pytest.raises(TimeoutError, match="theirs"):
            await place.wait(late())

    asyncio.run(main())


def test_a_client_that_leaves_is_not_taken_for_a_lost_replica() -> None:
    async def main() -> None:
        place = Place("replica-1", "http://x", 0)
        waiting = asyncio.create_task(place.wait(asyncio.Event().wait()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
