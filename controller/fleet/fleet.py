"""The fleet: which replicas there are, who has which requests, and what is done about it twice a second.

It lives in the entry point's loop. Rules are asked (routing.py, sizing.py), engines are started and ended in threads
by a carrier; a request is never waited for by anything but itself. What happens is told in one line each.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from ..errors import EngineError
from .carrier import Carrier, EngineHolder, EngineSight
from .place import Place
from .routing import choose
from .sizing import Resize, SizeMemory, SizeRule, resize
from .views import FleetView, ReplicaState, ReplicaView

T = TypeVar("T")
logger = logging.getLogger(__name__)
TICK_S: Final = 0.5
WAIT_S: Final = 600.0  # that a request waits for a replica: as long as an engine may take to start
MOST_WAITING: Final = 1024
FIRST_PAUSE_S: Final = 10.0  # after an engine that did not start; doubles
MOST_PAUSE_S: Final = 600.0
UNSEEN: Final = EngineSight(is_running=True, is_placed=False)
_MOST_THREADS: Final = 64


class NoReplicaError(EngineError):
    """No replica can take a request."""


@dataclass(slots=True, eq=False)
class Replica:
    """One engine as the fleet knows it."""

    name: str
    holder: EngineHolder
    asked_s: float  # when it was asked for
    since_s: float  # when its state began
    state: ReplicaState = "pending"
    places: set[Place] = field(default_factory=set)
    chosen_s: float = 0.0
    sight: EngineSight = UNSEEN
    looks: int = 0  # begun so far
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)

    def view(self) -> ReplicaView:
        """Return what the rules see."""
        body_bytes = sum(place.body_bytes for place in self.places)
        return ReplicaView(self.name, self.state, len(self.places), body_bytes, self.chosen_s, self.since_s)


@dataclass(slots=True)
class FleetCounts:
    """What has happened to replicas so far."""

    added: int = 0
    merged: int = 0
    restored: int = 0
    lost: int = 0
    not_started: int = 0
    start_s: float = 0.0  # from asking for the last one until it served


class Fleet:
    """See the module.

    :param tell: is called with one line for whatever happens
    :param clock: seconds
    """

    def __init__(
        self, carrier: Carrier, rule: SizeRule, tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic, wait_s: float = WAIT_S,
    ) -> None:  # fmt: skip
        self.rule = rule
        self.counts = FleetCounts()
        self.failure: EngineError | None = None  # the first engine did not start: there is nothing to serve with
        self._carrier, self._tell, self._clock, self._wait_s = carrier, tell, clock, wait_s
        self._replicas: dict[str, Replica] = {}
        self._memory = SizeMemory()
        self._number = 0
        self._waiting = 0
        self._has_served = self._has_failed = False
        self._pause_s, self._may_start_s = FIRST_PAUSE_S, 0.0
        self._changed = asyncio.Condition()
        self._ending: set[asyncio.Future[None]] = set()
        self._threads = ThreadPoolExecutor(min(2 * rule.most + 2, _MOST_THREADS), "faser-fleet")

    # --- for requests ---

    def view(self) -> FleetView:
        """Return the fleet as the rules see it."""
        now_s = self._clock()
        replicas = tuple(replica.view() for replica in self._replicas.values())
        return FleetView(now_s, replicas, self._waiting, now_s >= self._may_start_s)

    def replicas(self) -> list[Replica]:
        """Return the replicas there are, in the order in which they were asked for."""
        return list(self._replicas.values())

    async def take(self, body_bytes: int, failed: Collection[str] = ()) -> Place:
        """Return a place at the least loaded replica, waiting for one if none serves; raise NoReplicaError.

        :param failed: replicas that have failed this request
        """
        if self._waiting >= MOST_WAITING:
            raise NoReplicaError(f"{self._waiting} requests wait for a replica", f"fewer than {MOST_WAITING}")
        self._waiting += 1
        try:
            async with asyncio.timeout(self._wait_s), self._changed:
                while (name := choose(self.view().replicas, failed)) is None:
                    await self._changed.wait()
        except TimeoutError:
            raise NoReplicaError(f"no replica within {self._wait_s:g} s", "one that serves", "see /fleet") from None
        finally:
            self._waiting -= 1
        replica = self._replicas[name]
        place = Place(name, replica.sight.url, body_bytes)
        replica.places.add(place)
        replica.chosen_s = self._clock()
        return place

    def give_back(self, place: Place) -> None:
        """End a request's place; the replica may be gone by now."""
        if (replica := self._replicas.get(place.name)) is not None:
            replica.places.discard(place)

    async def is_lost(self, place: Place) -> bool:
        """Look at the replica of a request that failed; return whether it is gone, and will get no more."""
        if (replica := self._replicas.get(place.name)) is not None:
            await self._look(replica)
        return place.name not in self._replicas

    # --- for itself ---

    async def run(self) -> None:
        """Look and resize until cancelled or until the first engine did not start."""
        while self.failure is None:
            try:
                await self.tick()
            except Exception:  # requests are still served by the replicas there are
                if not self._has_failed:
                    logger.exception("the fleet could not look after itself; of further failures nothing is said")
                self._has_failed = True
            await asyncio.sleep(TICK_S)

    async def tick(self) -> None:
        """Look at every replica, then do what the rules say."""
        await asyncio.gather(*(self._look(replica) for replica in self.replicas()))
        for replica in self.replicas():
            if replica.state == "draining" and not replica.places:
                self._remove(replica)
                self.counts.merged += 1
                self._tell(f"{replica.name} is merged away")
        self._memory, change = resize(self.rule, self._memory, self.view())
        self._restore(change.restore)
        self._drain(change.drain)
        await self._add(change)
        await self._notify()

    async def close(self) -> None:
        """End every engine."""
        for replica in self.replicas():
            self._remove(replica)
        await asyncio.gather(*self._ending)
        self._threads.shutdown()

    def _restore(self, names: Collection[str]) -> None:
        for name in names:
            self._enter(self._replicas[name], "serving")
            self.counts.restored += 1
            self._tell(f"{name} is needed after all and serves on")

    def _drain(self, names: Collection[str]) -> None:
        for name in names:
            replica = self._replicas[name]
            if replica.state == "pending":
                self._remove(replica)
                self._tell(f"{name} is needed no more; it still waited for room")
            else:
                self._enter(replica, "draining")
                self._tell(f"{name} was not needed for {self.rule.idle_s:g} s: it finishes what it has and goes")

    async def _add(self, change: Resize) -> None:
        for _ in range(change.add):
            self._number += 1
            name = f"replica-{self._number}"
            self._tell(f"{name} starts, for {self._memory.mean:.1f} requests in flight")
            try:
                holder = await self._in_thread(partial(self._carrier.hold, name))
            except Exception as error:  # the cluster is gone, for a while or for good
                self._not_started(name, str(error) or type(error).__name__)
                return
            now_s = self._clock()
            self._replicas[name] = Replica(name, holder, now_s, now_s)

    def _enter(self, replica: Replica, state: ReplicaState) -> None:
        replica.state, replica.since_s = state, self._clock()

    async def _look(self, replica: Replica) -> None:
        """Ask how an engine is, and believe it. Who asks while somebody else does shares the next answer."""
        asked = replica.looks
        async with replica.looking:
            if replica.looks > asked or self._replicas.get(replica.name) is not replica:
                return  # seen since we asked, or gone
            replica.looks += 1
            sight = await self._in_thread(replica.holder.look)
            if self._replicas.get(replica.name) is replica:
                replica.sight = sight
                self._believe(replica)
        await self._notify()

    def _believe(self, replica: Replica) -> None:
        if replica.state in ("pending", "starting"):
            self._welcome(replica)
        elif not replica.sight.is_running or replica.sight.health == "dead":
            self._lose(replica)

    def _welcome(self, replica: Replica) -> None:
        """Let a replica serve once its engine does, or say why it never will."""
        sight = replica.sight
        if not sight.is_running:
            self._remove(replica)
            self._not_started(replica.name, sight.reason)
            return
        if replica.state == "pending" and sight.is_placed:
            self._enter(replica, "starting")
        if sight.health == "ready":
            self.counts.start_s = self._clock() - replica.asked_s
            self.counts.added += 1
            self._enter(replica, "serving")
            self._has_served, self._pause_s = True, FIRST_PAUSE_S
            self._tell(f"{replica.name} serves after {self.counts.start_s:.1f} s, {sight.where}")

    def _not_started(self, name: str, reason: str) -> None:
        """Try again later, less and less often; before anything has served there is nothing to go on with."""
        self.counts.not_started += 1
        self._may_start_s = self._clock() + self._pause_s
        if not self._has_served and not self._replicas:
            self.failure = EngineError(f"{name} did not start: {reason}")
            return
        self._tell(f"{name} did not start, next try in {self._pause_s:g} s: {reason}")
        self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)

    def _lose(self, replica: Replica) -> None:
        self._remove(replica)
        self.counts.lost += 1
        reason = replica.sight.reason or "its engine is dead"
        self._tell(f"{replica.name} is lost with {len(replica.places)} requests in flight: {reason}")
        for place in replica.places:
            place.abandon()

    def _remove(self, replica: Replica) -> None:
        """Forget a replica; its engine ends meanwhile."""
        del self._replicas[replica.name]
        ending = self._in_thread(replica.holder.stop)
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _in_thread(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
