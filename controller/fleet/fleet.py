"""The fleet: which replicas there are, who has which requests, and what is done about it twice a second.

It lives in the entry point's loop. Rules are asked (routing.py, sizing.py), engines are started and ended in threads
by a carrier; a request is never waited for by anything but itself. What happens is told in one line each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from ..errors import EngineError
from .carrier import Carrier, EngineHolder, EngineSight
from .routing import choose
from .sizing import Resize, SizeMemory, SizeRule, resize
from .views import FleetView, ReplicaState, ReplicaView

TICK_S: Final = 0.5
WAIT_S: Final = 600.0  # that a request waits for a replica: as long as an engine may take to start
MOST_WAITING: Final = 1024
_FIRST_PAUSE_S: Final = 10.0  # after an engine that did not start; doubles
_MOST_PAUSE_S: Final = 600.0


class NoReplicaError(EngineError):
    """No replica can take a request."""


@dataclass(slots=True)
class Replica:
    """One engine as the fleet knows it."""

    name: str
    holder: EngineHolder
    state: ReplicaState
    since_s: float
    url: str = ""
    where: str = ""
    pid: int = 0  # root of the engine's processes, on its machine
    requests: int = 0
    body_bytes: int = 0
    chosen_s: float = 0.0

    def view(self) -> ReplicaView:
        """Return what the rules see."""
        return ReplicaView(self.name, self.state, self.requests, self.body_bytes, self.chosen_s, self.since_s)


@dataclass(slots=True)
class FleetCounts:
    """What has happened so far."""

    added: int = 0
    merged: int = 0
    restored: int = 0
    lost: int = 0
    not_started: int = 0
    start_s: float = 0.0  # that the last engine took to start


@dataclass(frozen=True, slots=True)
class Place:
    """A request's place at a replica, to be given back."""

    name: str
    url: str
    body_bytes: int


class Fleet:
    """See the module.

    :param tell: is called with one line for whatever happens
    """

    def __init__(
        self,
        carrier: Carrier,
        rule: SizeRule,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rule = rule
        self.counts = FleetCounts()
        self.failure: EngineError | None = None  # the first engine did not start: there is nothing to serve with
        self._carrier, self._tell, self._clock = carrier, tell, clock
        self._replicas: dict[str, Replica] = {}
        self._memory = SizeMemory()
        self._number = 0
        self._waiting = 0
        self._has_served = False
        self._pause_s, self._may_start_s = _FIRST_PAUSE_S, 0.0
        self._changed = asyncio.Condition()
        self._ending: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(2 * max(rule.most, 1) + 2, "faser-fleet")

    # --- for requests ---

    def view(self) -> FleetView:
        """Return the fleet as the rules see it."""
        now_s = self._clock()
        replicas = tuple(replica.view() for replica in self._replicas.values())
        return FleetView(now_s, replicas, self._waiting, now_s >= self._may_start_s)

    def replicas(self) -> list[Replica]:
        """Return the replicas there are, in the order of their start."""
        return list(self._replicas.values())

    async def take(self, body_bytes: int, without: Collection[str] = ()) -> Place:
        """Return a place at the least loaded replica, waiting for one if none serves; raise NoReplicaError.

        :param without: replicas that have failed this request
        """
        if self._waiting >= MOST_WAITING:
            raise NoReplicaError(f"{self._waiting} requests wait for a replica", f"fewer than {MOST_WAITING}")
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_S), self._changed:
                while (name := choose(self.view().replicas, without)) is None:
                    self._require_hope(without)
                    await self._changed.wait()
        except TimeoutError:
            raise NoReplicaError(f"no replica within {WAIT_S:g} s", "one that serves", "see /fleet") from None
        finally:
            self._waiting -= 1
        replica = self._replicas[name]
        replica.requests += 1
        replica.body_bytes += body_bytes
        replica.chosen_s = self._clock()
        return Place(name, replica.url, body_bytes)

    def give_back(self, place: Place) -> None:
        """End a request's place; the replica may be gone by now."""
        if (replica := self._replicas.get(place.name)) is not None:
            replica.requests -= 1
            replica.body_bytes -= place.body_bytes

    async def is_lost(self, place: Place) -> bool:
        """Return whether the replica of a request that failed is gone; one that is gets no more."""
        replica = self._replicas.get(place.name)
        if replica is None or replica.url != place.url:
            return True
        await self._look(replica)
        return self._replicas.get(place.name) is not replica

    def _require_hope(self, without: Collection[str]) -> None:
        """Raise NoReplicaError where every replica has failed this request and no other is to come."""
        if without and set(without) >= set(self._replicas) and self._replicas:
            raise NoReplicaError("every replica failed this request", remedy="see /fleet and the replicas' logs")

    # --- for itself ---

    async def run(self) -> None:
        """Look and resize until cancelled or until the first engine did not start."""
        while self.failure is None:
            await self.tick()
            await asyncio.sleep(TICK_S)

    async def tick(self) -> None:
        """Look at every replica, then do what the rules say."""
        await asyncio.gather(*(self._look(replica) for replica in self.replicas()))
        for replica in self.replicas():
            if replica.state == "draining" and not replica.requests:
                self._remove(replica)
                self.counts.merged += 1
                self._tell(f"{replica.name} is merged away")
        self._memory, change = resize(self.rule, self._memory, self.view())
        self._apply(change)
        await self._notify()

    async def close(self) -> None:
        """End every engine."""
        for replica in self.replicas():
            self._remove(replica)
        await asyncio.gather(*self._ending)
        self._threads.shutdown()

    def _apply(self, change: Resize) -> None:
        for name in change.restore:
            self._enter(self._replicas[name], "serving")
            self.counts.restored += 1
            self._tell(f"{name} is needed after all and serves on")
        for name in change.drain:
            self._enter(self._replicas[name], "draining")
            self._tell(f"{name} was not needed for {self.rule.idle_s:g} s: it finishes what it has and goes")
        for _ in range(change.add):
            self._number += 1
            name = f"replica-{self._number}"
            self._replicas[name] = Replica(name, self._carrier.hold(name), "starting", self._clock())
            self._tell(f"{name} starts, for {self._memory.ongoing:.1f} requests in flight")

    def _enter(self, replica: Replica, state: ReplicaState) -> None:
        replica.state, replica.since_s = state, self._clock()

    async def _look(self, replica: Replica) -> None:
        """Ask how an engine is, and believe it."""
        sight = await asyncio.get_running_loop().run_in_executor(self._threads, replica.holder.look)
        if self._replicas.get(replica.name) is not replica:
            return  # it went while we looked
        replica.url, replica.where, replica.pid = sight.url, sight.where, sight.pid
        if replica.state == "starting":
            self._welcome(replica, sight)
        elif not sight.is_running or sight.status == 503:  # 503: vLLM's word for an engine that is dead
            self._remove(replica)
            self.counts.lost += 1
            reason = sight.reason or "its engine is dead"
            self._tell(f"{replica.name} is lost with {replica.requests} requests in flight: {reason}")
        await self._notify()

    def _welcome(self, replica: Replica, sight: EngineSight) -> None:
        """Let a replica serve once its engine does, or say why it never will."""
        if sight.is_running and sight.status == 200:
            self.counts.start_s = self._clock() - replica.since_s
            self.counts.added += 1
            self._enter(replica, "serving")
            self._has_served, self._pause_s = True, _FIRST_PAUSE_S
            self._tell(f"{replica.name} serves after {self.counts.start_s:.1f} s, {replica.where}")
        elif not sight.is_running:
            self._remove(replica)
            self.counts.not_started += 1
            self._may_start_s = self._clock() + self._pause_s
            if not self._has_served and not self._replicas:
                self.failure = EngineError(sight.reason)
                return
            self._tell(f"{replica.name} did not start, next try in {self._pause_s:g} s: {sight.reason}")
            self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)

    def _remove(self, replica: Replica) -> None:
        """Forget a replica and end its engine meanwhile."""
        del self._replicas[replica.name]
        ending = asyncio.get_running_loop().run_in_executor(self._threads, replica.holder.stop)
        task = asyncio.ensure_future(_finish(ending))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _finish(ending: asyncio.Future[None]) -> None:
    await ending
