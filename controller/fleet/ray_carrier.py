"""Engines in Ray actors, one each. Nothing else of the fleet talks to Ray (controller/ray_cluster.py).

Ray places an actor by the cores or GPUs that its engine takes, restarts nothing by itself, and ends the actors when the
fleet's process ends. Between us and an actor travel plain values: texts, numbers, lists and dicts of them.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

import msgspec

from ..ray_cluster import RayCluster
from .carrier import EngineSight
from .engine_actor import EngineActor, EngineOrder
from .placement import Placement, Room

_LOOK_S: Final = 10.0
_PENDING_S: Final = 0.1
_START_S: Final = 5.0
_STOP_S: Final = 60.0
_REASON_LETTERS: Final = 500


def room(cluster: RayCluster) -> list[Room]:
    """Return what each node that lives has in all."""
    nodes = [node["Resources"] for node in cluster.ray.nodes() if node["Alive"]]
    return [Room(int(each.get("CPU", 0)), int(each.get("GPU", 0))) for each in nodes]


class RayCarrier:
    """Starts actors that own such an engine each."""

    def __init__(self, cluster: RayCluster, order: EngineOrder, placement: Placement) -> None:
        self._ray, self._order, self._placement = cluster.ray, order, placement

    def hold(self, name: str) -> RayHolder:
        """Ask Ray for an actor; it may have to wait for room."""
        place = self._ray.remote(
            num_cpus=self._placement.cores, num_gpus=self._placement.gpus, max_restarts=0, max_concurrency=1
        )
        actor = place(EngineActor).remote()
        order = msgspec.structs.replace(self._order, name=f"{self._order.name}-{name}")
        return RayHolder(self._ray, actor, actor.start.remote(msgspec.to_builtins(order)))


class RayHolder:
    """One actor with its engine."""

    def __init__(self, ray: Any, actor: Any, started: Any) -> None:
        self._ray, self._actor, self._started = ray, actor, started
        self._place: dict[str, Any] = {}

    def look(self) -> EngineSight:
        """See EngineHolder."""
        try:
            if not self._place:
                self._place = self._ray.get(self._started, timeout=_PENDING_S)
            seen = self._ray.get(self._actor.look.remote(), timeout=_LOOK_S)
        except self._ray.exceptions.GetTimeoutError:
            return EngineSight(is_running=True, is_placed=bool(self._place), **self._place)
        except Exception as error:  # Ray's many: a dead actor, a node that is gone, a package that is not there
            return EngineSight(is_running=False, health="dead", reason=f"Ray: {_told(error)}")
        return EngineSight(**seen, **self._place)

    def stop(self) -> None:
        """See EngineHolder. A start under way is waited for, so that the engine ends in order, by its owner."""
        with contextlib.suppress(Exception):
            self._place = self._place or self._ray.get(self._started, timeout=_START_S)
            self._ray.get(self._actor.stop.remote(), timeout=_STOP_S)
        with contextlib.suppress(Exception):
            self._ray.kill(self._actor)


def _told(error: Exception) -> str:
    """Return one line of what Ray says in many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    reasons = [line for line in lines if line.startswith("The actor is dead because")]
    return (reasons or lines[-1:])[0][:_REASON_LETTERS]
