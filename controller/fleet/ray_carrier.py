"""Engines in Ray actors, one each. Nothing else of the fleet talks to Ray.

Ray places an actor by the cores or GPUs that its engine takes, restarts nothing by itself, and ends the actors when the
fleet's process ends. Between us and an actor travel plain values: texts, numbers, lists and dicts of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from ..errors import EndpointError, UsageError
from .carrier import EngineSight
from .engine_actor import EngineActor, EngineOrder
from .placement import Placement, Room

STORE_BYTES: Final = 80 << 20  # of a local instance, for objects: near the least Ray takes; nothing is kept there
_LOOK_S: Final = 10.0
_PENDING_S: Final = 0.1
_START_S: Final = 5.0
_STOP_S: Final = 60.0
_CONNECT_S: Final = 20.0
_REASON_LETTERS: Final = 500


class RayCluster:
    """A connection to a Ray that runs, or an instance of our own that ends with us.

    To be opened in the main thread: the kernel ends an instance with the thread that started it. Whoever reaches Ray's
    ports may run code unless a token is asked for, so our own instance asks for one.

    :param address: HOST:PORT or ray://HOST:PORT; None: an instance of our own on this machine
    :param cores: of an instance of our own
    """

    def __init__(self, address: str | None, cores: int) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self.is_ours = address is None
        self._folder = ""
        if address is None:
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
            os.environ.setdefault("RAY_worker_niceness", "0")  # else engines would run at 15, behind everybody
            self._folder = tempfile.mkdtemp(prefix="faser-ray-", dir="/tmp")  # short: sockets lie in it
            where = {"address": "local", "num_cpus": cores, "include_dashboard": False,
                     "object_store_memory": STORE_BYTES, "_temp_dir": self._folder}  # fmt: skip
        else:
            _require_ray(address)
            where = {"address": address}
        import ray

        self._ray: Any = ray
        try:
            ray.init(**where, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            self._remove_folder()
            reason = " ".join(str(error).split())[:_REASON_LETTERS] or type(error).__name__
            raise EndpointError(
                f"Ray at {address or 'this machine'}: {reason}", "a running Ray of this version"
            ) from None

    def room(self) -> list[Room]:
        """Return what each node that lives has in all."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return [Room(int(each.get("CPU", 0)), int(each.get("GPU", 0))) for each in nodes]

    def carrier(self, order: EngineOrder, placement: Placement) -> RayCarrier:
        """Return who starts such engines."""
        return RayCarrier(self._ray, order, placement)

    def close(self) -> None:
        """Leave the cluster, which ends our actors; an instance of our own ends too."""
        self._ray.shutdown()
        self._remove_folder()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _remove_folder(self) -> None:
        if self._folder and Path(self._folder).is_dir():
            shutil.rmtree(self._folder, ignore_errors=True)


class RayCarrier:
    """Starts actors that own such an engine each."""

    def __init__(self, ray: Any, order: EngineOrder, placement: Placement) -> None:
        self._ray, self._order, self._placement = ray, order, placement

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


def _require_ray(address: str) -> None:
    """Raise EndpointError where no Ray answers: Ray itself would try for minutes, and cannot be interrupted."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"--address {address!r}", "HOST:PORT")
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
        if not address.startswith("ray://"):  # where a client connects it gives up by itself
            subprocess.run(command, check=True, capture_output=True, timeout=_CONNECT_S, cwd="/")
    except (OSError, OverflowError, subprocess.SubprocessError):
        raise EndpointError(
            f"no Ray answers at {address}", "a running one", "start it with: ray start --head"
        ) from None
