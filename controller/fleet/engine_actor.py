"""What runs in a Ray actor: it starts one vLLM API server as its child and owns it.

Called by controller/fleet/ray_carrier.py through Ray, with plain values only. The server hangs on the actor by a pipe
(controller/engine/processes.py): however the actor ends, by order, by Ray or by a signal, the engine ends with it.
It imports no vLLM, and Ray only to ask where it is.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from ...engine_adapter.settings import ensure_private_folder, runtime_folder
from ...models.embedded.pair import ensure_embedded_pair
from ..engine.launch import EngineLaunch, free_port
from ..engine.running import RunningEngine, health
from ..engine.serve import EMBEDDED, embedded_launch, model_launch
from ..engine.sidecar_child import log_folder
from ..errors import EngineError, FaserError
from .cores import CoreClaim

_THREADS = "OMP_NUM_THREADS"
_DEVICES = "CUDA_VISIBLE_DEVICES"


class EngineOrder(msgspec.Struct, frozen=True):
    """What an actor is told: how to start its engine. Crosses processes as a dict of plain values."""

    name: str  # of its log
    model: str
    arguments: list[str]
    endpoint: str  # of the sidecar; empty: the node's own
    host: str  # where the engine listens; empty: at its node's address, which other nodes reach
    cores: int  # of its own; 0: it runs on all of them, beside GPUs
    is_spread: bool  # its ranks are vLLM's own Ray actors
    environment: dict[str, str]


class EngineActor:
    """One engine and its owner."""

    def __init__(self) -> None:
        self._engine: RunningEngine | None = None
        self._claim: CoreClaim | None = None
        self._refusal = ""

    def start(self, order: dict[str, object]) -> dict[str, object]:
        """Start the engine and return without waiting for it, with where it is; a refusal is told by `look`."""
        told = msgspec.convert(order, EngineOrder)
        try:
            self._engine = self._started(told)
        except (FaserError, OSError) as error:
            self._refusal = str(error)
            return {"url": "", "where": "", "pid": 0}
        cores = "cores " + ",".join(map(str, self._claim.cores)) if self._claim is not None else ""
        machine = "this machine" if told.host else _address()
        where = f"{machine}, {cores or _gpus()}"
        return {"url": self._engine.launch.url, "where": where, "pid": self._engine.pid}

    def look(self) -> dict[str, object]:
        """Return whether the engine's process lives, how it is, and why it ended."""
        if self._engine is None:
            return {"is_running": False, "health": "dead", "reason": self._refusal}
        try:
            self._engine.require_running()
        except EngineError as error:
            return {"is_running": False, "health": "dead", "reason": str(error)}
        return {"is_running": True, "health": health(self._engine.launch.url), "reason": ""}

    def stop(self) -> None:
        """End the engine and give its cores back."""
        if self._engine is not None:
            self._engine.stop()
        if self._claim is not None:
            self._claim.close()

    def _started(self, order: EngineOrder) -> RunningEngine:
        _set_environment(order)
        if order.cores:
            folder = runtime_folder() / "cores"
            ensure_private_folder(folder.parent)
            ensure_private_folder(folder)
            self._claim = CoreClaim(order.cores, sorted(os.sched_getaffinity(0)), folder)
            os.sched_setaffinity(0, self._claim.cores)  # the engine inherits it and counts its threads by it
        log = log_folder() / f"{order.name}.log"
        log.unlink(missing_ok=True)
        return RunningEngine(launch_of(order), log)


def launch_of(order: EngineOrder) -> EngineLaunch:
    """Return the engine's command line on this machine, as `faser serve` would start it."""
    host = order.host or _address()
    port = free_port(host)
    arguments = [*order.arguments, "--host", host, "--port", str(port)]
    if order.model == EMBEDDED:
        splits = os.environ.get("FASER_SPLITS", "")
        return embedded_launch(ensure_embedded_pair(), order.endpoint, port, arguments, splits)
    return model_launch(order.model, order.endpoint, arguments)


def _set_environment(order: EngineOrder) -> None:
    """Make this process's environment what the engine is to inherit: the operator's, and as little as may be of Ray's.

    Ray sets a number of threads, which is for its tasks, and hides all GPUs from who asked for none, as the owner of
    ranks does that ask for theirs themselves.
    """
    os.environ.pop(_THREADS, None)
    os.environ.update(order.environment)
    if order.is_spread:
        if not os.environ.get(_DEVICES):
            os.environ.pop(_DEVICES, None)
        os.environ["RAY_ADDRESS"] = str(_ray().get_runtime_context().gcs_address)


def _address() -> str:
    """Return this node's address."""
    return str(_ray().util.get_node_ip_address())


def _ray() -> Any:
    import ray

    return ray


def _gpus() -> str:
    return f"GPUs {os.environ.get(_DEVICES) or 'of vLLM'}"
