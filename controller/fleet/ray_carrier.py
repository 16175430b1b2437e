"""Engines in Ray actors, one each. Ray is imported here and nowhere else in the fleet.

Ray places an actor by the cores or GPUs that its engine takes, restarts nothing by itself, and ends the actors when the
fleet's process ends. Between us and an actor travel plain values: texts, numbers, lists and dicts of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Final, Self

import msgspec

from ..errors import EndpointError, UsageError
from .carrier import EngineSight
from .engine_actor import EngineActor, EngineOrder
from .placement import Placement, Room

STORE_BYTES: Final = 80 << 20  # of a local instance, for objects: near the least Ray takes; nothing is kept there
_LOOK_S: Final = 10.0
_STOP_S: Final = 60.0
_CONNECT_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class RayOrder:
    """What every engine of a fleet has in common."""

    order: EngineOrder
    placement: Placement


class RayCluster:
    """A connection to a Ray that runs, or an instance of our own that ends with us. To be opened in the main thread.

    Whoever reaches Ray's ports may run code unless a token is asked for: our own instance asks for one.

    :param address: HOST:PORT or ray://HOST:PORT; None: an instance of our own on this machine
    """

    def __init__(self, address: str | None, cores: int) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        if address is None:
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
            where = {"address": "local", "num_cpus": cores, "include_dashboard": False,
                     "object_store_memory": STORE_BYTES}  # fmt: skip
        else:
            _require_ray(address)
            where = {"address": address}
        import ray

        self._ray: Any = ray
        self.is_ours = address is None
        try:
            ray.init(**where, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise EndpointError(
                f"Ray at {address or 'this machine'}: {reason}", "a running Ray of this version"
            ) from None

    def room(self) -> list[Room]:
        """Return what each node that lives has in all."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return [Room(int(each.get("CPU", 0)), int(each.get("GPU", 0))) for each in nodes]

    def carrier(self, order: RayOrder) -> RayCarrier:
        """Return who starts such engines."""
        return RayCarrier(self._ray, order)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()


class RayCarrier:
    """Starts actors."""

    def __init__(self, ray: Any, order: RayOrder) -> None:
        self._ray, self._order = ray, order

    def hold(self, name: str) -> RayHolder:
        """Ask Ray for an actor; it may have to wait for room."""
        placement = self._order.placement
        options = {"num_cpus": placement.cores, "num_gpus": placement.gpus, "max_restarts": 0, "max_concurrency": 1}
        actor = self._ray.remote(**options)(EngineActor).remote()
        order = msgspec.structs.replace(self._order.order, name=name)
        return RayHolder(self._ray, actor, actor.start.remote(msgspec.to_builtins(order)))


class RayHolder:
    """One actor with its engine."""

    def __init__(self, ray: Any, actor: Any, started: Any) -> None:
        self._ray, self._actor, self._started = ray, actor, started
        self._place: dict[str, Any] | None = None

    def look(self) -> EngineSight:
        """See EngineHolder."""
        try:
            if self._place is None:
                self._place = self._ray.get(self._started, timeout=0.1)
            seen = self._ray.get(self._actor.look.remote(), timeout=_LOOK_S)
        except self._ray.exceptions.GetTimeoutError:
            return EngineSight(is_running=True, is_placed=self._place is not None, **(self._place or {}))
        except Exception as error:  # Ray's many: a dead actor, a node that is gone, a package that is not there
            return EngineSight(is_running=False, reason=_reason(error))
        return EngineSight(**seen, **self._place)

    def stop(self) -> None:
        """See EngineHolder."""
        with contextlib.suppress(Exception):
            if self._place is not None:
                self._ray.get(self._actor.stop.remote(), timeout=_STOP_S)
        with contextlib.suppress(Exception):
            self._ray.kill(self._actor)


def _reason(error: Exception) -> str:
    """Return one line of what Ray says in many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("The actor is dead because")), (lines or [""])[0])
    return f"Ray: {said or type(error).__name__}"[:500]


def _require_ray(address: str) -> None:
    """Raise EndpointError where no Ray answers: Ray itself would try for minutes, and cannot be interrupted."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"--address {address!r}", "HOST:PORT")
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
        if not address.startswith("ray://"):  # a client gives up by itself
            subprocess.run(command, check=True, capture_output=True, timeout=_CONNECT_S)
    except (OSError, OverflowError, subprocess.SubprocessError):
        raise EndpointError(
            f"no Ray answers at {address}", "the address of a running one", "ray start --head on one machine"
        ) from None
